"""On a GPU, kernels compute what their emulation on the CPU computes: the corpus, and bundled operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_comparison import bundled_calls, bundled_operators, compare_with_emulation
from emulated_kernels import RIGHT, WITH_NVIDIA, KernelCase
from fake_driver import forget, on_cpu
from torch import Tensor

import opsmith
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.cuda.nvrtc import include_directories

BUNDLED = bundled_operators()


@pytest.mark.gpu
@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_a_kernel_of_the_corpus(case: KernelCase) -> None:
    assert compare_with_emulation(case.operator(), [*case.arguments], "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not include_directories(), reason="NVIDIA's headers are not installed")
@pytest.mark.parametrize("case", WITH_NVIDIA, ids=str)
def test_types_of_nvidia_s_headers(case: KernelCase) -> None:
    assert compare_with_emulation(case.operator(), [*case.arguments], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", BUNDLED, ids=lambda each: each.name)
def test_a_bundled_operator(operator: Any) -> None:
    taken = [compare_with_emulation(operator, values, "cuda") for _, values in bundled_calls(operator)]
    assert any(taken)


# ---- The same, where the driver of these tests stands in for a GPU.


@pytest.mark.every(8)
@pytest.mark.parametrize("name", ["added", "fours", "histogram"])
def test_the_comparison_of_the_corpus(name: str) -> None:
    (case,) = (each for each in RIGHT if each.name == name)
    operator = case.operator()
    on_cpu(operator)
    forget(dry=False)
    assert compare_with_emulation(operator, [*case.arguments], "cpu")
    forget()


def test_the_comparison_of_an_operator_in_place() -> None:
    @opsmith.operator("device_comparison::raise_", mutates=["x"])
    def raise_(x: Tensor, by: float) -> None:
        x.add_(by)

    text = """
template <class T>
__global__ void raise_(View<T, 1> x, double by) {
  OPSMITH_EACH(i, x.numel()) x(i) += T(by);
}
"""
    raise_.kernel("cuda", cuda=text, grid=1)
    raise_.samples(lambda make: [(make(5), 2.0)])
    on_cpu(raise_)
    forget(dry=False)
    calls = [*bundled_calls(raise_)]
    assert [dtype for dtype, _ in calls] == [torch.float32, torch.float64]
    assert all(compare_with_emulation(raise_, values, "cpu") for _, values in calls)
    forget()


@pytest.mark.every(8)
@pytest.mark.parametrize("name", ["opsmith::rms_norm", "opsmith::rope_", "opsmith::adamw_"])
def test_the_comparison_of_bundled_operators(name: str) -> None:
    """Hidden results, an argument that is returned, and a kernel of several launches."""
    (operator,) = (each for each in BUNDLED if each.name == name)
    kernels, (cuda, *_) = operator.specification.kernels, cuda_kernels(operator.specification)
    machine = cuda.machine
    on_cpu(operator)
    forget(dry=False)
    try:
        calls = [values for dtype, values in bundled_calls(operator) if dtype == torch.float32]
        assert [compare_with_emulation(operator, values, "cpu") for values in calls[:1]] == [True]
    finally:
        forget()
        operator.replace_kernels(kernels)
        cuda.machine = machine


def test_a_difference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (each for each in RIGHT if each.name == "added")
    operator = case.operator()
    on_cpu(operator)
    forget(dry=False)
    monkeypatch.setattr(opsmith, "emulate", lambda operator, *values: values[0] * 1.001)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_emulation(operator, [*case.arguments], "cpu")
    forget()


def test_every_bundled_operator_with_a_kernel_is_compared() -> None:
    names = {each.name for each in BUNDLED}
    assert {"opsmith::involution", "opsmith::involution_input_gradient", "opsmith::rms_norm"} <= names
    assert all([*bundled_calls(each)] for each in BUNDLED)
