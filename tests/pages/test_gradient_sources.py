"""Explanation, page and graph of an operator name the same source of each gradient, of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Report
from opsmith.core.location import short_location
from opsmith.drawing import trace
from opsmith.pages.aspects import aspects_of
from opsmith.pages.content import collect_content

ONES, ROWS = torch.ones(3), torch.arange(3.0)


def reference(x: Tensor, y: Tensor) -> Tensor:
    """Compute x y."""
    return x * y


def of_x(grad: Tensor, y: Tensor) -> Tensor:
    return grad * y


def of_y(grad: Tensor, x: Tensor) -> Tensor:
    return grad * x


def both(grad: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": grad * y, "y": grad * x}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def declared(**options: Any) -> opsmith.Operator[..., Any]:
    return opsmith.operator("sources::product", **options)(reference)


def registered(*, differentiable: bool) -> opsmith.Operator[..., Any]:
    """An operator of torch.library, with autograd of its own or without."""
    operator = torch.library.custom_op(
        "sources::registered", lambda x, y: x * y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    operator.register_fake(lambda x, y: torch.empty_like(x))
    if differentiable:
        operator.register_autograd(
            lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    return opsmith.adopt(operator, reference=reference)


OWN = "the operator's own autograd; derived in forward mode and under `torch.func`"
ORDINARY, AGAIN = "ordinary autograd of the reference", "derived: the reference, run again"

KINDS: dict[str, tuple[Callable[[], opsmith.Operator[..., Any]], Mapping[str, str], str]] = {
    "reference alone": (declared, {"x": ORDINARY, "y": ORDINARY}, "derived"),
    "kernel": (lambda: declared().kernel("cpu", reference), {"x": AGAIN, "y": AGAIN}, "derived"),
    "kernel for another dtype": (
        lambda: declared().kernel("cpu", reference, dtypes=[torch.float64]),
        {"x": ORDINARY, "y": ORDINARY},
        "derived",
    ),
    "formulas": (
        lambda: declared().gradients(x=of_x, y=of_y),
        {"x": "formula", "y": "formula"},
        "handwritten",
    ),
    "joint formula": (
        lambda: declared().gradients(both),
        {"x": "joint formula", "y": "joint formula"},
        "handwritten",
    ),
    "one formula": (lambda: declared().gradients(y=of_y), {"x": AGAIN}, "derived"),
    "zero": (lambda: declared().gradients(x=opsmith.zero), {"x": "opsmith.zero", "y": AGAIN}, "declared"),
    "constant": (
        lambda: declared().gradients(x=opsmith.non_differentiable),
        {"x": "none: non-differentiable", "y": AGAIN},
        "declared",
    ),
    "not implemented": (
        lambda: declared().gradients(x=opsmith.not_implemented("later"), y=of_y),
        {"x": "opsmith.not_implemented('later')", "y": "formula"},
        "declared",
    ),
    "surrogate": (
        lambda: declared().surrogate_gradients(x=of_x),
        {"x": "surrogate formula", "y": AGAIN},
        "handwritten",
    ),
    "surrogate with a stand-in": (
        lambda: declared().surrogate_gradients(reference, y=of_y),
        {"x": "derived from the stand-in", "y": "surrogate formula"},
        "derived",
    ),
    "opaque": (
        lambda: declared(opaque=True).gradients(y=of_y),
        {"x": "none: the operator is opaque and no formula is given", "y": "formula"},
        "missing",
    ),
    "class": (
        lambda: opsmith.adopt(Product, "sources::adopted"),
        {"x": "backward of Product", "y": "backward of Product"},
        "handwritten",
    ),
    "library operator": (lambda: registered(differentiable=False), {"x": AGAIN, "y": AGAIN}, "derived"),
    "library operator with autograd": (
        lambda: registered(differentiable=True),
        {"x": OWN, "y": OWN},
        "its own",
    ),
    "library operator with autograd and a formula": (
        lambda: registered(differentiable=True).gradients(x=of_x),
        {"x": "formula", "y": AGAIN},
        "handwritten",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_three_agree(kind: str) -> None:
    make, words, origin = KINDS[kind]
    operator = make()
    if operator.specification.opaque:
        operator.fake(lambda x, y: torch.empty_like(x))
    operator.samples(lambda: [(ONES, ROWS)])
    explained = operator.explain(ONES, ROWS).gradients
    for name, text in words.items():
        assert explained[name].startswith(text), explained

    rows = {each.name: each for each in aspects_of(operator.specification, [ONES, ROWS])}
    assert rows["gradient of `x`"].origin == origin
    for name, text in explained.items():
        row = rows[f"gradient of `{name}`"]
        assert ", ".join(filter(None, [row.how, row.where])) == text

    graph = trace(operator)
    answers = {node.label: dict(node.attributes)["is"] for node in graph.nodes if node.kind == "answer"}
    groups = {group.label: group.title for group in graph.groups}
    for name, text in explained.items():
        source, _, where = text.partition(f", {__file__}")
        shown = f"{source}, {short_location(__file__ + where)}" if where else source
        if source in ("formula", "surrogate formula"):
            assert groups[f"gradient of {name}"] in shown
        elif source == "joint formula":
            assert groups["gradients of x, y"] in shown
        else:
            assert answers.get("gradient of every input", answers.get(f"gradient of {name}")) == shown


def test_a_page_tells_of_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not take it derives nothing anew; without a sample a kernel counts."""
    operator = declared().kernel("cpu", reference, dtypes=[torch.float64])
    assert {each.how for each in aspects_of(operator.specification) if each.checked_by == "gradient"} == {
        AGAIN
    }
    operator.samples(lambda: [(ONES, ROWS)])
    monkeypatch.setattr("opsmith.pages.content.exports_of", lambda operator: ())  # it takes seconds
    report = Report(operator.name, (), seed=0)
    content = collect_content(
        operator, print, report=report, benchmark=None, effort="quick", seed=0, architectures=()
    )
    assert {each.how for each in content.aspects if each.checked_by == "gradient"} == {ORDINARY}
