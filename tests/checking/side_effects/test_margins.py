"""Margins: a kernel whose results depend on memory outside of its arguments is told so, each time alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking.side_effects.canaries import with_margins

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
    pytest.mark.xdist_group("subject"),
]

RIGHT, AFTER, BEFORE, WRONG_BOUND, VECTORS, UNUSED = range(6)
"""Ways in which the kernel of `weighted` reads: the last digit of `way`."""

GRADIENT = 10
"""Factor of the way in which the kernel reads when the formula for `x` calls it."""

OTHER = 100
"""Added to that way, which the reference takes from the formula alone: so a check tries it in no call."""

WAYS = {
    AFTER: "x",
    BEFORE: "x",
    WRONG_BOUND: "w",
    GRADIENT * AFTER: "grad_output",
    GRADIENT * WRONG_BOUND: "w",
}
"""The argument outside of which each wrong way reads."""

taken: set[int] = set()
"""Ways that the reference takes, so that a check invents no other one."""


@opsmith.operator("margins::weighted")
def weighted(x: Tensor, w: Tensor, way: int) -> Tensor:
    """Multiply by the sum of the weights: x [n], w [m] -> [n]."""
    if way not in taken:
        raise ValueError(f"weighted: there is no way {way}")
    return x * w.sum()


def gradient_of_x(grad: Tensor, w: Tensor, way: int) -> Tensor:
    own = way // GRADIENT % GRADIENT + OTHER
    taken.add(own)
    try:
        return weighted(grad, w, own)
    finally:
        taken.discard(own)


weighted.gradients(
    x=gradient_of_x,
    w=lambda grad, x, w: (grad * x).sum() * torch.ones_like(w),
)

weighted.kernel(
    "cpu",
    cpp="""
template <class T>
void weighted(Contiguous<const T, 1> x, Contiguous<const T, 1> w, int64_t way, Contiguous<T, 1> y) {
  const int64_t n = x.numel(), m = w.numel();
  T sum = 0;
  if (way % 10 == 4) {  // four at a time, then the rest
    int64_t i = 0;
    T lanes[4] = {0, 0, 0, 0};
    for (; i + 4 <= m; i += 4)
      for (int64_t k = 0; k < 4; k++) lanes[k] += w.data[i + k];
    for (; i < m; i++) lanes[0] += w.data[i];
    sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  } else {
    const int64_t bound = way % 10 == 3 && m ? m + 1 : m;
    for (int64_t i = 0; i < bound; i++) sum += w.data[i];
  }
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * sum;
  if (way % 10 == 1 && n) y[n - 1] += x.data[n];
  if (way % 10 == 2 && n) y[0] += x.data[-1];
  if (way % 10 == 5 && n && x.data[n] == T(0.123456)) y[0] = 0;
}
""",
)


@weighted.samples
def _(make: Any) -> Any:
    (way,) = taken
    yield make(5), make(3), way
    yield make(4), make(8), way


def checked(way: int, **options: Any) -> opsmith.Report:
    taken.clear()
    taken.add(way)
    return opsmith.check(weighted, effort="quick", **options)


@pytest.mark.every(8)
@pytest.mark.parametrize("way", WAYS)
def test_a_read_outside_is_one_failure_that_names_the_argument_and_a_hint(way: int) -> None:
    reports = [checked(way) for _ in range(5)]
    (failure,) = reports[0].failures
    assert (failure.property, failure.cause, failure.severity) == ("forward", "out-of-bounds", "error")
    assert (failure.input, failure.follows) == (WAYS[way], None)
    assert f"depends on memory outside of `{WAYS[way]}`" in failure.message
    assert "--sanitize" in failure.message
    assert "sanitize=True" in failure.message
    what = "the gradient of `x`" if way >= GRADIENT else "`result`"
    assert failure.message.startswith(what)
    for report in reports[1:]:
        assert report.failures == reports[0].failures
    skipped = {each.reason for each in reports[0].outcomes if each.status == "skipped"}
    assert (
        "not run: the results depend on memory outside of the operator's tensors (see `forward`)" in skipped
    )


@pytest.mark.every(5)
@pytest.mark.parametrize("way", [RIGHT, VECTORS, UNUSED, GRADIENT * VECTORS])
def test_a_kernel_that_reads_to_the_end_or_drops_what_it_reads_passes(way: int) -> None:
    report = checked(way, only=["forward", "gradient", "determinism", "effects", "linearity"])
    assert not report.failures, report


def test_one_property_alone_tells_it() -> None:
    report = checked(AFTER, only=["linearity"])
    assert [(each.property, each.cause) for each in report.failures] == [("forward", "out-of-bounds")]


def test_a_process_of_its_own_tells_it() -> None:
    report = checked(BEFORE, only=["forward"], isolate=60)
    assert [(each.input, each.cause) for each in report.failures] == [("x", "out-of-bounds")]


@pytest.mark.slow
@pytest.mark.parametrize("way", [AFTER, BEFORE, WRONG_BOUND])
def test_the_hint_names_the_line(way: int) -> None:
    failure = checked(way, only=["forward"], sanitize=True).failures[0]
    assert (failure.property, failure.cause, failure.input) == ("sanitized", "out-of-bounds", WAYS[way])
    line = {AFTER: "x.data[n]", BEFORE: "x.data[-1]", WRONG_BOUND: "sum += w.data[i]"}[way]
    assert line in failure.evidence["line"]


SCRIPT = """
import test_margins
report = test_margins.checked(test_margins.AFTER)
for failure in report.failures:
    print(failure)
print([(outcome.property, outcome.status, outcome.reason) for outcome in report.outcomes])
"""


@pytest.mark.slow
def test_every_process_gives_the_same_report() -> None:
    folder = Path(__file__).parent
    runs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for _ in range(3)
    ]
    assert "out-of-bounds" in runs[0]
    assert len(set(runs)) == 1


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int32,
        torch.uint16,
        torch.bool,
    ],
    ids=str,
)
def test_margins_keep_the_numbers_and_the_strides(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype).mT
    (plain,), (other,) = with_margins([x], ["x"]), with_margins([x], ["x"], ["x"])
    for each in (plain, other):
        assert each.stride() == x.stride()
        assert torch.equal(each.to(torch.complex64), x.to(torch.complex64))
    beside = [each.as_strided((8,), (1,), each.storage_offset() - 1).cdouble() for each in (plain, other)]
    assert beside[0][0] != beside[1][0]
    assert beside[0][7] != beside[1][7]


def test_margins_of_indices_hold_numbers_that_may_index_the_same() -> None:
    index = torch.tensor([2, 4, 3])
    beside = [
        x.as_strided((5,), (1,), x.storage_offset() - 1).tolist()
        for x in (with_margins([index], ["index"])[0], with_margins([index], ["index"], ["index"])[0])
    ]
    assert beside == [[0, 2, 4, 3, 0], [4, 2, 4, 3, 4]]
