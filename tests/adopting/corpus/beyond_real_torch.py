"""Complex numbers, and code that is not made of torch operations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from corpus.entry import F64, ONCE, Entry, samples


class ComplexProduct(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.conj(), grad * x.conj()


class Power(Function):
    """Complex in, real out."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.real.square() + z.imag.square()

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        return 2 * grad * z


class NumpySin(Function):
    @staticmethod
    def forward(ctx, x):
        values = x.detach().cpu().numpy()
        ctx.save_for_backward(x)
        return torch.from_numpy(np.asarray(np.sin(values)))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(np.asarray(grad.numpy() * np.cos(x.detach().numpy())))


class NumpyCorrelation(Function):
    """Kept as NumPy arrays; with a reference, torch can do the rest."""

    @staticmethod
    def forward(ctx, signal, kernel):
        ctx.arrays = signal.detach().numpy(), kernel.detach().numpy()
        return torch.from_numpy(np.correlate(*ctx.arrays, mode="valid"))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        signal, kernel = ctx.arrays
        by_signal = np.convolve(grad.numpy(), kernel, mode="full")
        by_kernel = np.correlate(signal, grad.numpy(), mode="valid")
        return torch.from_numpy(by_signal), torch.from_numpy(by_kernel)


class NumpyBackward(Function):
    """Only its backward leaves torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * np.asarray(grad.detach().numpy()) * x.detach().numpy())


def correlation(signal: Tensor, kernel: Tensor) -> Tensor:
    return signal.unfold(0, kernel.shape[0], 1) @ kernel


C128 = torch.complex128


ENTRIES = [
    Entry(
        "complex_product",
        ComplexProduct,
        samples(
            lambda make: [
                (make(3, 4, dtype=C128), make(3, 4, dtype=C128)),
                (make(4, 3, dtype=C128).mT, make(3, 4, dtype=C128)),
            ]
        ),
        "complex128",
        ("complex",),
        truth=torch.mul,
    ),
    Entry(
        "power",
        Power,
        samples(lambda make: [(make(3, 4, dtype=C128),), (make(4, 3, dtype=C128).mH,)]),
        F64,
        ("complex",),
    ),
    Entry(
        "numpy_sin",
        NumpySin,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,), (make(),)]),
        F64,
        ("NumPy", "once_differentiable"),
        jvp=False,
        second="refused",
        refused={"second": ONCE},
    ),
    Entry(
        "numpy_correlation",
        NumpyCorrelation,
        samples(lambda make: [(make(6), make(3)), (make(10)[::2], make(2)), (make(3), make(3))]),
        F64,
        ("NumPy", "once_differentiable", "reference", "array attribute"),
        options={"reference": correlation},
        truth=correlation,
        second="truth",
    ),
    Entry(
        "numpy_backward",
        NumpyBackward,
        samples(lambda make: [(make(3, 4),), (make(4, 3).mT,)]),
        F64,
        ("NumPy",),
        truth=torch.square,
        jvp=False,
        second="never-wrong",
    ),
]
