"""Every class of error is raised somewhere and has a test of its whole message."""

from __future__ import annotations

import ast
import pickle
import re
from collections import Counter
from pathlib import Path

import opsmith
from opsmith import errors

HERE = Path(__file__).parent
ROOT = Path(opsmith.__file__).parent

BY_FEATURE_PACKAGES = {"MissingExtraError", "MissingSamplesError", "ModuleImportError", "UsageError"}
"""Raised by the check and the commands, which test their messages themselves."""


def named_in(path: Path, callee: str) -> set[str]:
    """Classes `errors.X` that are the first argument of, or called themselves as, `callee`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        first = node.args[0] if node.args else None
        if callee == "errors" and isinstance(first, ast.Attribute) and ast.unparse(first.value) == "errors":
            found.add(first.attr)  # a method that makes an error of the class that it is given
        target = node.func if callee == "errors" else node.args[0] if node.args else None
        is_callee = callee == "errors" or ast.unparse(node.func) == callee
        if is_callee and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "errors":
            found.add(target.attr)
    return found


BESIDE = [
    path
    for folder in ("benchmarking", "build", "checking", "drawing", "exporting", "kernels", "shipping")
    for path in (HERE.parent / folder).rglob("test_*.py")
]
"""Tests of kernels that are built and of feature packages, which test their messages themselves."""
CLASSES = sorted(set(errors.__all__) - {"OpsmithError"})


def test_every_class_is_raised() -> None:
    raised = {name for path in ROOT.rglob("*.py") for name in named_in(path, "errors")}
    assert set(CLASSES) - raised == set()


def test_every_class_has_a_test_of_its_message() -> None:
    tested = {name for path in HERE.glob("test_*.py") for name in named_in(path, "says")}
    tested |= {name for path in BESIDE for name in named_in(path, "pytest.raises")}
    tested |= {
        name
        for path in BESIDE
        if path.stem.endswith("_messages")
        for name in re.findall(r"^        errors\.(\w+),$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(CLASSES) - BY_FEATURE_PACKAGES - tested == set()


def test_every_class_is_also_a_builtin_one() -> None:
    """Code that catches ValueError, TypeError and the like catches ours."""
    for kind in (getattr(errors, name) for name in CLASSES):
        builtin = {base for base in kind.__mro__ if base.__module__ == "builtins"}
        assert issubclass(kind, errors.OpsmithError)
        assert builtin - {Exception, BaseException, object}, kind
        assert kind.__doc__, kind


def test_docstrings_are_told_apart() -> None:
    documentation = Counter(getattr(errors, name).__doc__ for name in CLASSES)
    assert max(documentation.values()) == 1


def test_form_of_a_message() -> None:
    error = errors.OpsmithError(
        "it is wrong",
        operator="demo::op",
        argument="x",
        expected="a",
        got="b",
        where="file.py:3",
        hint="write a",
    )
    assert str(error) == (
        "demo::op: it is wrong\n  argument: x\n  expected: a\n  got: b\n  where: file.py:3\n  hint: write a"
    )
    assert (error.problem, error.operator, error.argument) == ("it is wrong", "demo::op", "x")
    assert (error.expected, error.got, error.where, error.hint) == ("a", "b", "file.py:3", "write a")


def test_lines_that_say_nothing_are_left_out() -> None:
    assert errors.UsageError("it is wrong").message() == "it is wrong"
    assert errors.UsageError("it is wrong", hint="write a").message() == "it is wrong\n  hint: write a"


def test_the_last_line_is_the_address_of_the_page() -> None:
    error = errors.UsageError("it is wrong", hint="write a")
    assert str(error) == "it is wrong\n  hint: write a\n  more: opsmith rule UsageError"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_class_of_others_has_the_page_of_the_class_that_it_derives_from() -> None:
    class TheirError(errors.UsageError):
        pass

    assert str(TheirError("it is wrong")) == "it is wrong\n  more: opsmith rule UsageError"


def test_a_message_in_another_one_has_no_address() -> None:
    assert errors.message_of(errors.UsageError("it is wrong")) == "it is wrong"
    assert errors.message_of(ValueError("it is wrong")) == "it is wrong"
