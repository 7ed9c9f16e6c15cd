"""Operators as others register them, in Python: each is made anew, under a name of its own, by a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_numbers = itertools.count()
_kept: list[Any] = []


def sine(x: Tensor, by: float = 2.0) -> Tensor:
    """The reference of several of them."""
    return (x * by).sin()


def numpy_sine(x: Tensor, by: float = 2.0) -> Tensor:
    return torch.from_numpy(np.asarray(np.sin(x.detach().numpy() * by)))


@dataclass
class Foreign:
    """An operator and what is known about it.

    Args:
        operator: `torch.ops.elsewhere.name`, or a `custom_op`.
        reference: What computes the same.
        ran: Which of its own rules have run, by name.
    """

    operator: Any
    reference: Callable[..., Any]
    ran: list[str] = field(default_factory=list)


def name() -> str:
    return f"operator{next(_numbers)}"


def defined(schema: str, kernel: Callable[..., Any], key: str = "CPU") -> tuple[Any, Any]:
    """An operator of this schema, and the library that holds it."""
    library, short = torch.library.Library("elsewhere", "FRAGMENT"), name()
    _kept.append(library)
    library.define(f"{short}{schema}")
    library.impl(short, kernel, key)
    return getattr(torch.ops.elsewhere, short), library


def custom() -> Foreign:
    """A `custom_op` without anything."""
    return Foreign(
        torch.library.custom_op(f"elsewhere::{name()}", numpy_sine, mutates_args=()),
        sine,
    )


def custom_with_everything() -> Foreign:
    """A `custom_op` with a gradient, a fake kernel, a rule for `vmap` and one for autocast."""
    made = custom()
    operator = made.operator

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        made.ran.append("setup_context")
        ctx.save_for_backward(inputs[0])
        ctx.by = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> Any:
        made.ran.append("backward")
        (x,) = ctx.saved_tensors
        return grad * ctx.by * (x * ctx.by).cos(), None

    def fake(x: Tensor, by: float = 2.0) -> Tensor:
        made.ran.append("fake")
        return torch.empty_like(x)

    def vmap(info: Any, in_dims: Any, x: Tensor, by: float = 2.0) -> Any:
        made.ran.append("vmap")
        return operator(x, by), in_dims[0]

    operator.register_autograd(backward, setup_context=setup_context)
    operator.register_fake(fake)
    operator.register_vmap(vmap)
    operator.register_autocast("cpu", torch.float64)
    return made


def on_the_cpu() -> Foreign:
    """An operator with a kernel for the CPU alone."""
    operator, _ = defined("(Tensor x, float by=2.) -> Tensor", numpy_sine)
    return Foreign(operator, sine)


def everywhere() -> Foreign:
    """An operator with a kernel for all devices, which is no torch code."""
    operator, _ = defined("(Tensor x, float by=2.) -> Tensor", numpy_sine, "CompositeExplicitAutograd")
    return Foreign(operator, sine)


def at_autograd_of_the_cpu() -> Foreign:
    """An operator that differentiates itself on the CPU, and has a kernel for `meta`."""
    operator, library = defined("(Tensor x, float by=2.) -> Tensor", numpy_sine)
    made = Foreign(operator, sine)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
            ctx.save_for_backward(x)
            ctx.by = by
            with torch._C._AutoDispatchBelowAutograd():
                result: Tensor = operator(x, by)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            made.ran.append("backward")
            (x,) = ctx.saved_tensors
            return grad * ctx.by * (x * ctx.by).cos(), None

    def meta(x: Tensor, by: float = 2.0) -> Tensor:
        made.ran.append("fake")
        return torch.empty_like(x)

    short = operator.__name__
    library.impl(short, lambda x, by=2.0: Node.apply(x, by), "AutogradCPU")
    library.impl(short, meta, "Meta")
    return made


def of_many_arguments() -> Foreign:
    """Optional and list tensors, arguments by name alone, two results."""

    def kernel(x: Tensor, w: Any, ys: Any, *, by: float = 2.0, k: Any = (3, 3)) -> Any:
        result = x.detach().numpy() * by
        if w is not None:
            result = result * w.detach().numpy()
        for y in ys:
            result = result + y.detach().numpy() ** 2
        return torch.from_numpy(np.asarray(result)), torch.from_numpy(np.asarray(k[0] * result.sum() + k[1]))

    def reference(
        x: Tensor, weight: Tensor | None, others: list[Tensor], *, k: tuple[int, int], by: float
    ) -> tuple[Tensor, Tensor]:
        result = x * by if weight is None else x * by * weight
        for other in others:
            result = result + other**2
        return result, k[0] * result.sum() + k[1]

    schema = "(Tensor x, Tensor? w, Tensor[] ys, *, float by=2., int[2] k=3) -> (Tensor, Tensor)"
    operator, _ = defined(schema, kernel)
    return Foreign(operator, reference)
