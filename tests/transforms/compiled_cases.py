"""Compositions with torch.compile, as a table; in all of them torch traces one whole graph, or raises.

Left out is what torch 2.13 cannot do with a plain function either: `vmap` of `hessian` and `functionalize` in
compiled code, and a second backward through compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.func as F
from context_cases import loss_of, results_of, values_and_gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transform_cases import TRANSFORMS, Call
from transform_subjects import Subject

Function = Callable[..., Any]
Compile = Callable[[Function], Function]


def _transform(name: str, compile: Compile, function: Function, subject: Subject) -> Any:
    """All of a transform in compiled code."""
    step = compile(lambda single, batched: TRANSFORMS[name](Call(function, single, batched)))
    return step(subject.inputs(), subject.inputs(batch=True))


def _forward_and_backward(compile: Compile, function: Function, subject: Subject) -> Any:
    return values_and_gradients(compile(function), subject.inputs())


def _checkpoint(compile: Compile, function: Function, subject: Subject) -> Any:
    step = compile(lambda *inputs: checkpoint(function, *inputs, use_reentrant=False))
    return values_and_gradients(step, subject.inputs())


def _autocast(compile: Compile, function: Function, subject: Subject) -> Any:
    def step(*inputs: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*inputs)

    return values_and_gradients(compile(step), tuple(tensor.float() for tensor in subject.inputs()))


def _no_grad(compile: Compile, function: Function, subject: Subject) -> Any:
    def step(*inputs: Tensor) -> Any:
        with torch.no_grad():
            return function(*inputs)

    return compile(step)(*(tensor.requires_grad_() for tensor in subject.inputs()))


def _training(compile: Compile, function: Function, subject: Subject) -> Any:
    """Three steps of an optimizer: forward and loss in compiled code, backward and update outside."""
    parameters = [torch.nn.Parameter(tensor) for tensor in subject.inputs()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    loss = compile(lambda *given: loss_of(function(*given)))
    for _ in range(3):
        optimizer.zero_grad()
        loss(*parameters).backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _functional_training(compile: Compile, function: Function, subject: Subject) -> Any:
    """Gradients and update in compiled code."""

    def step(parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gradients = F.grad(lambda given: loss_of(function(*given)))(parameters)
        return tuple(p - 0.01 * g for p, g in zip(parameters, gradients, strict=True))

    compiled, parameters = compile(step), subject.inputs()
    for _ in range(3):
        parameters = compiled(parameters)
    return parameters


def _sizes(compile: Compile, function: Function, subject: Subject) -> Any:
    """One compiled function, called with sizes that it has not seen."""
    step, found = compile(lambda *inputs: F.vmap(function)(*inputs)), []
    for times in (1, 2, 3):
        inputs = tuple(torch.cat([tensor] * times) for tensor in subject.inputs(batch=True))
        found.append(values_and_gradients(step, inputs))
    return found


def _operations_around(compile: Compile, function: Function, subject: Subject) -> Any:
    """Views before and in-place operations after: what the trace has to make functional."""

    def step(*inputs: Tensor) -> Any:
        halves = [torch.stack([tensor, tensor * 0.5])[1].clone().mul_(2) for tensor in inputs]
        return tuple(result.clone().add_(1).relu() for result in results_of(function(*halves)))

    return values_and_gradients(compile(step), subject.inputs())


COMPOSITIONS: dict[str, Callable[[Compile, Function, Subject], Any]] = {
    "forward-and-backward": _forward_and_backward,
    "checkpoint": _checkpoint,
    "autocast": _autocast,
    "no-grad": _no_grad,
    "training": _training,
    "functional-training": _functional_training,
    "sizes": _sizes,
    "operations-around": _operations_around,
    **{
        name: partial(_transform, name)
        for name in (
            "grad",
            "vjp",
            "jvp",
            "jacrev",
            "jacfwd",
            "hessian",
            "vmap",
            "vmap-grad",
            "vmap-jvp",
            "jvp-vmap",
            "jacrev-jacfwd",
            "vmap-shared",
        )
    },
}
"""Each takes what compiles a function, the function, and whose inputs to take."""


def compiled(backend: str, **options: Any) -> Compile:
    """Return a function that compiles into one whole graph."""
    return lambda function: torch.compile(function, backend=backend, fullgraph=True, **options)
