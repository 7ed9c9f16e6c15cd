"""Declarations that an adopted Function needs: derived from the failures of a check, and tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.adopting.function_class import adopt_function
from opsmith.adopting.signature import value_names
from opsmith.checking import check
from opsmith.checking.diagnosis.diagnose import CONSTANT
from opsmith.checking.effort import EFFORTS
from opsmith.checking.report import Failure, Report
from opsmith.checking.subject_kinds import throwaway_name
from opsmith.core.call_arguments import CallArguments
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import class_of
from opsmith.core.tensors import map_tensors, nested_tensors
from opsmith.surveying.guesses import ClassSource, Guess
from opsmith.surveying.trials import fresh_inputs, run, seeded

NAMESPACE = "surveyed"

TRACED = "opcheck"
"""The property that traces an operator once."""


ON_THE_GUESS = replace(EFFORTS["quick"], variations=0)
"""Effort of a check on guessed arguments: no variations, since the class may refuse all others."""


@dataclass
class Declaration:
    """A class, arguments that it accepts, and its declarations so far.

    Args:
        source: The class.
        guess: Arguments on which it runs.
        seed: Seed of the check.
        kinds: Values of `kind=`.
    """

    source: ClassSource
    guess: Guess
    seed: int
    kinds: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the arguments of the guess."""
        return value_names(self.source.function_class, len(self.guess.values))

    def options(self) -> dict[str, str]:
        """Return the declarations as code, by their keywords."""
        code: dict[str, str] = {}
        if self.kinds:
            words = [f'"{kind}"' for kind in self.kinds]
            code["kind"] = words[0] if len(words) == 1 else f"({', '.join(words)})"
        return code

    def operator(self) -> Operator[..., Any]:
        """Adopt the class under a temporary name, and call it once, which shows its types."""
        operator = adopt_function(
            self.source.function_class,
            throwaway_name(NAMESPACE, self.source.function_class),
            reference=None,
            samples=None,
            signature=None,
            kind=self.kinds or "true",
            opaque=False,
            module=__name__,
        )
        with seeded(self.seed):
            operator(*map_tensors(torch.clone, self.guess.values))
        return operator

    def given(self, operator: Operator[..., Any], guess: Guess) -> list[Any]:
        """Return the arguments of a guess in the form of the operator's."""
        adopted, values = class_of(operator.specification.origin), map_tensors(torch.clone, guess.values)
        return list(adopted.completed(tuple(values), {})[0])

    def check(self, operator: Operator[..., Any]) -> Report:
        """Check the operator on the guess with little effort, and trace it once."""
        # A gradient that is assigned where it should be added is right for indices that do not repeat.
        guesses, function_class = self.guess.with_other_indices(), self.source.function_class
        also = [each for each in guesses if run(function_class, each, self.seed) == "gradients"]
        samples = [CallArguments(tuple(self.given(operator, each))) for each in (self.guess, *also)]
        # A positive guess tests a restricted domain, which special values would leave.
        skip = ["values"] if self.guess.positive else None
        report = check(operator, samples=samples, seed=self.seed, effort=ON_THE_GUESS, skip=skip)
        checked = {outcome.property for outcome in report.outcomes if outcome.status != "skipped"}
        if TRACED not in checked:
            return report
        traced = check(operator, samples=samples, seed=self.seed, only=[TRACED])
        instead = {outcome.property: outcome for outcome in traced.outcomes if not outcome.left_out}
        outcomes = tuple(instead.get(outcome.property, outcome) for outcome in report.outcomes)
        return replace(report, outcomes=outcomes)


def is_identity(declaration: Declaration, index: int) -> bool:
    """Return True if the forward returns this argument unchanged."""
    return any(torch.equal(each, declaration.guess.values[index]) for each in _results(declaration))


def returns_float32(declaration: Declaration) -> bool:
    """Return True if a class returns float32 for float64."""
    values = declaration.guess.values
    wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in values)
    return wide and any(result.dtype == torch.float32 for result in _results(declaration))


def _results(declaration: Declaration) -> list[Tensor]:
    apply: Callable[..., Any] = declaration.source.function_class.apply
    with seeded(declaration.seed), torch.no_grad():
        return list(nested_tensors(apply(*fresh_inputs(declaration.guess.values)[1])))


OTHER = ("layout", "raises", "nondeterministic", "not-exercised")
"""Causes other than a wrong value of the derivative."""


def add_declaration(declaration: Declaration, report: Report) -> str | None:
    """Add a declaration that the failures suggest, and return its reason; None if they suggest none."""
    failures = [failure for failure in report.failures if failure.follows is None]
    for rule in (_random, _low_precision, _deliberate_gradient):
        reason = rule(declaration, failures)
        if reason is not None:
            return reason
    return None


def _random(declaration: Declaration, failures: list[Failure]) -> str | None:
    if "stochastic" in declaration.kinds or not any(
        failure.property == "randomness" and "draws" in failure.evidence for failure in failures
    ):
        return None
    declaration.kinds.append("stochastic")
    return (
        'its forward draws random numbers: declare `kind="stochastic"`, and torch never merges two '
        "calls into one"
    )


def _low_precision(declaration: Declaration, failures: list[Failure]) -> str | None:
    if "float32" in declaration.kinds or not failures:
        return None
    returns = returns_float32(declaration)
    if not returns and not any(failure.cause == "precision" for failure in failures):
        return None
    declaration.kinds.append("float32")
    what = "returns" if returns else "computes in"
    return f'it {what} float32 for float64: if this is intended, declare `kind="float32"`'


def _deliberate_gradient(declaration: Declaration, failures: list[Failure]) -> str | None:
    """Declare a gradient that differs from the derivative, if there is evidence that it is intended."""
    if set(declaration.kinds) & {"surrogate", "nonlinear", "approximate"}:
        return None
    if any(failure.cause == "nonlinear-grad" for failure in failures):
        declaration.kinds.append("nonlinear")
        return (
            "twice the grad_output does not give twice the gradient, for example because its backward clips "
            'gradients: if this is intended, declare `kind="nonlinear"`; otherwise its backward is wrong'
        )
    for failure in failures:
        if failure.property != "gradient" or failure.cause in OTHER or failure.input not in declaration.names:
            continue
        if CONSTANT in failure.message:
            declaration.kinds.append("surrogate")
            return (
                f"small changes of `{failure.input}` do not change the results of its forward, so the "
                "derivative is zero, but its backward returns another gradient: if this is intended "
                '(a straight-through estimator), declare `kind="surrogate"`; otherwise its backward is wrong'
            )
        if is_identity(declaration, declaration.names.index(failure.input)):
            declaration.kinds.append("surrogate")
            return (
                f"its forward returns `{failure.input}` unchanged, but its backward changes the gradient: "
                'if this is intended (a gradient that is scaled or reversed), declare `kind="surrogate"`; '
                "otherwise its backward is wrong"
            )
    return None
