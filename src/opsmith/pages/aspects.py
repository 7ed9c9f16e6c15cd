"""Aspects of an operator: handwritten, declared or derived, and the property that checks each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from opsmith.core.formula import Formula
from opsmith.core.gradient_source import Kind, gradient_sources
from opsmith.core.location import where
from opsmith.core.origins.declared import Part
from opsmith.core.shape_samples import samples_for
from opsmith.core.specification import Specification
from opsmith.pages.kernels import kernel_entries

Origin = Literal["handwritten", "declared", "derived", "its own", "missing"]
"""Origins: code, an option, derived from the reference, registered with a library operator, not derivable."""


@dataclass(frozen=True)
class Aspect:
    """An aspect of an operator.

    Args:
        name: The name.
        origin: The origin.
        how: The description of the implementation.
        where: `file:line` of handwritten code.
        checked_by: The property that checks it; empty for none.
    """

    name: str
    origin: Origin
    how: str
    where: str = ""
    checked_by: str = ""


def aspects_of(specification: Specification, values: list[Any] | None = None) -> tuple[Aspect, ...]:
    """Every aspect of an operator.

    Args:
        specification: The operator.
        values: Argument values of the call whose gradients are told; None for a call that its kernels take.
    """
    return (
        *_forward(specification),
        *_gradients(specification, values),
        _second_order(specification),
        *_tangents(specification),
        _vmap(specification),
        _fake(specification),
        _autocast(specification),
        _compiled(specification),
        _onnx(specification),
        _flops(specification),
        _samples(specification),
    )


def _or_own(specification: Specification, part: Part, aspect: Aspect) -> Aspect:
    """Return the aspect, or the part that replaces it in an adopted operator."""
    own = specification.origin.own(part)
    if own is None:
        return aspect
    origin: Origin = "handwritten" if own.where else "its own"
    return replace(aspect, origin=origin, how=f"the {own.label}", where=own.where)


def _forward(specification: Specification) -> Iterator[Aspect]:
    what = "the function itself, which is opaque" if specification.opaque else "the reference"
    aspect = Aspect("result", "handwritten", f"{what}: the right result", specification.where, "forward")
    yield _or_own(specification, "forward", aspect)
    for kernel in kernel_entries(specification.kernels):
        dtypes = f", for {', '.join(kernel.dtypes)}" if kernel.dtypes else ""
        how = f"a kernel in {kernel.language}{dtypes}"
        yield Aspect(f"result on {kernel.device}", "handwritten", how, kernel.where, "forward")


_GRADIENT_ORIGINS: dict[Kind, Origin] = {
    "formula": "handwritten",
    "declared": "declared",
    "own": "its own",
    "missing": "missing",
    "stand-in": "derived",
    "kernel": "derived",
    "ordinary": "derived",
    "reference": "derived",
}


def _gradients(specification: Specification, values: list[Any] | None) -> Iterator[Aspect]:
    checked_by = "surrogate" if specification.gradients.surrogate else "gradient"
    for name, source in gradient_sources(specification, values).items():
        origin = _GRADIENT_ORIGINS[source.kind]
        yield Aspect(f"gradient of `{name}`", origin, source.words, source.where, checked_by)


def _second_order(specification: Specification) -> Aspect:
    own, checked_by = specification.origin.own("gradient"), "second_order"
    if own and specification.origin.once_differentiable:
        if specification.origin.referenced:
            return Aspect("second order", "derived", "from its reference", "", checked_by)
        how = f"the {own.label} is marked as differentiable once"
        return Aspect("second order", "missing", how, own.where, checked_by)
    if any(isinstance(rule, Formula) for rule in specification.gradients.rules.values()):
        how = "autograd through the formulas, and the operators that they call"
        return Aspect("second order", "derived", how, "", checked_by)
    if specification.opaque:
        return Aspect("second order", "missing", "there is no gradient to differentiate", "", checked_by)
    return Aspect("second order", "derived", "autograd through the reference", "", checked_by)


def _tangents(specification: Specification) -> Iterator[Aspect]:
    rules, checked_by = specification.tangents.rules, "forward_mode"
    for name, rule in rules.items():
        title = f"tangent of `{name}`"
        if isinstance(rule, Formula):
            yield Aspect(title, "handwritten", "a formula", rule.where, checked_by)
        else:
            yield Aspect(title, "declared", repr(rule), "", checked_by)
    every = [each.name for each in specification.schema.results if each.differentiable]
    if all(name in rules for name in every):
        return
    title = "forward mode" if not rules else "the other tangents"
    if any(isinstance(rule, Formula) for rule in specification.gradients.rules.values()):
        how = "the derivative of the gradient formulas by grad_output"
        aspect = Aspect(title, "derived", how, "", checked_by)
    elif specification.opaque:
        aspect = Aspect(title, "missing", "the operator is opaque: write `op.tangents(...)`", "", checked_by)
    else:
        aspect = Aspect(title, "derived", "forward mode through the reference", "", checked_by)
    yield _or_own(specification, "tangent", aspect)


def _vmap(specification: Specification) -> Aspect:
    if specification.batching is not None:
        how = f"one call serves the whole batch along `{specification.batching}`"
        return Aspect("vmap", "declared", how, "", "batching")
    how = "the reference, batched operation by operation"
    if specification.opaque:
        how = "the function, called for each example"
    return _or_own(specification, "vmap", Aspect("vmap", "derived", how, "", "vmap"))


def _fake(specification: Specification) -> Aspect:
    if specification.fake is not None:
        how = "a fake kernel"
        return Aspect("shapes and dtypes", "handwritten", how, where(specification.fake), "fake")
    origin: Origin = "derived"
    how = "the reference, on tensors without data"
    if specification.shapes is not None:
        origin, how = "declared", f"`{specification.shapes.text}`"
    elif specification.opaque:
        origin, how = "missing", "the operator is opaque: write `@op.fake`"
    return _or_own(specification, "fake", Aspect("shapes and dtypes", origin, how, "", "fake"))


_AUTOCAST = {
    "promote": "floating inputs except float64 are cast to the widest dtype among them",
    "lower": "floating inputs except float64 are cast to autocast's dtype",
    "float32": "floating inputs except float64 are cast to float32",
}


def _autocast(specification: Specification) -> Aspect:
    origin: Origin = "derived" if specification.autocast == "promote" else "declared"
    aspect = Aspect("autocast", origin, _AUTOCAST[specification.autocast], "", "autocast")
    return _or_own(specification, "autocast", aspect)


def _compiled(specification: Specification) -> Aspect:
    if specification.opaque or specification.origin.registered:
        return Aspect(
            "torch.compile", "derived", "one call, which the compiler treats as opaque", "", "compile"
        )
    modes: dict[Any, tuple[Origin, str]] = {
        None: ("derived", "the reference if no kernel takes the call; otherwise one opaque call"),
        True: ("declared", "the compiler always sees the reference"),
        False: ("declared", "one call, which the compiler treats as opaque"),
    }
    origin, how = modes[specification.inline]
    return Aspect("torch.compile", origin, how, "", "compile")


def _onnx(specification: Specification) -> Aspect:
    aspect = Aspect("ONNX", "derived", "the reference, as the body of a node of the operator's name")
    if specification.opaque:
        aspect = Aspect("ONNX", "missing", "an opaque operator has no body that could be exported")
    return _or_own(specification, "onnx", aspect)


def _flops(specification: Specification) -> Aspect:
    if specification.flops is not None:
        return Aspect("count of operations", "handwritten", "a formula", where(specification.flops))
    if specification.opaque:
        return Aspect("count of operations", "missing", "the operator is opaque: write `op.flops(...)`")
    return Aspect("count of operations", "derived", "counted in the reference, on tensors without data")


def _samples(specification: Specification) -> Aspect:
    if specification.samples is None and samples_for(specification) is not None:
        return Aspect("samples", "derived", "from `shapes=` and the types of the arguments")
    if specification.samples is None:
        how = "a check, a drawing, an export and a benchmark need samples: write `@op.samples`"
        return Aspect("samples", "missing", how)
    return Aspect("samples", "handwritten", "representative inputs", where(specification.samples))
