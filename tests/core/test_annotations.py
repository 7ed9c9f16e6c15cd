"""Annotations of a reference: `hints_of` against `typing.get_type_hints`."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from torch import Tensor

from opsmith.core.annotations import hints_of

Pair = tuple[int, int]
Named = "Tensor"


def classes(x: Tensor, n: int, *, flag: bool = True) -> Tensor: ...  # type: ignore[empty-body]
def others(x: Tensor | None, size: Pair, y: Annotated[Tensor, "y"], z: Named) -> None: ...  # type: ignore[valid-type]
def partly(x: Tensor, y, z: "list[Tensor]" = ()) -> Any: ...  # type: ignore[no-untyped-def]  # noqa: UP037
def nothing(): ...  # type: ignore[no-untyped-def]
def unknown(x: Tensor, y: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def a_number(x: Tensor, y: three) -> None: ...  # type: ignore[valid-type]


three = 3


class Holder:
    def method(self, x: Tensor, n: Pair) -> Holder: ...  # type: ignore[empty-body]


@typing.no_type_check
def unchecked(x: Tensor, y: 3) -> None: ...


def generic(x: Holder, y: Tensor) -> Tensor: ...  # type: ignore[empty-body]


generic.__type_params__ = (typing.TypeVar("Holder"),)  # type: ignore[attr-defined]  # as of `def generic[Holder]`


def resolved(resolve: Callable[..., Any], function: Any) -> Any:
    try:
        return list(resolve(function).items())
    except (NameError, TypeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "function",
    [classes, others, partly, nothing, unknown, a_number, unchecked, generic, Holder.method, Holder().method],
    ids=lambda function: function.__qualname__,
)
def test_hints_are_those_of_typing(function: Any) -> None:
    assert resolved(hints_of, function) == resolved(typing.get_type_hints, function)
