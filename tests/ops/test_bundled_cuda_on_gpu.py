"""On a GPU, the CUDA kernels of the operators of a language model compute what the references do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model_cases import CALLS, LAYOUTS, REAL, Layout, calls, expected, results
from random_layouts import contiguous
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith.core.tensors import map_tensors
from opsmith.ops import rms_norm

pytestmark = pytest.mark.gpu
NAMES = [each.specification.short_name for each in CALLS]


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("operator", CALLS, ids=NAMES)
def test_values(operator: Any, dtype: torch.dtype, layout: Layout) -> None:
    for on_cpu in calls(operator, dtype, layout):
        given = tuple(map_tensors(on_gpu, on_cpu))
        right = expected(operator, given)
        kernel = operator.explain(*given).kernel
        assert kernel is not None
        assert kernel.device == "cuda"
        returned = operator(*given)
        got = results(operator, returned if isinstance(returned, tuple) else (returned,), given)
        assert_close(got, right[: len(got)], equal_nan=True)


def test_many_rows_and_long_ones() -> None:
    for shape in [(100_000, 64), (3, 100_003)]:
        x, weight = torch.randn(shape, device="cuda"), torch.randn(shape[1], device="cuda")
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        wide = [each.detach().double().requires_grad_() for each in leaves]
        grad = torch.randn_like(x)
        found = torch.autograd.grad(rms_norm(*leaves), leaves, grad)
        right = torch.autograd.grad(rms_norm.reference(*wide)[0], wide, grad.double())
        bounds = [1e-4 * each.abs().max().item() for each in right]
        for one, two, bound in zip(found, right, bounds, strict=True):
            assert_close(one.double(), two, rtol=0, atol=bound)
        again = torch.autograd.grad(rms_norm(*leaves), leaves, grad)
        assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


@pytest.mark.parametrize("operator", CALLS, ids=NAMES)
def test_check_finds_no_error(operator: Any) -> None:
    for given in calls(operator, torch.float32, contiguous)[:1]:
        report = opsmith.check(operator, samples=[given], skip=["compile", "export", "opcheck"])
        assert not report.errors, str(report)
