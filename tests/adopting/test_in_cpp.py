"""An operator registered in C++ by `TORCH_LIBRARY` is adopted as it is, its own gradient included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils.cpp_extension import load_inline

import opsmith

SOURCE = """
#include <torch/library.h>
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

at::Tensor cube(const at::Tensor& x, double by, at::IntArrayRef size) {
  return x * x * x * by;
}

struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor x) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x});
    return x * x * x;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    auto x = ctx->get_saved_variables()[0];
    return {grads[0] * 3 * x * x};
  }
};

at::Tensor with_gradient(const at::Tensor& x) { return x * x * x; }
at::Tensor with_gradient_autograd(const at::Tensor& x) { return Cube::apply(x); }

TORCH_LIBRARY(in_cpp, m) {
  m.def("cube(Tensor x, *, float by=1., int[2] size=1) -> Tensor");
  m.def("with_gradient(Tensor x) -> Tensor");
  m.def("composed(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * x; });
}
TORCH_LIBRARY_IMPL(in_cpp, CPU, m) {
  m.impl("cube", &cube);
  m.impl("with_gradient", &with_gradient);
}
TORCH_LIBRARY_IMPL(in_cpp, Autograd, m) { m.impl("with_gradient", &with_gradient_autograd); }
"""


def cube(x: Tensor, *, by: float = 1.0, size: tuple[int, int] = (1, 1)) -> Tensor:
    return by * x**3


def plain_cube(x: Tensor) -> Tensor:
    return x**3


@pytest.mark.slow
def test_in_cpp(tmp_path: Path) -> None:
    load_inline(
        "opsmith_in_cpp",
        SOURCE,
        build_directory=str(tmp_path),
        is_python_module=False,
        no_implicit_headers=True,
    )
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    operators: Any = torch.ops.in_cpp
    for operator, reference, scale in (
        (operators.cube, cube, {"by": 2.0}),
        (operators.with_gradient, plain_cube, {}),
    ):

        def given(x: Tensor, operator: Any = operator, scale: Any = scale) -> Tensor:
            result: Tensor = operator(x, **scale)
            return result

        def right(x: Tensor, reference: Any = reference, scale: Any = scale) -> Tensor:
            result: Tensor = reference(x, **scale)
            return result

        if operator is operators.cube:
            with pytest.warns(UserWarning, match="was not registered"):
                before = F.grad(lambda x, given=given: given(x).sum())(x)
            assert before.eq(0).all()
        else:
            with pytest.raises(RuntimeError, match=r"cannot use C\+\+ torch::autograd::Function"):
                F.grad(lambda x, given=given: given(x).sum())(x)

        handle = opsmith.adopt(operator, reference=reference)
        handle.samples(
            lambda make, scale=scale: [make.call(make(3), **scale), make.call(make(2, 2), **scale)]
        )
        leaf = x.clone().requires_grad_()
        assert torch.autograd.gradcheck(given, (leaf,))
        assert torch.autograd.gradgradcheck(given, (leaf,))
        assert ("Cube" in repr(given(leaf))) == (operator is operators.with_gradient)
        assert_close(F.jvp(given, (x,), (x,)), F.jvp(right, (x,), (x,)))
        assert_close(F.vmap(given)(x), right(x))
        assert_close(
            F.hessian(lambda x, given=given: given(x).sum())(x),
            F.hessian(lambda x, right=right: right(x).sum())(x),
        )
        assert opsmith.check(handle).passed
    with pytest.raises(opsmith.errors.UsageError, match="it is composite"):
        opsmith.adopt(operators.composed, reference=plain_cube)
