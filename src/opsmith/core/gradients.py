"""Rules for gradients, by input, and for tangents of forward mode, by result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from opsmith import errors
from opsmith.core.call_arguments import shown
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
"""Parameter of a joint formula that receives a frozenset of the names of the inputs that need a gradient."""

AUTOCAST = "grads_autocast"
"""Parameter of the formula of a class that receives the autocast of the call, as text."""

Rule = Formula | Zero | NonDifferentiable | NotImplementedGradient


@dataclass(frozen=True)
class GradientRules:
    """Gradient rules of an operator, by input name.

    Args:
        rules: Rule by input name; the gradient of an input without a rule is derived from the reference.
        surrogate: True if the rules are wrong on purpose, as in a straight-through estimator.
        stand_in: The smooth function whose true gradient is the surrogate, if the author gave one.
    """

    rules: Mapping[str, Rule] = field(default_factory=lambda: MappingProxyType({}))
    surrogate: bool = False
    stand_in: Callable[..., Any] | None = None

    def with_rules(self, rules: Mapping[str, Rule], **changes: Any) -> GradientRules:
        """Return these rules, updated by the given rules."""
        return replace(self, rules=MappingProxyType({**self.rules, **rules}), **changes)

    @property
    def given(self) -> bool:
        """True if the author gave any gradient."""
        return bool(self.rules) or self.stand_in is not None

    def differentiable(self, name: str) -> bool:
        """Return False for an input that is declared non-differentiable."""
        return not isinstance(self.rules.get(name), NonDifferentiable)


def formula_rules(given: Mapping[str, Any], schema: Schema) -> dict[str, Rule]:
    """Check formulas, given by input name, and return them as rules.

    Raises:
        UnknownInputError, NotDifferentiableError, FormulaError, FormulaParameterError: As their names say.
    """
    rules: dict[str, Rule] = {}
    for name, rule in given.items():
        _check_input(name, schema)
        if isinstance(rule, Zero | NonDifferentiable | NotImplementedGradient):
            rules[name] = rule
        else:
            _refuse_no_function(rule, name, "gradient", "lambda grad: ...")
            rules[name] = _gradient_names(schema).formula(rule, (name,), f"the gradient of `{name}`")
    return rules


def joint_rules(function: Callable[..., Any], inputs: tuple[str, ...], schema: Schema) -> dict[str, Rule]:
    """Check a joint formula, and return it as the rule of each of its inputs; by default, of every tensor."""
    _refuse_no_joint(function, "gradient")
    for name in inputs:
        _check_input(name, schema)
    covered = inputs or schema.tensor_names
    names = _gradient_names(schema, NEEDED)
    return dict.fromkeys(covered, names.formula(function, covered, "the joint gradient", joint=True))


def _check_input(name: str, schema: Schema) -> None:
    """Refuse a name that is not a tensor argument."""
    if name not in schema.by_name:
        raise errors.UnknownInputError(
            f"a gradient is given for `{name}`, which is not an input",
            argument=name,
            expected=f"one of {listed(schema.tensor_names)}",
            hint="name the gradient after the argument of the reference",
        )
    if name not in schema.tensor_names:
        raise errors.NotDifferentiableError(
            f"a gradient is given for `{name}`, which is not a tensor",
            argument=name,
            expected=f"one of {listed(schema.tensor_names)}",
            got=schema.by_name[name].kind.annotation(),
            hint=f"leave `{name}` out: only tensors have gradients",
        )


def _refuse_no_function(rule: Any, name: str, derivative: str, example: str) -> None:
    """Refuse a rule that is neither a function nor a value that replaces one."""
    if callable(rule):
        return
    constant = ", .non_differentiable" if derivative == "gradient" else ""
    is_zero = rule is None or (isinstance(rule, int | float | complex) and rule == 0)
    raise errors.FormulaError(
        f"the {derivative} of `{name}` is neither a function nor a value that replaces a function",
        argument=name,
        expected=f"a function, or opsmith.zero{constant} or .not_implemented(...)",
        got=shown(rule) if hasattr(rule, "shape") else repr(rule),
        hint=f"write `{name}={example}`" + " or `opsmith.zero`" * is_zero,
    )


def _refuse_no_joint(function: Any, derivative: str) -> None:
    """Refuse a joint formula that is not a function."""
    if not callable(function):
        raise errors.FormulaError(
            f"the joint {derivative} is not a function",
            expected=f"a function that returns a dict of {derivative}s by name",
            got=shown(function),
            hint=f"write `@op.{derivative}s` over the function, or `op.{derivative}s(name=formula)`",
        )


def _gradient_names(schema: Schema, *more: str) -> FormulaNames:
    """Return the names that a gradient formula may use: inputs, results and gradients."""
    return FormulaNames(
        [*schema.names, *schema.result_position, *schema.gradient_position, *schema.aliases, *more],
        schema.shapes,
        "input, result or gradient",
        partial(_gradient_hint, schema),
        schema.aliases,
    )


def _gradient_hint(schema: Schema, name: str) -> str:
    if name in ("grad_output", "grad_out", "g"):
        return f"the gradient of the result is called `{next(iter(schema.gradient_position))}`"
    if name == "grad" and len(schema.results) > 1:
        return f"with several results, each has its own gradient: {listed(list(schema.gradient_position))}"
    if name in ("out", "output", "y"):
        return f"the result is called `{next(iter(schema.result_position))}`"
    return ""


TangentRule = Formula | Zero | NotImplementedGradient


@dataclass(frozen=True)
class TangentRules:
    """Tangent rules of an operator, by result name; a tangent without a rule is derived."""

    rules: Mapping[str, TangentRule] = field(default_factory=lambda: MappingProxyType({}))

    def with_rules(self, rules: Mapping[str, TangentRule]) -> TangentRules:
        """Return these rules, updated by the given rules."""
        return TangentRules(MappingProxyType({**self.rules, **rules}))


def tangent_rules(given: Mapping[str, Any], schema: Schema) -> dict[str, TangentRule]:
    """Check tangents, given by result name, and return them as rules.

    Raises:
        UnknownResultError, NotDifferentiableError, FormulaError, FormulaParameterError: As their names say.
    """
    rules: dict[str, TangentRule] = {}
    for given_name, rule in given.items():
        name = _result(given_name, schema)
        if isinstance(rule, Zero | NotImplementedGradient):
            rules[name] = rule
        else:
            example = f"lambda {next(iter(schema.tangents))}: ..."
            _refuse_no_function(rule, given_name, "tangent", example)
            names = _tangent_names(schema)
            rules[name] = names.formula(rule, (name,), f"the tangent of `{given_name}`")
    return rules


def joint_tangent_rules(
    function: Callable[..., Any], results: tuple[str, ...], schema: Schema
) -> dict[str, TangentRule]:
    """Check a joint tangent formula, and return it as the rule of each of its results; by default of all."""
    _refuse_no_joint(function, "tangent")
    named = tuple(_result(name, schema) for name in results)
    covered = named or tuple(result.name for result in schema.results if result.differentiable)
    names = _tangent_names(schema)
    return dict.fromkeys(covered, names.formula(function, covered, "the joint tangent", joint=True))


def _tangent_names(schema: Schema) -> FormulaNames:
    """Return the names that a tangent formula may use: inputs, results and tangents of inputs."""
    aliases = _aliases(schema)
    return FormulaNames(
        [*schema.names, *schema.result_position, *schema.tangents],
        aliases,
        "input, result or tangent of an input",
        partial(_tangent_hint, schema),
        aliases,
    )


def _result(name: str, schema: Schema) -> str:
    """Return the name of the result; refuse a result that has no tangent."""
    name = _aliases(schema).get(name, name)
    differentiable = [result.name for result in schema.results if result.differentiable]
    if name not in schema.result_position:
        raise errors.UnknownResultError(
            f"a tangent is given for `{name}`, which is not a result",
            argument=name,
            expected=f"one of {listed(differentiable)}",
            hint="name the tangent after a result: gradients belong to inputs, tangents to results",
        )
    if name not in differentiable:
        raise errors.NotDifferentiableError(
            f"a tangent is given for `{name}`, which is declared non-differentiable",
            argument=name,
            expected=f"one of {listed(differentiable)}",
            hint=f"leave `{name}` out, or change its role in `results=`",
        )
    return name


def _aliases(schema: Schema) -> dict[str, str]:
    return {alias: name for alias, name in schema.aliases.items() if name in schema.result_position}


def _tangent_hint(schema: Schema, name: str) -> str:
    if name in ("grad", *schema.gradient_position):
        return f"forward mode has tangents instead of gradients: {listed(list(schema.tangents))}"
    if name == "tangent" or name.removeprefix("tangent_") in schema.names:
        return f"each tensor has its own tangent: {listed(list(schema.tangents))}"
    return ""
