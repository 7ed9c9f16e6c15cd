"""Explanation of a call: the kernel and the formulas that would run, the tensors saved and recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opsmith.core.backward_plan import BackwardPlan, backward_plan, runs_ordinary
from opsmith.core.formula import Formula
from opsmith.core.gradient_source import gradient_sources
from opsmith.core.kernels import BuiltKernel, Kernel, choose
from opsmith.core.missing_kernels import in_silence
from opsmith.core.origins.function_class import ClassFormula
from opsmith.core.specification import Specification
from opsmith.display import text_block, titled_repr


@dataclass(frozen=True)
class Explanation:
    """Explanation of a call, without running it; `print` shows it.

    Args:
        operator: The operator's name.
        forward: The function that computes the results.
        rejected: Kernels that do not take the call, each with its reason.
        gradients: The source of each gradient, by input name.
        tangents: The source of each tangent that the author wrote for forward mode, by result name.
        saved: Inputs and results saved for the backward when every input needs a gradient.
        ordinary: True if autograd records the operations of the reference.
        recomputes: True if the backward runs the reference, or the stand-in, to derive a gradient.
        notes: Facts observed in the runs of an adopted class.
        own_autograd: True if an adopted operator has its own autograd.
        copies: Arguments and results that are copied: the kernel takes or writes a different layout, or an
            argument is overwritten.
        sizing: The source of the sizes of the results of a kernel that is built from source.
        kernel: The kernel that computes the results; None if the reference does.
        origin: Text that says where the built kernel came from; empty for a kernel in Python.
    """

    operator: str
    forward: str
    rejected: tuple[str, ...]
    gradients: dict[str, str]
    tangents: dict[str, str]
    saved: tuple[str, ...]
    ordinary: bool
    recomputes: bool
    notes: tuple[str, ...] = ()
    own_autograd: bool = False
    copies: tuple[str, ...] = ()
    sizing: str = ""
    kernel: Kernel | None = None
    origin: str = ""

    __repr__ = titled_repr(lambda explanation: f"{explanation.operator}: forward by {explanation.forward}")

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def __str__(self) -> str:
        lines = [self.operator, f"  forward: {self.forward}"]
        lines += [f"    origin: {self.origin}"] * bool(self.origin)
        lines += [f"    rejected: {reason}" for reason in self.rejected]
        lines += [f"    copies {copy}" for copy in self.copies]
        lines += [f"    sizes of the results: {self.sizing}"] * bool(self.sizing)
        lines += [f"  gradient of `{name}`: {source}" for name, source in self.gradients.items()]
        lines += [f"  tangent of `{name}`: {source}" for name, source in self.tangents.items()]
        nothing = "the tensors that the operations of the reference save" if self.ordinary else "nothing"
        if self.own_autograd:
            nothing = "the tensors that its own autograd saves"
        lines.append(f"  saved for the backward: {', '.join(self.saved) or nothing}")
        if self.recomputes:
            lines.append("  the backward runs the function that gradients are derived from")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


@in_silence()
def explain(specification: Specification, values: list[Any]) -> Explanation:
    """Explain a call with these argument values."""
    accepted, rejected = choose(specification.kernels, values)
    built = accepted.kernel.function if accepted else None
    if specification.origin.registered:
        forward = specification.origin.computes_by
    elif accepted:
        forward = str(accepted.kernel)
    else:
        forward = f"{specification.origin.own('forward') or 'reference'}, {specification.where}"
    rules = specification.gradients
    sources = gradient_sources(specification, values)
    own_autograd = any(each.kind == "own" for each in sources.values())
    ordinary = runs_ordinary(specification, values)
    plan = backward_plan(
        replace(specification, schema=specification.formula_schema),
        frozenset(filter(rules.differentiable, specification.schema.tensor_names)),
    )
    of_kernel = accepted is not None and ordinary
    saved = () if ordinary or own_autograd else _saved(plan)
    if of_kernel and isinstance(built, BuiltKernel):
        saved = built.saved(values)
    written_over = tuple(
        f"`{name}`: the backward needs its value before the call"
        for name in specification.schema.written
        if name in saved
    )
    return Explanation(
        specification.name,
        forward,
        tuple(f"{each.kernel}: {each.reason}" for each in rejected),
        {name: str(source) for name, source in sources.items()},
        {
            name: f"formula, {rule.where}" if isinstance(rule, Formula) else repr(rule)
            for name, rule in specification.tangents.rules.items()
        },
        saved,
        ordinary and not of_kernel,
        any(each.runs_again for each in sources.values()),
        tuple(specification.origin.notes(in_place=bool(specification.schema.written))),
        own_autograd,
        (*(built.copies(values) if isinstance(built, BuiltKernel) else ()), *written_over),
        built.sizing if isinstance(built, BuiltKernel) else "",
        accepted.kernel if accepted and not specification.origin.registered else None,
        accepted.kernel.given.origin_of(values)
        if accepted and isinstance(accepted.kernel.given, BuiltKernel)
        else "",
    )


def _saved(plan: BackwardPlan) -> tuple[str, ...]:
    """Return the names of saved tensors; an adopted class itself saves tensors while it runs."""
    of_class = any(isinstance(formula, ClassFormula) for formula in plan.formulas)
    return ("the values that its forward keeps on `ctx`",) if of_class else plan.saved
