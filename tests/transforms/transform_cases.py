"""Transforms to put operators through, as tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.func as F
from example_subjects import EXAMPLES
from torch import Tensor
from transform_subjects import DECLARED

SUBJECTS = [*DECLARED, *EXAMPLES]


def _results(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A scalar whose second derivative is not zero, so that no order can hide."""
    return lambda *inputs: sum(
        (result.pow(2).sum() for result in _results(function(*inputs))), torch.zeros(())
    )


@dataclass(frozen=True)
class Call:
    """A function under test with single and batched inputs."""

    function: Callable[..., Any]
    single: tuple[Tensor, ...]
    batched: tuple[Tensor, ...]
    every: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", tuple(range(len(self.single))))


def _leaves(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def _autograd_over_vmap(call: Call) -> Any:
    leaves = _leaves(call.batched)
    return torch.autograd.grad(_loss(F.vmap(call.function))(*leaves), leaves)


def _shared_over_vmap(call: Call) -> Any:
    """The last input is shared by the batch: its gradient is summed over the examples."""
    dims = (*(0,) * (len(call.single) - 1), None) if len(call.single) > 1 else (0,)
    inputs = (*call.batched[:-1], call.single[-1]) if len(call.single) > 1 else call.batched
    return F.grad(_loss(F.vmap(call.function, dims)), call.every)(*inputs)


def _moved(call: Call) -> Any:
    """The batch dimension is the last one, of inputs and results."""
    inputs = [tensor.movedim(0, -1) for tensor in call.batched]
    return F.vmap(call.function, -1, -1)(*inputs)


TRANSFORMS: dict[str, Callable[[Call], Any]] = {
    "grad": lambda c: F.grad(_loss(c.function), c.every)(*c.single),
    "vjp": lambda c: F.vjp(_loss(c.function), *c.single)[1](torch.tensor(2.0, dtype=torch.float64)),
    "jvp": lambda c: F.jvp(c.function, c.single, c.single),
    "linearize": lambda c: F.linearize(c.function, *c.single)[1](*c.single),
    "jacrev": lambda c: F.jacrev(c.function, c.every)(*c.single),
    "jacfwd": lambda c: F.jacfwd(c.function, c.every)(*c.single),
    "hessian": lambda c: F.hessian(_loss(c.function), c.every)(*c.single),
    "jacrev-jacrev": lambda c: F.jacrev(F.jacrev(_loss(c.function), c.every), c.every)(*c.single),
    "jacfwd-jacfwd": lambda c: F.jacfwd(F.jacfwd(_loss(c.function), c.every), c.every)(*c.single),
    "jacrev-jacfwd": lambda c: F.jacrev(F.jacfwd(_loss(c.function), c.every), c.every)(*c.single),
    "vmap": lambda c: F.vmap(c.function)(*c.batched),
    "vmap-last-dim": _moved,
    "vmap-shared": _shared_over_vmap,
    "vmap-vmap": lambda c: F.vmap(F.vmap(c.function))(*[torch.stack([b, b * 0.5]) for b in c.batched]),
    "vmap-grad": lambda c: F.vmap(F.grad(_loss(c.function), c.every))(*c.batched),
    "vmap-jvp": lambda c: F.vmap(lambda *a: F.jvp(c.function, a, a))(*c.batched),
    "jvp-vmap": lambda c: F.jvp(F.vmap(c.function), c.batched, c.batched),
    "vmap-hessian": lambda c: F.vmap(F.hessian(_loss(c.function), c.every))(*c.batched),
    "autograd-vmap": _autograd_over_vmap,
    "functionalize": lambda c: F.functionalize(c.function)(*c.single),
}

# Every nesting of three elementary transforms of a function of all inputs.
_ELEMENTARY = {
    "vmap": F.vmap,
    "jacrev": lambda f: F.jacrev(lambda *a: _loss(f)(*a), 0),
    "jacfwd": lambda f: F.jacfwd(lambda *a: _loss(f)(*a), 0),
}


def _nested(names: tuple[str, ...]) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        function, inputs = call.function, call.single
        for name in names:
            function = _ELEMENTARY[name](function)
            if name == "vmap":
                inputs = tuple(torch.stack([tensor, tensor * 0.5]) for tensor in inputs)
        return function(*inputs)

    return run


DEPTH_THREE = {
    "-of-".join(reversed(names)): _nested(names) for names in itertools.product(_ELEMENTARY, repeat=3)
}
