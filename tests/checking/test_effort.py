"""The effort of a check: work that `quick` leaves out, faults that it must find; loading torch's compiler."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.checking.effort import EFFORTS
from opsmith.checking.first_calls import sample_subset
from opsmith.checking.properties.torch.compile import load_compiler
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of

names = itertools.count()


def sampled(*shapes: tuple[int, ...]) -> Any:
    @opsmith.operator(f"cost::op{next(names)}")
    def scaled(x: Tensor, bias: Tensor | None = None, detached: bool = False) -> Tensor:
        inner = x.detach() if detached else x
        y = x * inner
        return y if bias is None else y + bias

    scaled.samples(lambda make: [*((make(*shape),) for shape in shapes), (make(3), make(3))])
    return scaled


def subject(operator: Any, effort: str = "quick") -> Subject:
    return subject_of(operator, None, 0, EFFORTS[effort])


def test_a_quick_check_takes_samples_of_other_kinds_first() -> None:
    many = subject(sampled((2,), (3,), (4,), (5,), (0,), (2, 2), (3, 2)))
    chosen = [sample.position for sample in sample_subset(many).samples]
    assert chosen == [0, 4, 5, 7]
    assert len(chosen) == EFFORTS["quick"].subset


def test_few_samples_and_more_effort_stay_as_they_are() -> None:
    few = subject(sampled((2,), (3,)))
    assert sample_subset(few) is few
    more = subject(sampled((2,), (3,), (4,), (5,), (0,)), "default")
    assert sample_subset(more) is more


def test_a_report_says_what_looked_at_fewer_samples() -> None:
    operator = sampled((2,), (3,), (4,), (5,), (0,))
    report = opsmith.check(operator, effort="quick", only=["forward", "memory"])
    assert report.remarks == ("`memory` used 4 of the 6 samples: the effort is `quick`",)
    assert not opsmith.check(operator, effort="quick", only=["forward"]).remarks
    assert not opsmith.check(operator, only=["memory"]).remarks


@pytest.mark.every(5)
@pytest.mark.parametrize("size", [3, 40])
def test_a_dependence_that_the_reference_hides_in_a_later_sample_is_found_quickly(size: int) -> None:
    """Random directions stand for the elements of later samples; where they contradict, all are looked at."""
    operator = sampled((4,))
    x = torch.arange(1.0, size + 1)
    report = opsmith.check(operator, samples=[(x,), (x, None, True)], effort="quick", only=["gradient"])
    (failure,) = report.failures
    assert failure.cause == "scale"
    assert str(failure.evidence["sample"]).startswith("sample 1 ")


@pytest.mark.slow
def test_torch_loads_its_compiler_once() -> None:
    load_compiler()
    loaded = {*sys.modules}
    report = opsmith.check(sampled((2,)), effort="quick", skip=["integration"])
    assert report.loading == report.compile_seconds
    compiler = ("torch._dynamo", "torch._inductor")
    assert not [name for name in {*sys.modules} - loaded if name.startswith(compiler)]
    assert opsmith.check(sampled((2,)), effort="quick", only=["forward"]).loading == 0.0


def test_an_effort_of_ones_own_has_the_name_of_a_level() -> None:
    more = replace(EFFORTS["quick"], variations=1)
    assert opsmith.check(sampled((2,)), effort=more, only=["forward"]).passed_as_asked
    with pytest.raises(errors.UsageError, match="there is no such level of effort") as raised:
        replace(EFFORTS["quick"], name="mine")  # type: ignore[arg-type]
    assert "`quick`, `default`, `thorough`" in str(raised.value)
    with pytest.raises(errors.UsageError, match="there is no such level of effort") as raised:
        opsmith.check(sampled((2,)), effort=["quick"])  # type: ignore[arg-type]
    assert raised.value.got == "list ['quick']"


def in_pairs(size: int) -> Tensor:
    """Numbers in a random order, each but a little from another: no step along a direction is short."""
    place = torch.randperm(size * size, generator=torch.Generator().manual_seed(0))
    return ((place // 2) * 2.0 / size**2 + place % 2 * 1e-6).view(size, size)


@pytest.mark.slow
def test_of_a_large_sample_fewer_elements_are_moved() -> None:
    """Each move costs a run over all of it; random directions stand for the others."""
    assert EFFORTS["default"].moved(40_000) == EFFORTS["default"].elements
    assert replace(EFFORTS["quick"], elements=3).moved(10**9) == 3
    calls = itertools.count()  # a list would be restored after each call

    @opsmith.operator(f"cost::op{next(names)}")
    def squared(x: Tensor) -> Tensor:
        next(calls)
        return x * x

    @opsmith.operator(f"cost::op{next(names)}")
    def in_order(x: Tensor) -> Tensor:
        next(calls)
        return x.flatten().sort().values

    effort = replace(EFFORTS["quick"], elements=256)
    taken = {}
    for operator, size in itertools.product((squared, in_order), (16, 400)):
        before = next(calls)
        sample = (in_pairs(size),)
        assert opsmith.check(operator, samples=[sample], effort=effort, only=["gradient"]).passed_as_asked
        taken[operator.name, size] = next(calls) - before
    # Random directions settle the derivative of a square, and elements are not moved one by one.
    assert max(taken[squared.name, 16], taken[squared.name, 400]) < 256
    assert taken[in_order.name, 400] < taken[in_order.name, 16]
