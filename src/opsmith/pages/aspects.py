"""Aspects of an operator: handwritten, declared or derived, and the property that checks each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from opsmith.core.adopted import ClassFormula
from opsmith.core.formula import Formula, NonDifferentiable, NotImplementedGradient
from opsmith.core.location import where
from opsmith.core.shape_samples import samples_for
from opsmith.core.specification import Specification
from opsmith.pages.kernels import kernel_entries

Origin = Literal["handwritten", "declared", "derived", "its own", "missing"]
"""Written as code; declared by an option; derived from the reference; registered with a library operator; and
not derivable."""


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


def aspects_of(specification: Specification) -> tuple[Aspect, ...]:
    """Every aspect of an operator."""
    return (
        *_forward(specification),
        *_gradients(specification),
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


def _forward(specification: Specification) -> Iterator[Aspect]:
    adopted = specification.adopted
    if specification.library_operator is not None:
        yield Aspect("result", "its own", "the kernels that it was registered with", "", "forward")
    elif adopted is not None:
        yield Aspect("result", "handwritten", f"the forward of `{adopted.name}`", adopted.where, "forward")
    else:
        what = "the function itself, which is opaque" if specification.opaque else "the reference"
        yield Aspect("result", "handwritten", f"{what}: what is right", specification.where, "forward")
    for kernel in kernel_entries(specification.kernels):
        dtypes = f", for {', '.join(kernel.dtypes)}" if kernel.dtypes else ""
        how = f"a kernel in {kernel.language}{dtypes}"
        yield Aspect(f"result on {kernel.device}", "handwritten", how, kernel.where, "forward")


def _gradients(specification: Specification) -> Iterator[Aspect]:
    rules = specification.gradients
    checked_by = "surrogate" if rules.surrogate else "gradient"
    for name in specification.schema.tensor_names:
        title = f"gradient of `{name}`"
        rule = rules.rules.get(name)
        if isinstance(rule, ClassFormula) and specification.adopted is not None:
            how = f"the backward of `{specification.adopted.name}`"
            yield Aspect(title, "handwritten", how, rule.where, checked_by)
        elif isinstance(rule, Formula):
            kind = "a surrogate formula, wrong on purpose" if rules.surrogate else "a formula"
            joint = ", for several inputs at once" * rule.joint
            yield Aspect(title, "handwritten", f"{kind}{joint}", rule.where, checked_by)
        elif isinstance(rule, NonDifferentiable):
            yield Aspect(title, "declared", "none: the input counts as a constant", "", checked_by)
        elif isinstance(rule, NotImplementedGradient):
            yield Aspect(title, "declared", f"refused: {rule.reason}", "", checked_by)
        elif rule is not None:
            yield Aspect(title, "declared", "zeros", "", checked_by)
        else:
            yield _derived_gradient(specification, title, checked_by)


def _derived_gradient(specification: Specification, title: str, checked_by: str) -> Aspect:
    rules = specification.gradients
    if rules.stand_in is not None:
        return Aspect(title, "derived", "from the stand-in", where(rules.stand_in), checked_by)
    if specification.library_operator is not None and specification.library_operator.autograd:
        return Aspect(title, "its own", "the autograd that it was registered with", "", checked_by)
    if specification.opaque:
        how = "the operator is opaque, and no formula is given"
        return Aspect(title, "missing", how, "", checked_by)
    how = "autograd through the reference"
    if rules.given or specification.kernels:
        how += ", which the backward runs again"
    return Aspect(title, "derived", how, "", checked_by)


def _second_order(specification: Specification) -> Aspect:
    adopted, rules = specification.adopted, specification.gradients
    checked_by = "second_order"
    if adopted is not None and adopted.once_differentiable:
        if adopted.reference is not None:
            return Aspect("second order", "derived", "from its reference", "", checked_by)
        how = f"the backward of `{adopted.name}` is marked as differentiable once"
        return Aspect("second order", "missing", how, adopted.backward_where, checked_by)
    if any(isinstance(rule, Formula) for rule in rules.rules.values()):
        how = "autograd through the formulas, and the operators that they call"
        return Aspect("second order", "derived", how, "", checked_by)
    if specification.opaque:
        return Aspect("second order", "missing", "there is no gradient to differentiate", "", checked_by)
    return Aspect("second order", "derived", "autograd through the reference", "", checked_by)


def _tangents(specification: Specification) -> Iterator[Aspect]:
    rules, adopted = specification.tangents.rules, specification.adopted
    checked_by = "forward_mode"
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
    if adopted is not None and adopted.jvp is not None:
        yield Aspect(title, "handwritten", f"the jvp of `{adopted.name}`", where(adopted.jvp), checked_by)
    elif any(isinstance(rule, Formula) for rule in specification.gradients.rules.values()):
        how = "the gradient formulas, differentiated by grad_output"
        yield Aspect(title, "derived", how, "", checked_by)
    elif specification.opaque:
        yield Aspect(title, "missing", "the operator is opaque: write `op.tangents(...)`", "", checked_by)
    else:
        yield Aspect(title, "derived", "forward mode through the reference", "", checked_by)


def _vmap(specification: Specification) -> Aspect:
    adopted, own = specification.adopted, specification.library_operator
    if specification.batching is not None:
        how = f"one call serves the whole batch along `{specification.batching}`"
        return Aspect("vmap", "declared", how, "", "batching")
    if own is not None and own.vmap:
        return Aspect("vmap", "its own", "the rule that it was registered with", "", "vmap")
    if adopted is not None and adopted.vmap is not None:
        return Aspect("vmap", "handwritten", f"the vmap of `{adopted.name}`", where(adopted.vmap), "vmap")
    if specification.opaque:
        return Aspect("vmap", "derived", "the function, called for one example after the other", "", "vmap")
    return Aspect("vmap", "derived", "the reference, batched operation by operation", "", "vmap")


def _fake(specification: Specification) -> Aspect:
    if specification.fake is not None:
        how = "a fake kernel"
        return Aspect("shapes and dtypes", "handwritten", how, where(specification.fake), "fake")
    if specification.library_operator is not None and specification.library_operator.fake:
        how = "the fake kernel that it was registered with"
        return Aspect("shapes and dtypes", "its own", how, "", "fake")
    if specification.shapes is not None:
        return Aspect("shapes and dtypes", "declared", f"`{specification.shapes.text}`", "", "fake")
    if specification.opaque:
        how = "the operator is opaque: write `@op.fake`"
        return Aspect("shapes and dtypes", "missing", how, "", "fake")
    return Aspect("shapes and dtypes", "derived", "the reference, on tensors without data", "", "fake")


_AUTOCAST = {
    "promote": "floating inputs but float64 are cast to the widest dtype among them",
    "lower": "floating inputs but float64 are cast to autocast's dtype",
    "float32": "floating inputs but float64 are cast to float32",
}


def _autocast(specification: Specification) -> Aspect:
    how = _AUTOCAST[specification.autocast]
    if specification.library_operator is not None and specification.library_operator.autocast:
        return Aspect("autocast", "its own", "the rule that it was registered with", "", "autocast")
    origin: Origin = "derived" if specification.autocast == "promote" else "declared"
    return Aspect("autocast", origin, how, "", "autocast")


def _compiled(specification: Specification) -> Aspect:
    if specification.opaque or specification.library_operator is not None:
        return Aspect(
            "torch.compile", "derived", "one call, which the compiler does not look into", "", "compile"
        )
    modes: dict[Any, tuple[Origin, str]] = {
        None: ("derived", "the reference is seen where no kernel takes the call; else it is one call"),
        True: ("declared", "the compiler always sees the reference"),
        False: ("declared", "one call, which the compiler does not look into"),
    }
    origin, how = modes[specification.inline]
    return Aspect("torch.compile", origin, how, "", "compile")


def _onnx(specification: Specification) -> Aspect:
    adopted = specification.adopted
    if adopted is not None and hasattr(adopted.function_class, "symbolic"):
        symbolic = adopted.function_class.symbolic
        return Aspect("ONNX", "handwritten", f"the symbolic of `{adopted.name}`", where(symbolic), "")
    if specification.opaque:
        return Aspect("ONNX", "missing", "an opaque operator has no body that could be exported", "", "")
    return Aspect("ONNX", "derived", "the reference, as the body of a node of the operator's name", "", "")


def _flops(specification: Specification) -> Aspect:
    if specification.flops is not None:
        return Aspect("count of operations", "handwritten", "a formula", where(specification.flops))
    if specification.opaque:
        return Aspect("count of operations", "missing", "the operator is opaque: write `op.flops(...)`")
    return Aspect("count of operations", "derived", "counted of the reference, on tensors without data")


def _samples(specification: Specification) -> Aspect:
    if specification.samples is None and samples_for(specification) is not None:
        return Aspect("samples", "derived", "from `shapes=` and the types of the arguments")
    if specification.samples is None:
        how = "nothing to check, draw, export or measure it with: write `@op.samples`"
        return Aspect("samples", "missing", how)
    return Aspect("samples", "handwritten", "representative inputs", where(specification.samples))
