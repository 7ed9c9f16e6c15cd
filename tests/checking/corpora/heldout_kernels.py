"""Held out: operators of ours whose kernel does not compute what the reference does."""

from typing import Any

import torch
from entries import planted, sound
from torch import Tensor

import opsmith


@planted("energy", "kernel-mismatch", input="result", also=("region", "missing-term"))
def h_energy_unrolled_by_four() -> Any:
    """The remainder of a length that is no multiple of four is not summed."""

    @opsmith.operator("heldout::energy_unrolled_by_four", shapes="x: ... M -> ...")
    def energy(x: Tensor) -> Tensor:
        return x.square().sum(-1)

    def kernel(x: Tensor) -> Tensor:
        whole = x.shape[-1] // 4 * 4
        lanes = x[..., :whole].reshape(*x.shape[:-1], whole // 4, 4)
        return lanes.square().sum(-2).sum(-1)

    energy.samples(lambda make: [(make(3, 4),), (make(2, 8),)])
    energy.kernel("cpu", kernel)
    return energy, None


@planted("inverse_root", "precision", input="result", also=("kernel-mismatch",))
def h_inverse_root_by_one_newton_step() -> Any:
    """The trick of Quake III: right to 0.2 %, and in float32 alone."""

    @opsmith.operator("heldout::inverse_root_by_one_newton_step")
    def inverse_root(x: Tensor) -> Tensor:
        return x.rsqrt().contiguous()

    def kernel(x: Tensor) -> Tensor:
        x = x.contiguous()
        guess = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(torch.float32)
        return guess * (1.5 - 0.5 * x * guess * guess)

    inverse_root.samples(lambda make: [(make(3, 4, low=0.5, high=4.0),)])
    inverse_root.kernel("cpu", kernel, dtypes=[torch.float32])
    return inverse_root, None


@planted("variance", "precision", input="result", also=("kernel-mismatch",))
def h_variance_by_two_moments() -> Any:
    """E[x²] - E[x]² cancels where the mean is large beside the deviation."""

    @opsmith.operator("heldout::variance_by_two_moments")
    def variance(x: Tensor) -> Tensor:
        return x.var(-1, unbiased=False)

    variance.samples(lambda make: [(make(4, 6, low=1000.0, high=1001.0),), (make(3, 5),)])
    variance.kernel("cpu", lambda x: x.square().mean(-1) - x.mean(-1).square())
    return variance, None


@planted("floor_at", "aliases-input", input="x")
def h_floor_that_finds_nothing_to_do() -> Any:
    @opsmith.operator("heldout::floor_that_finds_nothing_to_do")
    def floor_at(x: Tensor, low: float = -1.0) -> Tensor:
        return x.clamp(min=low)

    def kernel(x: Tensor, low: float = -1.0) -> Tensor:
        if x.numel() and x.detach().min() >= low:
            return x
        return x.clamp(min=low)

    floor_at.samples(lambda make: [(make(3, 4),), (make(5, low=0.0, high=1.0),)])
    floor_at.kernel("cpu", kernel)
    return floor_at, None


@planted("log_safe", "mutates-input", input="x")
def h_logarithm_that_mends_its_input() -> Any:
    """If an element is below eps, the kernel writes eps into the caller's tensor."""

    @opsmith.operator("heldout::logarithm_that_mends_its_input")
    def log_safe(x: Tensor, eps: float = 1e-3) -> Tensor:
        return x.clamp(min=eps).log()

    log_safe.samples(lambda make: [(make(3, 4, low=0.1, high=2.0),), (make(6),)])
    log_safe.kernel("cpu", lambda x, eps=1e-3: x.clamp_(min=eps).log())
    return log_safe, None


@planted("lower_triangle", "kernel-mismatch", input="result", also=("region", "nondeterministic"))
def h_triangle_above_which_nothing_is_written() -> Any:
    @opsmith.operator("heldout::triangle_above_which_nothing_is_written", shapes="x: ... N M -> ... N N")
    def gram(x: Tensor) -> Tensor:
        return (x @ x.mT).tril()

    def kernel(x: Tensor) -> Tensor:
        n = x.shape[-2]
        found = x.new_empty(*x.shape[:-2], n, n)
        for row in range(n):
            found[..., row, : row + 1] = (x[..., row : row + 1, :] * x[..., : row + 1, :]).sum(-1)
        return found

    gram.samples(lambda make: [(make(4, 3),), (make(2, 3, 5),)])
    gram.kernel("cpu", kernel)
    return gram, None


@planted("box_blur", "stale-state", input="result")
def h_blur_with_one_workspace() -> Any:
    """The second call of a shape writes into the result of the first."""
    workspaces: dict[Any, Tensor] = {}

    @opsmith.operator("heldout::blur_with_one_workspace")
    def blur(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (1, 1))
        return ((padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3).contiguous()

    def kernel(x: Tensor) -> Tensor:
        key = (tuple(x.shape), x.dtype)
        if key not in workspaces:
            workspaces[key] = torch.empty(x.shape, dtype=x.dtype)
        out, x = workspaces[key], x.detach()
        out.copy_(x)
        out[..., 1:] += x[..., :-1]
        out[..., :-1] += x[..., 1:]
        return out.div_(3).detach()

    blur.samples(lambda make: [(make(3, 5),), (make(7),)])
    blur.kernel("cpu", kernel)
    return blur, None


@planted("row_norm", "layout", input="x", also=("kernel-mismatch",))
def h_row_norm_by_pointer() -> Any:
    """The kernel reads rows one behind the other, as if every matrix lay so in memory."""

    @opsmith.operator("heldout::row_norm_by_pointer", shapes="x: N M -> N")
    def row_norm(x: Tensor) -> Tensor:
        return x.square().sum(-1).sqrt()

    def kernel(x: Tensor) -> Tensor:
        rows, columns = x.shape
        return torch.as_strided(x, (rows, columns), (columns, 1)).square().sum(-1).sqrt()

    row_norm.samples(lambda make: [(make(3, 5),), (make(4, 2),)])
    row_norm.kernel("cpu", kernel)
    return row_norm, None


@planted("log_sum_exp", "empty", also=("raises", "kernel-mismatch", "nan"))
def h_log_sum_exp_of_no_rows() -> Any:
    """The largest element of all is subtracted: an empty batch has none, and far below it a row is lost."""

    @opsmith.operator("heldout::log_sum_exp_of_no_rows")
    def log_sum_exp(x: Tensor) -> Tensor:
        return x.logsumexp(-1)

    def kernel(x: Tensor) -> Tensor:
        top = x.max()
        return (x - top).exp().sum(-1).log() + top

    log_sum_exp.samples(lambda make: [(make(3, 4),), (make(2, 5),)])
    log_sum_exp.kernel("cpu", kernel)
    return log_sum_exp, None


@sound
def h_outer_product_by_columns() -> Any:
    """The values lie column by column where the reference has rows: each result is copied to rows."""

    @opsmith.operator("heldout::outer_product_by_columns")
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y[None, :]

    outer.samples(lambda make: [(make(3), make(4)), (make(5), make(2))])
    outer.kernel("cpu", lambda x, y: (y[:, None] * x[None, :]).mT)
    return outer, None


@planted("histogram", "dtype", input="counts", also=("kernel-mismatch", "fake-mismatch"))
def h_histogram_in_floats() -> Any:
    """The reference counts in whole numbers; the kernel returns them as floats."""

    @opsmith.operator("heldout::histogram_in_floats", results={"counts": opsmith.non_differentiable})
    def histogram(x: Tensor, bins: int = 4) -> Tensor:
        edges = torch.linspace(-1.0, 1.0, bins + 1, dtype=x.dtype)[1:-1]
        place = torch.bucketize(x.contiguous(), edges)
        return (place[:, None] == torch.arange(bins)).sum(0)

    def kernel(x: Tensor, bins: int = 4) -> Tensor:
        edges = torch.linspace(-1.0, 1.0, bins + 1, dtype=x.dtype)[1:-1]
        place = torch.bucketize(x.contiguous(), edges)
        return torch.bincount(place, minlength=bins).to(x.dtype)

    histogram.samples(lambda make: [(make(9),), (make(5), 3)])
    histogram.kernel("cpu", kernel)
    return histogram, None


@planted("matrix_vector", "kernel-mismatch", input="result", also=("region", "missing-term"))
def h_matrix_vector_of_one_tile() -> Any:
    """Columns beyond the first tile of eight are not read; the samples have fewer."""

    @opsmith.operator("heldout::matrix_vector_of_one_tile", shapes="matrix: N M, vector: M -> N")
    def matrix_vector(matrix: Tensor, vector: Tensor) -> Tensor:
        return matrix @ vector

    def kernel(matrix: Tensor, vector: Tensor) -> Tensor:
        return (matrix[:, :8] * vector[:8]).sum(-1)

    matrix_vector.samples(lambda make: [(make(3, 5), make(5)), (make(2, 7), make(7))])
    matrix_vector.kernel("cpu", kernel)
    return matrix_vector, None


@planted("shuffle", "side-effect")
def h_shuffle_that_seeds_everybody() -> Any:
    """The kernel sets torch's own seed for its permutation, and so for the caller's next random number."""

    @opsmith.operator("heldout::shuffle_that_seeds_everybody")
    def shuffle(x: Tensor, seed: int = 0) -> Tensor:
        order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(seed))
        return x[order]

    def kernel(x: Tensor, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        return x[torch.randperm(x.shape[0])]

    shuffle.samples(lambda make: [(make(5, 2),), (make(4), 3)])
    shuffle.kernel("cpu", kernel)
    return shuffle, None


@planted("row_sum", "precision", input="result", also=("kernel-mismatch",))
def h_row_sum_in_half() -> Any:
    """A sum of float32 numbers that is accumulated in float16."""

    @opsmith.operator("heldout::row_sum_in_half", shapes="x: ... M -> ...")
    def row_sum(x: Tensor) -> Tensor:
        return x.sum(-1)

    def kernel(x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[:-1], dtype=torch.float16)
        for column in x.unbind(-1):
            total += column.to(torch.float16)
        return total.to(x.dtype)

    row_sum.samples(lambda make: [(make(3, 6),), (make(2, 9),)])
    row_sum.kernel("cpu", kernel, dtypes=[torch.float32])
    return row_sum, None


@planted("logit", "kernel-mismatch", input="result", also=("region", "sign"))
def h_logit_of_float32() -> Any:
    """Wrong in float32 alone, and there for numbers below a half."""

    @opsmith.operator("heldout::logit_of_float32")
    def logit(p: Tensor) -> Tensor:
        return p.log() - (-p).log1p()

    def kernel(p: Tensor) -> Tensor:
        odds = p.log() - (-p).log1p()
        return odds.abs() if p.dtype == torch.float32 else odds

    logit.samples(lambda make: [(make(3, 4, low=0.1, high=0.9),)])
    logit.kernel("cpu", kernel)
    return logit, None
