"""Recipes: the runtime plans calls with new sizes as Python does, and leaves to Python what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors, ops
from opsmith.core.schema import schema_of
from opsmith.core.shapes import read_shapes
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.runtime import recipe
from opsmith.kernels.runtime.library import RECIPE
from opsmith.ops.rms_norm import rms_norm_backward


def kernel_of(operator: Any) -> Any:
    return next(each.given for each in operator.specification.kernels if isinstance(each.given, CppKernel))


def planned_by_python(kernel: Any, arguments: list[tuple[Any, ...]]) -> list[tuple[int, ...]]:
    """Sizes of the first tensor of calls for which Python makes a plan."""
    found = []
    for each in arguments:
        before = kernel.cached_plans
        kernel.direct(*each)
        if kernel.cached_plans != before:
            found.append(tuple(each[0].shape))
    return found


def test_codes_and_limits_are_those_of_the_header() -> None:
    text = RECIPE.read_text()
    (listed,) = re.findall(r"enum Code : int64_t \{([^}]*)\}", text)
    assert tuple(re.findall(r"\w+", listed)) == recipe.CODES
    for name, number in (("operands", recipe.MOST_OPERANDS), ("letters", recipe.MOST_LETTERS)):
        assert f"most_{name} = {number};" in text


def test_results_with_a_dimension_of_size_1_need_one_plan_in_python() -> None:
    kernel = kernel_of(ops.rms_norm)
    kernel.withdraw()
    weight = torch.randn(64)
    calls = [(torch.randn(rows, 64), weight, 1e-6) for rows in range(2, 9)]
    assert planned_by_python(kernel, calls) == [(2, 64)]
    for each in calls:
        results = kernel.direct(*each)
        rights = ops.rms_norm.reference(*each)
        assert_close(results, rights)
        assert [made.stride() for made in results] == [right.stride() for right in rights]


def test_arguments_with_a_dimension_that_is_always_1_need_one_plan_in_python() -> None:
    kernel = kernel_of(rms_norm_backward)
    kernel.withdraw()
    calls: list[tuple[Any, ...]] = []
    for rows in range(2, 9):
        x, weight = torch.randn(rows, 64), torch.randn(64)
        calls.append((torch.randn(rows, 64), x, weight, ops.rms_norm.reference(x, weight)[1]))
    assert planned_by_python(kernel, calls) == [(2, 64)]
    for each in calls:
        assert_close(kernel.direct(*each), rms_norm_backward.reference(*each))


def test_sizes_of_0_and_1_by_chance_and_other_strides_are_planned_by_python() -> None:
    kernel = kernel_of(ops.rms_norm)
    kernel.withdraw()
    weight = torch.randn(64)
    calls = [(torch.randn(rows, 64), weight, 1e-6) for rows in (4, 1, 0, 3)]
    assert planned_by_python(kernel, calls) == [(4, 64), (1, 64), (0, 64)]
    across = torch.randn(64, 6).mT
    assert planned_by_python(kernel, [(across, weight, 1e-6), (across[:5], weight, 1e-6)]) == [
        (6, 64),
        (5, 64),
    ]


INNER = """
void NAME(View<const float, 2> x, View<float, 2> y) {
  for (int64_t i = 0; i < y.size(0); i++)
    for (int64_t j = 0; j < y.size(1); j++) y(i, j) = x(i, j);
}
"""
INNER_SIZES = "Shape sizes(View<const float, 2> x) { return {x.size(0) - 2, x.size(1) - 1}; }"


@pytest.mark.parametrize(
    ("shapes", "sizes"), [("x: N M -> N-2 M-1", ""), (None, INNER_SIZES)], ids=["shapes", "C++"]
)
def test_results_of_size_0_and_1_by_chance_are_planned_by_python(shapes: str | None, sizes: str) -> None:
    name = "sized_inner" if sizes else "inner"

    @opsmith.operator(f"recipes::{name}", shapes=shapes)
    def inner(x: Tensor) -> Tensor:
        return x[:-2, :-1].clone()  # a dimension of size 0 or 1 keeps its stride

    kernel = kernel_of(inner.kernel("cpu", cpp=INNER.replace("NAME", name) + sizes))
    kernel.direct(first := torch.randn(6, 5))
    kernel.direct(first)
    calls = [(torch.randn(rows, 3),) for rows in (4, 3, 5, 2)]
    assert planned_by_python(kernel, calls) == [(3, 3), (2, 3)]
    for (x,) in calls:
        assert torch.equal(kernel.direct(x), inner.reference(x))
        assert kernel.direct(x).stride() == inner.reference(x).stride()


def test_a_number_of_dimensions_that_depends_on_sizes_is_left_to_python() -> None:
    @opsmith.operator("recipes::paired")
    def paired(x: Tensor) -> Tensor:
        return torch.stack((x, x), 1) if len(x) > 9 else x.clone()

    kernel = kernel_of(
        paired.kernel(
            "cpu",
            cpp="""
