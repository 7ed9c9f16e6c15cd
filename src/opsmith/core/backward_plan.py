"""Plan of a backward: the formulas to run and the tensors to save, for the inputs that need gradients.

A call without a formula or kernel needs no plan: ordinary autograd differentiates the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opsmith.core.formula import Formula, NotImplementedGradient, Zero
from opsmith.core.gradients import NEEDED
from opsmith.core.kernels import Kernel, choose
from opsmith.core.specification import Specification


@dataclass(frozen=True)
class BackwardPlan:
    """The work of one backward.

    Args:
        needed: Inputs whose gradient is requested.
        formulas: Formulas to run, each once, even if it serves several inputs.
        zeros: Inputs whose gradient is zero.
        refused: Inputs whose gradient is declared as not implemented.
        derived: Inputs whose gradient comes from recomputing the reference.
        follows_hidden: Hidden results that formulas use without using their gradients. For a second-order
            gradient, the derivatives of these results come from the reference.
        saved: Names of the inputs and results to keep for the backward.
        inputs: For each formula, the inputs whose gradient it computes.
    """

    needed: frozenset[str]
    formulas: tuple[Formula, ...]
    zeros: tuple[str, ...]
    refused: tuple[str, ...]
    derived: tuple[str, ...]
    follows_hidden: tuple[str, ...]
    saved: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]


def backward_plan(specification: Specification, needed: frozenset[str]) -> BackwardPlan:
    """Plan the backward for these inputs; only tensors that the needed formulas name are saved."""
    schema, rules = specification.schema, specification.gradients.rules
    differentiable = specification.gradients.differentiable
    wanted = [name for name in schema.tensor_names if name in needed and differentiable(name)]
    formulas: list[Formula] = []
    zeros: list[str] = []
    refused: list[str] = []
    derived: list[str] = []
    for name in wanted:
        rule = rules.get(name)
        if isinstance(rule, Formula):
            if rule not in formulas:
                formulas.append(rule)
        elif isinstance(rule, Zero):
            zeros.append(name)
        elif isinstance(rule, NotImplementedGradient):
            refused.append(name)
        else:
            derived.append(name)
    named = {parameter for formula in formulas for parameter in formula.parameters}
    # A hidden result that a formula uses depends on the inputs: a second-order gradient differentiates it.
    follows_hidden = tuple(
        result.name
        for result in schema.results
        if result.hidden
        and result.differentiable
        and result.name in named
        and any(result.gradient_name() not in formula.parameters for formula in formulas)
    )
    keep = named - set(schema.gradient_position) - set(schema.shapes) - {NEEDED}
    if runs_again(specification, bool(derived)) or (follows_hidden and not specification.opaque):
        keep |= set(schema.names)
    saved = tuple(name for name in (*schema.names, *schema.result_position) if name in keep)
    return BackwardPlan(
        frozenset(wanted),
        tuple(formulas),
        tuple(zeros),
        tuple(refused),
        tuple(derived),
        follows_hidden,
        saved,
        tuple(tuple(name for name in wanted if rules.get(name) == formula) for formula in formulas),
    )


def runs_again(specification: Specification, derived: bool) -> bool:
    """Return True if the backward runs the reference, or the stand-in, to derive gradients."""
    return derived and (not specification.opaque or specification.gradients.stand_in is not None)


def runs_ordinary(
    specification: Specification, values: list[Any] | None, *, forward_mode: bool = False
) -> bool:
    """Return True if the reference runs under ordinary autograd: no formula and no kernel replaces it.

    Args:
        specification: The operator.
        values: Argument values of the call; None for a call that its kernels take.
        forward_mode: True if tangents may be needed, so that tangent formulas count too.
    """
    if specification.opaque or specification.gradients.given:
        return False
    if forward_mode and specification.tangents.rules:
        return False
    if not takes_kernel(specification, values):
        return True
    kernels = specification.kernels if values is None else [kernel_of(specification, values)]
    return bool(kernels) and all(each is not None and each.differentiable for each in kernels)


def kernel_of(specification: Specification, values: list[Any]) -> Kernel | None:
    """Return the kernel that takes a call with these values; None if the reference computes it."""
    accepted, _ = choose(specification.kernels, values)
    return None if accepted is None else accepted.kernel


def takes_kernel(specification: Specification, values: list[Any] | None) -> bool:
    """Return True if a kernel takes a call with these values: the author's, or an adopted operator's own.

    Args:
        specification: The operator.
        values: Argument values of the call; None for a call that its kernels take.
    """
    if specification.origin.registered:
        return True
    kernels = specification.kernels
    return bool(kernels) and (values is None or choose(kernels, values)[0] is not None)
