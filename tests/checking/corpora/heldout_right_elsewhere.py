"""Held out: operators of torch.library and adopted classes that look suspicious and are right."""

import itertools
from typing import Any

import numpy as np
import torch
from entries import sound
from heldout_numbers import normal, uniform
from torch import Tensor
from torch.autograd import Function

import opsmith

UNIQUE = itertools.count()


@sound
def h_reversal_adopted_as_surrogate() -> Any:
    class Reverse(Function):
        @staticmethod
        def forward(ctx, x, strength: float):
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.strength * grad, None

    name = f"heldout_adopted::reverse_{next(UNIQUE)}"
    return opsmith.adopt(Reverse, name, kind="surrogate"), [(normal(3, 4), 0.5)]


@sound
def h_registered_frames() -> Any:
    """An operator of torch.library with a fake kernel, a gradient, and views that are copied."""

    @torch.library.custom_op(f"heldout_right::frames_{next(UNIQUE)}", mutates_args=())
    def frames(signal: Tensor, width: int, hop: int) -> Tensor:
        return signal.unfold(-1, width, hop).clone(memory_format=torch.contiguous_format)

    @frames.register_fake
    def _(signal: Tensor, width: int, hop: int) -> Tensor:
        return signal.new_empty(*signal.shape[:-1], (signal.shape[-1] - width) // hop + 1, width)

    def keep(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        ctx.shape, ctx.sizes = inputs[0].shape, inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        width, hop = ctx.sizes
        places = torch.arange(ctx.shape[-1]).unfold(0, width, hop).flatten()
        return grad.new_zeros(ctx.shape).index_add(-1, places, grad.flatten(-2)), None, None

    frames.register_autograd(backward, setup_context=keep)
    return frames, [(normal(2, 9), 3, 2), (normal(8, seed=1), 3, 1)]


@sound
def h_registered_with_a_refusal() -> Any:
    """It refuses what is not contiguous, and returns whole numbers beside the remainders."""

    @torch.library.custom_op(f"heldout_right::split_{next(UNIQUE)}", mutates_args=())
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        if not x.is_contiguous():
            raise ValueError("split: x must be contiguous")
        whole = x.round()
        return x - whole, whole.to(torch.int64)

    @split.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)

    split.register_autograd(lambda ctx, grad, _: grad)
    return split, [(uniform(3, 4, low=-3.0, high=3.0),)]


@sound
def h_adopted_in_float32() -> Any:
    """It computes in float32 whatever comes in, and `kind="float32"` says so."""

    class Rsqrt(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            numbers = x.detach().float().contiguous().resolve_neg().numpy()
            return torch.as_tensor(1 / np.sqrt(numbers)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return (-0.5 * grad.float() * x.float().rsqrt() ** 3).to(grad.dtype)

    name = f"heldout_adopted::rsqrt_{next(UNIQUE)}"
    rsqrt = opsmith.adopt(
        Rsqrt, name, kind="float32", opaque=True, reference=lambda x: x.rsqrt().contiguous()
    )
    return rsqrt, [(uniform(3, 4, low=0.5, high=2.0),)]
