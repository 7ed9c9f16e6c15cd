"""Messages of `shapes=` and `batching=`, at the declaration and in calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors

Place = Callable[[Callable[..., Any]], str]


def linear(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    return x @ weight.mT


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / x.norm(), x.norm()


UNREADABLE: dict[str, tuple[Any, str, str | None, str]] = {
    "no-text": (
        3,
        "must be a string with one `->` in it",
        None,
        "write the arguments, `->`, and the results",
    ),
    "no-arrow": (
        "x: B M",
        "must be a string with one `->` in it",
        None,
        "write the arguments, `->`, and the results",
    ),
    "unknown-argument": (
        "y: B M -> B",
        "must name each tensor once",
        "'y: B M'",
        "begin each entry with one of `x`, `weight`",
    ),
    "no-tensor": (
        "stride: B -> B",
        "must name each tensor once",
        "'stride: B'",
        "begin each entry with one of `x`, `weight`",
    ),
    "twice": (
        "x: B, x: B -> B",
        "must name each tensor once",
        "'x: B'",
        "begin each entry with one of `x`, `weight`",
    ),
    "two-results": (
        "x: B -> B, B",
        "must give the dimensions of each result",
        "'B, B'",
        "write one entry for each result after `->`, 1 in all",
    ),
    "not-a-size": (
        "x: B M! -> B",
        "has a dimension that cannot be read",
        "M!",
        "write letters, numbers, `H//2`, `_`",
    ),
    "a-call": (
        "x: B len(B) -> B",
        "has a dimension that cannot be read",
        "len(B)",
        "write letters, numbers, `H//2`, `_`",
    ),
    "dots-inside": (
        "x: B ... -> B",
        "has a dimension that cannot be read",
        "...",
        "write letters, numbers, `H//2`, `_`",
    ),
    "unbound": (
        "x: B M -> B Q",
        "uses `Q`, whose size no argument shows",
        None,
        "make it a dimension of an argument, or write `_`",
    ),
    "unbound-expression": (
        "x: B 2*M -> B",
        "uses `M`, whose size no argument shows",
        None,
        "make it a dimension of an argument, or write `_`",
    ),
    "leading-result": (
        "x: B M -> ... B",
        "has `...` only in a result",
        None,
        "begin an argument with `...`, too",
    ),
}


@pytest.mark.parametrize(("shapes", "problem", "got", "hint"), UNREADABLE.values(), ids=UNREADABLE)
def test_shapes_that_cannot_be_read(
    shapes: Any, problem: str, got: str | None, hint: str, name: str, place: Place, says: Any
) -> None:
    with says(
        errors.ShapePatternError,
        f"""
        {name}: `shapes=` {problem}
          argument: shapes
          expected: `x: B M, weight: N M -> B N`, in the order of the arguments and results
          got: {repr(shapes) if got is None else got}
          where: {place(linear)}
          hint: {hint}
        """,
    ):
        opsmith.operator(name, shapes=shapes)(linear)


def test_results_of_an_operator_that_only_writes(name: str, place: Place, says: Any) -> None:
    def double_(x: Tensor) -> Tensor:
        return x.mul_(2)

    opsmith.operator(name, mutates=["x"], returns="x", shapes="x: B M -> B M")(double_)
    with says(
        errors.ShapePatternError,
        f"""
        {name}: `shapes=` must give the dimensions of each result
          argument: shapes
          expected: `x: B M, weight: N M -> B N`, in the order of the arguments and results
          got: 'M'
          where: {place(double_)}
          hint: write nothing after `->`
        """,
    ):
        opsmith.operator(name, mutates=["x"], returns="x", shapes="x: B M -> M")(double_)


BATCHING: dict[str, tuple[Any, str | None, str]] = {
    "nothing": (True, None, "has an invalid value"),
    "no-shapes": ("B", None, "names a dimension, but there is no `shapes=`"),
    "not-in-the-result": (
        "B",
        "x: B M, weight: N M -> N",
        "names a dimension that does not come first in every result",
    ),
    "not-in-an-argument": (
        "M",
        "x: B M, weight: N M -> M",
        "names a dimension that comes first in no argument",
    ),
    "elsewhere": ("B", "x: B M, weight: M B -> B", "names a dimension that does not always come first"),
    "twice": ("B", "x: B M, weight: N M -> B B", "names a dimension that does not always come first"),
    "no-dots": ("...", "x: B M -> B", "names a dimension that does not come first in every result"),
}


@pytest.mark.parametrize(("batching", "shapes", "problem"), BATCHING.values(), ids=BATCHING)
def test_batching_without_a_meaning(
    batching: Any, shapes: str | None, problem: str, name: str, place: Place, says: Any
) -> None:
    with says(
        errors.UsageError,
        f"""
        {name}: `batching` {problem}
          argument: batching
          expected: `elementwise`, or a dimension that comes first in `shapes=`, a letter or `...`
          got: {batching!r}
          where: {place(linear)}
          hint: write `shapes="x: B M, weight: N M -> B N", batching="B"`, or leave `batching=` out
        """,
    ):
        opsmith.operator(name, shapes=shapes, batching=batching)(linear)


def test_batching_with_a_hidden_result_of_unknown_shape(name: str, place: Place, says: Any) -> None:
    with says(
        errors.UsageError,
        f"""
        {name}: `batching` needs the shape of every result, including hidden results
          argument: batching
          expected: `elementwise`, or a dimension that comes first in `shapes=`, a letter or `...`
          got: 'B'
          where: {place(normed)}
          hint: write `shapes="x: B M, weight: N M -> B N", batching="B"`, or leave `batching=` out
        """,
    ):
        opsmith.operator(name, hidden=("size",), shapes="x: B M -> B M", batching="B")(normed)


def test_tensor_of_the_wrong_shape(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, shapes="x: B M, weight: N M -> B N")(linear)
    with says(
        errors.ShapeError,
        f"""
        {name}: `weight` has the wrong shape
          argument: weight
          expected: `N M` with M = 3
          got: [2, 4]
          where: {place(linear)}
          hint: call it with `x: B M, weight: N M -> B N`
        """,
    ):
        operator(torch.ones(4, 3), torch.ones(2, 4))


def test_not_elementwise_after_all(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, batching="elementwise")(linear).kernel("cpu", linear)
    with says(
        errors.ShapeError,
        f"""
        {name}: `result` has no batch dimension, but it needs one with `batching='elementwise'`
          argument: result
          expected: [5, 2, 2]
          got: [5, 1, 2]
          where: {place(linear)}
          hint: leave `batching=` out: then each example is computed separately
        """,
    ):
        torch.vmap(operator)(torch.ones(5, 2), torch.ones(5, 2, 2))


def test_batch_dimension_lost(name: str, says: Any, place: Place) -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True)

    operator = opsmith.operator(name, shapes="x: B M -> B M", batching="B")(total).kernel("cpu", total)
    for _ in range(2):
        operator(torch.ones(1, 3))
    with says(
        errors.ShapeError,
        f"""
        {name}: `result` has no batch dimension, but it needs one with `batching='B'`
          argument: result
          expected: [10, ...]
          got: [1, 3]
          where: {place(total)}
          hint: leave `batching=` out: then each example is computed separately
        """,
    ):
        torch.vmap(operator)(torch.ones(5, 2, 3))


def test_result_of_another_shape(name: str, place: Place, says: Any) -> None:
    with says(
        errors.ShapeError,
        f"""
        {name}: the shape of `result` differs from `shapes=`
          argument: result
          expected: `B`, that is [4]
          got: [4, 2]
          where: {place(linear)}
          hint: correct `shapes=` or the function; write `_` for a size that cannot be inferred
        """,
    ):
        opsmith.operator(name, shapes="x: B M, weight: N M -> B")(linear)(torch.ones(4, 3), torch.ones(2, 3))


def test_result_of_another_dtype_than_its_fake(name: str, place: Place, says: Any) -> None:
    def largest(x: Tensor) -> Tensor:
        return x.argmax(-1)

    with says(
        errors.ResultTypeError,
        f"""
        {name}: the dtype of `result` differs from the dtype of the fake kernel derived from `shapes=`
          argument: result
          expected: torch.float32, to which its tensors promote
          got: torch.int64
          where: {place(largest)}
          hint: write `@op.fake` over a function that returns empty tensors of the right dtype
        """,
    ):
        opsmith.operator(name, opaque=True, shapes="x: B M -> B")(largest)(torch.ones(4, 3))


def cut(x: Tensor, step: int) -> Tensor:
    return x[: len(x) // step - 2] * 1


@pytest.mark.parametrize(("step", "size"), [(1, 1), (0, 4)], ids=["negative", "by-zero"])
def test_size_that_is_none(step: int, size: int, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, opaque=True, shapes="x: H -> H//step-2")(cut)
    with says(
        errors.ShapeError,
        f"""
        {name}: `result` would have a negative size, or a size that divides by zero
          argument: result
          expected: `H//step-2`
          got: [{size}]
          where: {place(cut)}
          hint: call it with `x: H -> H//step-2`
        """,
    ):
        operator(torch.ones(size, device="meta"), step)


def test_batching_by_a_number_that_is_given(name: str, place: Place, says: Any) -> None:
    def repeated(x: Tensor, n: int) -> Tensor:
        return x * n

    with says(
        errors.UsageError,
        f"""
        {name}: `batching` names an argument whose value is a size, but a batch would change this size
          argument: batching
          expected: `elementwise`, or a dimension that comes first in `shapes=`, a letter or `...`
          got: 'n'
          where: {place(repeated)}
          hint: write `shapes="x: B M, weight: N M -> B N", batching="B"`, or leave `batching=` out
        """,
    ):
        opsmith.operator(name, shapes="x: n M -> n M", batching="n")(repeated)
