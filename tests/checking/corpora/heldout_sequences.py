"""Held out: attention, recurrent cells, reversible blocks and layers as `autograd.Function`s, and wrong."""

from typing import Any

import torch
from entries import planted
from heldout_numbers import normal
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@planted("attention", "missing-term", input="query")
def h_attention_without_delta() -> Any:
    """The backward of a softmax subtracts what the rows of dP P sum to; for the queries it is left out."""

    class Attention(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, query, key, value):
            p = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
            ctx.save_for_backward(query, key, value, p)
            return p @ value

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            query, key, value, p = ctx.saved_tensors
            by_p = grad @ value.mT
            delta = (by_p * p).sum(-1, keepdim=True)
            root = query.shape[-1] ** 0.5
            return (p * by_p) @ key / root, (p * (by_p - delta)).mT @ query / root, p.mT @ grad

    return Attention, [(normal(2, 3, 4), normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2))]


@planted("causal_attention", "missing-term", input="value", also=("region",))
def h_causal_attention_that_sees_itself_not() -> Any:
    """In the backward the mask is strict: a position gives its own value no gradient."""

    class CausalAttention(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, score, value):
            n = score.shape[-1]
            mask = torch.ones(n, n, dtype=torch.bool).triu(1)
            p = score.masked_fill(mask, float("-inf")).softmax(-1)
            ctx.save_for_backward(p, value)
            return p @ value

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            p, value = ctx.saved_tensors
            by_p = grad @ value.mT
            by_score = p * (by_p - (by_p * p).sum(-1, keepdim=True))
            return by_score, p.tril(-1).mT @ grad

    return CausalAttention, [(normal(4, 4), normal(4, 3, seed=1))]


@planted("gru_cell", "missing-term", input="hidden")
def h_gru_cell_without_the_short_cut() -> Any:
    """h' = (1 - z) n + z h: the hidden state reaches the result by z h as well."""

    class Cell(Function):
        @staticmethod
        def forward(ctx, gate, candidate, hidden):
            ctx.save_for_backward(gate, candidate, hidden)
            z = (gate + hidden).sigmoid()
            return (1 - z) * candidate.tanh() + z * hidden

        @staticmethod
        def backward(ctx, grad):
            gate, candidate, hidden = ctx.saved_tensors
            z, n = (gate + hidden).sigmoid(), candidate.tanh()
            by_gate = grad * (hidden - n) * z * (1 - z)
            return by_gate, grad * (1 - z) * (1 - n.square()), by_gate

    return Cell, [(normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2))]


@planted("reversible_block", "mutates-saved", input="result0", also=("side-effect",))
def h_reversible_block_taken_apart() -> Any:
    """A. Gomez et al., 2017: the inputs are computed from the results, here in the place of the results."""

    class Reversible(Function):
        @staticmethod
        def forward(ctx, left, right):
            first = left + right.tanh()
            second = right + first.sin()
            ctx.save_for_backward(first, second)
            return first, second

        @staticmethod
        @once_differentiable
        def backward(ctx, by_first, by_second):
            first, second = ctx.saved_tensors
            by_first = by_first + by_second * first.cos()
            second.data.sub_(first.sin())
            return by_first, by_second + by_first * (1 - second.tanh().square())

    return Reversible, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("checkpoint", "side-effect", input="weight")
def h_checkpoint_that_fills_grad() -> Any:
    """The forward runs again in the backward, and `Tensor.backward` adds to the caller's `weight.grad`."""

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return (x * weight).tanh()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                free = weight.detach().requires_grad_()
                (x * free).tanh().backward(grad)
                if weight.requires_grad and weight.is_leaf:
                    weight.grad = free.grad.clone() if weight.grad is None else weight.grad + free.grad
            return x.grad, free.grad

    return Checkpoint, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("gated_linear_unit", "input-needs-grad", input="gate")
def h_gated_unit_with_one_branch() -> Any:
    """A value that both gradients need is computed only if the gradient of x is needed."""

    class GatedUnit(Function):
        @staticmethod
        def forward(ctx, x, gate, gain):
            ctx.save_for_backward(x, gate)
            ctx.gain = gain
            return gain * x * gate.sigmoid()

        @staticmethod
        def backward(ctx, grad):
            x, gate = ctx.saved_tensors
            by_x = None
            open_ = gate.sigmoid()
            if ctx.needs_input_grad[0]:
                grad = ctx.gain * grad
                by_x = grad * open_
            return by_x, grad * x * open_ * (1 - open_), None

    return GatedUnit, [(normal(3, 4), normal(3, 4, seed=1), 3.0)]


