"""The kernels that are to come with involution give what its reference gives: every size, step and layout."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from involution_kernels import candidates

pytestmark = [
    pytest.mark.slow,  # they take half a minute to compile
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
    pytest.mark.xdist_group("involution_kernels"),
]

TOLERANCE = {torch.float32: 4e-6, torch.float64: 2e-14, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest element, a few units in the last place: 16 bits are rounded once, after sums in float32."""


@pytest.fixture(scope="module", autouse=True)
def _attached() -> None:
    candidates.attach()


def cases(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Random sizes and steps, each of which the kernels have a path of their own for, and others."""
    draw = random.Random(seed)
    while count:
        groups, channels = draw.choice([1, 2, 3]), draw.choice([1, 3, 8, 16, 20, 33])
        kernel = (draw.choice([1, 2, 3, 4, 5, 7]), draw.choice([1, 3, 4, 5, 7]))
        stride, dilation = (tuple(draw.choice(some) for _ in "hw") for some in ([1, 1, 2, 3], [1, 1, 1, 2]))
        padding = tuple(draw.choice([0, k // 2, k]) for k in kernel)
        size = (draw.choice([1, 7, 14, 15, 30]), draw.choice([1, 7, 13, 14, 16, 29]))
        result = tuple(
            (n + 2 * p - (d * (k - 1) + 1)) // s + 1
            for n, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
        )
        if min(result) < 1:
            continue
        count -= 1
        yield {
            "sizes": (draw.choice([1, 2]), groups * channels, *size),
            "weight": (groups, *kernel, *result),
            "steps": (stride, padding, dilation),
            "last": draw.random() < 0.3,
            "turned": draw.random() < 0.2,
        }


def made(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Image, weight and what came back, as they lie in the case."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    (B, C, *_), (_, _, _, *result) = case["sizes"], case["weight"]
    image, came, weight = numbers(*case["sizes"]), numbers(B, C, *result), numbers(B, *case["weight"])
    if case["last"]:
        image, came = (each.to(memory_format=torch.channels_last) for each in (image, came))
    if case["turned"]:
        weight = weight.permute(0, 4, 5, 1, 2, 3).contiguous().permute(0, 3, 4, 5, 1, 2)
    return image, weight, came


def calls(case: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    image, weight, came = made(case, dtype)
    steps, (groups, *kernel, _, _) = case["steps"], case["weight"]
    yield candidates.involution, (image, weight, *steps)
    yield candidates.input_gradient, (came, weight, tuple(image.shape[2:]), *steps)
    yield candidates.weight_gradient, (came, image, groups, tuple(kernel), *steps)


def expected(operator: Any, arguments: tuple[Any, ...]) -> Tensor:
    wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
    result: Tensor = operator.reference(*wide)
    return result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes(seed: int, dtype: torch.dtype) -> None:
    for case in cases(seed, 40):
        for operator, arguments in calls(case, dtype):
            found, right = operator(*arguments), expected(operator, arguments)
            assert found.dtype == dtype
            within = TOLERANCE[dtype] * max(1.0, right.abs().max().item())
            torch.testing.assert_close(found.double(), right, rtol=0, atol=within, msg=str((operator, case)))


@pytest.mark.parametrize("odd", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_goes_where_the_reference_has_it(odd: float) -> None:
    for number, case in enumerate(cases(5, 30)):
        image, weight, came = made(case, torch.float32)
        for each in (image, weight, came)[:: 1 + number % 3]:  # all of them, two, or the image
            for place in (0, -1):  # in corners, where taps look beyond the image
                each[(place,) * each.dim()] = odd
        steps, (groups, *kernel, _, _) = case["steps"], case["weight"]
        for operator, arguments in (
            (candidates.involution, (image, weight, *steps)),
            (candidates.input_gradient, (came, weight, tuple(image.shape[2:]), *steps)),
            (candidates.weight_gradient, (came, image, groups, tuple(kernel), *steps)),
        ):
            found, right = operator(*arguments), operator.reference(*arguments)
            assert torch.equal(found.isfinite(), right.isfinite()), (operator, case)
            assert torch.equal(found.isnan(), right.isnan()), (operator, case)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_numbers_with_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    case = next(cases(7, 1)) | {"sizes": (2, 48, 30, 29), "weight": (3, 7, 7, 30, 29)}
    case |= {"steps": (1, 3, 1)}
    alone = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            alone.append([operator(*arguments) for operator, arguments in calls(case, torch.float32)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *alone))


def test_empty_batches() -> None:
    case = {
        "sizes": (0, 16, 5, 5),
        "weight": (1, 3, 3, 5, 5),
        "steps": (1, 1, 1),
        "last": False,
        "turned": False,
    }
    for operator, arguments in calls(case, torch.float32):
        assert operator(*arguments).shape == expected(operator, arguments).shape
