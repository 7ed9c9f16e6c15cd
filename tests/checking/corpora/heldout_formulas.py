"""Held out: operators of ours whose gradient formulas are wrong, in the first order or in the second."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from entries import planted
from torch import Tensor

import opsmith


@planted("huber", "region", input="x")
def h_huber_below_the_threshold() -> Any:
    """Beyond the threshold the slope is ±delta; here it is +delta on both sides."""

    @opsmith.operator("heldout::huber_below_the_threshold")
    def huber(x: Tensor, delta: float = 0.5) -> Tensor:
        size = x.abs()
        return torch.where(size <= delta, 0.5 * x * x, delta * (size - 0.5 * delta))

    huber.samples(lambda make: [(make(3, 4),), (make(7), 0.25)])
    huber.gradients(
        x=lambda grad, x, delta: grad * torch.where(x.abs() <= delta, x, torch.full_like(x, delta))
    )
    return huber, None


@planted("layer_norm", "missing-term", input="x")
def h_layer_norm_without_the_mean() -> Any:
    @opsmith.operator("heldout::layer_norm_without_the_mean", hidden=("mean", "rstd"))
    def layer_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (x - mean) * rstd * weight, mean, rstd

    def by_x(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        normal = (x - mean) * rstd
        scaled = grad * weight
        return rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))

    layer_norm.samples(lambda make: [(make(4, 6), make(6)), (make(2, 3, 5), make(5))])
    layer_norm.gradients(x=by_x, weight=lambda grad, x, mean, rstd: grad * (x - mean) * rstd)
    return layer_norm, None


@planted("log_mean_exp", "scale", input="x")
def h_log_mean_exp_divided_again() -> Any:
    """The mean is already in the result: its gradient is the softmax, and not the softmax over n."""

    @opsmith.operator("heldout::log_mean_exp_divided_again")
    def log_mean_exp(x: Tensor) -> Tensor:
        return x.logsumexp(-1) - float(np.log(x.shape[-1]))

    log_mean_exp.samples(lambda make: [(make(3, 4),), (make(2, 7),)])
    log_mean_exp.gradients(x=lambda grad, x: grad[..., None] * x.softmax(-1) / x.shape[-1])
    return log_mean_exp, None


@planted("cumsum", "shifted", input="x", also=("missing-term",))
def h_cumsum_exclusive() -> Any:
    """The reversed sum of the gradient without the element itself."""

    @opsmith.operator("heldout::cumsum_exclusive")
    def running(x: Tensor) -> Tensor:
        return x.cumsum(-1)

    def by_x(grad: Tensor) -> Tensor:
        return grad.flip(-1).cumsum(-1).flip(-1) - grad

    running.samples(lambda make: [(make(3, 5),), (make(8),)])
    running.gradients(x=by_x)
    return running, None


@planted("lerp", "swapped-inputs")
def h_lerp_the_wrong_way() -> Any:
    @opsmith.operator("heldout::lerp_the_wrong_way")
    def lerp(start: Tensor, end: Tensor, weight: float = 0.2) -> Tensor:
        return start + weight * (end - start)

    lerp.samples(lambda make: [(make(3, 4), make(3, 4)), (make(5), make(5), 0.75)])
    lerp.gradients(start=lambda grad, weight: grad * weight, end=lambda grad, weight: grad * (1 - weight))
    return lerp, None


@planted("swish", "second-order", input="x", order=2)
def h_swish_with_a_detached_gate() -> Any:
    @opsmith.operator("heldout::swish_with_a_detached_gate")
    def swish(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    def by_x(grad: Tensor, x: Tensor) -> Tensor:
        gate = x.detach().sigmoid()
        return grad * (gate + x * gate * (1 - gate))

    swish.samples(lambda make: [(make(3, 4),)])
    swish.gradients(x=by_x)
    return swish, None


@planted("log_cosh", "second-order", input="x", order=2, also=("raises",))
def h_log_cosh_by_numpy() -> Any:
    """The first order is right; there is no second, since NumPy leaves no graph."""

    @opsmith.operator("heldout::log_cosh_by_numpy")
    def log_cosh(x: Tensor) -> Tensor:
        return x.abs() + (-2 * x.abs()).exp().log1p() - float(np.log(2.0))

    def by_x(grad: Tensor, x: Tensor) -> Tensor:
        return torch.from_numpy(grad.detach().numpy() * np.tanh(x.detach().numpy()))

    log_cosh.samples(lambda make: [(make(2, 3),)])
    log_cosh.gradients(x=by_x)
    return log_cosh, None


@planted("bilinear", "input-needs-grad", input="x")
def h_bilinear_when_alone() -> Any:
    """The joint formula scales the gradient first where the gain needs none, and then once more."""

    @opsmith.operator("heldout::bilinear_when_alone")
    def gated(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
        return x * y * gain

    @gated.gradients("x", "y", "gain")
    def _(
        grad: Tensor, x: Tensor, y: Tensor, gain: Tensor, grads_needed: frozenset[str]
    ) -> dict[str, Tensor]:
        found = {}
        scaled = grad if "gain" not in grads_needed else grad * gain
        if "gain" in grads_needed:
            found["gain"] = grad * x * y
        if "y" in grads_needed:
            found["y"] = grad * gain * x
        if "x" in grads_needed:
            found["x"] = scaled * y
        return found

    gated.samples(lambda make: [(make(3, 4), make(3, 4), make(3, 4))])
    return gated, None


@planted("moments", "missing-term", input="x")
def h_moments_about_zero() -> Any:
    """Of two results, the mean's gradient is right; that of the variance is taken about zero."""

    @opsmith.operator("heldout::moments_about_zero", results=("mean", "variance"))
    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(-1)
        return mean, (x - mean[..., None]).square().mean(-1)

    def by_x(grad_mean: Tensor, grad_variance: Tensor, x: Tensor) -> Tensor:
        n = x.shape[-1]
        return grad_mean[..., None].expand_as(x) / n + 2 / n * grad_variance[..., None] * x

    moments.samples(lambda make: [(make(3, 5),), (make(4, 2),)])
    moments.gradients(x=by_x)
    return moments, None


