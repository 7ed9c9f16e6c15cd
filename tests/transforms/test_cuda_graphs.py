"""CUDA graphs: an operator is captured and replayed, forward and backward, with the author's formulas."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transform_cases import SUBJECTS
from transform_subjects import Subject

pytestmark = pytest.mark.gpu

CAPTURED = [
    subject
    for subject in SUBJECTS
    # A NumPy routine and a kernel for the CPU have nothing to capture.
    if subject.name not in ("opaque", "bessel", "kernel-no-formula")
]


@pytest.fixture(autouse=True)
def _no_graph_ends_in_a_capture() -> None:
    """Free the graphs of earlier tests: CUDA refuses to reset one while another is captured."""
    gc.collect()


class Holding(nn.Module):
    """A module around a function of tensors, the parameters among them."""

    def __init__(self, function: Any, first: Tensor, *others: Tensor) -> None:
        super().__init__()
        self.function = function
        self.gain = nn.Parameter(torch.ones((), dtype=first.dtype, device=first.device))
        self.names = [f"other{at}" for at in range(len(others))]
        for name, other in zip(self.names, others, strict=True):
            self.register_parameter(name, nn.Parameter(other.clone()))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.gain, *(getattr(self, name) for name in self.names))


def _step(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    torch.stack([result.square().sum() for result in results]).sum().backward()
    return [*results, *(each.grad.clone() for each in module.parameters() if each.grad is not None)]


# torch says so of any module, a plain one too: it warms up on a stream of its own.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("subject", CAPTURED, ids=lambda subject: subject.name)
def test_captured_callable(subject: Subject) -> None:
    inputs = [each.to("cuda", torch.float32) for each in subject.inputs()]
    module = Holding(subject.operator, *inputs)
    expected = _step(Holding(subject.plain, *inputs), inputs[0] * 2)
    captured: Any = torch.cuda.make_graphed_callables(module, (inputs[0],))
    assert_close(_step(captured, inputs[0] * 2), expected)


@pytest.mark.parametrize("subject", CAPTURED, ids=lambda subject: subject.name)
def test_captured_call(subject: Subject) -> None:
    inputs = [each.to("cuda", torch.float32) for each in subject.inputs()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            subject.operator(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = subject.operator(*inputs)
    for each in inputs:
        each.mul_(0.5)
    graph.replay()
    assert_close(result, subject.plain(*inputs))


# torch captures nothing when it makes its pool of memory.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.compile
@pytest.mark.parametrize("name", ["formulas", "no-formula"])
def test_compiled_with_reduced_overhead(name: str) -> None:
    (subject,) = [each for each in SUBJECTS if each.name == name]
    inputs = [each.to("cuda", torch.float32) for each in subject.inputs()]
    module = Holding(subject.operator, *inputs)
    compiled: Any = torch.compile(module, mode="reduce-overhead")
    expected = _step(Holding(subject.plain, *inputs), inputs[0])
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = [each.clone() for each in _step(compiled, inputs[0])]
    assert_close(found, expected)
