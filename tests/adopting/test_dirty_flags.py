"""Which arguments a class writes into: shown by its source, by a call, by a sample, or declared."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from dirty_classes import ByHelper, Clips, Doubles, MarksArguments, WritesTwo, mark, numbers
from torch import Tensor
from torch.autograd import Function
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.core.origins import function_class


def test_a_call_shows_what_the_source_does_not() -> None:
    operator, x = opsmith.adopt(ByHelper, "dirty::helper"), numbers(3)
    assert "!" not in str(operator)
    for inplace in (False, True, False, True):
        given = x.clone()
        assert (operator(given, inplace) is given) == inplace
        assert_close(given, -x if inplace else x)
    assert str(operator) == "<opsmith operator dirty::helper(Tensor(a!) x, bool inplace) -> Tensor(a!)>"
    assert "a call whose flags mark nothing returns new tensors, as `functional` does" in (
        operator.explain(x, True).notes
    )


def test_a_sample_shows_it_beforehand() -> None:
    operator = opsmith.adopt(ByHelper, "dirty::sampled", samples=[(numbers(3), True)])
    assert str(operator) == "<opsmith operator dirty::sampled(Tensor(a!) x, bool inplace) -> Tensor(a!)>"


def test_mutates_declares_it_beforehand() -> None:
    operator = opsmith.adopt(ByHelper, "dirty::declared", mutates="x")
    assert "Tensor(a!)" in str(operator)
    for inplace in (False, True, False):
        given = numbers(3)
        assert (operator(given, inplace) is given) == inplace


def test_with_a_stated_signature() -> None:
    operator = opsmith.adopt(
        ByHelper, "dirty::stated", signature="(x: Tensor, inplace: bool = True) -> Tensor"
    )
    given = numbers(3)
    assert operator(given, True) is given
    assert str(operator) == "<opsmith operator dirty::stated(Tensor(a!) x, bool inplace=True) -> Tensor(a!)>"


def test_without_any_it_works_on_copies() -> None:
    operator, x = opsmith.adopt(WritesTwo, "dirty::copies", mutates=()), numbers(3)
    assert (
        str(operator)
        == "<opsmith operator dirty::copies(Tensor x, Tensor y, float by=3.0) -> (Tensor, Tensor)>"
    )
    given = x.clone(), x.clone()
    for _ in range(2):
        assert_close(operator(*given), (3 * x, 4 * x))
        assert_close(given, (x, x))
    assert "`x` is copied first: forward writes into it" in operator.explain(*given).notes


def test_what_is_left_out_is_copied() -> None:
    operator, x = opsmith.adopt(WritesTwo, "dirty::one_of_two", mutates=["y"]), numbers(3)
    for _ in range(2):
        given = x.clone(), x.clone()
        new_y, new_x = operator(*given)
        assert new_y is given[1]
        assert_close((*given, new_x), (x, 3 * x, 4 * x))


def test_a_class_that_writes_and_does_not_mark_works_on_a_copy() -> None:
    class Unmarked(Doubles):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.mul_(2)

    operator, given = opsmith.adopt(Unmarked, "dirty::unmarked"), numbers(3)
    for _ in range(2):
        assert_close(operator(given), 2 * numbers(3))
        assert_close(given, numbers(3))
    assert operator.explain(given).notes == ("`x` is copied first: forward writes into it",)


def test_arguments_that_signature_names_one_by_one_are_written() -> None:
    operator = opsmith.adopt(
        MarksArguments, "dirty::named", signature="(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]"
    )
    given = numbers(3)
    assert operator(given, given.clone())[0] is given
    assert_close(given, 2 * numbers(3))


class Drifts(Function):
    """What it returns, and whether it writes, changes from call to call."""

    results = ("dirty",)

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
        if "dirty" in cls.results:
            ctx.mark_dirty(x)
        if "dirty" in cls.results or "written" in cls.results:
            x.mul_(2)
        every = {"dirty": x, "written": x, "new": x * 2, "none": None}
        found = tuple(every[each] for each in cls.results)
        return found if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


def drifts(name: str, *first: str, **options: Any) -> opsmith.Operator[..., Any]:
    Drifts.results = first
    operator = opsmith.adopt(Drifts, f"dirty::drifts_{name}", **options)
    operator(numbers(3))
    return operator


def test_marks_that_no_flag_chooses_are_refused() -> None:
    operator = drifts("marks", "dirty")
    Drifts.results = ("new",)
    with pytest.raises(errors.MutationError, match="marks `x` as dirty in some calls but not in others"):
        operator(numbers(3))
    given = numbers(3)
    assert_close(operator(given), 2 * numbers(3))
    assert_close(given, numbers(3))


def test_a_write_that_is_not_marked_any_more_is_refused() -> None:
    operator = drifts("writes", "dirty")
    Drifts.results = ("written",)
    with pytest.raises(errors.MutationError, match="marks `x` as dirty in some calls"):
        operator(numbers(3))


def test_another_structure_after_the_write_is_refused() -> None:
    operator = drifts("structure", "dirty")
    Drifts.results = ("dirty", "new")
    with pytest.raises(
        errors.MutationError, match="returned results that differ from the results of earlier"
    ) as raised:
        operator(numbers(3))
    assert "declare the possible results" in str(raised.value)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_first_call_that_shows_another_structure_writes_once(mode: Any) -> None:
    Drifts.results = ("new", "dirty")
    operator = opsmith.adopt(Drifts, f"dirty::drifts_first_{mode.__name__}", mutates=None)
    for _ in range(2):
        with mode():
            given = numbers(3)
            results = operator(given)
        assert results[1] is given
        assert_close([*results], [4 * numbers(3), 2 * numbers(3)])


def test_a_later_call_in_inference_mode_that_shows_another_structure_is_refused() -> None:
    operator = drifts("inference", "dirty", "new")
    Drifts.results = ("dirty", "none")
    for _ in range(2):
        with torch.inference_mode():
            given = numbers(3)
            with pytest.raises(
                errors.MutationError, match="returned results that differ from the results of earlier runs"
            ):
                operator(given)
        assert_close(given, 2 * numbers(3))


def test_flags_that_mark_nothing_are_learnt_in_inference_mode_too() -> None:
    operator = opsmith.adopt(Clips, "dirty::clips_inference")
    operator.functional(numbers(3), False)
    with torch.inference_mode():
        given = numbers(3)
        assert operator(given, False) is not given
    assert_close(given, numbers(3))


class ByFlagAndText(Function):
    """A flag chooses whether it writes, and a text does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, mode: str) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            return x.mul_(2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None, None


@pytest.mark.slow
def test_threads_that_show_new_flags_do_not_disturb_one_another() -> None:
    interval, problems = sys.getswitchinterval(), list[str]()

    def calls(operator: opsmith.Operator[..., Any], thread: int) -> None:
        for at in range(15):
            for inplace in (True, False):
                x = torch.ones(2)
                try:
                    result = operator(x, inplace, f"{thread} {at}")
                except errors.OpsmithError as error:
                    problems.append(str(error))
                else:
                    if (result is x) != inplace or x[0] != 1 + inplace:
                        problems.append(f"inplace={inplace}: {x}")

    sys.setswitchinterval(1e-6)
    try:
        for trial in range(20):
            operator = opsmith.adopt(ByFlagAndText, f"dirty::threads_{trial}")
            threads = [threading.Thread(target=calls, args=(operator, each)) for each in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems, problems[0]


def test_a_text_that_varies_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_class, "MAX_FLAGS", 8)
    operator = opsmith.adopt(ByFlagAndText, "dirty::texts")
    for at in range(20):
        x = numbers(3).requires_grad_() * 1
        assert operator(x, True, str(at)) is x
        assert operator(x, False, str(at)) is not x
        assert_close(x.detach(), 2 * numbers(3))
    facts = function_class.class_of(operator.specification.origin).facts
    for known in (facts.dirty_under, facts.written_under, facts.keeps_under):
        assert 0 < len(known) <= 8


class Swaps(Function):
    """A flag chooses the order of its outputs, or which argument it writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, which: str) -> Any:
        written = y if which == "second" else x
        mark(ctx, written, True)
        written.add_(1)
        new = x * 2
        return (new, written) if which == "swapped" else (written, new)

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        return one, other, None


@pytest.mark.parametrize(
    ("which", "problem", "hint"),
    [
        ("swapped", "returns `x` at a different position", "let forward return `x` at one position"),
        (
            "second",
            "marks different arguments as dirty",
            "it cannot decide which argument is written: adopt two classes; or let",
        ),
    ],
)
def test_a_flag_cannot_choose_which_argument_is_written(which: str, problem: str, hint: str) -> None:
    operator = opsmith.adopt(Swaps, f"dirty::swaps_{which}")
    operator(numbers(3), numbers(3), "first")
    given = numbers(3), numbers(3, seed=1)
    with pytest.raises(errors.ResultTypeError, match=problem) as raised:
        operator(*given, which)
    assert hint in str(raised.value)
    assert_close(given, (numbers(3), numbers(3, seed=1)))
