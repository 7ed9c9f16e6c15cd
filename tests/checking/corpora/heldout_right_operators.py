"""Held out: operators of ours that look suspicious and are right."""

from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from entries import sound
from torch import Tensor

import opsmith


@sound
def h_fraction_on_whole_numbers() -> Any:
    """A sample on the jumps: the slope is 1 on both sides of each."""

    @opsmith.operator("heldout::fraction_on_whole_numbers", batching="elementwise")
    def fraction(x: Tensor) -> Tensor:
        return x - x.floor()

    fraction.samples(lambda make: [(make(3, 4),), (torch.tensor([-1.0, 0.0, 2.0, 0.5], dtype=make.dtype),)])
    return fraction.gradients(x=lambda grad: grad), None


@sound
def h_soft_shrink_at_its_kinks() -> Any:
    @opsmith.operator("heldout::soft_shrink_at_its_kinks")
    def soft_shrink(x: Tensor, by: float = 0.5) -> Tensor:
        return x.sign() * (x.abs() - by).clamp(min=0)

    soft_shrink.samples(lambda make: [(make(5),), (torch.tensor([-0.5, 0.0, 0.5, 1.5], dtype=make.dtype),)])
    return soft_shrink.gradients(x=lambda grad, x, by: grad * (x.abs() > by)), None


@sound
def h_solve_with_hilbert() -> Any:
    """The Hilbert matrix of order 6: condition 1.5e7."""

    @opsmith.operator("heldout::solve_with_hilbert")
    def solve(matrix: Tensor, right: Tensor) -> Tensor:
        return torch.linalg.solve(matrix, right)

    @solve.gradients
    def _(grad: Tensor, matrix: Tensor, result: Tensor) -> dict[str, Tensor]:
        by_right = torch.linalg.solve(matrix.mH, grad)
        return {"right": by_right, "matrix": -by_right @ result.mH}

    @solve.samples
    def _(make: Any) -> Any:
        n = torch.arange(6, dtype=make.dtype)
        yield 1 / (n[:, None] + n + 1), make(6, 2)

    return solve, None


@sound
def h_tail_of_a_gaussian() -> Any:
    """Gradients of 1e-40 and less."""

    @opsmith.operator("heldout::tail_of_a_gaussian")
    def tail(x: Tensor) -> Tensor:
        return torch.exp(-0.5 * x * x)

    tail.samples(lambda make: [(make(3, 4, low=12.0, high=16.0),), (make(5),)])
    return tail.gradients(x=lambda grad, x, result: -grad * (x * result).conj()), None


@sound
def h_moebius() -> Any:
    """A complex function that is holomorphic, and its conjugates."""

    @opsmith.operator("heldout::moebius")
    def moebius(z: Tensor, a: Tensor) -> Tensor:
        return (z + a) / (z - 3.0)

    moebius.samples(lambda make: [(torch.complex(make(3), make(3)), torch.complex(make(3), make(3)))])
    moebius.gradients(
        z=lambda grad, z, a: grad * (-(3.0 + a) / (z - 3.0).square()).conj(),
        a=lambda grad, z: grad * (1 / (z - 3.0)).conj(),
    )
    return moebius, None


@sound
def h_phase_of_a_mixture() -> Any:
    """Real and complex inputs, and a real result."""

    @opsmith.operator("heldout::phase_of_a_mixture")
    def power(z: Tensor, weight: Tensor) -> Tensor:
        if weight.is_complex():
            raise TypeError(f"power: the weight must be real, got {weight.dtype}")
        return weight * (z.real.square() + z.imag.square())

    power.samples(lambda make: [(torch.complex(make(2, 3), make(2, 3)), make(3))])
    power.gradients(
        z=lambda grad, z, weight: 2 * grad * weight * z,
        weight=lambda grad, z: grad * (z.real.square() + z.imag.square()),
    )
    return power, None


@sound
def h_block_quantiser() -> Any:
    """Whole numbers and their scale: two results, of which one has no gradient."""

    @opsmith.operator("heldout::block_quantiser", results={"codes": opsmith.non_differentiable, "scale": ...})
    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

    quantise.samples(lambda make: [(make(3, 4),), (make(6),)])
    quantise.gradients(
        x=lambda grad_scale, x, scale: grad_scale * x * (scale.numel() / max(1, x.numel())) / scale
    )
    return quantise, None


