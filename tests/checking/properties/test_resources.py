"""The property `resources`: a CUDA kernel is held to its author's limits, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Outcome
from opsmith.kernels.cuda import nvrtc

names = itertools.count()
KERNEL = """
template <class T, int N>
__global__ void __launch_bounds__({bounds}) sums(Contiguous<const T, 2> x, Contiguous<T, 1> y) {
  T kept[{kept}];
  for (int i = 0; i < {kept}; i++) kept[i] = x[(threadIdx.x + i) % x.numel()];
  for (int round = 0; round < N; round++)
    for (int i = 0; i < {kept}; i++) kept[i] = kept[i] * kept[(i + 7) % {kept}] + round;
  for (int i = 0; i < {kept}; i++) y[threadIdx.x % y.numel()] += kept[i];
}
"""


def declared(text: str = KERNEL, *, kept: int = 2, bounds: str = "256", **words: Any) -> Any:
    @opsmith.operator(f"resources::op{next(names)}")
    def sums(x: Tensor) -> Tensor:
        return x.sum(1)

    text = text.replace("{kept}", str(kept)).replace("{bounds}", bounds)
    said = {"grid": 1, "constants": {"N": "x.shape[1]"}} | words
    sums.kernel("cuda", cuda=text, entry="sums", **said)
    sums.samples(lambda make: [(make(3, 4),), (make(2, 5),)])
    return sums


def outcome(operator: Any, effort: Any = "quick", **options: Any) -> Outcome:
    report = opsmith.check(operator, only=["resources"], effort=effort, **options)
    return next(each for each in report.outcomes if each.property == "resources")


@pytest.mark.slow
def test_a_kernel_that_keeps_to_its_limits_passes() -> None:
    assert outcome(declared(max_spills=0, max_registers=100)).status == "passed"
    assert outcome(declared()).status == "passed"


@pytest.mark.slow
def test_spills_are_found() -> None:
    words = {"block": 1024, "constants": {"N": 4}, "dtypes": [torch.float64]}
    operator = declared(kept=64, bounds="1024, 2", max_spills=0, **words)
    found = outcome(operator)
    assert found.status == "failed"
    (failure,) = found.failures
    assert failure.cause == "resources"
    told = "the CUDA kernel exceeds its limits: for float64, N=4, sm_90 it spills "
    assert failure.message.startswith(told)
    assert failure.where == operator.specification.kernels[0].function.where
    assert failure.evidence["most bytes spilled"] > 0


def test_both_architectures_are_looked_at_by_default() -> None:
    operator = declared(max_registers=4, constants={"N": 1}, dtypes=[torch.float32])
    (failure,) = outcome(operator, "default").failures
    assert "for float32, N=1, sm_80 it takes " in failure.message
    assert "for float32, N=1, sm_90 it takes " in failure.message


def test_registers_are_found() -> None:
    found = outcome(declared(max_registers=4))
    assert "registers, and max_registers is 4" in found.failures[0].message


def test_a_compile_error_is_found_where_there_is_no_gpu() -> None:
    found = outcome(declared(KERNEL.replace("T kept", "Tee kept")))
    assert found.status == "failed"
    assert found.failures[0].cause == "raises"
    assert 'identifier "Tee" is undefined' in found.failures[0].message


@pytest.mark.slow
def test_samples_that_are_given_to_the_check_count() -> None:
    found = outcome(declared(max_registers=4), samples=[(torch.ones(2, 9),)])
    assert "for float32, N=9, sm_90 it takes " in found.failures[0].message
    assert "N=4" not in found.failures[0].message


def test_without_a_cuda_kernel_it_is_skipped() -> None:
    found = outcome(opsmith.ops.exp)
    assert (found.status, found.reason) == ("skipped", "the operator has no kernel in CUDA C++")


def test_without_nvrtc_it_is_skipped_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())
    found = outcome(declared())
    assert found.status == "skipped"
    assert found.reason.startswith("there is no NVRTC, which compiles CUDA C++: pip install '.[cuda]'")
