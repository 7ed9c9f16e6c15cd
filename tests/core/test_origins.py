"""Origins of operators: an origin answers for its own parts, and nobody else asks what kind it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.core.explanation import explain
from opsmith.core.origins.declared import DECLARED, MAPPED, TRACED, Origin, Own, Part
from opsmith.core.origins.function_class import class_of
from opsmith.core.source_hash import operator_hash
from opsmith.pages.aspects import aspects_of

PARTS: tuple[Part, ...] = ("forward", "gradient", "tangent", "vmap", "fake", "autocast", "onnx")
X = torch.linspace(-1.0, 1.0, 3)


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0]


class Whole(Function):
    """A class with every method that torch knows."""

    generate_vmap_rule = False

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * 2

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Whole.apply(x), in_dims[0]

    @staticmethod
    def symbolic(graph: Any, x: Any) -> Any:
        return graph.op("Add", x, x)


class ByVjp(Function):
    """A class whose backward has its other name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def vjp(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def parts_of(origin: Origin) -> list[str]:
    return [part for part in PARTS if origin.own(part)]


def adopted(kind: type[Function], **options: Any) -> opsmith.Operator[..., Any]:
    return opsmith.adopt(kind, f"origins::{kind.__name__.lower()}", samples=[(X,)], **options)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Square, ["forward", "gradient"]),
        (Whole, ["forward", "gradient", "tangent", "vmap", "autocast", "onnx"]),
        (ByVjp, ["forward", "gradient"]),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_a_class_brings_its_methods_along(kind: type[Function], parts: list[str]) -> None:
    origin = adopted(kind).specification.origin
    assert parts_of(origin) == parts
    forward = origin.own("forward")
    assert forward is not None
    assert forward.function == kind.forward
    assert (forward.label, str(forward)) == (f"forward of `{kind.__name__}`", f"forward of {kind.__name__}")
    assert forward.where.startswith(__file__)


def test_a_declared_operator_brings_nothing_along() -> None:
    origin = opsmith.ops.exp.specification.origin
    assert origin is DECLARED
    assert (parts_of(origin), origin.methods(()), origin.sources()) == ([], ({}, ()), ())


def test_a_custom_op_brings_along_what_was_registered() -> None:
    @torch.library.custom_op("origins::halved", mutates_args=(), device_types="cpu")
    def halved(x: Tensor) -> Tensor:
        return x / 2

    def half(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2

    halved.register_autograd(half)
    operator = opsmith.adopt(halved, reference=lambda x: x / 2)
    origin = operator.specification.origin
    assert parts_of(origin) == ["forward", "gradient"]
    assert operator.specification.where_of("gradient") == f"{__file__}:{half.__code__.co_firstlineno}"
    assert origin.devices == ("cpu",)
    assert origin.own("gradient", "cpu")
    assert operator.explain(X).forward == "the operator's own kernel"


def test_a_class_without_a_reference_runs_where_calls_have_not_shown_otherwise() -> None:
    operator = adopted(Square)
    facts = class_of(operator.specification.origin).facts
    facts.suspected[f"forward {TRACED}"] = "it raised once"
    facts.instead[f"forward {MAPPED}"] = "it raised"
    asked: dict[str, Any] = {"traced": (TRACED,), "mapped": (MAPPED,)}
    for origin, answers in (
        (operator.specification.origin, {"traced": (True, False), "mapped": (False, False)}),
        (
            replace(class_of(operator.specification.origin), reference=torch.square),
            dict.fromkeys(asked, (True, True)),
        ),
        (DECLARED, dict.fromkeys(asked, (True, True))),
    ):
        for what, (circumstance,) in asked.items():
            assert (origin.runs(circumstance), origin.runs(circumstance, suspected=True)) == answers[what]


@dataclass(frozen=True)
class Transcribed(Origin):
    """An origin of which opsmith does not know: somebody wrote its parts in another language."""

    subject: Any

    computes_by = "the transcribed routine"

    def own(self, part: Part, device: str = "") -> Own | None:
        """Return a part that was transcribed: all but the fake kernel, and no gradient but on the CPU."""
        if part == "fake" or (part == "gradient" and device not in ("", "cpu")):
            return None
        return Own(f"{part} that was transcribed", self.subject, "routine.f90:1")

    def compute(self, reference: Callable[..., Any], *, in_place: bool) -> Callable[..., Any]:
        """Return the routine."""
        routine: Callable[..., Any] = self.subject
        return routine

    def notes(self, *, in_place: bool) -> list[str]:
        """Return what was seen of it."""
        return ["it was transcribed"]


def test_a_new_origin_is_one_class() -> None:
    """Explanations, drawings, hashes and calls ask the origin, so that a new one needs no other change."""

    def routine(x: Tensor) -> Tensor:
        return x.exp()

    declared = replace(opsmith.ops.exp.specification, batching=None)
    specification = replace(declared, origin=Transcribed(routine))
    assert specification.computed_by is routine
    assert specification.where_of("gradient") == "routine.f90:1"
    assert specification.where_of("fake") == specification.where
    explanation = explain(specification, [X])
    assert explanation.forward == f"forward that was transcribed, {specification.where}"
    assert explanation.notes == ("it was transcribed",)
    told = {each.name: (each.origin, each.how) for each in aspects_of(specification)}
    before = {each.name: (each.origin, each.how) for each in aspects_of(declared)}
    changed = {"result": "forward", "forward mode": "tangent", "vmap": "vmap"}
    changed |= {"autocast": "autocast", "ONNX": "onnx"}
    assert told == before | {
        name: ("handwritten", f"the {part} that was transcribed") for name, part in changed.items()
    }
    other = replace(declared, origin=Transcribed(torch.exp))
    assert len({operator_hash(each) for each in (declared, specification, other)}) == 3
