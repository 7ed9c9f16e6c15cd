"""Locations in source code: `file:line` is parsed in one place, and other texts are no locations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from opsmith.checking.output.annotations import Unchecked, lines
from opsmith.core.location import innermost, line_at, parsed, short_location, where

HERE = innermost.__code__.co_filename


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("demo.py:7", ("demo.py", 7)),
        ("C:/demo.py:12", ("C:/demo.py", 12)),
        ("two\nlines.py:7", ("two\nlines.py", 7)),
        ("len", None),
        ("x:²", None),
        ("x:٣", None),
        ("x:0", None),
        (f"x:{'9' * 5000}", None),
        (":7", None),
        ("", None),
        (None, None),
    ],
)
def test_a_location_is_a_file_and_a_number(where: str | None, found: tuple[str, int] | None) -> None:
    assert parsed(where) == found


def doubling(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def doubled() -> int:
        return 2 * function()

    return doubled


class Methods:
    @staticmethod
    def of_one() -> int:
        return 1

    @staticmethod
    @doubling
    # a comment
    def of_two() -> int:
        return 2

    def of_none(self) -> int:
        return 3

    of_lambda = staticmethod(lambda: 4)


@doubling
def decorated() -> int:
    return 5


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (Methods.of_one, "def of_one() -> int:"),
        (Methods.of_two, "def of_two() -> int:"),
        (Methods.of_none, "def of_none(self) -> int:"),
        (Methods.of_lambda, "of_lambda = staticmethod(lambda: 4)"),
        (decorated, "@doubling"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_the_line_of_a_method_is_that_of_its_def(function: Callable[..., int], line: str) -> None:
    assert line_at(where(function)) == line


@pytest.mark.parametrize("where", ["x:²", "len", f"x:{'9' * 5000}"])
def test_a_text_that_is_no_location_has_no_line(where: str) -> None:
    assert line_at(where) == ""
    assert short_location(where) == where
    shown = "opsmith: error: demo::op: could not be checked: no\n"
    assert lines([], [Unchecked("demo::op", "", "no", where)]) == shown


def test_the_innermost_line_is_in_the_file_of_a_location() -> None:
    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011  # it has no message
        fails()
    raised = fails.__code__.co_firstlineno + 1
    assert innermost(caught.value, f"{__file__}:1") == f"{__file__}:{raised}"
    assert innermost(caught.value, f"{HERE}:1") == f"{HERE}:1"
    assert innermost(caught.value, "len") == "len"
