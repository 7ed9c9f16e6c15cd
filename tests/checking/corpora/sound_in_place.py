"""Right operators that write in place: caches, optimizers, statistics; `planted_in_place` breaks some."""

from typing import Any

import torch
from entries import sound
from heldout_numbers import normal, uniform, whole
from torch import Tensor

import opsmith


def store_rows(cache: Tensor, index: Tensor, rows: Tensor) -> None:
    """cache[index[i]] <- rows[i].  cache [N, D], index [M], rows [M, D]."""
    cache.index_copy_(0, index, rows)


def decay(state: Tensor, x: Tensor, rate: float = 0.5) -> None:
    """state <- rate state + x.  state, x [...]."""
    state.mul_(rate).add_(x)


def keep_where(state: Tensor, mask: Tensor, x: Tensor) -> None:
    """state <- x where the mask is set.  state, mask, x [...]."""
    state.copy_(torch.where(mask, x, state))


def push(ring: Tensor, x: Tensor, position: int) -> None:
    """ring[position mod N] <- x.  ring [N, D], x [D]."""
    ring[position % ring.shape[0]] = x


def adam(
    parameters: list[Tensor],
    slopes: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    largest: list[Tensor],
    rate: float = 0.1,
    step: int = 1,
) -> None:
    """One step of Adam, or of AMSGrad where `largest` has tensors (Reddi et al., 2018)."""
    for at, (parameter, slope) in enumerate(zip(parameters, slopes, strict=True)):
        mean, square = means[at], squares[at]
        mean.mul_(0.9).add_(0.1 * slope)
        square.mul_(0.99).add_(0.01 * slope * slope)
        if largest:
            largest[at].copy_(torch.maximum(largest[at].clone(), square))
            square = largest[at]
        size = (square / (1 - 0.99**step)).sqrt() + 1e-6
        parameter.sub_(rate / (1 - 0.9**step) * mean / size)


def momentum(x: Tensor, slope: Tensor, velocity: Tensor | None = None, rate: float = 0.1) -> None:
    """velocity <- 0.9 velocity + slope, if given; x <- x - rate times it.  x, slope, velocity [...]."""
    if velocity is not None:
        velocity.mul_(0.9).add_(slope)
        slope = velocity
    x.sub_(rate * slope)


