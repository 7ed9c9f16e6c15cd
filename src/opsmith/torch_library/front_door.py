"""The front door: code generated for one operator, which calls its kernel with nothing in between.

The dispatcher asks many things of every call. A call whose tensors are of a form that has been through before
(type, dtype, device, rank, requires_grad, dispatch keys with the modes in force) needs one question, and goes
to the kernel at once, or to an autograd node written for this operator. Everything else goes through the
dispatcher. So do the first call and the first backward, where what the author's code may not do is looked
for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opsmith.core.bases import BOOL, FLOAT, INT, STR
from opsmith.core.kinds import Kind
from opsmith.core.operator import MISSING
from opsmith.core.schema import REQUIRED, Argument
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.call_forms import Ways
from opsmith.torch_library.contract_source import CONTRACT_NAMES, ContractSource
from opsmith.torch_library.shape_source import sizes_agree

_SCALARS = {FLOAT: "_op_float", INT: "_op_int", BOOL: "_op_bool", STR: "_op_str"}
OPTIONAL_TENSORS = 3
"""Each doubles how many lists of forms there are."""


def front_door(
    specification: Specification, overload: Any, call: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Generate the `__call__` of a handle; None for an operator that needs the dispatcher for every call.

    Args:
        specification: The operator.
        overload: The operator as torch knows it.
        call: Takes the handle, positional and keyword arguments: the call that is right in every case.
    """
    schema = specification.schema
    tensors = [argument for argument in schema.arguments if argument.kind.is_tensor]
    optional = [each.name for each in tensors if each.kind.optional]
    taken = any(name.startswith("_op_") for name in (*schema.names, specification.short_name))
    # Results that are constants are cut off their graph on the dispatcher's path.
    unfit = (
        len(schema.results) > 1
        or not schema.always_tensors
        or not schema.results[0].differentiable
        or specification.random
        or specification.adopted is not None
    )
    if taken or unfit or len(tensors) == len(optional) or len(optional) > OPTIONAL_TENSORS:
        return None
    if any(each.kind.sequence for each in tensors):
        return None
    ways = Ways(specification)
    names: dict[str, Any] = {
        **capabilities.front_door_checks(),
        **CONTRACT_NAMES,
        "_op_MISSING": MISSING,
        "_op_AttributeError": AttributeError,
        "_op_dict": dict,
        "_op_float": float,
        "_op_int": int,
        "_op_bool": bool,
        "_op_str": str,
        "_op_tuple": tuple,
        "_op_are_ints": _are_ints,
        "_op_grad_enabled": torch.is_grad_enabled,
        "_op_overload": overload,
        "_op_call": call,
        "_op_admit": ways.admit,
        "_op_settle": ways.settle,
        "_op_in_shape": ways.in_shape,
        **{f"_op_ways_{index}": known for index, known in enumerate(ways.known)},
    }
    for argument in schema.arguments:
        names[f"_op_exact_{argument.name}"] = argument.kind.base.exact
        if argument.default is not REQUIRED:
            names[f"_op_default_{argument.name}"] = argument.default
            names[f"_op_restored_{argument.name}"] = argument.kind.restore(argument.default)
    exec(_source(specification), names)
    door: Callable[..., Any] = names["__call__"]
    return door


def _source(specification: Specification) -> str:
    schema = specification.schema
    tensors = [argument for argument in schema.arguments if argument.kind.is_tensor]
    every = ", ".join(each.name for each in tensors)
    optional = [each.name for each in tensors if each.kind.optional]
    plain = [
        "not _op_extra",
        "not _op_unknown",
        # Asked first of all: a subclass or a mode that watches torch functions would see the other questions.
        capabilities.watched_source(every),
        *capabilities.FRONT_DOOR_CONDITIONS,
        *(_fits(each) for each in schema.arguments if not each.kind.is_tensor),
        # Other tensors that are no plain dense ones are of another form; of this kind torch cannot ask that.
        *(_given(each, "not {0}.is_nested") for each in tensors),
    ]
    in_shape = sizes_agree(specification)
    to_kernel = "".join(f"{_passed(each)}, " for each in schema.arguments[: schema.positional])
    to_kernel += "".join(f"{each.name}={_passed(each)}, " for each in schema.arguments[schema.positional :])
    to_node = "".join(f"{_passed(each)}, " for each in schema.arguments)
    positional = "".join(f"{name}, " for name in schema.names[: schema.positional])
    keywords = "".join(f"{name}={name}, " for name in schema.names[schema.positional :])
    contract = ContractSource(specification)
    before = "_op_before" if contract.may_write else "None"
    # Code that is seen to write nowhere is seen to use no tensors but its arguments.
    overload = f"_op_overload({positional}{keywords})"
    if schema.lowering is not None:
        overload = f"_op_call(_op_handle, ({positional}), _op_dict({keywords}))"
    captured = " and (_op_requires or not _op_result.requires_grad)" * contract.may_write
    return f"""
def __call__(_op_handle, /, {_signature(schema.arguments, schema.positional)}):
    if _op_compiling():
        return {overload}
    try:
        _op_plain = {" and ".join(plain)}
    except _op_AttributeError:
        _op_plain = False  # what should be a tensor is none
    if _op_plain:
        for _op_fits, _op_kernel, _op_apply, _op_requires in {_chosen("_op_ways_{}", optional)}:
            if {_chosen_call(tensors, optional)}:
                break
        else:
            _, _op_kernel, _op_apply, _op_requires = _op_admit(({to_node}))
        if _op_kernel is not None{f" and {in_shape}" if in_shape else ""}:
            if _op_apply is not None and (not _op_requires or _op_grad_enabled()):
                return _op_apply({to_node})
            {f"_op_before = {contract.before()}" if contract.may_write else ""}
            _op_result = _op_kernel({to_kernel})
            if {contract.held()}{captured}:
                return _op_result
            return _op_settle(_op_kernel, _op_result, [{to_node}], {before})
    return _op_call(_op_handle, ({positional}*_op_extra,), _op_dict({keywords}**_op_unknown))
"""


