"""How an operator is called: its arguments and results, with their shapes, and its author's words."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from opsmith.core.schema import REQUIRED, Schema
from opsmith.core.specification import Specification

WIDTH = 80
"""Columns of a call that stands in one line."""


@dataclass(frozen=True)
class Parameter:
    """An argument or a result.

    Args:
        name: Its name.
        kind: What it is, as Python writes it.
        shape: Its shape in letters; empty where none is declared.
        remark: Its default, or its role.
    """

    name: str
    kind: str
    shape: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Signature:
    """How an operator is called.

    Args:
        call: As one writes it in Python.
        schema: As torch writes it.
        words: Its author's docstring.
        arguments: In order.
        results: In order, hidden ones too.
    """

    call: str
    schema: str
    words: str
    arguments: tuple[Parameter, ...]
    results: tuple[Parameter, ...]


def signature_of(specification: Specification) -> Signature:
    """The signature of an operator."""
    schema = specification.schema
    shapes = _shapes(specification)
    return Signature(
        _call(specification.short_name, schema),
        schema.text(specification.name),
        inspect.cleandoc(specification.reference.__doc__ or ""),
        tuple(
            Parameter(
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
            Parameter(
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
    pieces: list[str] = []
    for each in schema.arguments:
        if each.keyword_only and "*" not in pieces:
            pieces.append("*")
        default = "" if each.default is REQUIRED else f" = {each.default!r}"
        pieces.append(f"{each.name}: {each.kind.annotation()}{default}")
    shown = [schema.results[position] for position in schema.visible]
    kinds = [each.annotation() for each in shown]
    returned = kinds[0] if schema.single else f"tuple[{', '.join(kinds)}]"
    line = f"{name}({', '.join(pieces)}) -> {returned}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in pieces), f") -> {returned}"])


def _shapes(specification: Specification) -> dict[str, str]:
    """The declared shape of each argument and result, in letters."""
    declared = specification.shapes
    if declared is None:
        return {}
    named = {name: f"[{', '.join(dims.text.split())}]" for name, dims in declared.arguments.items()}
    results = specification.schema.results
    for result, dims in zip(results, declared.results, strict=False):
        named[result.name] = f"[{', '.join(dims.text.split())}]"
    return named