@sound
def h_polynomial_of_a_list() -> Any:
    """A list of tensors of different shapes that broadcast, and a list of numbers."""

    @opsmith.operator("heldout::polynomial_of_a_list")
    def combine(parts: list[Tensor], weights: list[float]) -> Tensor:
        return sum((w * p * p for w, p in zip(weights, parts, strict=True)), torch.zeros_like(parts[0]))

    def by_parts(grad: Tensor, parts: list[Tensor], weights: list[float]) -> list[Tensor]:
        return [2 * w * p.conj() * grad for w, p in zip(weights, parts, strict=True)]

    combine.samples(lambda make: [([make(3, 4), make(4), make(3, 1)], [0.5, -2.0, 1.0]), ([make(5)], [3.0])])
    return combine.gradients(parts=by_parts), None


@sound
def h_norm_by_name() -> Any:
    """A word chooses what is computed; the kinks of one choice are not those of the other."""

    @opsmith.operator("heldout::norm_by_name")
    def norm(x: Tensor, kind: Literal["one", "smooth"] = "smooth") -> Tensor:
        return x.abs().sum(-1) if kind == "one" else (x.square().sum(-1) + 1.0).sqrt()

    def by_x(grad: Tensor, x: Tensor, kind: str, result: Tensor) -> Tensor:
        if kind == "one":
            return grad[..., None] * x.sgn()
        return (grad / result.conj())[..., None] * x.conj()

    norm.samples(lambda make: [(make(3, 4),), (make(2, 3), "one")])
    return norm.gradients(x=by_x), None


@sound
def h_dropout_by_seed() -> Any:
    """Random, and the same for the same seed; the mask is a hidden result."""

    @opsmith.operator(
        "heldout::dropout_by_seed",
        opaque=True,
        results={"result": ..., "mask": opsmith.non_differentiable},
        hidden=("mask",),
    )
    def dropout(x: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p
        return (x * mask / (1 - p)).contiguous(), mask

    dropout.fake(lambda x, p, seed: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)))
    dropout.samples(lambda make: [(make(3, 4), 0.3, 1), (make(5), 0.5, 2)])
    dropout.gradients(x=lambda grad, p, mask: grad * mask / (1 - p))
    return dropout, None


@sound
def h_noise_with_its_mask() -> Any:
    """It draws from torch's state, says so, and returns what it drew as a hidden result."""

    @opsmith.operator(
        "heldout::noise_with_its_mask",
        random=True,
        results={"result": ..., "noise": opsmith.non_differentiable},
        hidden=("noise",),
    )
    def jitter(x: Tensor) -> tuple[Tensor, Tensor]:
        noise = 1 + 0.1 * torch.randn_like(x)
        return x * noise, noise

    jitter.samples(lambda make: [(make(3, 4),)])
    return jitter.gradients(x=lambda grad, noise: grad * noise.conj()), None


