import torch
from onnxscript import opset18 as onnx
from torch import Tensor


@torch.library.custom_op("before::rms_norm", mutates_args=())  # 1. the operator
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake  # 2. shape, dtype and strides, for torch.compile
def _(x, weight, eps=1e-6):
    return torch.empty_like(x)


def setup_context(ctx, inputs, output):  # 3. what the backward saves
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def backward(ctx, grad):  # 4. one gradient for each input, matched by position
    x, weight = ctx.saved_tensors
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
    g = grad * weight
    return r * g - x * r**3 * (g * x).mean(-1, keepdim=True), (grad * x * r).flatten(0, -2).sum(0), None


rms_norm.register_autograd(backward, setup_context=setup_context)


def to_onnx(x, weight, eps: float = 1e-6):  # 5. the mathematics once more, for the exporter
    return x / onnx.Sqrt(onnx.ReduceMean(x * x, [-1], keepdims=1) + eps) * weight


def test_gradient():  # 6. one shape, one layout, one dtype
    x, weight = torch.randn(4, 8).double(), torch.randn(8).double()
    assert torch.autograd.gradcheck(rms_norm, (x.requires_grad_(), weight.requires_grad_()))