def _chosen(text: str, optional: Sequence[str]) -> str:
    """A choice by which of the optional tensors are given: `text` with the number of the case."""
    cases = list(itertools.product((False, True), repeat=len(optional)))
    choice = text.format(len(cases) - 1)
    for number, given in reversed(list(enumerate(cases[:-1]))):
        missing = " and ".join(
            f"{name} is {'not ' * there}None" for name, there in zip(optional, given, strict=True)
        )
        choice = f"{text.format(number)} if {missing} else {choice}"
    return f"({choice})"


def _chosen_call(tensors: Sequence[Argument], optional: Sequence[str]) -> str:
    """The question whether the tensors given are of a known form."""
    choice = ""
    for given in itertools.product((False, True), repeat=len(optional)):
        there = dict(zip(optional, given, strict=True))
        asked = ", ".join(each.name for each in tensors if there.get(each.name, True))
        missing = " and ".join(f"{name} is {'not ' * is_there}None" for name, is_there in there.items())
        choice += f"_op_fits({asked})" + (f" if {missing} else " if not all(given) else "")
    return choice


def _signature(arguments: Sequence[Argument], positional: int) -> str:
    pieces = [
        f"{each.name}={'_op_MISSING' if each.default is REQUIRED else f'_op_default_{each.name}'}"
        for each in arguments
    ]
    return ", ".join([*pieces[:positional], "*_op_extra", *pieces[positional:], "**_op_unknown"])


def _of_ints(kind: Kind) -> bool:
    """Whether a value is a sequence of whole numbers: a size, a stride."""
    return kind.sequence and kind.base is INT and not kind.item_optional and kind.structure is None


def _are_ints(value: Any, length: int | None) -> bool:
    """Whether a value is a plain sequence of whole numbers, none of them symbolic."""
    if type(value) not in (tuple, torch.Size, list) or length not in (None, len(value)):
        return False
    return all(type(item) is int for item in value)


def _fits(argument: Argument) -> str:
    """A condition: the argument, no tensor, is of a kind that the door passes on as it is."""
    kind = argument.kind
    if kind.base is FLOAT and not kind.sequence:
        return _given(argument, "(_op_type({0}) is _op_float or _op_type({0}) is _op_int)")
    if _of_ints(kind):
        several = f"_op_are_ints({{0}}, {kind.length})"
        return _given(argument, f"_op_type({{0}}) is _op_int or {several}" if kind.spread else several)
    if kind.base in _SCALARS and (not kind.sequence or kind.spread):
        return _given(argument, f"_op_type({{0}}) is {_SCALARS[kind.base]}")
    name = argument.name
    if kind.base.exact is not None and not kind.sequence:
        return _given(argument, f"_op_type({{0}}) is _op_exact_{name}")
    return (
        "False"
        if kind.structure is not None or argument.default is REQUIRED
        else f"{name} is _op_default_{name}"
    )


def _passed(argument: Argument) -> str:
    """What the kernel gets for an argument that fits."""
    name, kind = argument.name, argument.kind
    if kind.base is FLOAT and not kind.sequence:  # the dispatcher makes a float of a whole number too
        return f"(None if {name} is None else _op_float({name}))" if kind.optional else f"_op_float({name})"
    if kind.is_tensor or not kind.sequence:
        return name
    spread = "(" + f"{name}, " * (kind.length or 1) + ")"
    if _of_ints(kind):
        several = f"_op_tuple({name})" if kind.as_tuple else f"[*{name}]"
        if kind.spread:
            one = spread if kind.as_tuple else f"[*{spread}]"
            several = f"({one} if _op_type({name}) is _op_int else {several})"
        return f"(None if {name} is None else {several})" if kind.optional else several
    if kind.spread:
        return f"(None if {name} is None else {spread})" if kind.optional else spread
    restored = f"_op_restored_{name}"
    # Each call gets a list of its own.
    return restored if kind.as_tuple else f"({restored} if {restored} is None else [*{restored}])"


def _given(argument: Argument, condition: str) -> str:
    """A condition on an argument that holds where an optional one is not given."""
    text = condition.format(argument.name)
    return f"({argument.name} is None or {text})" if argument.kind.optional else f"({text})"
