"""Numbers of floating point that the kernel alone reads: calls that differ in them share a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_driver import OnCpu, driver, forget, on_cpu
from torch import Tensor

import opsmith
from opsmith import errors, ops

CPP = """
template <class T>
void added_(Contiguous<T> x, double by, List<double> more, std::optional<double> last) {
  for (int64_t i = 0; i < x.numel(); i++) {
    x[i] += T(by) + (last ? T(*last) : T(0));
    for (double each : more) x[i] += T(each);
  }
}
"""
CUDA = """
template <class T>
__global__ void added_(Contiguous<T> x, NUMBER by, List<NUMBER, 3> more, Optional<NUMBER> last) {
  OPSMITH_EACH(i, x.numel()) {
    x[i] += T(by) + (last.given ? T(last.value) : T(0));
    for (int at = 0; at < more.size; at++) x[i] += T(more[at]);
  }
}
"""
LAUNCH: dict[str, Any] = {"grid": 1, "block": 32}


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    forget(dry=False)
    yield
    forget()


def declare(name: str, by: Callable[[Any], Any]) -> tuple[Any, Any]:
    """An operator that writes in place, and its kernel."""

    @opsmith.operator(f"free_numbers::{name}", mutates=["x"])
    def added_(x: Tensor, by: float, more: list[float], last: float | None = None) -> None:
        if by == 7.0:
            raise ValueError("`by` is seven")
        x.add_(by + sum(more) + (last or 0.0))

    by(added_)
    return added_, added_.specification.kernels[0].given


def in_cpp(operator: Any) -> None:
    operator.kernel("cpu", cpp=CPP, entry="added_")


def in_cuda(number: str, **launch: Any) -> Callable[[Any], Any]:
    def give(operator: Any) -> None:
        operator.kernel("cuda", cuda=CUDA.replace("NUMBER", number), entry="added_", **{**LAUNCH, **launch})
        on_cpu(operator)

    return give


WAYS = {"C++": in_cpp, "CUDA, double": in_cuda("double"), "CUDA, float": in_cuda("float")}


@pytest.mark.parametrize("way", WAYS)
def test_calls_with_other_numbers_share_a_plan(way: str) -> None:
    operator, kernel = declare(f"shared_{[*WAYS].index(way)}", WAYS[way])
    numbers = (0.5, -0.0, 1e-3, 3.0, 1e30, math.inf, 2.0**-130)
    for by, first, last in zip(numbers, numbers[1:], [None, *numbers], strict=False):
        for more in ([], [first], [first, 0.25, first]):
            x, expected = torch.zeros(3), torch.zeros(3)
            operator(x, by, more, last)
            operator.reference(expected, by, more, last)
            torch.testing.assert_close(x, expected, equal_nan=True)
    assert kernel.cached_plans == 3 * 2  # by the length of the list, and whether the last one is given


def test_a_number_that_the_launch_depends_on_is_part_of_the_signature() -> None:
    by_name = in_cuda("double", grid="2 if by > 1 else 1")
    for name, give in (("grid", by_name), ("function", in_cuda("double", grid=lambda by: 1))):
        operator, kernel = declare(name, give)
        for plans, by in enumerate((0.5, 1.5, 2.5), 1):
            x = torch.zeros(40)
            operator(x, by, [1.0])
            operator(x, by, [2.0])
            assert torch.equal(x, torch.full((40,), 2 * by + 3.0))
            assert kernel.cached_plans == plans


def in_a_size(name: str) -> Any:
    """An operator whose result has a size that depends on a number, with a kernel in C++."""

    @opsmith.operator(f"free_numbers::{name}")
    def repeated(x: Tensor, times: float) -> Tensor:
        return x.new_zeros(int(times)) + x

    return repeated.kernel(
        "cpu",
        entry="repeated",
        cpp="void repeated(View<const float, 1> x, double times, Contiguous<float> y) {"
        " for (int64_t i = 0; i < y.numel(); i++) y[i] = x(0); }",
    )


def test_where_there_is_a_result_its_layout_may_depend_on_a_number() -> None:
    repeated = in_a_size("repeated")
    for times in (1.0, 2.0, 3.0):
        assert repeated(torch.ones(1), times).shape == (int(times),)


def test_out_has_the_sizes_of_the_results_in_each_call() -> None:
    repeated = in_a_size("repeated_into")
    out = torch.zeros(2)
    for _ in range(2):
        assert torch.equal(repeated.out(torch.ones(1), 2.5, out=out), torch.ones(2))
        with pytest.raises(errors.ShapeError, match="`out` has another shape"):
            repeated.out(torch.ones(1), 3.0, out=out)


def test_the_reference_checks_numbers_in_the_first_call_of_a_kind() -> None:
    operator, _ = declare("checked", in_cpp)
    with pytest.raises(ValueError, match="is seven"):
        operator(torch.zeros(3), 7.0, [])
    operator(torch.zeros(3), 1.0, [])
    operator(torch.zeros(3), 7.0, [])  # the kernel alone reads it


def test_a_reload_reads_anew_what_a_plan_depends_on() -> None:
    operator, kernel = declare("again", in_cpp)
    for _ in range(2):
        for by in (0.5, 1.5):
            x = torch.zeros(3)
            operator(x, by, [])
            assert torch.equal(x, torch.full((3,), by))
        assert kernel.cached_plans == 1
        operator.reload()


@pytest.mark.parametrize("language", ["C++", "CUDA"])
def test_adamw_makes_no_plan_for_another_rate(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [each.given for each in ops.adamw_.specification.kernels]
    kernel = next(each for each in kernels if each.language == language)
    if language == "CUDA":
        monkeypatch.setattr(kernel, "machine", OnCpu())
        driver().take(kernel)
    kernel.reload()
    state = [[torch.rand(3, at + 1) for at in range(3)] for _ in range(4)]
    expected = [[each.clone() for each in tensors] for tensors in state]
    step, expected_step = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for rate in itertools.islice(itertools.count(1), 4):
            kernel(*state, step, rate / 100, 0.9 - rate / 10)
            ops.adamw_.reference(*expected, expected_step, rate / 100, 0.9 - rate / 10)
    torch.testing.assert_close(state, expected)
    assert kernel.cached_plans == 1
    kernel.reload()
