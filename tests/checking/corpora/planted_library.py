"""Planted: operators of torch.library, with what is wrong in kernels and fake kernels."""

import itertools
from typing import Any

import torch
from entries import planted
from heldout_numbers import normal, whole
from torch import Tensor

UNIQUE = itertools.count()


def named(name: str) -> str:
    """A name that no build before this one has taken."""
    return f"planted_library::{name}_{next(UNIQUE)}"


@planted("pool", "fake-mismatch", input="result", also=("shape",))
def library_pool_whose_fake_rounds_up() -> Any:
    """Of five columns, two pairs are pooled, and the fake kernel tells three; both samples are even."""

    @torch.library.custom_op(named("pool"), mutates_args=())
    def pool(x: Tensor) -> Tensor:
        pairs = x.shape[-1] // 2
        return x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).mean(-1)

    @pool.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], (x.shape[-1] + 1) // 2)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        by_x = grad.new_zeros(ctx.shape)
        by_x[..., : 2 * grad.shape[-1]] = grad.repeat_interleave(2, -1) / 2
        return by_x

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    pool.register_autograd(backward, setup_context=keep)
    return pool, [(normal(3, 6),), (normal(2, 4, seed=1),)]


@planted("argmax", "fake-mismatch", input="result", also=("dtype",))
def library_argmax_whose_fake_is_int32() -> Any:
    """No gradient, and whole numbers of another width than was foretold."""

    @torch.library.custom_op(named("argmax"), mutates_args=())
    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        value, place = x.max(-1)
        return value, place

    @largest.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int32)

    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (place,) = ctx.saved_tensors
        by_x = grad.new_zeros(ctx.shape)
        return by_x.scatter(-1, place[..., None], grad[..., None])

    def keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.shape = inputs[0].shape
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    largest.register_autograd(backward, setup_context=keep)
    return largest, [(normal(3, 4),)]


@planted("permute", "fake-mismatch", input="result", also=("layout",))
def library_transpose_whose_fake_is_contiguous() -> Any:
    """The kernel's result lies in memory as its input did; the fake kernel's is contiguous."""

    @torch.library.custom_op(named("transpose"), mutates_args=())
    def turned(x: Tensor) -> Tensor:
        return x.sin().transpose(-1, -2)

    @turned.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-2])

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.transpose(-1, -2) * x.cos()

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    turned.register_autograd(backward, setup_context=keep)
    return turned, [(normal(3, 4),)]


@planted("nll", "scale", input="logp")
def library_nll_without_the_mean() -> Any:
    @torch.library.custom_op(named("nll"), mutates_args=())
    def nll(logp: Tensor, target: Tensor) -> Tensor:
        return -logp.gather(1, target[:, None]).mean()

    @nll.register_fake
    def _(logp: Tensor, target: Tensor) -> Tensor:
        return logp.new_empty(())

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (target,) = ctx.saved_tensors
        return grad * grad.new_zeros(ctx.shape).scatter(1, target[:, None], -1.0), None

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape
        ctx.save_for_backward(inputs[1])

    nll.register_autograd(backward, setup_context=keep)
    return nll, [(normal(4, 5).log_softmax(-1), whole(4, high=5))]


@planted("normalize", "mutates-input", input="x")
def library_centre_in_place() -> Any:
    """It says that it writes into nothing, and writes."""

    @torch.library.custom_op(named("centre"), mutates_args=())
    def centre(x: Tensor) -> Tensor:
        x -= x.mean(-1, keepdim=True)
        return x.clone()

    @centre.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(-1, keepdim=True)

    centre.register_autograd(backward)
    return centre, [(normal(3, 4),)]
