"""Compiled code holds a kernel in Triton itself: torch's compiler sees it, and fuses what is around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import opsmith

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton_operators import OPERATORS, picked, pixel_sums, softmax, times, tuned  # noqa: E402

pytestmark = [
    pytest.mark.compile,
    # torch's compiler asks Triton 3.9 for its options without a choice of its own, once in a process.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]

WRAPPER = torch.ops.higher_order.triton_kernel_wrapper_functional


@pytest.fixture(autouse=True)
def _driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the GPU's driver, which torch asks for the architecture to see what a kernel writes."""
    if request.node.get_closest_marker("gpu"):
        torch.compiler.reset()
        return
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver))
    torch.compiler.reset()


def graph_of(function: Any, *shapes: tuple[int, ...], dynamic: bool = False) -> torch.fx.GraphModule:
    """The graph that torch.compile hands to its backend, for tensors without data on a missing GPU."""
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = [torch.empty(shape, device="cuda") for shape in shapes]
        compiled = torch.compile(
            function, backend=aot_autograd(fw_compiler=capture), fullgraph=True, dynamic=dynamic
        )
        compiled(*arguments)
    [graph] = graphs
    return graph


def calls_in(graph: torch.fx.GraphModule) -> list[Any]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def kernel_in(graph: torch.fx.GraphModule) -> Any:
    found = [node for node in calls_in(graph) if node.target is WRAPPER]
    assert len(found) == 1
    return found[0]


def test_the_kernel_is_in_the_graph_and_not_a_call_of_the_operator() -> None:
    graph = graph_of(lambda x: times(x.relu(), 2.0) + 1, (3, 5))
    kernel = kernel_in(graph)
    assert kernel.kwargs["kwargs"]["result_numel"] == 15
    assert kernel.kwargs["grid"] == [(1, 1, 1)]
    assert kernel.kwargs["tensors_to_clone"] == ["result_ptr"]  # the argument is read alone
    targets = {str(node.target) for node in calls_in(graph)}
    assert {"aten.relu.default", "aten.add.Tensor"} <= targets
    assert not [target for target in targets if target.startswith("triton_kernels")]


def test_the_copies_around_a_kernel_are_in_the_graph() -> None:
    graph = graph_of(lambda x: pixel_sums(x), (2, 3, 4, 5))
    before = calls_in(graph)[: calls_in(graph).index(kernel_in(graph))]
    assert "aten.clone.default" in [str(node.target) for node in before]


@pytest.mark.slow
def test_sizes_stay_open() -> None:
    graph = graph_of(lambda x: softmax(x) + 1, (6, 100), dynamic=True)
    kernel = kernel_in(graph)
    [(rows, *_)] = kernel.kwargs["grid"]
    assert isinstance(rows, torch.fx.Node)
    assert isinstance(kernel.kwargs["kwargs"]["x_size_1"], torch.fx.Node)


def test_a_tuned_kernel_is_seen_with_all_its_configurations() -> None:
    graph = graph_of(lambda x: tuned(x), (45,))
    kernel = kernel_in(graph)
    assert len(kernel.kwargs["grid"]) == 2


def test_what_the_kernel_does_not_take_is_the_reference_there() -> None:
    graph = graph_of(lambda x: softmax(x.double()), (3, 5))
    targets = {str(node.target) for node in calls_in(graph)}
    assert "triton_kernel_wrapper_functional" not in targets
    assert any("softmax" in target or "exp" in target for target in targets)


def test_two_results_and_an_option() -> None:
    with FakeTensorMode():
        x, index = torch.empty(4, 5, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
        graph = make_fx(lambda x, index: picked.specification.kernels[0].function.traced(x, index))(x, index)
    assert "triton_kernel_wrapper_mutation" in graph.code
    assert "'scale': 2" in graph.code


def test_arguments_that_are_left_out_and_given_by_name() -> None:
    @opsmith.operator("triton_kernels::named")
    def named(x: torch.Tensor, by: float = 2.0, block: int = 16) -> torch.Tensor:
        return x * by

    named.kernel(
        "cuda",
        triton=times.specification.kernels[0].function.source.function,
        grid=lambda result, BLOCK: triton.cdiv(result.numel(), BLOCK),
        constants={"BLOCK": lambda block: block},
    )
    kernel = kernel_in(graph_of(lambda x: named(block=4, x=x), (3, 5)))
    assert kernel.kwargs["kwargs"]["by"] == 2.0
    assert kernel.kwargs["grid"] == [(4, 1, 1)]


def test_an_author_may_want_a_whole_call() -> None:
    @opsmith.operator("triton_kernels::whole", inline=False)
    def whole(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    whole.kernel(
        "cuda",
        triton=times.specification.kernels[0].function.source.function,
        grid=1,
        constants={"BLOCK": 64},
    )
    graph = graph_of(lambda x: whole(x, 2.0), (3, 5))
    assert {str(node.target) for node in calls_in(graph)} == {"triton_kernels.whole.default"}


def test_an_exported_program_keeps_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return times(x, 2.0)

    program = torch.export.export(Model(), (torch.randn(3, 5),))
    assert "triton_kernels.times.default" in str(program.graph)


def test_on_the_cpu_compiled_code_holds_the_reference() -> None:
    x = torch.randn(3, 5)
    assert_close(torch.compile(lambda x: times(x, 2.0) + 1, backend="aot_eager")(x), x * 2 + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_inductor_on_a_gpu(name: str) -> None:
    report = opsmith.check(OPERATORS[name], only=["forward", "compile"])
    assert not report.failures, report


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_copies_what_the_kernel_wants_otherwise(dynamic: bool) -> None:
    x = torch.randn(5, 3, device="cuda").mT
    result = torch.compile(lambda x: times(x, 2.0) + 1, dynamic=dynamic)(x)
    assert_close(result, x * 2 + 1)
    assert result.stride() == (x * 2 + 1).stride()