@planted("power", "unknown", input="z", also=("sign",))
def h_power_of_a_signal() -> Any:
    """|z|² has the gradient 2 g z; here it is conjugated, so that the imaginary part has the wrong sign."""

    @opsmith.operator("heldout::power_of_a_signal")
    def power(z: Tensor) -> Tensor:
        return z.real.square() + z.imag.square()

    power.samples(lambda make: [(torch.complex(make(3), make(3)),), (torch.complex(make(2, 4), make(2, 4)),)])
    power.gradients(z=lambda grad, z: 2 * grad * z.conj())
    return power, None


@planted("weighted_stack", "swapped-inputs", input="parts")
def h_stack_in_reverse() -> Any:
    @opsmith.operator("heldout::stack_in_reverse")
    def stack(parts: list[Tensor]) -> Tensor:
        return torch.stack([(i + 1) * part for i, part in enumerate(parts)])

    stack.samples(lambda make: [([make(3), make(3)],), ([make(2, 2), make(2, 2), make(2, 2)],)])
    stack.gradients(parts=lambda grad: [(i + 1) * grad[i] for i in reversed(range(grad.shape[0]))])
    return stack, None


@planted("cosine_normalise", "second-order", input="x", order=2)
def h_unit_vector_with_a_constant_norm() -> Any:
    """The norm depends on x, and is declared to have no gradient."""

    @opsmith.operator(
        "heldout::unit_vector_with_a_constant_norm",
        results={"unit": ..., "norm": opsmith.non_differentiable},
        hidden=("norm",),
    )
    def unit_vector(x: Tensor) -> tuple[Tensor, Tensor]:
        norm = x.norm(dim=-1, keepdim=True)
        return x / norm, norm

    def by_x(grad: Tensor, x: Tensor, norm: Tensor) -> Tensor:
        return grad / norm - x * (grad * x).sum(-1, keepdim=True) / norm**3

    unit_vector.samples(lambda make: [(make(3, 4),)])
    unit_vector.gradients(x=by_x)
    return unit_vector, None


@planted("take_rows", "region", input="table", also=("missing-term",))
def h_take_rows_that_repeat() -> Any:
    """The gradient of a row that is taken twice is that of its last place."""

    @opsmith.operator("heldout::take_rows_that_repeat")
    def take_rows(table: Tensor, index: Tensor) -> Tensor:
        return table[index]

    def by_table(grad: Tensor, table_shape: torch.Size, index: Tensor) -> Tensor:
        found = grad.new_zeros(table_shape)
        return found.scatter(0, index[:, None].expand_as(grad), grad)

    take_rows.samples(
        lambda make: [
            (make(5, 3), torch.tensor([4, 0, 2])),
            (make(4, 2), torch.tensor([1, 3, 1, 0, 3])),
        ]
    )
    take_rows.gradients(table=by_table)
    return take_rows, None


@planted("softplus", "nonlinear-grad", input="x")
def h_softplus_that_clips() -> Any:
    @opsmith.operator("heldout::softplus_that_clips")
    def softplus(x: Tensor) -> Tensor:
        return F.softplus(x)

    softplus.samples(lambda make: [(make(3, 4),)])
    softplus.gradients(x=lambda grad, x: (grad * x.sigmoid()).clamp(-1.0, 1.0))
    return softplus, None


@planted("pinball", "missing-gradient", input="target")
def h_pinball_with_a_constant_target() -> Any:
    @opsmith.operator("heldout::pinball_with_a_constant_target")
    def pinball(prediction: Tensor, target: Tensor, quantile: float = 0.9) -> Tensor:
        error = target - prediction
        return torch.where(error >= 0, quantile * error, (quantile - 1) * error)

    def by_prediction(grad: Tensor, prediction: Tensor, target: Tensor, quantile: float) -> Tensor:
        return torch.where(target >= prediction, -quantile * grad, (1 - quantile) * grad)

    pinball.samples(lambda make: [(make(6), make(6)), (make(2, 3), make(2, 3), 0.1)])
    pinball.gradients(prediction=by_prediction, target=opsmith.zero)
    return pinball, None
