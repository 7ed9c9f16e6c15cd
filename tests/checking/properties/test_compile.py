"""The property `compile`: compiled code beside the operator itself."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functions import Square
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome

pytestmark = pytest.mark.compile

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5
names = itertools.count()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch.compiler.reset()


def compiled(checked: Any, *samples: Any, **options: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples) or None, only=["compile"], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == "compile")


def declare(reference: Any, **options: Any) -> Any:
    return opsmith.operator(f"test_compile::op{next(names)}", **options)(reference)


class OtherwiseCompiled(Square):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * (2 if torch.compiler.is_compiling() else 1)


class OtherGradientCompiled(Square):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (3 if torch.compiler.is_compiling() else 2) * grad * ctx.saved_tensors[0]


class ThroughNumpy(Square):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)


class Prints(Square):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        torch._dynamo.graph_break()
        return x * x


@pytest.mark.parametrize(
    ("wrong", "input", "says"),
    [
        (OtherwiseCompiled, "result", "`result` differs from the plain call: at"),
        (OtherGradientCompiled, "x", "the gradient of `x` differs from the plain call: at"),
    ],
)
def test_a_class_that_gives_something_else_in_compiled_code_is_found(
    wrong: Any, input: str, says: str
) -> None:
    (failure, *_) = compiled(wrong, (X,)).failures
    assert (failure.cause, failure.input) == ("kernel-mismatch", input)
    assert failure.message.startswith("compiled by torch.compile(..., dynamic=False, backend='aot_eager')")
    assert says in failure.message


@pytest.mark.slow
def test_a_class_that_compiles_passes() -> None:
    found = compiled(Square, (X,), (X[0],))
    assert (found.status, found.notes, found.compiles) == ("passed", (), True)


def test_a_break_of_the_graph_is_noted_with_torch_s_reason() -> None:
    found = compiled(Prints, (X,))
    assert found.status == "passed"
    assert found.notes[0].startswith("the operator breaks the graph: ")


def test_quick_compiles_nothing() -> None:
    found = compiled(Square, (X,), effort="quick")
    assert (found.status, found.reason) == ("skipped", "the effort is `quick`, which compiles nothing")


def square(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.slow
def test_an_operator_compiles_for_other_sizes_at_once() -> None:
    operator = declare(square).gradients(x=lambda grad, x: 2 * grad * x)
    found = compiled(operator, (X,), (X[:2],))
    assert (found.status, found.notes) == ("passed", ())


@pytest.mark.slow
def test_an_operator_that_is_compiled_anew_for_each_size_is_a_limit() -> None:
    def sized(x: Tensor) -> Tensor:
        return x * sum(1 for _ in range(x.shape[0]))

    found = compiled(declare(sized), (X,), (torch.rand(5, 4),))
    assert found.word() == "limit"
    (failure,) = found.failures
    assert failure.cause == "recompiles"
    assert failure.message.startswith("with dynamic=True, the operator is compiled again for other sizes")


def test_a_kernel_unlike_its_fake_kernel_is_refused_before_code_is_compiled() -> None:
    operator = declare(square, inline=False).kernel("cpu", lambda x: x * x)
    operator.fake(lambda x: x.new_empty(x.shape[0], x.shape[1] + 1))
    found = compiled(operator, (X,))
    assert (found.status, found.reason) == ("skipped", "the operator could not run at all: see `forward`")


def test_what_raises_by_itself_is_left_to_others() -> None:
    class Miscounts(Square):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, grad, grad

    found = compiled(Miscounts, (X,))
    assert found.status == "skipped"
    assert "raises without `torch.compile`" in found.notes[0]


def test_a_sample_that_raises_by_itself_is_left_out_alone() -> None:
    class OfMatrices(Square):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 2 * grad.mT.mT * ctx.saved_tensors[0]

    found = compiled(OfMatrices, (X,), (X[0],))
    assert found.status == "passed"
    assert [note.partition(" (")[0] for note in found.notes] == ["sample 1"]


@pytest.mark.slow
def test_without_a_fake_kernel_the_graph_breaks_with_the_hint() -> None:
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    operator = declare(sine, opaque=True).gradients(x=opsmith.non_differentiable)
    found = compiled(operator, (X,))
    assert found.status == "passed"
    for each in ("the operator breaks the graph", "has no fake kernel", "hint: write `@op.fake`"):
        assert any(each in note for note in found.notes)


@pytest.mark.slow
def test_what_draws_is_held_to_its_form() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    assert compiled(declare(noisy, random=True), (X,)).status == "passed"


@pytest.mark.slow
def test_thorough_runs_inductor() -> None:
    assert compiled(Square, (X,), effort="thorough").status == "passed"


class Branching(Function):
    """It looks at numbers, at which torch breaks the graph, and logs that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1 if bool((x == 1).all()) else x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_torch_logs_nothing_meanwhile() -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    try:
        compiled(Branching, (X,))
    finally:
        logger.removeHandler(handler)
    assert logged == []
