"""Contenders: who computes the same takes part, and of everyone else it is told why not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarked import gate, seldom, unshaped
from briefly import left_out, timed
from torch import Tensor

import opsmith
from opsmith.benchmarking import Benchmark

Measure = Callable[..., Benchmark]


@pytest.mark.slow
def test_baselines_that_compute_something_else_are_told_and_not_timed(measure: Measure) -> None:
    def writes(x: Tensor, y: Tensor) -> Tensor:
        result = x * y.tanh()
        with torch.no_grad():
            x += 1
        return result

    def no_gradient(x: Tensor, y: Tensor) -> Tensor:
        return x.detach() * y.tanh()

    baselines: dict[str, Callable[..., Any]] = {
        "right": lambda x, y: y.tanh() * x,
        "other values": lambda x, y: x * y.sigmoid(),
        "a little off": lambda x, y: x * y.tanh() * (1 + 1e-4),
        "other shape": lambda x, y: (x * y.tanh())[:1],
        "other dtype": lambda x, y: (x * y.tanh()).double(),
        "two results": lambda x, y: (x, y),
        "no gradient": no_gradient,
        "raises": lambda x, y: x @ y,
        "silent": lambda x, y: [][0],
        "exits": lambda x, y: sys.exit("at once"),
        "writes": writes,
    }
    case = measure(gate, baselines=baselines, sizes={"B": 4, "M": 6}).cases[-1]
    told = left_out(case)
    assert set(told) == set(baselines) - {"right"}
    assert ("right", "both") in timed(case)
    assert not {name for name, _ in timed(case)} & set(told)
    assert told["other values"].startswith("it computes something else: its result: at [")
    assert "24 of 24 elements are wrong" in told["other values"]
    assert told["a little off"].startswith("it computes something else: its result: at [")
    assert told["other shape"].endswith("its result: it has the shape [1, 6], but the reference has [4, 6]")
    assert told["other dtype"].endswith("it has the dtype torch.float64, but the reference has torch.float32")
    assert told["two results"].endswith("it returns 2 tensors, but the reference returns 1")
    assert told["no gradient"].startswith("it computes something else: its gradient 0: at [")
    assert told["raises"].startswith("it raises RuntimeError: ")
    assert "mat1 and mat2 shapes cannot be multiplied" in told["raises"]
    assert told["silent"] == "it raises IndexError: list index out of range"
    assert told["exits"] == "it raises SystemExit: at once"
    assert told["writes"] == "it writes into its arguments"


@pytest.mark.slow
def test_what_a_baseline_writes_does_not_reach_the_others(measure: Measure) -> None:
    def writes(x: Tensor, y: Tensor) -> Tensor:
        x.detach().zero_()
        return x * y.tanh()

    case = measure(gate, baselines={"writes": writes, "after": lambda x, y: x * y.tanh()}).cases[-1]
    assert set(left_out(case)) == {"writes"}


@pytest.mark.slow
def test_a_baseline_that_computes_in_another_order_is_no_other(measure: Measure) -> None:
    def backwards(x: Tensor, weight: Tensor) -> Tensor:
        parts = [x[:, at : at + 1] * weight[:, at] for at in reversed(range(x.shape[1]))]
        return sum(parts[1:], parts[0])

    case = measure(
        unshaped, baselines={"backwards": backwards}, samples=lambda make: [(make(16, 300), make(8, 300))]
    ).cases[-1]
    assert left_out(case) == {}


def test_an_operator_that_is_wrong_at_a_larger_size_is_told(measure: Measure) -> None:
    found = measure(seldom)
    assert found.wrong == ("N=160 (float32, cpu)", "N=1280 (float32, cpu)")[-len(found.wrong) :]
    assert "native" in left_out(found.cases[-1])
    assert left_out(found.cases[0]) == {}
    assert measure(gate).wrong == ()


def test_a_random_operator_is_not_held_to_other_numbers(measure: Measure) -> None:
    @opsmith.operator("session::noisy", random=True)
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    noisy.kernel("cpu", lambda x: torch.rand_like(x) * 0.5 + x)
    noisy.samples(lambda make: [(make(5),)])
    assert left_out(measure(noisy, directions=["forward"]).cases[-1]) == {}


def test_a_random_operator_that_writes_into_its_arguments_at_a_larger_size_is_told(measure: Measure) -> None:
    @opsmith.operator("session::careless", random=True)
    def careless(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    careless.kernel("cpu", lambda x: (x.zero_() if x.numel() > 99 else x) + torch.rand_like(x))
    careless.samples(lambda make: [(make(5),)])
    found = measure(careless, directions=["forward"])
    assert left_out(found.cases[-1]) == {"native": "it writes into its arguments"}
    assert left_out(found.cases[0]) == {}
