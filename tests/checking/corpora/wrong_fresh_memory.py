"""Function classes whose results depend on what memory held before."""

from typing import Any

import numpy as np
import torch
from class_mutants import Twice, matrix, mutant, twin
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@mutant("determinism", "nondeterministic", "result", "a call reads memory that it has not written")
def forgets_the_last_row() -> Any:
    class Forgets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            y[:-1] = x[:-1] ** 2
            return y

    return Forgets, matrix()


@mutant("determinism", "nondeterministic", "result", "a call reads memory that it has not written")
def forgets_in_numpy() -> Any:
    class Forgets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            values = x.detach().numpy()
            y = np.empty(values.shape, values.dtype)
            y[:-1] = values[:-1] ** 2
            return torch.from_numpy(y)

    return Forgets, matrix()


@mutant("determinism", "nondeterministic", "x", "a backward reads memory that it has not written")
def adds_into_empty() -> Any:
    class Adds(Twice):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return torch.empty_like(x).add_(2 * grad * x)

    return Adds, matrix()


@mutant("determinism", "nondeterministic", "result", "where torch fills new memory with the largest number")
def forgets_whole_numbers() -> Any:
    class Ranks(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ranks = torch.empty(x.shape, dtype=torch.int64)
            ranks[1:] = x[1:].argsort()
            ctx.mark_non_differentiable(ranks)
            return ranks

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None

    return Ranks, matrix()


@twin
def fills_what_is_empty() -> Any:
    class Fills(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            y[:-1] = x[:-1] ** 2
            y[-1:] = x[-1:] ** 2
            return y

    return Fills, matrix()
