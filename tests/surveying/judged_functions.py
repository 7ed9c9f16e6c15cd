"""Functions as people write them, right and wrong, for `opsmith adopt` to judge."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd import Function


class GradReverse(Function):
    @staticmethod
    def forward(ctx, x, lambda_):
        ctx.lambda_ = lambda_
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lambda_ * grad, None


class ClipGrad(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


class DampPositive(Function):
    """Twice the grad_output gives twice the gradient, and minus once something else."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - 0.1 * grad.abs()


class Embed(Function):
    @staticmethod
    def forward(ctx, weight, indices):
        ctx.save_for_backward(indices)
        ctx.n = weight.shape[0]
        return weight[indices]

    @staticmethod
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.n, grad.shape[-1])
        out.index_add_(0, indices.flatten(), grad.reshape(-1, grad.shape[-1]))
        return out, None


class Conv(Function):
    @staticmethod
    def forward(ctx, input, weight, bias=None, stride=1, padding=0):
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(input, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        gi = torch.nn.grad.conv2d_input(input.shape, weight, grad, ctx.stride, ctx.padding)
        gw = torch.nn.grad.conv2d_weight(input, weight.shape, grad, ctx.stride, ctx.padding)
        gb = grad.sum((0, 2, 3)) if ctx.has_bias else None
        return gi, gw, gb, None, None


class Log(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.log()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.x


class Typo(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.cos(y) * x  # noqa: F821 - the mistake


class TooFew(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * x * y,)


class Swapped(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * a, grad * b


class Reduce(Function):
    @staticmethod
    def forward(ctx, pred, target, reduction: str):
        ctx.save_for_backward(pred, target)
        ctx.reduction = reduction
        loss = (pred - target) ** 2
        if reduction == "mean":
            return loss.mean()
        if reduction == "sum":
            return loss.sum()
        raise ValueError(reduction)

    @staticmethod
    def backward(ctx, grad):
        pred, target = ctx.saved_tensors
        g = 2 * (pred - target) * grad
        if ctx.reduction == "mean":
            g = g / pred.numel()
        return g, -g, None


class NumpyNoise(Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.from_numpy(np.random.randn(*x.shape))

    @staticmethod
    def backward(ctx, grad):
        return grad


class Broken(Function):
    @staticmethod
    def forward(ctx, x):
        raise RuntimeError("the extension is not compiled")

    @staticmethod
    def backward(ctx, grad):
        return grad


class RoundSTE(Function):
    @staticmethod
    def forward(ctx, x, bits=8):
        scale = 2**bits
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MarksDirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WritesUnmarked(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Outer:
    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].exp()


def make(power):
    class Power(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**power

        @staticmethod
        def backward(ctx, grad):
            return grad * power * ctx.saved_tensors[0] ** (power - 1)

    return Power


Cube = make(3)
Fourth = make(4)


class TopK(Function):
    @staticmethod
    def forward(ctx, x, k):
        values, indices = x.topk(k, dim=-1)
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx, grad, _):
        (indices,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        return out.scatter(-1, indices, grad), None


class Single(Function):
    @staticmethod
    def forward(ctx, x):
        x = x.float()
        ctx.save_for_backward(x)
        return x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        s = ctx.saved_tensors[0].sigmoid()
        return (grad * s * (1 - s)).double()


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()


class BaseOfOthers(Function):
    @staticmethod
    def backward(ctx, grad):
        return grad


class TwoKernels(Function):
    """Right for vectors; for matrices the backward forgets a sum's second half."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * (2 if x.dim() == 2 else 1), grad * x


class Unguessable(Function):
    @staticmethod
    def forward(ctx, x, settings: dict):
        ctx.settings = settings
        return x * settings["scale"]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.settings["scale"], None


class Demanding(Function):
    @staticmethod
    def forward(ctx, x, y):
        assert x.shape == (7, 11, 13), f"got {list(x.shape)}"
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class Cell(Function):
    """A cell of two gates, as the tutorials on extensions have it."""

    @staticmethod
    def forward(ctx, input, weights, bias, old_h, old_cell):
        both = torch.cat([old_h, input], dim=1)
        gates = torch.addmm(bias, both, weights.t())
        opened, shut, new = gates.sigmoid().chunk(3, dim=1)
        cell = old_cell * shut + opened * new
        ctx.save_for_backward(both, weights, opened, shut, new, old_cell)
        return cell, cell * opened

    @staticmethod
    def backward(ctx, grad_cell, grad_out):
        both, weights, opened, shut, new, old_cell = ctx.saved_tensors
        cell = old_cell * shut + opened * new
        d_cell = grad_cell + grad_out * opened
        d_opened = d_cell * new + grad_out * cell
        d_shut, d_new = d_cell * old_cell, d_cell * opened
        moved = torch.cat(
            [d * y * (1 - y) for d, y in ((d_opened, opened), (d_shut, shut), (d_new, new))], dim=1
        )
        d_both, wide = moved @ weights, old_cell.shape[1]
        return d_both[:, wide:], moved.t() @ both, moved.sum(0), d_both[:, :wide], d_cell * shut


class WithInit(Function):
    def __init__(self, factor):
        self.factor = factor

    def forward(self, x):
        return x * self.factor

    def backward(self, grad):
        return grad * self.factor


class BadShape(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, x.t() @ grad


class Item(Function):
    @staticmethod
    def forward(ctx, x):
        return x.pow(2).sum().sqrt().item()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Positive(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x[x > 0]

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_variables
        return torch.zeros_like(x).masked_scatter(x > 0, grad)


class Root(Function):
    """A square root that is right in its domain alone, and does not look at it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs().sqrt()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5 / ctx.saved_tensors[0].abs().sqrt()


class Abstract(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


class AnswersOnce(Function):
    """One gradient, as calls without the slope ask for."""

    @staticmethod
    def forward(ctx, x, slope=0.1):
        ctx.slope = slope
        return x * slope

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope


class LeavesInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * np.cos(ctx.saved_tensors[0].detach().numpy()))


class Nested(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), (x.cos().detach(),)

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0].cos()


class NoSuchMethod(Function):
    @staticmethod
    def forward(ctx, x, w):
        return (x @ w.t()).frobnicate()

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class AsksAnObject(Function):
    @staticmethod
    def forward(ctx, x, options):
        return x * options.scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(Function):
    """`k` is a tensor here: the code asks for its `mT`."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False):
        p = (q @ k.mT).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        grad_p = grad @ v.mT
        grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
        return grad_s @ k, grad_s.mT @ q, p.mT @ grad, None