@sound
def h_sort_by_hand() -> Any:
    """An odd-even sort in place, inside, on a copy."""

    @opsmith.operator("heldout::sort_by_hand")
    def arrange(x: Tensor) -> Tensor:
        return x.sort(-1).values.contiguous()

    def kernel(x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        n = y.shape[-1] if y.dim() else 0
        for step in range(n):
            for i in range(step % 2, n - 1, 2):
                pair = y[..., i : i + 2].clone()
                y[..., i], y[..., i + 1] = pair.amin(-1), pair.amax(-1)
        return y

    def by_x(grad: Tensor, x: Tensor) -> Tensor:
        order = x.argsort(-1)
        return torch.zeros_like(x).scatter(-1, order, grad)

    arrange.samples(lambda make: [(make(3, 5),), (make(4),)])
    return arrange.gradients(x=by_x).kernel("cpu", kernel), None


@sound
def h_row_means_laid_out() -> Any:
    """The result is expanded: each row is one number in memory."""

    @opsmith.operator("heldout::row_means_laid_out")
    def row_means(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True).expand(x.shape)

    row_means.samples(lambda make: [(make(3, 4),), (make(2, 3, 5),)])
    return row_means.gradients(x=lambda grad, x_shape: grad.mean(-1, keepdim=True).expand(x_shape)), None


@sound
def h_straight_through() -> Any:
    """A surrogate with its stand-in."""

    @opsmith.operator("heldout::straight_through")
    def binarise(x: Tensor) -> Tensor:
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    binarise.samples(lambda make: [(make(3, 4),), (torch.tensor([0.0, -1.0, 1.0], dtype=make.dtype),)])
    binarise.surrogate_gradients(
        lambda x: x.clamp(-1.0, 1.0), x=lambda grad, x: grad * ((x >= -1.0) & (x <= 1.0))
    )
    return binarise, None


@sound
def h_reversed_gradient() -> Any:
    """A surrogate without one."""

    @opsmith.operator("heldout::reversed_gradient")
    def reverse(x: Tensor, strength: float = 1.0) -> Tensor:
        return x.clone()

    reverse.samples(lambda make: [(make(3, 4),), (make(5), 0.5)])
    return reverse.surrogate_gradients(x=lambda grad, strength: -strength * grad), None


@sound
def h_kernel_for_float32_alone() -> Any:
    """NumPy in float32: other dtypes are the reference's."""

    @opsmith.operator("heldout::kernel_for_float32_alone")
    def diagonal(x: Tensor, y: Tensor) -> Tensor:
        return (x * x + y * y + 1.0).sqrt().contiguous()

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        a, b = (side.detach().resolve_neg().numpy() for side in (x, y))
        return torch.from_numpy(np.asarray(np.sqrt(a * a + b * b + np.float32(1.0)), order="C"))

    diagonal.samples(lambda make: [(make(3, 4), make(3, 4)), (make(2, 5), make(5))])
    diagonal.gradients(
        x=lambda grad, x, result: grad * (x / result).conj(),
        y=lambda grad, y, result: grad * (y / result).conj(),
    )
    return diagonal.kernel("cpu", kernel, dtypes=[torch.float32]), None


@cache
def hadamard(n: int) -> tuple[tuple[float, ...], ...]:
    """The matrix of order n, a power of two."""
    if n == 1:
        return ((1.0,),)
    half = hadamard(n // 2)
    return tuple(row + row for row in half) + tuple(row + tuple(-x for x in row) for row in half)


@sound
def h_walsh_hadamard() -> Any:
    """It refuses lengths that are no power of two, and keeps its tables from call to call."""

    @opsmith.operator("heldout::walsh_hadamard")
    def transform(x: Tensor) -> Tensor:
        n = int(x.shape[-1])
        if n < 1 or n & (n - 1):
            raise ValueError(f"walsh_hadamard: the length must be a power of two, got {n}")
        return x @ torch.tensor(hadamard(n), dtype=x.dtype, device=x.device)

    transform.samples(lambda make: [(make(3, 4),), (make(2, 8),)])
    return transform.gradients(x=lambda grad: transform(grad)), None


@sound
def h_logarithm_of_the_positive() -> Any:
    """It refuses whole numbers and what is empty, each with an error of its own."""

    @opsmith.operator("heldout::logarithm_of_the_positive")
    def mean_log(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"mean_log: expected floating numbers, got {x.dtype}")
        if x.numel() == 0:
            raise ValueError("mean_log: there is no mean of nothing")
        return x.log().mean()

    mean_log.samples(lambda make: [(make(3, 4, low=0.5, high=2.0),), (make(5, low=0.5, high=2.0),)])
    return mean_log.gradients(x=lambda grad, x: grad / (x * x.numel())), None


@sound
def h_matrix_product_in_wider_numbers() -> Any:
    """Half precision in, sums in float32, half precision out; a weight of another dtype than the input."""

    @opsmith.operator("heldout::matrix_product_in_wider_numbers", autocast="float32")
    def product(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, weight.dtype))
        return (x.to(wide) @ weight.to(wide)).to(x.dtype)

    product.samples(lambda make: [(make(3, 4), make(4, 2).float()), (make(2, 5), make(5, 3))])
    return product, None


@sound
def h_cumulative_maximum() -> Any:
    """Ties, and a gradient that many results send to one element."""

    @opsmith.operator(
        "heldout::cumulative_maximum", results={"value": ..., "place": opsmith.non_differentiable}
    )
    def running(x: Tensor) -> tuple[Tensor, Tensor]:
        value, place = x.cummax(-1)
        return value, place

    def by_x(grad_value: Tensor, x_shape: torch.Size, place: Tensor) -> Tensor:
        return grad_value.new_zeros(x_shape).scatter_add(-1, place, grad_value)

    running.samples(
        lambda make: [(make(3, 6),), (torch.tensor([1.0, 1.0, 3.0, 2.0, 3.0], dtype=make.dtype),)]
    )
    return running.gradients(x=by_x), None