void paired(View<const float, 1> x, View<float, 1> y) {
  for (int64_t i = 0; i < y.size(0); i++) y(i) = x(i);
}
Shape sizes(View<const float, 1> x) { return x.size(0) > 9 ? Shape{x.size(0), 2} : Shape{x.size(0)}; }
""",
        )
    )
    kernel.direct(first := torch.randn(5))
    kernel.direct(first)
    assert planned_by_python(kernel, [(torch.randn(6),)]) == []
    with pytest.raises(errors.KernelSignatureError, match="differs from the reference's result"):
        kernel.direct(torch.randn(12))


def test_shapes_that_are_not_those_of_the_reference_are_refused_in_each_call() -> None:
    @opsmith.operator("recipes::wrong", shapes="x: N -> 8")
    def wrong(x: Tensor) -> Tensor:
        return x * 2

    wrong.kernel("cpu", cpp="void wrong(View<const float, 1> x, View<float, 1> y) {}")
    for _ in range(2):
        with pytest.raises(errors.ShapeError, match="the shape of `result` differs from `shapes=`"):
            wrong(torch.randn(5))


REFUSED = {
    "a division by zero": ("x: N, y: M -> N//(M-3)", (8, 5), (9, 4), (8, 3)),
    "a remainder of zero": ("x: N, y: M -> N%(M-3)+2", (8, 5), (9, 6), (8, 3)),
    "a negative size": ("x: N, y: M -> N-M", (8, 5), (9, 5), (3, 9)),
    "beyond 64 bits": (f"x: N, y: M -> N+(M-5)*{2**32}*{2**32}", (8, 5), (9, 5), (8, 6)),
    "a wrong size": ("x: N, y: N//2 -> N", (8, 4), (9, 4), (8, 5)),
    "a wrong number": ("x: N, y: 5 -> N", (8, 5), (9, 5), (8, 6)),
}
"""`shapes=`; sizes of a first call, of one that the recipe plans, of one that Python refuses."""


@pytest.mark.parametrize("case", REFUSED)
def test_python_refuses_in_its_own_words_what_a_recipe_does_not_plan(case: str) -> None:
    text, first, second, wrong = REFUSED[case]
    schema = schema_of(_two, "recipes::two")
    shapes = read_shapes(text, schema)

    @opsmith.operator("recipes::two", shapes=text)
    def two(x: Tensor, y: Tensor) -> Tensor:
        (size,) = shapes.results[0].evaluate(shapes.bind(schema, [x, y])[0])
        return x.new_zeros(size)

    two.kernel("cpu", cpp="void two(View<const float, 1>, View<const float, 1>, View<float, 1>) {}")
    kernel = kernel_of(two)

    def refusal() -> tuple[type, str]:
        with pytest.raises(Exception) as caught:  # noqa: PT011  # torch's own, too
            two(*map(torch.zeros, wrong))
        return type(caught.value), str(caught.value)[:90]  # torch adds a trace of its own

    expected = refusal()
    calls = [tuple(map(torch.zeros, sizes)) for sizes in (first, second)]
    assert planned_by_python(kernel, calls) == [(first[0],)]
    assert refusal() == expected


def _two(x: Tensor, y: Tensor) -> Tensor:
    return x
