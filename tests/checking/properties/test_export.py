"""The property `export`: an exported program beside the operator itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome
from opsmith.checking.properties.torch import compile as module

pytestmark = pytest.mark.compile

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5
names = itertools.count()


def exported(checked: Any, *samples: Any, **options: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples) or None, only=["export"], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == "export")


def declare(reference: Any, **options: Any) -> Any:
    return opsmith.operator(f"test_export::op{next(names)}", **options)(reference)


def square(x: Tensor) -> Tensor:
    return x * x


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class OtherwiseExported(Square):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x * (2 if torch.compiler.is_compiling() else 1)


class KnowsItsSize(Square):
    """Traced with one size, it has that size in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x * float(int(x.shape[0]))


def test_an_operator_is_in_the_program() -> None:
    found = exported(declare(square), (X,), (X[0],))
    assert (found.status, found.notes, found.compiles) == ("passed", (), True)


def test_a_class_is_inlined() -> None:
    assert exported(Square, (X,)).status == "passed"


def test_a_program_that_gives_something_else_is_found() -> None:
    (failure, *_) = exported(OtherwiseExported, (X,)).failures
    assert (failure.cause, failure.input) == ("kernel-mismatch", "result")
    assert failure.message.startswith("in an exported program, `result` differs from the plain call: at")


def test_a_program_for_one_size_alone_is_noted() -> None:
    found = exported(KnowsItsSize, (X,), (torch.rand(5, 4),))
    assert found.status == "passed", found
    assert any("the export is fixed to this size, because of" in note for note in found.notes)


def test_an_operator_that_is_missing_from_the_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declare(square)
    monkeypatch.setattr(module, "step_of", lambda subject: lambda calls: [x * x for (x,), _ in calls])
    (failure,) = exported(operator, (X,)).failures
    assert failure.cause == "unknown"
    assert failure.message == (
        f"the exported program calls `test_export.{operator.name.partition('::')[2]}.default` 0 times "
        "instead of 1; it calls aten.mul.Tensor"
    )


def test_an_operator_that_cannot_be_traced_is_found() -> None:
    def shift(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    (failure,) = exported(declare(shift), (X,)).failures
    assert failure.cause == "raises"
    assert failure.message.startswith(
        "torch.export.export(..., strict=False) raises, but a plain call does not: "
    )


def test_quick_exports_nothing() -> None:
    found = exported(Square, (X,), effort="quick")
    assert (found.status, found.reason) == ("skipped", "the effort is `quick`, which compiles nothing")


def test_a_generator_is_left_out() -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.empty_like(x).uniform_(generator=generator)

    found = exported(declare(noisy), (X, torch.Generator()))
    assert (found.status, found.reason) == ("skipped", "no sample can be exported")
    assert found.notes == ("a sample with a generator was left out: no exported program takes a generator",)


@pytest.mark.slow
def test_a_sample_without_a_tensor_is_not_called() -> None:
    def total(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).sum(0)

    found = exported(declare(total), ([X, X],), ([],))
    assert found.status == "passed"
    assert not any("was left out" in note for note in found.notes)


class Branching(Function):
    """Its forward asks for a number, which an export does not have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x if torch.any(x > 0) else x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_refused_export_is_told_in_the_report_alone(capfd: pytest.CaptureFixture[str]) -> None:
    found = exported(Branching, (X,))
    assert "cannot be exported" in str((found.reason, found.notes))
    assert capfd.readouterr() == ("", "")