def statistics(mean: Tensor, variance: Tensor, count: Tensor, x: Tensor) -> Tensor:
    """Running statistics, and the normalised batch.  mean, variance [C], count [], x [B, C]."""
    found, spread = x.mean(0), x.var(0, unbiased=False)
    mean.lerp_(found, 0.1)
    variance.lerp_(spread, 0.1)
    count.add_(1)
    return (x - found) / (spread + 1e-5).sqrt()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn pairs of columns of q and k by an angle for each row.  q, k [N, 2 D], cos, sin [N, D]."""
    for each in (q, k):
        first, second = each.clone().chunk(2, -1)
        turned = first * cos - second * sin, second * cos + first * sin
        each.copy_(torch.cat(turned, -1))


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """residual <- residual + x; x <- RMSNorm of it.  x, residual [..., D], weight [D]."""
    residual.add_(x)
    x.copy_(residual * (residual.square().mean(-1, keepdim=True) + eps).rsqrt() * weight)


def quantise(codes: Tensor, scale: Tensor, x: Tensor) -> None:
    """codes <- x in whole numbers of a scale for each row.  codes [N, D] of int8, scale [N, 1], x [N, D]."""
    scale.copy_(x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127)
    codes.copy_((x / scale).round().to(torch.int8))


def gather_into(out: Tensor, index: Tensor, x: Tensor) -> None:
    """out[index[i]] += x[i].  out [N, D], index [M, D], x [M, D]."""
    out.scatter_add_(0, index, x)


def mask_of(*shape: int) -> Tensor:
    return normal(*shape, seed=5) > 0


def adam_samples() -> list[Any]:
    shapes = [(3, 4), (5,)]

    def several(seed: int, low: float = -1.0) -> list[Tensor]:
        return [uniform(*shape, low=low, seed=seed + at) for at, shape in enumerate(shapes)]

    states = [several(0), several(2), several(4), several(6, 0.1)]
    return [(*states, several(8, 0.1)), (*states, [], 0.1, 3)]


WRITERS: dict[str, tuple[Any, list[str], list[Any]]] = {
    "store_rows": (store_rows, ["cache"], [(normal(5, 3), torch.tensor([3, 0]), normal(2, 3, seed=1))]),
    "decay": (decay, ["state"], [(normal(5, 3), normal(5, 3, seed=1)), (normal(7), normal(7, seed=1), 0.3)]),
    "keep_where": (keep_where, ["state"], [(normal(3, 5), mask_of(3, 5), normal(3, 5, seed=1))]),
    "push": (push, ["ring"], [(normal(4, 3), normal(3, seed=1), 6)]),
    "adam": (adam, ["parameters", "means", "squares", "largest"], adam_samples()),
    "momentum": (
        momentum,
        ["x", "velocity"],
        [(normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)), (normal(5), normal(5, seed=1))],
    ),
    "statistics": (
        statistics,
        ["mean", "variance", "count"],
        [(normal(3), uniform(3, low=0.5), torch.tensor(4), normal(6, 3, seed=1))],
    ),
    "rope": (
        rope,
        ["q", "k"],
        [(normal(3, 4), normal(3, 4, seed=1), normal(3, 2, seed=2).cos(), normal(3, 2, seed=2).sin())],
    ),
    "residual_norm": (
        residual_norm,
        ["x", "residual"],
        [(normal(3, 4), normal(3, 4, seed=1), 1 + 0.1 * normal(4, seed=2))],
    ),
    "quantise": (
        quantise,
        ["codes", "scale"],
        [(torch.zeros(3, 4, dtype=torch.int8), torch.ones(3, 1), normal(3, 4))],
    ),
    "gather_into": (
        gather_into,
        ["out"],
        [(normal(4, 3), whole(6, 3, high=4), normal(6, 3, seed=1))],
    ),
}
"""Reference, declared arguments, and samples of each."""


def writer(name: str, base: str, **aspects: Any) -> tuple[Any, Any]:
    """Declare one of these under a name of its own, with the aspects of `opsmith.operator`."""
    reference, mutates, samples = WRITERS[base]
    made = opsmith.operator(f"in_place_{name}::{base}", **{"mutates": mutates, **aspects})(reference)
    if base == "adam":  # nobody differentiates the step of an optimizer, and it has many inputs
        made.gradients(**dict.fromkeys(made.specification.schema.tensor_names, opsmith.non_differentiable))
    return made, samples


def _enter(base: str) -> None:
    def build() -> Any:
        return writer("right", base)

    build.__name__ = f"in_place_{base}"
    sound(build)


for each in WRITERS:
    _enter(each)


@sound
def in_place_rope_of_raw_memory() -> Any:
    """A kernel that writes past torch, by the strides of what it is given."""

    def kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for each in (q, k):
            memory, c, s = each.detach().numpy(), cos.detach().numpy(), sin.detach().numpy()
            half = memory.shape[1] // 2
            first, second = memory[:, :half].copy(), memory[:, half:].copy()
            memory[:, :half] = first * c - second * s
            memory[:, half:] = second * c + first * s

    made, samples = writer("raw", "rope")
    return made.kernel("cpu", kernel, dtypes=[torch.float32, torch.float64]), samples


@sound
def in_place_momentum_with_a_kernel() -> Any:
    made, samples = writer("kernel", "momentum")
    return made.kernel("cpu", momentum), samples


@sound
def in_place_decay_with_formulas() -> Any:
    def multiply_and_add(state: Tensor, x: Tensor, rate: float) -> None:
        state.copy_(x + rate * state)

    made, samples = writer("formulas", "decay")
    made.gradients(
        state=lambda grad_state, rate: rate * grad_state,
        x=lambda grad_state: grad_state,
    )
    return made.kernel("cpu", multiply_and_add), samples


@sound
def in_place_store_of_contiguous_caches_alone() -> Any:
    """It refuses a layout in words, which is a remark and no failure."""

    def kernel(cache: Tensor, index: Tensor, rows: Tensor) -> None:
        if not cache.is_contiguous():
            raise ValueError("the cache must be contiguous")
        cache.index_copy_(0, index, rows)

    made, samples = writer("contiguous", "store_rows")
    return made.kernel("cpu", kernel), samples


@sound
def in_place_noise() -> Any:
    """It draws, and writes what it drew."""

    @opsmith.operator("in_place_right::noise", mutates=["x"], random=True)
    def noise(x: Tensor, size: float = 0.1) -> None:
        x.add_(size * torch.randn_like(x))

    return noise, [(normal(3, 4),)]


@sound
def in_place_swap() -> Any:
    @opsmith.operator("in_place_right::swap", mutates=["x", "y"])
    def swap(x: Tensor, y: Tensor) -> None:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)

    return swap, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def in_place_running_maximum() -> Any:
    """Only some elements change, and which ones depends on what was there."""

    @opsmith.operator("in_place_right::running_maximum", mutates=["peak"])
    def running_maximum(peak: Tensor, x: Tensor) -> Tensor:
        higher = x > peak
        peak.copy_(torch.where(higher, x, peak))
        return higher.sum()

    return running_maximum, [(normal(3, 4), normal(3, 4, seed=1))]


@sound
def in_place_fill_of_the_upper_triangle() -> Any:
    """What was there has no part in what is written."""

    @opsmith.operator("in_place_right::fill_upper", mutates=["x"])
    def fill_upper(x: Tensor, value: float) -> None:
        x.masked_fill_(torch.ones_like(x, dtype=torch.bool).triu(1), value)

    return fill_upper, [(normal(4, 4), -2.0)]
