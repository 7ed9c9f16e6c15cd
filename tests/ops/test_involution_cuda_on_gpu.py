"""On a GPU, the CUDA kernels of involution compute what the references do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from involution_cases import (
    BEYOND,
    OPERATORS,
    PLAIN,
    STEPS,
    STRIDED,
    UNEVEN,
    UNITS,
    Case,
    cases,
    expected,
    held,
)
from torch import Tensor

import opsmith

pytestmark = pytest.mark.gpu

REDNET = [
    Case(4, C // 16, 16, (side, side), (7, 7), (step, step), (3, 3))
    for C, side, step in [(64, 56, 1), (128, 56, 2), (128, 28, 1), (256, 14, 1), (512, 14, 2), (512, 7, 1)]
]


def compared(case: Case, dtype: torch.dtype) -> None:
    made = case.tensors(dtype, "cuda")
    for name, arguments in case.calls(*made).items():
        kernel = OPERATORS[name].explain(*arguments).kernel
        assert kernel is not None
        assert kernel.device == "cuda"
        found = OPERATORS[name](*arguments)
        held(found, expected(name, arguments), dtype, (name, case))
        assert torch.equal(found, OPERATORS[name](*arguments)), "the same numbers each time"


@pytest.mark.parametrize("case", [PLAIN, STRIDED, UNEVEN, BEYOND, *REDNET], ids=str)
@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_values(case: Case, dtype: torch.dtype) -> None:
    compared(case, dtype)


@pytest.mark.parametrize("step", range(len(STEPS)))
@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_random_sizes_and_layouts(step: int, dtype: torch.dtype) -> None:
    for case in [each for each in cases(step, 400) if each.kernel == STEPS[step]["kernel"]][:25]:
        compared(case, dtype)


@pytest.mark.parametrize("case", [PLAIN, STRIDED, UNEVEN, BEYOND], ids=str)
@pytest.mark.parametrize("odd", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_goes_where_the_reference_has_it(case: Case, odd: float) -> None:
    made = case.tensors(torch.float32, "cuda")
    for each in made:
        for place in (0, -1):
            each[(place,) * each.dim()] = odd
    for name, arguments in case.calls(*made).items():
        found, right = OPERATORS[name](*arguments), OPERATORS[name].reference(*arguments)
        assert torch.equal(found.isnan(), right.isnan()), name
        assert torch.equal(found.isinf(), right.isinf()), name


def test_more_elements_than_32_bits_count() -> None:
    """The last image of a batch whose weights are more than 2^32 elements."""
    batch, side = 1100, 280
    needed = batch * side * side * 49 * 2
    if torch.cuda.mem_get_info()[0] < needed + (4 << 30):
        pytest.skip(f"the GPU has no {needed >> 30} GiB and some more that are free")
    image = torch.randn(batch, 1, side, side, device="cuda", dtype=torch.float16)
    weight = torch.empty(batch, 1, 7, 7, side, side, device="cuda", dtype=torch.float16).normal_()
    found = OPERATORS["forward"](image, weight, 1, 3)
    last: tuple[Tensor, ...] = (image[-1:].clone(), weight[-1:].clone())
    held(found[-1:], expected("forward", (*last, 1, 3)), torch.float16, "forward")
    back = OPERATORS["input gradient"](image, weight, (side, side), 1, 3)
    held(back[-1:], expected("input gradient", (*last, (side, side), 1, 3)), torch.float16, "input gradient")
    del weight, found, back
    by_weight = OPERATORS["weight gradient"](image, image, 1, (7, 7), 1, 3)
    right = expected("weight gradient", (last[0], last[0], 1, (7, 7), 1, 3))
    held(by_weight[-1:], right, torch.float16, "weight gradient")


@pytest.mark.parametrize("name", OPERATORS)
def test_check_passes(name: str) -> None:
    operator: Any = OPERATORS[name]
    report = opsmith.check(operator, skip=["compile", "export", "opcheck"])
    assert report.passed, str(report)
