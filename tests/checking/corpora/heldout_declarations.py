"""Held out: what else an operator of ours declares, and is wrong: fakes, tangents, batches, randomness."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from entries import planted, sound
from torch import Tensor

import opsmith


@planted("downsample", "fake-mismatch", input="result", also=("shape",))
def h_downsample_whose_fake_rounds_down() -> Any:
    """Right for even lengths, of which the samples are."""

    @opsmith.operator("heldout::downsample_whose_fake_rounds_down", opaque=True)
    def downsample(x: Tensor) -> Tensor:
        return x[..., ::2].clone(memory_format=torch.contiguous_format)

    def by_x(grad: Tensor, x_shape: torch.Size) -> Tensor:
        spread = grad.new_zeros(x_shape)
        spread[..., ::2] = grad
        return spread

    downsample.fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
    downsample.samples(lambda make: [(make(3, 4),), (make(2, 6),)])
    downsample.gradients(x=by_x)
    return downsample, None


@sound
def h_channel_scale_whose_fake_is_contiguous() -> Any:
    """The operator answers with channels last, the fake kernel with rows: each result is copied to rows."""

    @opsmith.operator("heldout::channel_scale_whose_fake_is_contiguous", opaque=True)
    def channel_scale(image: Tensor, gain: Tensor) -> Tensor:
        return (image * gain[:, None, None]).contiguous(memory_format=torch.channels_last)

    channel_scale.fake(lambda image, gain: torch.empty(image.shape, dtype=image.dtype, device=image.device))
    channel_scale.samples(lambda make: [(make(2, 3, 4, 5), make(3))])
    channel_scale.gradients(
        image=lambda grad, gain: grad * gain[:, None, None],
        gain=lambda grad, image: (grad * image).sum((0, 2, 3)),
    )
    return channel_scale, None


@planted("quantise", "fake-mismatch", input="codes", also=("dtype",))
def h_quantise_whose_fake_keeps_the_dtype() -> Any:
    @opsmith.operator(
        "heldout::quantise_whose_fake_keeps_the_dtype",
        results={"codes": opsmith.non_differentiable, "scale": ...},
        opaque=True,
    )
    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.square().mean().sqrt()
        return (x / scale).round().to(torch.int32), scale

    @quantise.fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty(())

    quantise.samples(lambda make: [(make(3, 4),), (make(7),)])
    quantise.gradients(x=lambda grad_scale, x, scale: grad_scale * x / (scale * x.numel()))
    return quantise, None


@planted("quotient", "forward-mode", input="y", also=("missing-term", "missing-gradient"))
def h_quotient_whose_tangent_forgets_the_divisor() -> Any:
    @opsmith.operator("heldout::quotient_whose_tangent_forgets_the_divisor")
    def quotient(x: Tensor, y: Tensor) -> Tensor:
        return x / y

    quotient.gradients(x=lambda grad, y: grad / y, y=lambda grad, y, result: -grad * result / y)
    quotient.tangents(result=lambda y, tangent_x: tangent_x / y)
    quotient.samples(lambda make: [(make(3, 4), make(3, 4, low=1.0, high=2.0))])
    return quotient, None


@planted("leaky_relu", "forward-mode", input="x", also=("region",))
def h_leaky_relu_whose_tangent_does_not_leak() -> Any:
    @opsmith.operator("heldout::leaky_relu_whose_tangent_does_not_leak")
    def leaky_relu(x: Tensor, slope: float = 0.1) -> Tensor:
        return torch.where(x > 0, x, slope * x)

    leaky_relu.gradients(x=lambda grad, x, slope: torch.where(x > 0, grad, slope * grad))
    leaky_relu.tangents(result=lambda x, tangent_x: torch.where(x > 0, tangent_x, torch.zeros_like(x)))
    leaky_relu.samples(lambda make: [(make(3, 4),)])
    return leaky_relu, None


@planted("z_score", "unknown", input="result", also=("kernel-mismatch",))
def h_z_score_said_to_be_elementwise() -> Any:
    """One call does not serve a batch: the mean would be that of all examples."""

    @opsmith.operator("heldout::z_score_said_to_be_elementwise", batching="elementwise")
    def z_score(x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.square().mean() + 1.0).sqrt()

    def kernel(x: Tensor) -> Tensor:
        return (x - x.mean()).div_((x.square().mean() + 1.0).sqrt())

    z_score.samples(lambda make: [(make(3, 4),), (make(6),)])
    z_score.kernel("cpu", kernel)
    return z_score, None


@planted("rms_norm", "kernel-mismatch", input="rstd")
def h_rms_norm_whose_kernel_hides_the_root() -> Any:
    """The result is right; what the kernel keeps for the formulas is the root, and not one over it."""

    @opsmith.operator(
        "heldout::rms_norm_whose_kernel_hides_the_root", results=("y", "rstd"), hidden=("rstd",)
    )
    def rms_norm(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * rstd, rstd

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        root = (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x / root, root

    def by_x(grad_y: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
        return rstd * (grad_y - x * rstd.square() * (grad_y * x).mean(-1, keepdim=True))

    rms_norm.samples(lambda make: [(make(3, 4),), (make(2, 5),)])
    rms_norm.gradients(x=by_x).kernel("cpu", kernel)
    return rms_norm, None


@planted("stochastic_round", "nondeterministic", input="result")
def h_stochastic_rounding_unsaid() -> Any:
    """It draws, and does not say `random=True`."""

    @opsmith.operator("heldout::stochastic_rounding_unsaid")
    def stochastic_round(x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).floor()

    stochastic_round.samples(lambda make: [(make(3, 4, low=-2.0, high=2.0),)])
    stochastic_round.gradients(x=opsmith.zero)
    return stochastic_round, None


@planted("running_centre", "stale-state", input="result", also=("nondeterministic", "side-effect"))
def h_running_centre() -> Any:
    """A mean that is carried from call to call."""
    seen = {"mean": 0.0}

    @opsmith.operator("heldout::running_centre", opaque=True)
    def centre(x: Tensor) -> Tensor:
        before = seen["mean"]
        if x.numel():
            seen["mean"] = 0.9 * before + 0.1 * float(x.detach().mean())
        return (x - before).contiguous()

    centre.fake(lambda x: x.new_empty(x.shape))
    centre.samples(lambda make: [(make(3, 4, low=1.0, high=2.0),)])
    centre.gradients(x=lambda grad: grad.clone())
    return centre, None


@planted("annealed", "stale-state", input="x", also=("nondeterministic",))
def h_annealed_gradient() -> Any:
    """The forward is a function; the formula counts its own calls and grows weaker from one to the next."""
    steps = itertools.count(1)

    @opsmith.operator("heldout::annealed_gradient")
    def soft_step(x: Tensor) -> Tensor:
        return x.sigmoid()

    soft_step.samples(lambda make: [(make(3, 4),)])
    soft_step.gradients(x=lambda grad, result: grad * result * (1 - result) / next(steps) ** 0.5)
    return soft_step, None


@planted("mish", "second-order", input="x", order=2, also=("scale",))
def h_mish_with_its_own_gradient_operator() -> Any:
    """The gradient is an operator too, and that one's formula is wrong by a factor."""

    @opsmith.operator("heldout::mish_slope")
    def mish_slope(flow: Tensor, x: Tensor) -> Tensor:
        inner = F.softplus(x).tanh()
        return flow * (inner + x * (1 - inner.square()) * x.sigmoid())

    def curvature(x: Tensor) -> Tensor:
        inner, gate = F.softplus(x).tanh(), x.sigmoid()
        slope = (1 - inner.square()) * gate
        return 2 * slope - 2 * x * inner * slope * gate + x * slope * (1 - gate)

    mish_slope.gradients(
        flow=lambda grad, x: mish_slope(grad, x),
        x=lambda grad, flow, x: 0.5 * grad * flow * curvature(x),
    )

    @opsmith.operator("heldout::mish_with_its_own_gradient_operator")
    def mish(x: Tensor) -> Tensor:
        return x * F.softplus(x).tanh()

    mish.samples(lambda make: [(make(3, 4),)])
    mish.gradients(x=lambda grad, x: mish_slope(grad, x))
    return mish, None


@planted("group_maximum", "kernel-mismatch", input="result", also=("region", "shifted"))
def h_group_maximum_of_the_first_rows() -> Any:
    """`batching="B"` and a kernel that is right for up to four rows: it reads the rest in the wrong place."""

    @opsmith.operator("heldout::group_maximum", shapes="x: B M -> B", batching="B")
    def group_maximum(x: Tensor) -> Tensor:
        return x.amax(-1)

    def kernel(x: Tensor) -> Tensor:
        found = x.amax(-1)
        found[4:] = x[: max(0, x.shape[0] - 4)].amax(-1)
        return found

    group_maximum.samples(lambda make: [(make(2, 3),), (make(4, 5),)])
    group_maximum.kernel("cpu", kernel)
    return group_maximum, None
