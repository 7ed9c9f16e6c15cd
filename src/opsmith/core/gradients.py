"""Gradient rules: for each input a formula, one of three answers, or nothing (then it is derived)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from opsmith import errors
from opsmith.core.answers import NonDifferentiable, NotImplementedGradient, Zero
from opsmith.core.location import where
from opsmith.core.schema import Schema

NEEDED = "grads_needed"
"""Parameter under which a joint formula learns which inputs need a gradient (a frozenset of names)."""

Answer = Zero | NonDifferentiable | NotImplementedGradient


@dataclass(frozen=True)
class Formula:
    """A function that computes the gradient of one input; a joint one returns a dict, by input name.

    Args:
        function: The function.
        inputs: The inputs it answers for.
        keywords: Its parameters, as written.
        parameters: What each of them means: the name of an input, a result or a gradient.
        joint: Whether it answers for several inputs.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    keywords: tuple[str, ...]
    parameters: tuple[str, ...]
    joint: bool = False

    @cached_property
    def where(self) -> str:
        """`file:line` of the formula."""
        return where(self.function)


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
            keywords = formula_parameters(rule, schema, operator, f"the gradient of `{name}`")
            rules[name] = Formula(rule, (name,), keywords, _meanings(keywords, schema))
        else:
            raise errors.FormulaError(
                f"the gradient of `{name}` is neither a function nor an answer",
                operator=operator,
                argument=name,
                expected="a function, or opsmith.zero, .non_differentiable or .not_implemented(...)",
                got=repr(rule),
                where=place,
                mend=f"write `{name}=lambda grad: ...`"
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
    keywords = formula_parameters(function, schema, operator, "the joint gradient", joint=True)
    formula = Formula(function, covered, keywords, _meanings(keywords, schema), joint=True)
    return dict.fromkeys(covered, formula)


def check_input(name: str, schema: Schema, operator: str, place: str) -> None:
    """Refuse a name that is no tensor argument."""
    if name not in schema.by_name:
        raise errors.UnknownInputError(
            f"a gradient is given for `{name}`, which is not an input",
            operator=operator,
            argument=name,
            expected=f"one of {_listed(schema.tensor_names)}",
            where=place,
            mend="name the gradient after the argument of the reference",
        )
    if name not in schema.tensor_names:
        raise errors.NotDifferentiableError(
            f"a gradient is given for `{name}`, which is not a tensor",
            operator=operator,
            argument=name,
            expected=f"one of {_listed(schema.tensor_names)}",
            got=schema.by_name[name].kind.hint(),
            where=place,
            mend=f"leave `{name}` out: only tensors have gradients",
        )


def formula_parameters(
    function: Callable[..., Any], schema: Schema, operator: str, what: str, *, joint: bool = False
) -> tuple[str, ...]:
    """The names a formula asks for, each checked against the inputs, results and gradients there are."""
    known = [*schema.names, *schema.result_position, *schema.gradient_position, *schema.aliases]
    known += [NEEDED] * joint
    place = where(function)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise errors.FormulaError(
            f"{what} has no signature that could be read",
            operator=operator,
            expected=f"parameters from {_listed(known)}",
            got=place,
            mend="write a function around it: `lambda grad: ...`",
        ) from error
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise errors.FormulaError(
                f"{what} takes `{parameter}`; a formula's parameters name what it needs",
                operator=operator,
                expected=f"parameters from {_listed(known)}",
                where=place,
                mend="name each thing that the formula uses",
            )
        if parameter.default is not parameter.empty:
            raise errors.FormulaError(
                f"{what} gives its parameter `{name}` a default, which would hide what it needs",
                operator=operator,
                argument=name,
                where=place,
                mend="close over the value instead: write the formula inside a function that has it",
            )
        if name not in known and name not in schema.shapes:
            raise errors.FormulaParameterError(
                f"{what} asks for `{name}`, which is no input, result or gradient",
                operator=operator,
                argument=name,
                expected=f"one of {_listed(known)}",
                where=place,
                mend=_nearest(name, known, schema),
            )
    return tuple(parameters)


def _meanings(keywords: tuple[str, ...], schema: Schema) -> tuple[str, ...]:
    return tuple(schema.aliases.get(name, name) for name in keywords)


def _nearest(name: str, known: list[str], schema: Schema) -> str:
    import difflib

    if name in ("grad_output", "grad_out", "g"):
        return f"the incoming gradient is called `{next(iter(schema.gradient_position))}`"
    if name == "grad" and len(schema.results) > 1:
        return f"with several results each has its own: {_listed(list(schema.gradient_position))}"
    if name in ("out", "output", "y"):
        return f"the result is called `{next(iter(schema.result_position))}`"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else "use one of those names"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
