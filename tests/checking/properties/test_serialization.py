"""The property `serialization`: copies, pickles and files of operators and of their results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from functions import Doubled
from torch import Tensor

import opsmith
import opsmith.ops
from opsmith.checking import Outcome
from opsmith.checking.properties.behaviour import serialization as module

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5


def serialization(checked: Any, *samples: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples) or None, only=["serialization"])
    return next(outcome for outcome in report.outcomes if outcome.property == "serialization")


@opsmith.operator("test_serialization::double")
def double(x: Tensor) -> Tensor:
    return x * 2


class Marked(Tensor):
    """A tensor that forgets its numbers where it is pickled."""

    def __deepcopy__(self, memo: Any) -> Marked:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.zeros, (tuple(self.shape),)


class Forgetting(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).as_subclass(Marked)


class Unpicklable(Tensor):
    def __deepcopy__(self, memo: Any) -> Unpicklable:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError("not this one")


class Refusing(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).as_subclass(Unpicklable)


def test_what_can_be_stored_passes() -> None:
    for checked, samples in ((double, [(X,)]), (Doubled, [(X,)]), (opsmith.ops.linear, [])):
        found = serialization(checked, *samples)
        assert (found.status, found.notes) == ("passed", ())


def test_an_operator_that_is_declared_locally_passes() -> None:
    @opsmith.operator("test_serialization::local")
    def local(x: Tensor) -> Tensor:
        return x * 2

    assert serialization(local, (X,)).status == "passed"


def test_a_local_class_is_skipped_with_the_reason() -> None:
    class Local(Doubled):
        pass

    found = serialization(Local, (X,))
    assert found.status == "skipped"
    assert found.reason.endswith(": define the class at the top of a module")


def test_results_that_come_back_with_other_numbers_are_found() -> None:
    (failure, *_) = serialization(Forgetting, (X,)).failures
    assert failure.input == "result"
    assert failure.message.startswith("`result` is not the same after `pickle`: at")


def test_results_that_cannot_be_stored_are_found() -> None:
    (failure, *_) = serialization(Refusing, (X,)).failures
    assert (failure.cause, failure.input) == ("raises", "result")
    assert "of `result` raises PicklingError: not this one" in failure.message


def test_an_operator_that_cannot_be_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(value: Any) -> Any:
        raise TypeError("cannot pickle it")

    monkeypatch.setitem(module.WAYS, "`pickle`", broken)
    (failure, *_) = serialization(double, (X,)).failures
    assert (failure.cause, failure.input) == ("raises", None)
    assert failure.message == "`pickle` of it raises TypeError: cannot pickle it"


def test_a_copy_that_gives_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @opsmith.operator("test_serialization::thrice")
    def thrice(x: Tensor) -> Tensor:
        return x * 3

    monkeypatch.setattr(module, "_forms", lambda kept: [("it", kept, lambda copied: thrice)])
    (failure, *_) = serialization(double, (X,)).failures
    assert failure.cause == "stale-state"
    assert failure.message == "the copy from `copy.deepcopy` of it returns a different `result`"


def test_an_operator_of_torch_library_is_tried() -> None:
    @torch.library.custom_op("test_serialization::foreign", mutates_args=())
    def foreign(x: Tensor) -> Tensor:
        return x * 2

    outcome = serialization(foreign, (X,))
    assert outcome.status == "passed"
    (note,) = outcome.notes
    assert note.startswith("`pickle` of it, `torch.save` of it, ")
    assert " at 0x" not in note, "the same seed is to give the same report"
