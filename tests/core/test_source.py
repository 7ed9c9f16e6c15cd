"""The source of a function: which lines, which tree, and which code are its own."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opsmith.core import source


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@wrapping
@functools.lru_cache(
    maxsize=3,
)
def decorated(x: Any, y: Any = lambda q: q) -> Any:
    """Words,
    with `return nothing` in them.
    """

    def inner() -> int:
        return 3

    if x:
        return inner(), y
    return None


class Documented:
    @staticmethod
    def method(x: Any) -> Any:
        text = """
at column 0"""
        return x, text


# fmt: off
PLUS, MINUS = lambda x: x + 1, lambda x: x - 1
CHOOSING = [lambda x, y: (x if y
                          else -x)]
OUTER = lambda x: (lambda x: x)
KEPT = [lambda x: x * k for k in (1,)]  # noqa: B023
NOTHING = lambda: None
# fmt: on

TEXTS: dict[str, tuple[Any, str]] = {
    "a lambda beside another": (MINUS, "lambda x: x - 1"),
    "the other": (PLUS, "lambda x: x + 1"),
    "a lambda of two lines": (CHOOSING[0], "lambda x, y: (x if y\nelse -x)"),
    "a lambda around another": (OUTER, "lambda x: (lambda x: x)"),
    "the inner one": (OUTER(1), "lambda x: x"),
    "a lambda in a comprehension": (KEPT[0], "lambda x: x * k"),
    "a lambda of a constant": (NOTHING, "lambda: None"),
    "a default": (source.inspect.unwrap(decorated).__defaults__[0], "lambda q: q"),
    "a method with text at column 0": (
        Documented.method,
        "    @staticmethod\n    def method(x: Any) -> Any:\n"
        '        text = """\nat column 0"""\n        return x, text',
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_that_of_the_function_alone(name: str) -> None:
    function, text = TEXTS[name]
    assert source.text(function) == text


def test_a_decorated_function_is_the_one_that_was_written() -> None:
    text = source.text(decorated)
    assert text.startswith("@wrapping\n@functools.lru_cache(\n    maxsize=3,\n)\ndef decorated(x: Any")
    assert text.endswith("    return None")
    assert "Words" in text
    assert "Words" not in source.text(decorated, docstring=False)
    assert source.parameters_of(decorated) == ("x", "y")
    assert source.code_of(decorated) is decorated.__wrapped__.__wrapped__.__code__  # type: ignore[attr-defined]
    assert source.decorated_in(decorated, __file__)
    assert not source.decorated_in(decorated, functools.__file__)


def test_returns_are_those_of_the_function_itself() -> None:
    tree = source.tree(decorated)
    assert isinstance(tree, ast.FunctionDef)
    shown = [None if each is None else ast.unparse(each) for each in source.returns(tree)]
    assert shown == ["(inner(), y)", "None"]
    found = source.tree(PLUS)
    assert isinstance(found, ast.Lambda)
    assert [ast.unparse(each) for each in source.returns(found) if each is not None] == ["x + 1"]


CELL = "def twice(x):\n    return 2 * x\n"


def of_text(text: str, file: str) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), scope)
    return scope["twice"]


def test_a_cell_of_a_notebook_is_a_source_and_exec_is_none() -> None:
    file = "<ipython-input-1-source>"
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    try:
        assert source.text(of_text(CELL, file)) == CELL.rstrip()
    finally:
        del linecache.cache[file]
    without = of_text(CELL, "<string>")
    assert source.tree(without) is None
    assert source.text(without) == ""
    assert source.may_name(without, {"print"}) is False


@pytest.mark.parametrize(
    "edited",
    ["\n" + CELL, CELL.replace("x", "y"), CELL.replace("twice", "thrice"), "def (", ""],
    ids=["moved", "other parameters", "another name", "no code", "empty"],
)
def test_lines_that_have_changed_are_no_source(edited: str, tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text(CELL, encoding="utf-8")
    function = of_text(CELL, str(file))
    assert source.text(function) == CELL.rstrip()
    file.write_text(edited, encoding="utf-8")
    assert source.tree(function) is None
    assert source.text(function) == ""


def test_code_that_is_not_of_python_may_name_anything() -> None:
    assert source.code_of(len) is None
    assert source.parameters_of(len) == ()
    assert source.may_name(len, {"detach"})
    assert source.may_name(lambda x: [each.detach() for each in x], {"detach"})
