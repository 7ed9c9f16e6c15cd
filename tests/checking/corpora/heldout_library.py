"""Held out: operators that were registered with torch.library, and are wrong."""

import itertools
from typing import Any

import torch
from entries import planted
from heldout_numbers import normal, uniform
from torch import Tensor

UNIQUE = itertools.count()
LIBRARIES: list[torch.library.Library] = []  # what is defined lives as long as its library


def named(name: str) -> str:
    """A name that no build before this one has taken."""
    return f"heldout_library::{name}_{next(UNIQUE)}"


@planted("quadratic_form", "transposed", input="matrix")
def h_library_bilinear_form() -> Any:
    @torch.library.custom_op(named("bilinear_form"), mutates_args=())
    def bilinear_form(x: Tensor, matrix: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bi,ij,bj->b", x, matrix, y)

    @bilinear_form.register_fake
    def _(x: Tensor, matrix: Tensor, y: Tensor) -> Tensor:
        return x.new_empty(x.shape[0])

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, matrix, y = ctx.saved_tensors
        by_matrix = torch.einsum("b,bi,bj->ji", grad, x, y)
        return grad[:, None] * (y @ matrix.mT), by_matrix, grad[:, None] * (x @ matrix)

    bilinear_form.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return bilinear_form, [(normal(2, 3), normal(3, 3, seed=1), normal(2, 3, seed=2))]


@planted("frames", "fake-mismatch", input="result", also=("shape",))
def h_library_frames() -> Any:
    """The fake kernel has one frame too few wherever the hop divides what is left over."""

    @torch.library.custom_op(named("frames"), mutates_args=())
    def frames(signal: Tensor, width: int, hop: int) -> Tensor:
        return signal.unfold(-1, width, hop).clone(memory_format=torch.contiguous_format)

    @frames.register_fake
    def _(signal: Tensor, width: int, hop: int) -> Tensor:
        left = signal.shape[-1] - width
        return signal.new_empty(*signal.shape[:-1], -(-left // hop), width)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        width, hop = ctx.sizes
        whole = grad.new_zeros(ctx.shape)
        for i in range(grad.shape[-2]):
            whole[..., i * hop : i * hop + width] += grad[..., i, :]
        return whole, None, None

    def keep(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        signal, width, hop = inputs
        ctx.shape, ctx.sizes = signal.shape, (width, hop)

    frames.register_autograd(backward, setup_context=keep)
    return frames, [(normal(2, 8), 3, 2), (normal(9, seed=1), 3, 2)]


@planted("segment_energy", "layout", input="x")
def h_library_energy_by_pointer() -> Any:
    """An implementation registered for the CPU that walks through memory as if it were contiguous."""
    namespace, name = named("energy_by_pointer").split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    LIBRARIES.append(library)
    library.define(f"{name}(Tensor x) -> Tensor")

    def compute(x: Tensor) -> Tensor:
        strides = torch.empty(x.shape, device="meta").stride()
        return torch.as_strided(x, x.shape, strides).square().cumsum(-1)

    library.impl(name, compute, "CPU")
    torch.library.register_fake(f"{namespace}::{name}", lambda x: x.new_empty(x.shape), lib=library)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad.flip(-1).cumsum(-1).flip(-1)

    torch.library.register_autograd(
        f"{namespace}::{name}",
        backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=library,
    )
    return getattr(getattr(torch.ops, namespace), name), [(normal(3, 4),), (normal(5, seed=1),)]


@planted("alpha_blend", "mutates-input", input="alpha")
def h_library_blend_that_clamps() -> Any:
    """`mutates_args=()`, and where an alpha lies beyond 1 it is clamped in the caller's tensor."""

    @torch.library.custom_op(named("blend_that_clamps"), mutates_args=())
    def blend(colour: Tensor, alpha: Tensor) -> Tensor:
        alpha.clamp_(0.0, 1.0)
        return colour * alpha

    blend.register_fake(lambda colour, alpha: torch.empty_like(colour))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        colour, alpha = ctx.saved_tensors
        inside = (alpha > 0) & (alpha < 1)
        return grad * alpha, grad * colour * inside

    blend.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return blend, [(normal(3, 4), uniform(3, 4, low=0.2, high=1.4))]


@planted("fake_quantise", "aliases-input", input="x", also=("raises",))
def h_library_quantise_to_all_bits() -> Any:
    """With 32 bits nothing is to be done, and the input itself is returned."""

    @torch.library.custom_op(named("quantise_to_all_bits"), mutates_args=())
    def quantise(x: Tensor, bits: int) -> Tensor:
        if bits >= 32:
            return x
        steps = 2.0**bits
        return (x * steps).round() / steps

    quantise.register_fake(lambda x, bits: torch.empty_like(x))

    def keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.bits = inputs[1]

    quantise.register_autograd(
        lambda ctx, grad: (grad if ctx.bits >= 32 else torch.zeros_like(grad), None), setup_context=keep
    )
    return quantise, [(normal(3, 4), 3), (normal(5, seed=1), 32)]


@planted("huber_loss", "ignores-grad-output", input="prediction")
def h_library_loss_that_is_always_last() -> Any:
    """A loss is where a backward begins, thinks its author: so the grad_output is taken to be 1."""

    @torch.library.custom_op(named("loss_that_is_always_last"), mutates_args=())
    def log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).cosh().log().mean()

    log_cosh.register_fake(lambda prediction, target: prediction.new_empty(()))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        prediction, target = ctx.saved_tensors
        slope = (prediction - target).tanh() / prediction.numel()
        return slope, -slope * grad

    log_cosh.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return log_cosh, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("scale_shift", "missing-gradient", input="shift")
def h_library_scale_and_no_shift() -> Any:
    @torch.library.custom_op(named("scale_and_no_shift"), mutates_args=())
    def scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * scale + shift

    scale_shift.register_fake(lambda x, scale, shift: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0), None

    scale_shift.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
    )
    return scale_shift, [(normal(4, 3), normal(3, seed=1), normal(3, seed=2))]


@planted("soft_threshold", "mutates-saved", input="x")
def h_library_threshold_that_marks() -> Any:
    """The backward uses the mask that it kept as scratch: a second backward meets another mask."""

    @torch.library.custom_op(named("threshold_that_marks"), mutates_args=())
    def soft_threshold(x: Tensor, by: float) -> Tensor:
        return x.sign() * (x.abs() - by).clamp(min=0)

    soft_threshold.register_fake(lambda x, by: torch.empty_like(x))

    def keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        x, by = inputs
        ctx.save_for_backward((x.abs() > by).to(x.dtype))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return mask.data.mul_(grad).clone(), None

    soft_threshold.register_autograd(backward, setup_context=keep)
    return soft_threshold, [(normal(3, 4), 0.5)]
