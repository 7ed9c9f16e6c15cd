"""Code decides by values, and never by words of its own messages: messages are free to change.

A test of words is `"run again" in text` or `text.startswith("kernel")`, also by the name of a constant. It is
forbidden where the words stand in a message of opsmith's own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import opsmith

ROOT = Path(opsmith.__file__).parent

TEXTS = {
    *(
        "text",
        "words",
        "word",
        "reason",
        "message",
        "note",
        "line",
        "remark",
        "problem",
        "hint",
        "got",
        "said",
    ),
    *(
        "expected",
        "forward",
        "label",
        "title",
        "form",
        "how",
        "why",
        "what",
        "about",
        "task",
        "error",
        "origin",
    ),
}
"""Last words of the names of texts: the right side of `"word" in ...` may be a collection, too."""

METHODS = {"startswith", "endswith", "find", "index", "rfind"}

OTHERS: dict[tuple[str, str], str] = {
    ("kernels/cuda/compiler.py", "match['kind'].endswith('error')"): "a message of NVRTC",
    ("surveying/trials.py", "TOO_FEW in text"): "a message of torch",
    ("surveying/trials.py", "TOO_FEW in found.text"): "a message of torch",
    ("torch_library/capabilities/private/autograd_graph.py", "'freed' in message"): "a message of torch",
    ("core/annotations.py", "getattr(annotation, '__module__', '').startswith('numpy')"): "a module",
    ("kernels/cuda/emulation/refusals.py", "first['text'].startswith('expected ')"): "words of g++",
    ("kernels/cuda/launch.py", "rule.name.endswith('grid')"): "a name in generated code",
    ("kernels/triton/compiler.py", "line.lstrip().startswith('def ')"): "Python",
    ("checking/processes/child.py", "'fork' in str(error)"): "a message of torch",
    (
        "torch_library/capabilities/private/library_operators.py",
        "name.startswith('Autograd')",
    ): "a key of torch",
    ("checking/exceptions.py", "written.startswith('grad')"): "an argument of a formula",
}
"""Words of others, which stand in messages of ours by chance."""

KEPT: dict[tuple[str, str], str] = {
    ("checking/diagnosis/detectors/region.py", "how.startswith('times')"): "key of a column",
    ("checking/diagnosis/detectors/region.py", "source[1].startswith('times')"): "key of a column",
    ("checking/diagnosis/detectors/scale.py", "how.startswith('times')"): "key of a column",
    ("checking/diagnosis/detectors/region.py", "text.startswith(('the last', 'the first'))"): "grammar",
    ("checking/properties/behaviour/memory.py", "'result' not in each.words"): "name of a value",
    ("torch_library/origins/fallback.py", "task.startswith('backward')"): "name of a task",
}
"""Keys and names that are words; each should become a value."""


def constants(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    yield target.id, node.value.value


def messages(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Texts of several words, with their lines; docstrings are no messages."""
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        value = node.value if isinstance(node, ast.Constant) and id(node) not in statements else None
        if isinstance(value, str) and len(value.split()) > 2:
            yield node.lineno, value


def texts(node: ast.expr, known: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in known:
        yield known[node.id]
    elif isinstance(node, ast.Tuple):
        for each in node.elts:
            yield from texts(each, known)


def is_text(node: ast.expr, words: str) -> bool:
    """True if a value is a text: by its name, or because no key has several words."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.SetComp | ast.ListComp):
        return False
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
    name = getattr(node, "attr", getattr(node, "id", "")).strip("_")
    return name.rpartition("_")[2] in TEXTS or (" " in words.strip() and name not in ("evidence", "right"))


def words_of(node: ast.AST, known: Mapping[str, str]) -> Iterator[str]:
    """Words that an expression looks for in a text."""
    if isinstance(node, ast.Compare):
        for operation, left, right in zip(
            node.ops, [node.left, *node.comparators], node.comparators, strict=False
        ):
            if isinstance(operation, ast.In | ast.NotIn):
                yield from (each for each in texts(left, known) if is_text(right, each))
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in METHODS and node.args:
        yield from texts(node.args[0], known)


def found_in(sources: Mapping[str, str]) -> list[tuple[str, str]]:
    """Tests of words in sources, as pairs of file and expression."""
    trees = {name: list(ast.walk(ast.parse(source))) for name, source in sources.items()}
    known = {
        name: text for nodes in trees.values() for name, text in constants(nodes) if name.strip("_").isupper()
    }
    said = [(name, *message) for name, nodes in trees.items() for message in messages(nodes)]
    found: dict[tuple[str, str], None] = {}
    for name, nodes in trees.items():
        for node in nodes:
            for words in words_of(node, known):
                at = name, getattr(node, "lineno", 0)
                if re.fullmatch(PROSE, words) and is_said(words.strip(), at, said):
                    found[name, ast.unparse(node)] = None
    return list(found)


PROSE = r"[A-Za-z `]*[a-z]{2,}[a-z ,`_]*(?<!_)"


def is_said(words: str, at: tuple[str, int], said: list[tuple[str, int, str]]) -> bool:
    """True if words stand in a message, other than the test of them."""
    whole = re.compile(rf"(?<![\w.-]){re.escape(words)}(?!\w)")
    return any(words in text and whole.search(text) and (name, line) != at for name, line, text in said)


def test_no_code_reads_prose() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
        if "template" not in path.parts
    }
    found = {*found_in(sources)}
    named = {*OTHERS, *KEPT}
    assert (found - named, named - found) == (set(), set())


@pytest.mark.parametrize(
    "test",
    [
        '"run again" in words',
        '"surrogate" not in outcome.reason',
        'explanation.forward.startswith("reference")',
        'str(error).find("the reference") >= 0',
        "AGAIN in note",
        'text.endswith(("elsewhere", "again"))',
    ],
)
def test_a_new_one_is_found(test: str) -> None:
    source = (
        'AGAIN = "run again"\n'
        'MESSAGE = "derived: the reference of a surrogate, run again"\n'
        f"def decide():\n    return {test}\n"
    )
    assert found_in({"new.py": source}) == [("new.py", ast.unparse(ast.parse(test.partition(" >=")[0])))]


@pytest.mark.parametrize(
    "test",
    ['"run" in ("run", "again")', '"surrogate" in adopted.kinds', 'name.startswith("_")', '"cl" in words'],
)
def test_keys_and_names_are_no_prose(test: str) -> None:
    source = f'MESSAGE = "a surrogate is run again, and again"\nfound = {test}\n'
    assert found_in({"new.py": source}) == []
