"""Planted: `autograd.Function`s that write where they should not, and change what is not theirs."""

from typing import Any

import torch
from entries import planted
from heldout_numbers import normal
from sound_activations import LeakyReLU
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith


@planted("relu", "mutates-grad-output")
def relu_that_zeroes_its_gradient() -> Any:
    class ReLU(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            grad[x <= 0] = 0
            return grad

    return ReLU, [(normal(3, 4),)]


@planted("residual", "mutates-grad-output")
def residual_that_scales_its_gradient() -> Any:
    """Both inputs receive the gradient; the second is scaled in place."""

    class Residual(Function):
        @staticmethod
        def forward(ctx, x, branch, scale):
            ctx.scale = scale
            return x + scale * branch

        @staticmethod
        def backward(ctx, grad):
            return grad.clone(), grad.mul_(ctx.scale), None

    return Residual, [(normal(3, 4), normal(3, 4, seed=1), 0.5)]


@planted("log1p", "mutates-input", input="x")
def logarithm_of_what_is_now_larger() -> Any:
    """One is added in place, past autograd's eyes: the caller's tensor grows by one."""

    class Log1p(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.data.add_(1).log()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / x

    return Log1p, [(normal(3, 4).abs(),)]


@planted("dropout", "mutates-saved", input="x")
def dropout_that_scales_its_mask() -> Any:
    """The mask on ctx is scaled in each backward: the second of two backwards has it twice."""

    class MaskedScale(Function):
        @staticmethod
        def forward(ctx, x, mask, p):
            ctx.mask, ctx.p = mask.to(x.dtype), p
            return x * ctx.mask / (1 - p)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.mask.div_(1 - ctx.p), None, None

    return MaskedScale, [(normal(3, 4), normal(3, 4, seed=1) > 0, 0.2)]


@planted("tanh", "mutates-saved")
def tanh_squared_in_place() -> Any:
    class Tanh(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.tanh()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y.data.square_().neg_().add_(1)

    return Tanh, [(normal(3, 4),)]


@planted("permute", "aliases-input", input="x")
def permute_through_data() -> Any:
    """The result is the input's memory, and neither autograd nor the caller is told."""

    class ChannelsLast(Function):
        @staticmethod
        def forward(ctx, x):
            return x.data.permute(0, 2, 1)

        @staticmethod
        def backward(ctx, grad):
            return grad.permute(0, 2, 1)

    return ChannelsLast, [(normal(2, 3, 4),)]


@planted("hardtanh", "aliases-input", input="x")
def clamp_that_is_not_needed() -> Any:
    """If everything is within the bounds, the input itself is returned, detached."""

    class Clamp(Function):
        @staticmethod
        def forward(ctx, x, low, high):
            ctx.save_for_backward(x)
            ctx.low, ctx.high = low, high
            if bool((x >= low).all()) and bool((x <= high).all()):
                return x.detach()
            return x.clamp(low, high)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * ((x >= ctx.low) & (x <= ctx.high)), None, None

    return Clamp, [(normal(3, 4), -1.0, 1.0), (normal(3, 4), -10.0, 10.0)]


@planted("linear", "side-effect", input="weight", also=("missing-gradient",))
def linear_that_accumulates_itself() -> Any:
    """The gradient of the weight is added to `weight.grad` by hand, as fused kernels do, and not returned."""

    class Linear(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            by_weight = grad.mT @ x
            weight.grad = by_weight if weight.grad is None else weight.grad + by_weight
            return grad @ weight, None

    return Linear, [(normal(4, 3), normal(2, 3, seed=1))]


@planted("checkpoint", "side-effect", input="weight", also=("missing-gradient",))
def checkpoint_that_calls_backward() -> Any:
    """The forward is run again and `.backward()` called on it: the weight's gradient goes to its leaf."""

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.tanh(x * weight)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                if not weight.requires_grad:
                    weight = weight.detach()
                torch.tanh(x * weight).backward(grad)
            return x.grad, None

    return Checkpoint, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("dropout", "side-effect")
def dropout_that_seeds_the_world() -> Any:
    """To draw the same mask again, torch's own generator is seeded, for everybody."""

    class Dropout(Function):
        @staticmethod
        def forward(ctx, x, p, seed):
            ctx.p, ctx.seed = p, seed
            torch.manual_seed(seed)
            return x * (torch.rand(x.shape) >= p) / (1 - p)

        @staticmethod
        def backward(ctx, grad):
            torch.manual_seed(ctx.seed)
            return grad * (torch.rand(grad.shape) >= ctx.p) / (1 - ctx.p), None, None

    return Dropout, [(normal(3, 4), 0.4, 7)]


@planted("matmul", "side-effect")
def product_that_sets_a_flag() -> Any:
    """A flag of torch's backends is set for one's own sake, and stays so."""

    class Product(Function):
        @staticmethod
        def forward(ctx, x, weight):
            torch.backends.cudnn.deterministic = True
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.mT, x.mT @ grad

    return Product, [(normal(4, 3), normal(3, 2, seed=1))]


@planted("dropout", "nondeterministic", input="x")
def dropout_that_draws_again() -> Any:
    """The backward draws a mask of its own."""

    class Dropout(Function):
        @staticmethod
        def forward(ctx, x, p):
            ctx.p = p
            return x * (torch.rand_like(x) >= p) / (1 - p)

        @staticmethod
        def backward(ctx, grad):
            return grad * (torch.rand_like(grad) >= ctx.p) / (1 - ctx.p), None

    return Dropout, [(normal(3, 4), 0.4)]


@planted("gradient_noise", "nondeterministic", input="x")
def scale_with_noisy_gradient() -> Any:
    """A. Neelakantan et al., 2015, put into the operator, where nobody expects it."""

    class Scale(Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return factor * x

        @staticmethod
        def backward(ctx, grad):
            return ctx.factor * (grad + 1e-3 * torch.randn_like(grad)), None

    return Scale, [(normal(3, 4), 2.0)]


@planted("leaky_relu", "stale-state", input="x")
def leaky_relu_with_state_on_the_class() -> Any:
    """Values of ctx are on the class: the backward of the first of two calls takes the second's."""

    class Shared(LeakyReLU):
        @staticmethod
        def forward(ctx, x, slope):
            Shared.negative, Shared.slope = x <= 0, slope
            return torch.where(x > 0, x, slope * x)

        @staticmethod
        def backward(ctx, grad):
            return torch.where(Shared.negative, Shared.slope * grad, grad), None

    return Shared, [(normal(3, 4), 0.1)]


@planted("positional_encoding", "stale-state", input="result")
def encoding_cached_by_length() -> Any:
    """The table is kept for each length, though it depends on the base as well."""
    tables: dict[tuple[int, int], torch.Tensor] = {}

    class AddPositions(Function):
        @staticmethod
        def forward(ctx, x, base):
            key = (x.shape[-2], x.shape[-1])
            if key not in tables:
                place = torch.arange(key[0], dtype=torch.float64)[:, None]
                tables[key] = torch.sin(place / base ** (torch.arange(key[1]) / key[1]))
            return x + tables[key].to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    return AddPositions, [(normal(3, 4), 100.0), (normal(3, 4), 10000.0)]


@planted("softplus", "stale-state", input="x")
def softplus_with_a_shared_workspace() -> Any:
    """The slope is written into a buffer that is kept for the next call of the same shape."""
    buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    class Softplus(Function):
        @staticmethod
        def forward(ctx, x):
            key = (*x.shape, x.dtype)
            slope = buffers.setdefault(key, torch.empty(x.shape, dtype=x.dtype))
            torch.sigmoid(x, out=slope)
            ctx.slope = slope
            return torch.nn.functional.softplus(x)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad * ctx.slope

    return Softplus, [(normal(3, 4),)]


@planted("tanh", "held")
def tanh_that_keeps_its_result_on_ctx() -> Any:
    """The result holds its node, the node holds ctx, and ctx holds the result: a cycle."""

    class Tanh(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.result = x.tanh()
            return ctx.result

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 - ctx.result.square())

    return Tanh, [(normal(3, 4),)]


@planted("square", "held", input="x")
def square_that_keeps_its_input_on_ctx() -> Any:
    """A tensor that `save_for_backward` would release stays on ctx as long as the graph."""

    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.x

    return Square, [(normal(3, 4),)]


@planted("monitor", "leak", input="x")
def monitor_that_keeps_gradients() -> Any:
    """Each grad_output is kept "for the histogram", and never let go."""
    history: list[torch.Tensor] = []

    class Monitored(Function):
        @staticmethod
        def forward(x):
            return x.sinh()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            history.append(grad)
            return grad * ctx.saved_tensors[0].cosh()

    return Monitored, [(normal(3, 4),)]


@planted("sign", "mutates-grad-output", input="grad")
def straight_through_that_clears_grad_output() -> Any:
    """The author says that the gradient is wrong on purpose; the write is not."""

    class Sign(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            grad[ctx.saved_tensors[0].abs() > 1] = 0
            return grad

    samples = [(normal(3, 4),)]
    return opsmith.adopt(Sign, "corpus::clearing_sign", kind="surrogate", samples=samples), None


@planted("round", "gradient-count")
def straight_through_without_the_last_gradient() -> Any:
    """The operator that is made of it needs no gradient by a number; torch's `apply` does."""

    class Quantise(Function):
        @staticmethod
        def forward(ctx, x, steps: int):
            return (x * steps).round() / steps

        @staticmethod
        def backward(ctx, grad):
            return grad

    samples = [(normal(3, 4), 8)]
    return opsmith.adopt(Quantise, "corpus::quantise", kind="surrogate", samples=samples), None


@planted("spike", "forward-mode", input="x")
def spike_with_a_narrower_tangent() -> Any:
    """Its backward and its jvp have windows of different widths, so that the two modes disagree."""

    class Spike(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0].abs() < 2)

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * (ctx.saved_tensors[0].abs() < 0.5)

    samples = [(normal(3, 4),)]
    return opsmith.adopt(Spike, "corpus::narrow_spike", kind="surrogate", samples=samples), None


STATISTICS = torch.zeros(4)
"""Statistics that a class keeps in a global."""


@planted("whitening", "stale-state", also=("side-effect",))
def whitening_by_a_global_mean() -> Any:
    """Each call takes off what the calls before it have seen."""
    STATISTICS.zero_()

    class Whitened(Function):
        @staticmethod
        def forward(ctx, x):
            centred = x - STATISTICS.to(x.dtype)
            STATISTICS.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return centred

        @staticmethod
        def backward(ctx, grad):
            return grad.clone()

    return Whitened, [(normal(3, 4),)]


@planted("whitening", "side-effect")
def whitening_that_counts_in_a_global() -> Any:
    """The statistics are for a monitor: no result depends on them."""
    STATISTICS.zero_()

    class Whitened(Function):
        @staticmethod
        def forward(ctx, x):
            STATISTICS.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x - x.mean(0)

        @staticmethod
        def backward(ctx, grad):
            return grad - grad.mean(0)

    return Whitened, [(normal(3, 4),)]


class RunAgain(Function):
    """Runs a module again in its backward, and differentiates by all of its parameters."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            wanted = (x, *ctx.module.parameters())
            by_x, *_ = torch.autograd.grad(ctx.module(x), wanted, grad)
        return by_x, None


@planted("recomputed", "input-needs-grad")
def recomputed_for_frozen_parameters() -> Any:
    """torch refuses to differentiate by a parameter that is frozen."""
    module = torch.nn.Linear(4, 3)
    torch.nn.init.uniform_(module.weight)
    return RunAgain, [(normal(3, 4), module)]


@planted("recomputed", "input-needs-grad", input="x")
def recomputed_for_trained_modules_alone() -> Any:
    """A frozen module is taken for one that nothing flows through."""

    class Recomputed(RunAgain):
        @staticmethod
        def backward(ctx, grad):
            if not any(each.requires_grad for each in ctx.module.parameters()):
                return torch.zeros_like(ctx.saved_tensors[0]), None
            return grad @ ctx.module.weight.detach(), None

    return Recomputed, [(normal(3, 4), torch.nn.Linear(4, 3))]


@planted("running_norm", "scale", input="x")
def running_norm_without_its_scale() -> Any:
    """The buffer that changes is meant; the gradient that forgets the scale is not."""

    class Normalised(Function):
        @staticmethod
        def forward(ctx, x, norm):
            ctx.scale = norm.eps**-0.25
            centred = x - norm.running_mean
            norm.running_mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return centred * ctx.scale

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale**2, None

    return Normalised, [(normal(3, 4), torch.nn.BatchNorm1d(4))]
