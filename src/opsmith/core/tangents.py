"""Tangent rules, for forward mode: for each result a formula, an answer, or nothing (then it is derived)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from opsmith import errors
from opsmith.core.answers import NotImplementedGradient, Zero
from opsmith.core.formula import Formula, Vocabulary, listed
from opsmith.core.schema import Schema

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
            rules[name] = _formula(rule, (name,), schema, operator, f"the tangent of `{given_name}`")
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
    formula = _formula(function, covered, schema, operator, "the joint tangent", joint=True)
    return dict.fromkeys(covered, formula)


def _formula(
    function: Callable[..., Any],
    results: tuple[str, ...],
    schema: Schema,
    operator: str,
    what: str,
    *,
    joint: bool = False,
) -> Formula:
    aliases = _aliases(schema)
    vocabulary = Vocabulary(
        operator,
        [*schema.names, *schema.result_position, *schema.tangents],
        aliases,
        "input, result or tangent of an input",
        partial(_hint, schema),
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


def _hint(schema: Schema, name: str) -> str:
    if name in ("grad", *schema.gradient_position):
        return f"a gradient comes in from behind; here come in {listed(list(schema.tangents))}"
    if name == "tangent" or name.removeprefix("tangent_") in schema.names:
        return f"each tensor has its own tangent: {listed(list(schema.tangents))}"
    return ""
