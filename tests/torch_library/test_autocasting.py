"""Autocast inputs are cast before they are saved, gradients come back as they were."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import opsmith

LOW = torch.bfloat16
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
Rule = Literal["promote", "lower", "float32"]

# rule, dtype of x, dtype of weight, dtype that the formula sees for each
EXPECTED: list[tuple[Rule, torch.dtype, torch.dtype, torch.dtype, torch.dtype]] = [
    ("promote", SINGLE, SINGLE, SINGLE, SINGLE),
    ("promote", LOW, SINGLE, SINGLE, SINGLE),
    ("promote", LOW, LOW, LOW, LOW),
    ("promote", HALF, LOW, SINGLE, SINGLE),
    ("promote", LOW, DOUBLE, LOW, DOUBLE),
    ("lower", SINGLE, SINGLE, LOW, LOW),
    ("lower", HALF, SINGLE, LOW, LOW),
    ("lower", SINGLE, DOUBLE, LOW, DOUBLE),
    ("float32", LOW, LOW, SINGLE, SINGLE),
    ("float32", HALF, SINGLE, SINGLE, SINGLE),
    ("float32", LOW, DOUBLE, SINGLE, DOUBLE),
]


def short(value: Any) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("way", ["formulas", "derived", "ordinary"])
@pytest.mark.parametrize(("rule", "first", "second", "seen_x", "seen_weight"), EXPECTED, ids=short)
def test_rule(
    rule: Rule,
    first: torch.dtype,
    second: torch.dtype,
    seen_x: torch.dtype,
    seen_weight: torch.dtype,
    way: str,
    name: str,
) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.dtype, weight.dtype))
        return x * weight

    def formula(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.dtype, weight.dtype))
        return grad * weight

    operator = opsmith.operator(name, autocast=rule)(product)
    if way == "formulas":
        operator.gradients(x=formula, weight=lambda grad, x: grad * x)
    if way == "derived":
        operator.kernel("cpu", product)
    x = torch.tensor([1.0, 2.0], dtype=first, requires_grad=True)
    weight = torch.tensor([0.5, 3.0], dtype=second, requires_grad=True)
    with torch.autocast("cpu", dtype=LOW):
        result = operator(x, weight)
    assert result.dtype is torch.promote_types(seen_x, seen_weight)
    of_x, of_weight = grad(result.sum(), (x, weight))
    assert_close(of_x, torch.tensor([0.5, 3.0], dtype=first))
    assert_close(of_weight, torch.tensor([1.0, 2.0], dtype=second))
    assert set(seen) == {(seen_x, seen_weight)}


def test_saved_tensors_are_the_cast_ones(name: str) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    operator = opsmith.operator(name, autocast="lower")(product).gradients(
        x=lambda grad, weight: grad * weight, weight=lambda grad, x: grad * x
    )
    saved: list[torch.dtype] = []
    with (
        torch.autocast("cpu", dtype=LOW),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.dtype), t)[1], lambda t: t),
    ):
        operator(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))
    assert saved == [LOW, LOW]


@pytest.mark.parametrize("rule", ["promote", "lower", "float32"])
def test_integers_and_lists(rule: Rule, name: str) -> None:
    seen: list[torch.dtype] = []

    def total(xs: list[Tensor], index: Tensor, extra: Tensor | None = None) -> Tensor:
        seen.extend(x.dtype for x in xs)
        seen.append(index.dtype)
        return torch.stack(xs).sum(0)[index]

    operator = opsmith.operator(name, autocast=rule)(total)
    with torch.autocast("cpu", dtype=LOW):
        operator([torch.ones(2), torch.ones(2, dtype=LOW)], torch.tensor([0]), None)
    wanted = LOW if rule == "lower" else SINGLE
    assert seen == [wanted, wanted, torch.int64]


def test_reference_runs_outside_of_autocast(name: str) -> None:
    """The rule alone decides; autocast does not reach into the reference and change it again."""

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    promoted = opsmith.operator(name)(matmul)
    lowered = opsmith.operator(f"{name}_lower", autocast="lower")(matmul)
    with torch.autocast("cpu", dtype=LOW):
        assert promoted(torch.ones(2, 2), torch.ones(2, 2)).dtype is SINGLE
        assert lowered(torch.ones(2, 2), torch.ones(2, 2)).dtype is LOW


def test_disabled_autocast_changes_nothing(name: str) -> None:
    def same(x: Tensor) -> Tensor:
        return x.clone()

    operator = opsmith.operator(name, autocast="lower")(same)
    with torch.autocast("cpu", dtype=LOW, enabled=False):
        assert operator(torch.ones(2)).dtype is SINGLE
    assert operator(torch.ones(2)).dtype is SINGLE


def test_keyword_only_tensors(name: str) -> None:
    def scaled(x: Tensor, *, weight: Tensor, by: float = 1.0) -> Tensor:
        return x * weight * by

    operator = opsmith.operator(name, autocast="lower")(scaled)
    with torch.autocast("cpu", dtype=LOW):
        assert operator(torch.ones(2), weight=torch.ones(2), by=2.0).dtype is LOW


def test_hidden_results(name: str) -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, x * 3

    operator = opsmith.operator(name, hidden=("triple",), autocast="lower")(halves).gradients(
        x=lambda grad, triple: grad * triple
    )
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=LOW):
        result = operator(x)
    assert result.dtype is LOW
    assert_close(grad(result.sum(), x)[0], torch.full((2,), 3.0))


def test_operators_in_a_reference_follow_their_own_rule_only_outside(name: str) -> None:
    def inner(x: Tensor) -> Tensor:
        return x * 2

    lowered = opsmith.operator(f"{name}_inner", autocast="lower")(inner)

    def outer(x: Tensor) -> Tensor:
        return lowered(x) + 1

    operator = opsmith.operator(name)(outer)
    with torch.autocast("cpu", dtype=LOW):
        assert lowered(torch.ones(2)).dtype is LOW
        assert operator(torch.ones(2)).dtype is SINGLE
