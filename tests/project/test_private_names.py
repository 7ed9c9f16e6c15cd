"""torch's private names are used in one folder alone, and each use there has a test of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import opsmith
from opsmith.torch_library import capabilities
from opsmith.torch_library.capabilities.capability import CAPABILITIES

CAPABILITIES_PACKAGE = capabilities.__name__
ROOT = Path(opsmith.__file__).parent
PRIVATE = ROOT / "torch_library" / "capabilities" / "private"
HOME = Path(__file__).parents[1] / "torch_library"
TESTS = [
    HOME / "test_capabilities.py",
    HOME / "test_known_calls_names.py",
    HOME / "test_library_operator_names.py",
]

OWN = {"self", "cls", "super()"}
IN_TEXT = re.compile(r"(?<![\w])(?:torch|Tensor|_op_\w+)(?:\.\w+)*?\.(_(?!_)\w+)")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


DOCUMENTED = {"os._exit", "sys._current_frames", "sys._getframe"}
"""Names with an underscore that are in Python's manual."""


def private_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Private names of other modules and objects that a source uses, also within text that becomes source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(is_private, alias.name.split("."))):
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if any(map(is_private, full.split("."))):
                    yield full, node.lineno
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            full = f"{base}.{node.attr}"
            if base not in OWN and base != "type(self)" and full not in DOCUMENTED:
                yield f"{base}.{node.attr}", node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in IN_TEXT.finditer(node.value):
                yield found[0], node.lineno


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != PRIVATE)


def test_private_names_are_used_in_one_folder_alone() -> None:
    found = {str(path): [*private_names(ast.parse(path.read_text(encoding="utf-8")))] for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C.f()", "torch._C"),
        ("from torch._dynamo import config", "torch._dynamo.config"),
        ("import torch._inductor", "torch._inductor"),
        ("def f():\n    from torch import _ops", "torch._ops"),
        ("x._version", "x._version"),
        ("operator.torch_operator._schema", "operator.torch_operator._schema"),
        ('exec("torch._C.f()")', "torch._C"),
        ('f"if _op_result._is_view(): {x}"', "_op_result._is_view"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert [found for found, _ in private_names(ast.parse(source))] == [name]


@pytest.mark.parametrize(
    "source", ["self._plans", "cls._declared", "_private = 1", "x.__dict__", "'`_` and a._b in prose'"]
)
def test_a_name_of_one_s_own_is_fine(source: str) -> None:
    assert list(private_names(ast.parse(source))) == []


def parts() -> dict[str, set[str]]:
    """Uses of torch's private names, by function, class or constant of the folder's modules."""
    found: dict[str, set[str]] = {}
    for path in sorted(PRIVATE.glob("*.py")):
        found |= parts_of(ast.parse(path.read_text(encoding="utf-8")))
    return found


def parts_of(tree: ast.Module) -> dict[str, set[str]]:
    """The same of one module, self-tests left out."""
    aliases = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if any(map(is_private, f"{node.module}.{alias.name}".split(".")))
    }
    aliases |= {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and is_private(node.target.id)
    }
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            name = ast.unparse(target)
        else:
            continue
        used = {private for private, _ in private_names(node)}
        used |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in aliases} - {
            name
        }
        if used and not is_private(name) and name != "self_test":
            found[name] = used
    return found


def test_there_are_capabilities() -> None:
    assert {"below_autograd", "version", "autocast_key", "Transform"} <= set(parts())


def test_each_module_is_a_capability_and_tests_itself() -> None:
    modules = {path.stem: path for path in PRIVATE.glob("*.py") if path.stem != "__init__"}
    assert set(modules) == set(CAPABILITIES)
    for name, path in modules.items():
        defined = set(vars(import_module(f"{CAPABILITIES_PACKAGE}.private.{name}")))
        assert {"self_test", *CAPABILITIES[name].provides} <= defined, path.name


def test_each_use_of_a_private_name_has_a_test() -> None:
    tests = {
        node.name
        for node in ast.walk(ast.parse("".join(path.read_text(encoding="utf-8") for path in TESTS)))
        if isinstance(node, ast.FunctionDef)
    }
    untested = {}
    for part, names in parts().items():
        wanted = f"test_{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', part).lower()}"
        if not any(each == wanted or each.startswith(f"{wanted}_") for each in tests):
            untested[wanted] = sorted(names)
    assert untested == {}, f"{TESTS[0].name} needs these tests, which exercise the names beside them"
