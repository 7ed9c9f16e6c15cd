"""Under autocast an operator is the plain function of inputs cast by its rule, and so is all that follows."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from context_cases import values_and_gradients
from matrices import diagonal
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transform_cases import SUBJECTS, TRANSFORMS, Call
from transform_subjects import Subject

import opsmith

LOW = torch.bfloat16
RULES = {"ops.exp": "float32", "ops.linear": "lower"} | {
    subject.name: "lower" for subject in SUBJECTS if subject.name.startswith("ops.involution")
}
RULES |= dict.fromkeys(("in-place", "in-place-kernel", "in-place-list"), "as written")
NAMED = {subject.name: subject for subject in SUBJECTS}
COMPOSED = ["formulas", "no-formula", "kernel-no-formula", "hidden", "ops.exp", "ops.mul", "ops.linear"]
STEPS = ["grad", "jvp", "jacrev", "jacfwd", "vmap", "vmap-shared", "vmap-grad", "jvp-vmap", "autograd-vmap"]


def _autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        with torch.autocast("cpu", dtype=LOW):
            return function(*inputs)

    return run


def _cast_by_rule(subject: Subject) -> Callable[..., Any]:
    """The plain function, of cast inputs; without autocast.

    Involution has a kernel that computes in float32 and rounds once, where torch's operations round each.
    """
    if subject.name.startswith("ops.involution"):
        return lambda *inputs: subject.plain(*(tensor.to(LOW).float() for tensor in inputs)).to(LOW)
    rule = RULES.get(subject.name, "promote")
    if rule == "as written":  # what is written is never cast
        return subject.plain

    def run(*inputs: Tensor) -> Any:
        widest = reduce(torch.promote_types, (tensor.dtype for tensor in inputs))
        dtype = {"promote": widest, "lower": LOW, "float32": torch.float32}[rule]
        return subject.plain(*(tensor.to(dtype) for tensor in inputs))

    return run


def _close(subject: Subject, found: Any, expected: Any) -> None:
    """To the accuracy of the dtype that was computed in: gradients of bfloat16 values come as float32."""
    tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if RULES.get(subject.name) in ("lower", "as written") else {}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("subject", "way", "first"),
    diagonal(SUBJECTS, ["plainly", "checkpoint", "checkpoint-reentrant"], [torch.float32, LOW], every=3),
)
def test_values_and_gradients(subject: Subject, way: str, first: torch.dtype) -> None:
    if first is LOW and len(subject.shapes) == 1 and subject.name != "ops.exp":
        first = torch.float32  # promoted from itself alone, it would be computed in bfloat16
    inputs = tuple(tensor.float() for tensor in subject.inputs())
    inputs = (inputs[0].to(first), *inputs[1:])
    function = _autocast(subject.operator)
    if way == "checkpoint":
        function = lambda *leaves: checkpoint(_autocast(subject.operator), *leaves, use_reentrant=False)
    if way == "checkpoint-reentrant":
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        results = checkpoint(_autocast(subject.operator), *leaves, use_reentrant=True)
        results = results if isinstance(results, tuple) else (results,)
        sum((result.pow(2).sum() for result in results), torch.zeros(())).backward()
        found = tuple(r.detach() for r in results), tuple(leaf.grad for leaf in leaves)
    else:
        found = values_and_gradients(function, inputs)
    expected = values_and_gradients(_cast_by_rule(subject), inputs)
    assert [g.dtype for g in found[1]] == [tensor.dtype for tensor in inputs]
    _close(subject, found, expected)


@pytest.mark.parametrize(("name", "step"), diagonal(COMPOSED, STEPS, every=3))
def test_transforms(name: str, step: str) -> None:
    subject = NAMED[name]
    single, batched = (
        tuple(tensor.float() for tensor in subject.inputs(batch=batch)) for batch in (False, True)
    )
    found = TRANSFORMS[step](Call(_autocast(subject.operator), single, batched))
    _close(subject, found, TRANSFORMS[step](Call(_cast_by_rule(subject), single, batched)))


@pytest.mark.parametrize("name", COMPOSED)
def test_autocast_around_everything(name: str) -> None:
    """The backward runs under autocast too, which torch advises against and people do."""
    subject = NAMED[name]
    inputs = tuple(tensor.float() for tensor in subject.inputs())
    with torch.autocast("cpu", dtype=LOW):
        found = values_and_gradients(subject.operator, inputs)
    _close(subject, found, values_and_gradients(_cast_by_rule(subject), inputs))


@pytest.mark.parametrize("forward", [False, True], ids=["forward-without", "forward-with"])
@pytest.mark.parametrize("backward", [False, True], ids=["backward-without", "backward-with"])
def test_forward_and_backward_in_different_states(forward: bool, backward: bool) -> None:
    """Gradients have the dtypes and the precision of the forward, wherever `backward` is called."""
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    found: list[tuple[Tensor, ...]] = []
    for function in (*[opsmith.ops.linear] * 3, torch.nn.functional.linear):
        with torch.autocast("cpu", enabled=forward):
            y = function(x, weight)
        with torch.autocast("cpu", enabled=backward):
            found.append(torch.autograd.grad(y.float().square().sum(), (x, weight)))
    for gradients in found[:3]:
        for gradient, expected in zip(gradients, found[3], strict=True):
            assert gradient.dtype == expected.dtype
            tolerance = {"rtol": 2e-2, "atol": 2e-1} if forward or backward else {}
            torch.testing.assert_close(gradient, expected, **tolerance)
    if not forward:
        exact = torch.autograd.grad((x @ weight.mT).square().sum(), (x, weight))
        for gradients in found[:3]:
            torch.testing.assert_close(gradients, exact)
