"""Held out: faults that show rarely: under threads, in inference mode, for size 1, for one frequency."""

import time
from typing import Any

import torch
from entries import planted
from heldout_numbers import normal
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith


@planted("product_with_a_square", "second-order", input="y", order=2, also=("missing-term",))
def h_product_that_detaches_one() -> Any:
    """Of the two inputs one is a constant in the backward."""

    class Product(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * y * y, 2 * grad * x * y.detach()

    return Product, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("channel_softmax", "shape", input="result", also=("kernel-mismatch", "fake-mismatch"))
def h_softmax_of_one_row() -> Any:
    """The kernel squeezes: a batch of one row, or a row of one element, loses a dimension."""

    @opsmith.operator("heldout::softmax_of_one_row", shapes="x: N M -> N M")
    def softmax(x: Tensor) -> Tensor:
        return x.softmax(-1)

    def kernel(x: Tensor) -> Tensor:
        rows = x.squeeze()
        return rows.softmax(-1) if rows.dim() else torch.ones_like(rows)

    softmax.samples(lambda make: [(make(3, 4),), (make(2, 5),)])
    softmax.kernel("cpu", kernel)
    return softmax, None


@planted("envelope", "stale-state", input="result", also=("nondeterministic",))
def h_envelope_with_a_shared_buffer() -> Any:
    """Two threads write into one buffer; alone, each call is right."""
    buffers: dict[Any, Tensor] = {}

    @opsmith.operator("heldout::envelope_with_a_shared_buffer")
    def envelope(x: Tensor) -> Tensor:
        return x.abs().cumsum(-1).contiguous()

    def kernel(x: Tensor) -> Tensor:
        key = (tuple(x.shape), x.dtype)
        buffer = buffers.setdefault(key, torch.empty(x.shape, dtype=x.dtype))
        buffer.copy_(x.detach()).abs_()
        time.sleep(0.002)  # as long as a device takes
        return buffer.cumsum(-1)

    envelope.samples(lambda make: [(make(3, 4),), (make(6),)])
    envelope.kernel("cpu", kernel)
    return envelope, None


@planted("sigmoid", "unknown", input="result", also=("kernel-mismatch", "precision"))
def h_sigmoid_of_inference() -> Any:
    """A rational approximation where nobody trains."""

    @opsmith.operator("heldout::sigmoid_of_inference")
    def sigmoid(x: Tensor) -> Tensor:
        return x.sigmoid()

    def kernel(x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            return 0.5 + 0.5 * x / (1 + x.abs())
        return x.sigmoid()

    sigmoid.samples(lambda make: [(make(3, 4),)])
    sigmoid.kernel("cpu", kernel)
    return sigmoid, None


@planted("relu", "nonlinear-grad", input="x")
def h_relu_that_guides() -> Any:
    """Guided backpropagation (J. Springenberg et al., 2015) in a class that is called ReLU."""

    class ReLU(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad.clamp(min=0) * (x > 0)

    return ReLU, [(normal(3, 4),)]


@planted("pairwise_energy", "ignores-grad-output", input="x", also=("unknown",))
def h_energy_of_a_uniform_gradient() -> Any:
    """It takes the grad_output to be the same for all results, as `.sum()` makes it."""

    class Energy(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum(-1)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * (grad[0] if grad.numel() else 1.0)

    return Energy, [(normal(3, 4),), (normal(2, 5, seed=1),)]


@planted("spectral_filter", "region", input="gain", also=("scale",))
def h_filter_at_the_nyquist_frequency() -> Any:
    """Each frequency but the first and, for even lengths, the last counts twice; here the last does too."""

    class SpectralFilter(Function):
        @staticmethod
        def forward(ctx, signal, gain):
            if gain.shape[-1] != signal.shape[-1] // 2 + 1:
                raise ValueError(f"SpectralFilter: {gain.shape[-1]} gains for {signal.shape[-1]} samples")
            ctx.save_for_backward(signal, gain)
            return torch.fft.irfft(torch.fft.rfft(signal) * gain, n=signal.shape[-1])

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            signal, gain = ctx.saved_tensors
            n = signal.shape[-1]
            by_signal = torch.fft.irfft(torch.fft.rfft(grad) * gain, n=n)
            twice = torch.full_like(gain, 2.0 / n)
            twice[0] = 1.0 / n
            product = (torch.fft.rfft(grad).conj() * torch.fft.rfft(signal)).real
            return by_signal, (product * twice).sum(0)

    return SpectralFilter, [(normal(3, 6), normal(4, seed=1)), (normal(2, 8, seed=2), normal(5, seed=3))]
