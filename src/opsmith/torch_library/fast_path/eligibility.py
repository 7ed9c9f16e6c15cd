"""Eligibility for the fast path: of operators, of the arguments of a call, and of call signatures."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.core.argument_types import BOOL, FLOAT, INT, NUMBER, STR, ArgumentType
from opsmith.core.schema import REQUIRED, Argument, Schema
from opsmith.core.shapes import ANY
from opsmith.core.specification import Specification

_SCALARS = {FLOAT: "_op_float", INT: "_op_int", BOOL: "_op_bool", STR: "_op_str"}


def has_fast_path(specification: Specification) -> bool:
    """Return True if calls of an operator may take the fast path."""
    schema = specification.schema
    by_context = any(kernel.by_context for kernel in specification.kernels)
    reserved = specification.short_name.startswith("_op_")
    return (
        schema.always_tensors
        and (not schema.written or len(schema.results) <= 1)
        and not (schema.written and schema.hidden)
        and not (reserved or by_context or specification.origin.outputs is not None)
        and takes_fast_path(schema)
    )


def takes_fast_path(schema: Schema) -> bool:
    """Return True if the fast path can take arguments as an operator has them."""
    tensors = [argument.kind for argument in schema.arguments if argument.kind.is_tensor]
    optional = sum(kind.optional for kind in tensors)
    return (
        not any(name.startswith("_op_") for name in schema.names)
        and optional < len(tensors)
        and not any(kind.sequence and (kind.optional or kind.item_optional) for kind in tensors)
    )


def is_int_sequence(kind: ArgumentType) -> bool:
    """Return True for a sequence of integers, as a size or stride."""
    return kind.sequence and kind.base is INT and not kind.item_optional and kind.structure is None


def are_ints(value: Any, length: int | None) -> bool:
    """Return True if a value is a plain sequence of integers, none of them symbolic."""
    if type(value) not in (tuple, torch.Size, list) or length not in (None, len(value)):
        return False
    return all(type(item) is int for item in value)


def type_condition(argument: Argument) -> str:
    """Source of a condition: the argument, not a tensor, has a type that the fast path takes."""
    kind = argument.kind
    if kind.base is FLOAT and not kind.sequence:
        return unless_none(argument, "(_op_type({0}) is _op_float or _op_type({0}) is _op_int)")
    if kind.base is NUMBER and not kind.sequence:
        return unless_none(argument, "(_op_type({0}) is _op_int or _op_type({0}) is _op_float)")
    if is_int_sequence(kind):
        several = f"_op_are_ints({{0}}, {kind.length})"
        return unless_none(argument, f"_op_type({{0}}) is _op_int or {several}" if kind.spread else several)
    if kind.base in _SCALARS and (not kind.sequence or kind.spread):
        return unless_none(argument, f"_op_type({{0}}) is {_SCALARS[kind.base]}")
    name = argument.name
    if kind.base.exact is not None and not kind.sequence:
        return unless_none(argument, f"_op_type({{0}}) is _op_exact_{name}")
    return (
        "False"
        if kind.structure is not None or argument.default is REQUIRED
        else f"{name} is _op_default_{name}"
    )


def unless_none(argument: Argument, condition: str) -> str:
    """Source of a condition on an argument; an optional one that is None fulfils it."""
    text = condition.format(argument.name)
    return f"({argument.name} is None or {text})" if argument.kind.optional else f"({text})"


def size_condition(specification: Specification) -> str:
    """Source of a condition: sizes of the same letter are equal; empty if nothing is to be checked."""
    shapes = specification.shapes
    if shapes is None:
        return ""
    everything = f"_op_in_shape(({', '.join(specification.schema.names)}, ))"
    lists = {each.name for each in specification.schema.arguments if each.kind.sequence}
    if lists & set(shapes.arguments) or sum(dims.leading for dims in shapes.arguments.values()) > 1:
        return everything
    optional = {each.name for each in specification.schema.arguments if each.kind.optional}
    if shapes.integers & optional:
        return everything  # None is not a size
    first: dict[str, str] = {name: name for name in shapes.integers}
    conditions: list[str] = []
    for name in sorted(shapes.arguments, key=lambda name: name in optional):
        dims = shapes.arguments[name]
        agree: list[str] = []
        for dim, size in enumerate(dims.sizes):
            found = f"{name}.size({dim - len(dims.sizes)})"
            if size == ANY:
                continue
            if size.isdigit():
                agree.append(f"{found} == {size}")
            elif not size.isidentifier() or (size not in first and name in optional):
                return everything  # an expression, or a letter of an optional argument only
            elif size in first:
                agree.append(f"{found} == {first[size]}")
            else:
                first[size] = found
        if agree and name in optional:
            conditions.append(f"({name} is None or {' and '.join(agree)})")
        else:
            conditions += agree
    return " and ".join(conditions)
