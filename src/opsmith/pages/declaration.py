"""The declaration of an operator: its signature, and the source of each function in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opsmith.core import source
from opsmith.core.formula import Formula
from opsmith.core.location import where
from opsmith.core.origins.function_class import ClassFormula
from opsmith.core.schema import REQUIRED, Schema
from opsmith.core.specification import Specification

WIDTH = 80
"""Largest width of a signature in one line."""


@dataclass(frozen=True)
class ParameterRow:
    """A row for an argument or a result.

    Args:
        name: The name.
        kind: The annotation.
        shape: The declared shape; empty for none.
        remark: The default or the role.
    """

    name: str
    kind: str
    shape: str = ""
    remark: str = ""


@dataclass(frozen=True)
class CallSignature:
    """The signature of an operator.

    Args:
        call: The signature in Python.
        schema: The schema of torch.
        words: The docstring.
        arguments: The arguments in order.
        results: The results in order, hidden ones included.
    """

    call: str
    schema: str
    words: str
    arguments: tuple[ParameterRow, ...]
    results: tuple[ParameterRow, ...]


def signature_of(specification: Specification) -> CallSignature:
    """The signature of an operator."""
    schema = specification.schema
    shapes = _shapes(specification)
    return CallSignature(
        _call(specification.short_name, schema),
        schema.text(specification.name),
        inspect.cleandoc(specification.reference.__doc__ or ""),
        tuple(
            ParameterRow(
                each.name,
                each.kind.annotation(),
                shapes.get(each.name, ""),
                _joined(
                    [f"default {each.default!r}"] * (each.default is not REQUIRED),
                    ["by keyword"] * each.keyword_only,
                ),
            )
            for each in schema.arguments
        ),
        tuple(
            ParameterRow(
                each.name,
                each.annotation(),
                shapes.get(each.name, ""),
                _joined(
                    ["hidden from callers"] * each.hidden,
                    ["non-differentiable"] * (not each.differentiable),
                ),
            )
            for each in schema.results
        ),
    )


def _joined(*remarks: list[str]) -> str:
    return ", ".join(each for some in remarks for each in some)


def _call(name: str, schema: Schema) -> str:
    pieces = schema.parameters()
    shown = [schema.results[position] for position in schema.visible]
    kinds = [each.annotation() for each in shown]
    returned = kinds[0] if schema.single else f"tuple[{', '.join(kinds)}]"
    line = f"{name}({', '.join(pieces)}) -> {returned}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in pieces), f") -> {returned}"])


def _shapes(specification: Specification) -> dict[str, str]:
    """The declared shape of each argument and result."""
    declared = specification.shapes
    if declared is None:
        return {}
    named = {name: f"[{', '.join(dims.text.split())}]" for name, dims in declared.arguments.items()}
    results = specification.schema.results
    for result, dims in zip(results, declared.results, strict=False):
        named[result.name] = f"[{', '.join(dims.text.split())}]"
    return named


@dataclass(frozen=True)
class SourceCode:
    """The source of a function.

    Args:
        title: The role of the function.
        text: The source; empty if there is none.
        where: `file:line`.
    """

    title: str
    text: str
    where: str


def codes_of(specification: Specification) -> tuple[SourceCode, ...]:
    """The source of the reference, the formulas, the fake kernel and the samples."""
    rules = specification.gradients
    kind = "surrogate gradient" if rules.surrogate else "gradient"
    text = source.text(specification.reference, docstring=False)  # the page has it at the top
    reference = SourceCode(_reference_title(specification), text, where(specification.reference))
    found = [reference] * specification.origin.referenced
    own = specification.origin.own("forward")
    if own and own.function:
        found.append(_code(str(own), own.function))
    found += _formulas(rules.rules, kind)
    if rules.stand_in is not None:
        found.append(_code("stand-in, from which gradients are derived", rules.stand_in))
    found += _formulas(specification.tangents.rules, "tangent")
    others = {
        "fake kernel": specification.fake,
        "count of floating-point operations": specification.flops,
        "samples": specification.samples,
    }
    found += [_code(title, function) for title, function in others.items() if function is not None]
    return tuple(found)


def _reference_title(specification: Specification) -> str:
    return "the function, which is opaque" if specification.opaque else "reference"


def _formulas(rules: Mapping[str, Any], kind: str) -> Iterator[SourceCode]:
    """Each formula once, also a joint one of several inputs."""
    done: list[Formula] = []
    for name, rule in rules.items():
        if not isinstance(rule, Formula):
            yield SourceCode(f"{kind} of `{name}`", repr(rule), "")
        elif rule not in done:
            done.append(rule)
            names = ", ".join(f"`{each}`" for each in rule.answers_for)
            function = getattr(rule.function, "backward", None) if isinstance(rule, ClassFormula) else None
            many = "s" if len(rule.answers_for) > 1 else ""
            yield _code(f"{kind}{many} of {names}", function or rule.function, rule.where)


def _code(title: str, function: Callable[..., Any], location: str = "") -> SourceCode:
    return SourceCode(title, source.text(function), location or where(function))
