"""Function classes whose results share memory with something else."""

from typing import Any

import torch
from class_mutants import matrix, mutant, twin
from torch import Tensor
from torch.autograd import Function


@twin
def returns_a_view() -> Any:
    class Turns(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.mT

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mT

    return Turns, matrix()


@twin
def returns_its_input() -> Any:
    class Same(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return Same, matrix()


@mutant("effects", "aliases-input", "result", "`result` shares memory with `x`, unknown to autograd")
def returns_detached() -> Any:
    class Same(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return Same, matrix()


@mutant("effects", "aliases-input", "result", "`result` shares memory with `x`, unknown to autograd")
def returns_numpy_of_it() -> Any:
    class Turns(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.from_numpy(x.detach().numpy().T)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mT

    return Turns, matrix()


@mutant("effects", "aliases-input", "result1", "`result1` shares memory with the result `result0`")
def returns_two_of_one() -> Any:
    class Two(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = 2 * x
            return y, y.data

        @staticmethod
        def backward(ctx: Any, grad: Any, other: Any) -> Any:
            return 2 * (grad + other)

    return Two, matrix()


@mutant(
    "effects",
    "stale-state",
    "result",
    "two calls return the same memory as `result`, which the operator keeps: the call overwrites "
    "the result of the first",
    "leak",
)
def returns_a_buffer_again() -> Any:
    buffers: dict[Any, Tensor] = {}

    class Doubles(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            key = x.shape, x.dtype
            if key not in buffers:
                buffers[key] = torch.empty_like(x)
            return torch.mul(x.detach(), 2, out=buffers[key]).detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()


@twin
def works_in_a_buffer() -> Any:
    """One for each thread; what it returns is new."""
    import threading

    local = threading.local()

    class Doubles(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            buffers = local.__dict__.setdefault("buffers", {})
            with torch.inference_mode(False):  # one made in inference mode would be of no use elsewhere
                work = buffers.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
            torch.mul(x.detach(), 2, out=work)
            return work + 0

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()
