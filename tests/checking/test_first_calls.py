"""What cannot run is reported once, and the properties run on the other samples."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build.toolchain import FLAGS, Toolchain
from opsmith.checking import first_calls
from opsmith.kernels.cpp.compiler import OBJECT, building_with, builds_as_usual
from opsmith.kernels.cpp.kernel import CppKernel

FITTING = (torch.randn(3, 4), torch.randn(4, 5))
MISFIT = (torch.randn(3, 4), torch.randn(5, 4))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


@opsmith.operator("first_calls::product")
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@pytest.mark.parametrize("checked", [Product, product])
def test_samples_of_wrong_shapes_are_one_failure_and_nothing_else_runs(checked: Any) -> None:
    report = opsmith.check(checked, samples=[MISFIT, MISFIT])
    (failure,) = report.failures
    assert (failure.property, failure.cause, failure.follows) == ("forward", "raises", None)
    assert "shapes cannot be multiplied" in failure.message
    reasons = {outcome.reason for outcome in report.outcomes if outcome.property != "forward"}
    assert reasons == {"the operator could not run at all: see `forward`"}
    assert not report.passed


@pytest.mark.every(4)
@pytest.mark.parametrize("checked", [Product, product])
@pytest.mark.parametrize("isolate", [False, 60.0])
def test_one_sample_of_wrong_shapes_leaves_the_others_to_every_property(checked: Any, isolate: Any) -> None:
    only = ["forward", "gradient", "serialization", "vmap"]
    report = opsmith.check(checked, samples=[MISFIT, FITTING], only=only, effort="quick", isolate=isolate)
    (failure,) = report.failures
    assert failure.evidence["sample"] == "sample 0 (x [3, 4], weight [5, 4])"
    status = {outcome.property: outcome.status for outcome in report.outcomes if not outcome.left_out}
    assert status["gradient"] == status["serialization"] == "passed"
    assert any("sample 1 (x [3, 4], weight [4, 5])" in each for each in report.inputs)
    assert len(report.inputs) == len({each.partition(" (")[0] for each in report.inputs})


def test_a_sample_that_cannot_run_is_reported_where_results_were_not_asked_for() -> None:
    report = opsmith.check(product, samples=[MISFIT, FITTING], only=["memory"], effort="quick")
    assert [(each.property, each.cause) for each in report.failures] == [("forward", "raises")]
    assert not report.passed_as_asked


def test_a_reference_that_calls_itself_is_one_failure() -> None:
    @opsmith.operator("first_calls::endless")
    def endless(x: Tensor) -> Tensor:
        return endless(x) + 1  # type: ignore[no-any-return]

    (failure,) = opsmith.check(endless, samples=[(torch.ones(2),), (torch.ones(3),)]).failures
    assert failure.message.startswith("RecursionError: ")


TYPO = """
template <class T>
void twice(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++)
    y[i] = xx[i] * 2;
}
"""


@pytest.mark.slow
def test_a_kernel_that_is_not_built_is_one_failure_and_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @opsmith.operator("first_calls::twice")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.gradients(x=lambda grad: grad * 2)
    twice.kernel("cpu", entry="twice", cpp=TYPO)
    compiled: list[Any] = []
    run = Toolchain.run

    def counted(self: Toolchain, arguments: Any, directory: Any) -> Any:
        compiled.extend([arguments] if arguments[-1] == OBJECT else [])
        return run(self, arguments, directory)

    monkeypatch.setattr(Toolchain, "run", counted)
    (failure,) = opsmith.check(twice, samples=[(torch.ones(2),), (torch.ones(3),)]).failures
    assert failure.message.startswith("CompileError: first_calls::twice: the C++ compiler refuses the kernel")
    for _ in range(3):
        with pytest.raises(errors.CompileError, match="'xx' was not declared") as caught:
            twice(torch.ones(2))
        assert len(caught.traceback) < 30, "a remembered error does not collect the lines of every call"
    assert len(compiled) == 1


def test_kernels_are_compiled_at_once_in_the_context_of_the_check() -> None:
    usual: list[bool] = []

    class Ahead(CppKernel):
        def __init__(self) -> None:
            pass

        def compile_ahead(self) -> None:
            usual.append(builds_as_usual())
            if usual[-1]:
                raise errors.UsageError("not the first call's")

    kernels = [SimpleNamespace(given=Ahead()) for _ in range(2)]
    subject: Any = SimpleNamespace(kernels_on=lambda device: kernels)
    with building_with((*FLAGS, "-DOTHER")):
        first_calls.compile_kernels(subject)
    assert usual == [False, False]
    with pytest.raises(errors.UsageError, match="not the first call's"):
        first_calls.compile_kernels(subject)


def test_kernels_in_cpp_are_compiled_at_once_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    both, main = threading.Barrier(2, timeout=60), threading.main_thread()
    threads: list[threading.Thread] = []

    def refused(kernel: CppKernel) -> Any:
        threads.append(threading.current_thread())
        if threads[-1] is not main:
            both.wait()
        raise errors.ToolchainError("there is no C++ compiler", got="none", hint="install one")

    @opsmith.operator("first_calls::compiled_at_once")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.samples(lambda make: [(make(3),)])
    for dtype in (torch.float32, torch.float64):
        text = "template <class T> void twice(Contiguous<const T> x, Contiguous<T> y) {}"
        twice.kernel("cpu", cpp=text, entry="twice", dtypes=[dtype])
    monkeypatch.setattr(CppKernel, "compile", refused)
    monkeypatch.setattr(first_calls, "processors", lambda: 2)
    report = opsmith.check(twice, only=["forward"], effort="quick")
    assert next(each.status for each in report.outcomes if each.property == "forward") == "passed"
    assert len(set(threads)) == len(threads) == 2
    assert main not in threads
