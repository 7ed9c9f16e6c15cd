"""Rules for gradients, by input, and for tangents of forward mode, by result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from opsmith import errors
from opsmith.core.formula import (
    Formula,
    FormulaNames,
    NonDifferentiable,
    NotImplementedGradient,
    Zero,
    listed,
)
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
    vocabulary = FormulaNames(
        operator,
        [*known, *[NEEDED] * joint],
        schema.shapes,
        "input, result or gradient",
        partial(_gradient_hint, schema),
    )
    return vocabulary.keywords_of(function, what)


def _meanings(keywords: tuple[str, ...], schema: Schema) -> tuple[str, ...]:
    return tuple(schema.aliases.get(name, name) for name in keywords)


def _gradient_hint(schema: Schema, name: str) -> str:
    if name in ("grad_output", "grad_out", "g"):
        return f"the incoming gradient is called `{next(iter(schema.gradient_position))}`"
    if name == "grad" and len(schema.results) > 1:
        return f"with several results each has its own: {listed(list(schema.gradient_position))}"
    if name in ("out", "output", "y"):
        return f"the result is called `{next(iter(schema.result_position))}`"
    return ""


TangentRule = Formula | Zero | NotImplementedGradient


@dataclass(frozen=True)
class TangentRules:
    """Every tangent rule of an operator, by result name; a result that is absent is derived."""

    rules: Mapping[str, TangentRule] = field(default_factory=lambda: MappingProxyType({}))

    def with_rules(self, rules: Mapping[str, TangentRule]) -> TangentRules:
        """These rules and others, which win."""
        return TangentRules(MappingProxyType({**self.rules, **rules}))


def tangent_rules(
    given: Mapping[str, Any], schema: Schema, operator: str, place: str
) -> dict[str, TangentRule]:
    """Check tangents given by result name, and turn them into rules.

    Raises:
        UnknownResultError, NotDifferentiableError, FormulaError, FormulaParameterError: As their names say.
    """
    rules: dict[str, TangentRule] = {}
    for given_name, rule in given.items():
        name = _result(given_name, schema, operator, place)
        if isinstance(rule, Zero | NotImplementedGradient):
            rules[name] = rule
        elif callable(rule):
            rules[name] = _tangent_formula(rule, (name,), schema, operator, f"the tangent of `{given_name}`")
        else:
            raise errors.FormulaError(
                f"the tangent of `{given_name}` is neither a function nor an answer",
                operator=operator,
                argument=given_name,
                expected="a function, or opsmith.zero or .not_implemented(...)",
                got=repr(rule),
                where=place,
                hint=f"write `{given_name}=lambda {next(iter(schema.tangents))}: ...`"
                + (" or `opsmith.zero`" if rule is None or rule == 0 else ""),
            )
    return rules


def joint_tangent_rules(
    function: Callable[..., Any], results: tuple[str, ...], schema: Schema, operator: str, place: str
) -> dict[str, TangentRule]:
    """Check a joint tangent formula, and turn it into one rule for all its results; none named means all."""
    named = tuple(_result(name, schema, operator, place) for name in results)
    covered = named or tuple(result.name for result in schema.results if result.differentiable)
    formula = _tangent_formula(function, covered, schema, operator, "the joint tangent", joint=True)
    return dict.fromkeys(covered, formula)


def _tangent_formula(
    function: Callable[..., Any],
    results: tuple[str, ...],
    schema: Schema,
    operator: str,
    what: str,
    *,
    joint: bool = False,
) -> Formula:
    aliases = _aliases(schema)
    vocabulary = FormulaNames(
        operator,
        [*schema.names, *schema.result_position, *schema.tangents],
        aliases,
        "input, result or tangent of an input",
        partial(_tangent_hint, schema),
    )
    keywords = vocabulary.keywords_of(function, what)
    parameters = tuple(aliases.get(name, name) for name in keywords)
    return Formula(function, results, keywords, parameters, joint)


def _result(name: str, schema: Schema, operator: str, place: str) -> str:
    """The result that a name means; refuses one that has no tangent."""
    name = _aliases(schema).get(name, name)
    differentiable = [result.name for result in schema.results if result.differentiable]
    if name not in schema.result_position:
        raise errors.UnknownResultError(
            f"a tangent is given for `{name}`, which is not a result",
            operator=operator,
            argument=name,
            expected=f"one of {listed(differentiable)}",
            where=place,
            hint="name the tangent after the result: a gradient belongs to an input, a tangent to a result",
        )
    if name not in differentiable:
        raise errors.NotDifferentiableError(
            f"a tangent is given for `{name}`, which is declared non-differentiable",
            operator=operator,
            argument=name,
            expected=f"one of {listed(differentiable)}",
            where=place,
            hint=f"leave `{name}` out, or change its role in `results=`",
        )
    return name


def _aliases(schema: Schema) -> dict[str, str]:
    return {alias: name for alias, name in schema.aliases.items() if name in schema.result_position}


def _tangent_hint(schema: Schema, name: str) -> str:
    if name in ("grad", *schema.gradient_position):
        return f"a gradient comes in from behind; here come in {listed(list(schema.tangents))}"
    if name == "tangent" or name.removeprefix("tangent_") in schema.names:
        return f"each tensor has its own tangent: {listed(list(schema.tangents))}"
    return ""