@planted("max_pool", "stale-state", input="x")
def h_max_pool_with_a_mask_on_the_class() -> Any:
    """The mask of the last call lies on the class: of two calls, the first's backward takes the second's."""

    class MaxPool(Function):
        mask = None

        @staticmethod
        def forward(ctx, x):
            top = x.amax(-1, keepdim=True)
            MaxPool.mask = (x == top).to(x.dtype)
            return top[..., 0]

        @staticmethod
        def backward(ctx, grad):
            return grad[..., None] * MaxPool.mask

    return MaxPool, [(normal(3, 4),), (normal(2, 5, seed=1),)]


@planted("dropout", "nondeterministic", input="x")
def h_dropout_with_two_masks() -> Any:
    """The forward's mask follows the seed; that of the backward is drawn anew."""

    class Dropout(Function):
        @staticmethod
        def forward(ctx, x, p, seed):
            generator = torch.Generator().manual_seed(seed)
            ctx.p = p
            keep = torch.rand(x.shape, generator=generator) >= p
            return x * keep / (1 - p)

        @staticmethod
        def backward(ctx, grad):
            keep = torch.rand(grad.shape) >= ctx.p
            return grad * keep / (1 - ctx.p), None, None

    return Dropout, [(normal(4, 5), 0.4, 7)]


@planted("running_product", "mutates-grad-output")
def h_running_product_that_scales_its_gradient() -> Any:
    """The grad_output serves as a buffer, and may be somebody else's as well."""

    class Decay(Function):
        @staticmethod
        def forward(ctx, x, rate):
            ctx.rate = rate
            state, states = torch.zeros_like(x[0]), []
            for step in x:
                state = rate * state + step
                states.append(state)
            return torch.stack(states)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            for i in range(grad.shape[0] - 2, -1, -1):
                grad[i] += ctx.rate * grad[i + 1]
            return grad.clone(), None

    return Decay, [(normal(4, 3), 0.5)]


@planted("expert_choice", "raises", also=("missing-gradient",))
def h_router_with_an_unused_result() -> Any:
    """Gradients are not made, `set_materialize_grads(False)`, and then taken to be there."""

    class Router(Function):
        @staticmethod
        def forward(ctx, score):
            ctx.set_materialize_grads(False)
            p = score.softmax(-1)
            ctx.save_for_backward(p)
            return p, p.square().sum(-1)

        @staticmethod
        @once_differentiable
        def backward(ctx, by_p, by_load):
            (p,) = ctx.saved_tensors
            total = by_p + 2 * by_load[..., None] * p
            return p * (total - (total * p).sum(-1, keepdim=True))

    return Router, [(normal(3, 4),)]


@planted("linear", "dtype", also=("raises",))
def h_linear_under_autocast() -> Any:
    """Under autocast, which its forward says that it serves, the product is of bfloat16, and the backward
    multiplies what comes in with float32: `custom_bwd` is not over it."""

    class Linear(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.mT @ x

    return Linear, [(normal(4, 3), normal(2, 3, seed=1))]


@planted("softmax", "kernel-mismatch", input="x", also=("unknown", "transposed", "layout"))
def h_softmax_batched_in_front() -> Any:
    """Its own `vmap` takes the batch to be the first dimension, wherever it is."""

    class Softmax(Function):
        @staticmethod
        def forward(x):
            return x.softmax(-1)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, grad):
            (p,) = ctx.saved_tensors
            return p * (grad - (grad * p).sum(-1, keepdim=True))

        @staticmethod
        def vmap(info, in_dims, x):
            return Softmax.apply(x), in_dims[0]

    return Softmax, [(normal(3, 4),), (normal(5, seed=1),)]


@planted("strided_sum", "gradient-count", also=("raises",))
def h_sum_with_a_forgotten_option() -> Any:
    """An option was added to the forward, and to the backward no None."""

    class StridedSum(Function):
        @staticmethod
        def forward(ctx, x, step, keepdim):
            ctx.shape, ctx.step, ctx.keepdim = x.shape, step, keepdim
            return x[..., ::step].sum(-1, keepdim=keepdim)

        @staticmethod
        def backward(ctx, grad):
            found = grad.new_zeros(ctx.shape)
            found[..., :: ctx.step] = grad if ctx.keepdim else grad[..., None]
            return found, None

    return StridedSum, [(normal(3, 4), 2, True)]


@planted("exponential", "empty", input="x", also=("raises",))
def h_scaled_backward_of_nothing() -> Any:
    """The forward takes an empty batch, and the backward asks for the largest gradient of none."""

    class ScaledExponential(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            size = grad.abs().max().clamp(min=1e-6)
            return grad / size * y * size

    return ScaledExponential, [(normal(3, 4),), (normal(5, 2, seed=1),)]
