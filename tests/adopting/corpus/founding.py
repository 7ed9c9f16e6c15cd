"""The Functions of the documents that this project began with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from corpus.entry import F64, Entry, samples


class Exp(Function):
    @staticmethod
    def forward(ctx, i):
        result = i.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        (result,) = ctx.saved_tensors
        return grad_output * result


class Linear(Function):
    @staticmethod
    def forward(ctx, input, weight, bias=None):
        ctx.save_for_backward(input, weight, bias)
        output = input.mm(weight.t())
        if bias is not None:
            output += bias.unsqueeze(0).expand_as(output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output.mm(weight)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_output.t().mm(input)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


class LinearWithSetup(Function):
    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = input.mm(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias = inputs
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_bias = grad_output.sum(0) if ctx.has_bias else None
        return grad_output.mm(weight), grad_output.t().mm(input), grad_bias


class LinearNotStatic(Function):
    def forward(self, input, weight, bias=None):
        self.save_for_backward(input, weight, bias)
        output = input.mm(weight.t())
        if bias is not None:
            output += bias.unsqueeze(0).expand_as(output)
        return output

    def backward(self, grad_output):
        input, weight, bias = self.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if self.needs_input_grad[0]:
            grad_input = grad_output.mm(weight)
        if self.needs_input_grad[1]:
            grad_weight = grad_output.t().mm(input)
        if bias is not None and self.needs_input_grad[2]:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


class AddConstant(Function):
    @staticmethod
    def forward(ctx, tensor, constant):
        return tensor + constant

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class Transpose(Function):
    """Its result is a view of its input."""

    @staticmethod
    def forward(ctx, tensor, dim0=0, dim1=1):
        ctx.dims = dim0, dim1
        return tensor.transpose(dim0, dim1)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.transpose(*ctx.dims), None, None


class MyLinear(Function):
    """Names its node in ONNX; the three dimensions are named by the chain rule."""

    @staticmethod
    def symbolic(g, X, W, B):
        return g.op("custom::MYLINEAR", X, W, B)

    @staticmethod
    def forward(ctx, X, W, B):
        ctx.save_for_backward(X, W)
        return X @ W.T + B

    @staticmethod
    def backward(ctx, G):
        X, W = ctx.saved_tensors
        return G @ W, G.T @ X, G.sum(0)


class Mul(Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return w * x

    @staticmethod
    def backward(ctx, grad_output):
        _w, x = ctx.saved_tensors
        return grad_output * x, None


def _linear(make: Any) -> list[Any]:
    return [
        (make(4, 3), make(2, 3), make(2)),
        (make(3, 5).t(), make(3, 2).t()[:, ::1], None),
        (make(1, 2), make(1, 2), make(4)[::4]),
        (make(0, 3), make(2, 3), make(2)),
    ]


ENTRIES = [
    Entry(
        "exp",
        Exp,
        samples(lambda make: [(make(3, 4),), (make(4, 6)[:, ::2],), (make(),), (make(0, 2),)]),
        F64,
        ("static old style", "saves its result", "types by default Tensor"),
        truth=torch.exp,
    ),
    Entry(
        "linear",
        Linear,
        samples(_linear),
        F64,
        ("optional tensor", "needs_input_grad", "types from defaults"),
        options={"signature": "(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor"},
    ),
    Entry(
        "linear_with_setup",
        LinearWithSetup,
        samples(_linear),
        F64,
        ("setup_context", "types from annotations", "attribute"),
        truth=torch.nn.functional.linear,
    ),
    Entry(
        "linear_not_static",
        LinearNotStatic,
        samples(_linear),
        F64,
        ("non-static", "optional tensor"),
        needs_samples=True,
    ),
    Entry(
        "add_constant",
        AddConstant,
        samples(lambda make: [(make(3, 4), 2.5), (make(2, 3).mT, -1.0)]),
        F64,
        ("plain number", "types from samples"),
        needs_samples=True,
    ),
    Entry(
        "transpose",
        Transpose,
        samples(lambda make: [(make(3, 4),), (make(2, 3, 4), 0, 2), (make(2, 3, 4)[:, ::2], 1, -1)]),
        F64,
        ("view of an input", "types from defaults", "attribute"),
        truth=lambda tensor, dim0=0, dim1=1: tensor.transpose(dim0, dim1).clone(),
    ),
    Entry(
        "my_linear",
        MyLinear,
        samples(lambda make: [(make(4, 3), make(2, 3), make(2)), (make(1, 3), make(3, 2).T, make(2))]),
        F64,
        ("symbolic",),
    ),
    Entry(
        "mul_without_gradient",
        Mul,
        samples(lambda make: [(make(1, 2), make(1, 2)), (make(3, 2), make(2, 3).T)]),
        F64,
        ("a gradient left out",),
        options={"kind": "approximate"},
        second="untold",
        jvp=False,
    ),
]
