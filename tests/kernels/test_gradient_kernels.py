"""A gradient may be computed by a kernel: that of an operator which the formula calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith


@opsmith.operator("gradient_kernels::softsign_gradient")
def softsign_gradient(g: Tensor, x: Tensor) -> Tensor:
    return g / (1 + x.abs()) ** 2


softsign_gradient.kernel(
    "cpu",
    cpp="""
#include <cmath>
template <class T>
void softsign_gradient(Contiguous<const T> g, Contiguous<const T> x, Contiguous<T> result) {
  for (int64_t i = 0; i < x.numel(); i++) {
    T below = 1 + std::abs(x[i]);
    result[i] = g[i] / (below * below);
  }
}
""",
)


@opsmith.operator("gradient_kernels::softsign")
def softsign(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


softsign.gradients(x=lambda grad, x: softsign_gradient(grad, x))
softsign.kernel(
    "cpu",
    cpp="""
#include <cmath>
template <class T>
void softsign(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] / (1 + std::abs(x[i]));
}
""",
)


@softsign.samples
def _(make: Any) -> Any:
    yield (make(3, 5),)
    yield (make(4, 2).mT,)


@softsign_gradient.samples
def _(make: Any) -> Any:
    yield make(3, 5), make(3, 5)
    yield make(2, 4).mT, make(4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [softsign, softsign_gradient], ids=lambda each: each.__name__)
def test_check_passes_through_both_kernels(operator: Any) -> None:
    report = opsmith.check(operator, skip=["compile", "export", "opcheck"])
    assert report.passed, str(report)


@pytest.mark.slow
def test_the_kernel_computes_the_gradient() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(softsign(x).sum(), x)
        assert_close(gradient, 1 / (1 + x.detach().abs()) ** 2)
    assert softsign_gradient.specification.kernels[0].function.cached_plans >= 1  # type: ignore[attr-defined]
