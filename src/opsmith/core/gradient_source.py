"""Source of each gradient of a call: a formula, a declaration, autograd, or a derivation.

The explanation of a call, the page and the graph of an operator all take it from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from opsmith.core.backward_plan import kernel_of, runs_ordinary
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula, NonDifferentiable
from opsmith.core.gradients import Rule
from opsmith.core.location import where
from opsmith.core.origins.function_class import ClassFormula
from opsmith.core.specification import Specification

Kind = Literal["formula", "declared", "own", "stand-in", "missing", "kernel", "ordinary", "reference"]
"""Written as code; declared by a value; the autograd of an adopted operator; derived from the stand-in;
missing, as none can be derived; the backward of a kernel; ordinary autograd of the reference; derived from
the reference, which the backward runs again."""


@dataclass(frozen=True)
class GradientSource:
    """Source of the gradient of one input.

    Args:
        kind: Its kind.
        words: Its description.
        where: `file:line` of the code that computes the gradient, if an author wrote it.
    """

    kind: Kind
    words: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.words}, {self.where}" if self.where else self.words

    @property
    def runs_again(self) -> bool:
        """True if the backward runs the reference, or the stand-in."""
        return self.kind in ("stand-in", "reference")


def gradient_sources(
    specification: Specification, values: list[Any] | None = None
) -> dict[str, GradientSource]:
    """Return the source of the gradient of each tensor argument.

    Args:
        specification: The operator.
        values: Argument values of the call; None for a call that its kernels take.
    """
    rules, without_rule = specification.gradients.rules, _without_rule(specification, values)
    return {
        name: _of_rule(specification, rules[name]) if name in rules else without_rule
        for name in specification.schema.tensor_names
    }


def _of_rule(specification: Specification, rule: Rule) -> GradientSource:
    kind = "surrogate " * specification.gradients.surrogate
    if isinstance(rule, ClassFormula):
        return GradientSource("formula", f"{kind}{specification.origin.own('gradient')}", rule.where)
    if isinstance(rule, Formula):
        return GradientSource("formula", f"{kind}{'joint ' * rule.joint}formula", rule.where)
    if isinstance(rule, NonDifferentiable):
        return GradientSource("declared", "none: non-differentiable")
    return GradientSource("declared", repr(rule))


def _without_rule(specification: Specification, values: list[Any] | None) -> GradientSource:
    rules = specification.gradients
    if rules.stand_in is not None:
        return GradientSource("stand-in", "derived from the stand-in", where(rules.stand_in))
    devices = {""} if values is None else {each.device.type for each in tensors_in(values)}
    if not rules.given and any(specification.origin.own("gradient", device) for device in devices):
        return GradientSource("own", OWN_AUTOGRAD)
    if specification.opaque:
        return GradientSource("missing", "none: the operator is opaque and no formula is given")
    if runs_ordinary(specification, values):
        own = (each for each in specification.kernels if each.differentiable)
        kernel = next(own, None) if values is None else kernel_of(specification, values)
        if kernel is not None:
            return GradientSource("kernel", "backward of the kernel", kernel.where)
        return GradientSource("ordinary", "ordinary autograd of the reference")
    return GradientSource("reference", "derived: the reference, run again")


OWN_AUTOGRAD = "the operator's own autograd; derived in forward mode and under `torch.func`"
