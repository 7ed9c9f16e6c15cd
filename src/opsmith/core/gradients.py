"""Gradient rules: for each input a formula, one of three answers, or nothing (then it is derived)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from opsmith import errors
from opsmith.core.answers import NonDifferentiable, NotImplementedGradient, Zero
from opsmith.core.formula import Formula, Vocabulary, listed
from opsmith.core.schema import Schema

NEEDED = "grads_needed"
"""Parameter under which a joint formula learns which inputs need a gradient (a frozenset of names)."""

Answer = Zero | NonDifferentiable | NotImplementedGradient


Rule = Formula | Answer


@dataclass(frozen=True)
class GradientRules:
    """Every rule of an operator, by input name.

    Args:
        rules: Formula or answer by input name; an input that is absent is derived from the reference.
        surrogate: Whether the rules are wrong on purpose (a straight-through estimator, say).
        stand_in: The smooth function whose true gradient a surrogate takes, if the author stated one.
    """

    rules: Mapping[str, Rule] = field(default_factory=lambda: MappingProxyType({}))
    surrogate: bool = False
    stand_in: Callable[..., Any] | None = None

    def with_rules(self, rules: Mapping[str, Rule], **changes: Any) -> GradientRules:
        """These rules and others, which win."""
        return replace(self, rules=MappingProxyType({**self.rules, **rules}), **changes)

    @property
    def given(self) -> bool:
        """Whether the author said anything about gradients."""
        return bool(self.rules) or self.stand_in is not None

    def differentiable(self, name: str) -> bool:
        """Whether gradients flow to this input at all."""
        return not isinstance(self.rules.get(name), NonDifferentiable)


def formula_rules(given: Mapping[str, Any], schema: Schema, operator: str, place: str) -> dict[str, Rule]:
    """Check formulas given by input name, and turn them into rules.

    Raises:
        UnknownInputError, NotDifferentiableError, FormulaError, FormulaParameterError: As their names say.
    """
    rules: dict[str, Rule] = {}
    for name, rule in given.items():
        check_input(name, schema, operator, place)
        if isinstance(rule, Zero | NonDifferentiable | NotImplementedGradient):
            rules[name] = rule
        elif callable(rule):
            keywords = _keywords(rule, schema, operator, f"the gradient of `{name}`")
            rules[name] = Formula(rule, (name,), keywords, _meanings(keywords, schema))
        else:
            raise errors.FormulaError(
                f"the gradient of `{name}` is neither a function nor an answer",
                operator=operator,
                argument=name,
                expected="a function, or opsmith.zero, .non_differentiable or .not_implemented(...)",
                got=repr(rule),
                where=place,
                hint=f"write `{name}=lambda grad: ...`"
                + (" or `opsmith.zero`" if rule is None or rule == 0 else ""),
            )
    return rules


def joint_rules(
    function: Callable[..., Any], inputs: tuple[str, ...], schema: Schema, operator: str, place: str
) -> dict[str, Rule]:
    """Check a joint formula, and turn it into one rule for all its inputs; none named means every tensor."""
    for name in inputs:
        check_input(name, schema, operator, place)
    covered = inputs or schema.tensor_names
    keywords = _keywords(function, schema, operator, "the joint gradient", joint=True)
    formula = Formula(function, covered, keywords, _meanings(keywords, schema), joint=True)
    return dict.fromkeys(covered, formula)


def check_input(name: str, schema: Schema, operator: str, place: str) -> None:
    """Refuse a name that is no tensor argument."""
    if name not in schema.by_name:
        raise errors.UnknownInputError(
            f"a gradient is given for `{name}`, which is not an input",
            operator=operator,
            argument=name,
            expected=f"one of {listed(schema.tensor_names)}",
            where=place,
            hint="name the gradient after the argument of the reference",
        )
    if name not in schema.tensor_names:
        raise errors.NotDifferentiableError(
            f"a gradient is given for `{name}`, which is not a tensor",
            operator=operator,
            argument=name,
            expected=f"one of {listed(schema.tensor_names)}",
            got=schema.by_name[name].kind.annotation(),
            where=place,
            hint=f"leave `{name}` out: only tensors have gradients",
        )


def _keywords(
    function: Callable[..., Any], schema: Schema, operator: str, what: str, *, joint: bool = False
) -> tuple[str, ...]:
    """The names a formula asks for, each checked against the inputs, results and gradients there are."""
    known = [*schema.names, *schema.result_position, *schema.gradient_position, *schema.aliases]
    vocabulary = Vocabulary(
        operator,
        [*known, *[NEEDED] * joint],
        schema.shapes,
        "input, result or gradient",
        partial(_hint, schema),
    )
    return vocabulary.keywords_of(function, what)


def _meanings(keywords: tuple[str, ...], schema: Schema) -> tuple[str, ...]:
    return tuple(schema.aliases.get(name, name) for name in keywords)


def _hint(schema: Schema, name: str) -> str:
    if name in ("grad_output", "grad_out", "g"):
        return f"the incoming gradient is called `{next(iter(schema.gradient_position))}`"
    if name == "grad" and len(schema.results) > 1:
        return f"with several results each has its own: {listed(list(schema.gradient_position))}"
    if name in ("out", "output", "y"):
        return f"the result is called `{next(iter(schema.result_position))}`"
    return ""
