"""Compiled forwards and compiled backwards of every operator: values and gradients of the plain function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_cases import COMPOSITIONS, compiled
from context_cases import loss_of, values_and_gradients
from transform_cases import SUBJECTS
from transform_subjects import Subject

pytestmark = pytest.mark.compile

# What test_compiled_matrix.py compiles in every way is not compiled here again.
COMPILED_THERE = ("formulas", "no-formula", "kernel-no-formula", "hidden", "list-and-two-results")
# A node with formulas and a node of a derived backward are not slow.
BACKWARDS = {
    "formulas": True,
    "part-derived": False,
    "kernel-no-formula": True,
    "joint": False,
    "hidden": False,
    "list-and-two-results": False,
    "opaque": False,
    "ops.linear": False,
    "ops.involution": False,
}


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.every(10)
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(s, id=s.name, marks=pytest.mark.slow if s.name.startswith("ops.involution") else ())
        for s in SUBJECTS
        if s.name not in COMPILED_THERE
    ],
)
def test_compiled_forward(subject: Subject) -> None:
    """Its backward is compiled along with it."""
    found = COMPOSITIONS["forward-and-backward"](compiled("aot_eager"), subject.operator, subject)
    torch.testing.assert_close(found, values_and_gradients(subject.plain, subject.inputs()))


# torch reads `.grad` of every tensor that compiled code closes over, and then warns of it.
@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "warm",
    [
        pytest.param("not", id="first-call"),
        pytest.param("forward", id="second-call", marks=pytest.mark.slow),
        pytest.param("backward", id="later-call", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(s, id=s.name, marks=() if BACKWARDS[s.name] else pytest.mark.slow)
        for s in SUBJECTS
        if s.name in BACKWARDS
    ],
)
def test_compiled_backward(subject: Subject, warm: str) -> None:
    """Compiled autograd: the backward of an eager call, formulas and all, becomes one graph when it runs."""
    inputs = subject.inputs()
    _, expected = values_and_gradients(subject.plain, inputs)
    for _ in range(2):  # a later call may be differentiated by a node of its own
        if warm == "forward":
            subject.operator(*(tensor.clone().requires_grad_() for tensor in inputs))
        if warm == "backward":
            values_and_gradients(subject.operator, inputs)
    one_graph = {"fullgraph": True}
    with torch._dynamo.config.patch(compiled_autograd=True, compiled_autograd_kwargs_override=one_graph):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        loss = loss_of(subject.operator(*leaves))
        torch.compile(lambda: loss.backward(), backend="aot_eager")()
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)
