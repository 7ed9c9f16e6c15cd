"""The fast path: a `__call__` generated for one operator, which calls its kernel without the dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from opsmith.core.argument_types import FLOAT
from opsmith.core.operator import MISSING
from opsmith.core.schema import REQUIRED, Argument, Schema
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.primitive import RegisteredOperator
from opsmith.torch_library.fast_path.call_plan import call_plan
from opsmith.torch_library.fast_path.eligibility import (
    are_ints,
    has_fast_path,
    is_int_sequence,
    size_condition,
    type_condition,
    unless_none,
)
from opsmith.torch_library.fast_path.node_source import sequence_source
from opsmith.torch_library.fast_path.purity import ContractSource
from opsmith.torch_library.fast_path.signatures import CallSignatures, KernelSignatures


def generate_call(
    registered: RegisteredOperator,
    overload: Any,
    call: Callable[..., Any],
    on_dtensors: Callable[[tuple[Any, ...]], Any] | None = None,
) -> Callable[..., Any] | None:
    """Generate the `__call__` of a handle; None for an operator without a fast path.

    Args:
        registered: The operator.
        overload: The operator's `OpOverload`, `torch.ops.namespace.name.default`.
        call: Takes the handle, positional and keyword arguments: the slow path.
        on_dtensors: Computes a call on DTensors from its argument values; returns None for the slow path.
    """
    specification = registered.specification
    if not has_fast_path(specification):
        return None
    schema, signatures = specification.schema, KernelSignatures(registered, on_dtensors)
    contract = ContractSource(specification)
    names = {
        **contract.names,
        "_op_grad_enabled": torch.is_grad_enabled,
        "_op_inference_mode": torch.is_inference_mode_enabled,
        "_op_overload": overload,
        "_op_validate": signatures.validate_write if schema.written else signatures.validate,
        "_op_in_shape": signatures.in_shape,
    }
    body = _call_body(specification, contract)
    return generated(signatures, call, body, names, _overload(schema), contract=contract)


def generated(
    signatures: CallSignatures,
    call: Callable[..., Any],
    body: str,
    names: dict[str, Any],
    compiled: str | None = None,
    *,
    keywords: bool = True,
    contract: ContractSource | None = None,
) -> Callable[..., Any]:
    """Generate a `__call__` that finds the implementation of a call by its signature.

    Args:
        signatures: The operator's known signatures.
        call: Takes the handle, positional and keyword arguments: the slow path.
        body: Source for a call with an `Implementation`, of its parts; what does not return takes the slow
            path.
        names: Globals of it.
        compiled: Source for a call that torch compiles; None for the slow path.
        keywords: False if calls with arguments given by name take the slow path, which then gets MISSING for
            arguments that are left out.
        contract: The contract of the kernels, by which C++ decides; None where the body alone does.
    """
    schema = signatures.specification.schema
    names = {
        **capabilities.guard_names(),
        **names,
        "_op_MISSING": MISSING,
        "_op_not_tensors": (AttributeError, TypeError),
        "_op_dict": dict,
        "_op_float": float,
        "_op_int": int,
        "_op_bool": bool,
        "_op_str": str,
        "_op_tuple": tuple,
        "_op_type": type,
        "_op_list": list,
        "_op_len": len,
        "_op_map": map,
        "_op_is_nested": attrgetter("is_nested"),
        "_op_are_ints": are_ints,
        "_op_must_be_deterministic": torch.are_deterministic_algorithms_enabled,
        "_op_call": call,
        "_op_select": signatures.select,
        **_signature_names(signatures),
    }
    for argument in schema.arguments:
        names[f"_op_exact_{argument.name}"] = argument.kind.base.exact
        if argument.default is not REQUIRED:
            names[f"_op_default_{argument.name}"] = argument.default
            names[f"_op_restored_{argument.name}"] = argument.kind.restore(argument.default)
    exec(_call_source(signatures, body, compiled, keywords), names)
    fast_call: Callable[..., Any] = names["__call__"]
    # Python names the function by it where an argument comes twice.
    fast_call.__qualname__ = signatures.specification.short_name
    fast_call.call_plan = call_plan(  # type: ignore[attr-defined]
        signatures, names, contract, by_name=keywords
    )
    return fast_call


def _signature_names(signatures: CallSignatures) -> dict[str, Any]:
    """Globals that hold known signatures: lists, or dictionaries of them."""
    known = signatures.known if signatures.by_key else [each[()] for each in signatures.known]
    return {f"_op_signatures_{index}": each for index, each in enumerate(known)}


def _call_source(signatures: CallSignatures, body: str, compiled: str | None, by_name: bool) -> str:
    specification = signatures.specification
    schema = specification.schema
    tensors = [argument for argument in schema.arguments if argument.kind.is_tensor]
    every = ", ".join(_spread(each) for each in tensors)
    lists, optional = signatures.lists, signatures.chosen_by
    plain = [
        "not _op_extra",
        "not _op_unknown",
        # Checked first: a subclass or a `TorchFunctionMode` would see the other checks.
        capabilities.torch_function_condition(every),
        *capabilities.GUARD_CONDITIONS,
        *(() if specification.rounds_alike else ("not _op_must_be_deterministic()",)),
        *(type_condition(each) for each in schema.arguments if not each.kind.is_tensor),
        # The guard rejects other tensors that are not dense, but cannot take nested ones.
        *(unless_none(each, "not {0}.is_nested") for each in tensors if not each.kind.sequence),
        *(f"(_op_type({name}) is _op_list or _op_type({name}) is _op_tuple)" for name in lists),
        *(f"True not in _op_map(_op_is_nested, {name})" for name in lists),
    ]
    key = "".join(f"{name} is not None, " for name in signatures.optional_keys)
    key += "".join(f"_op_len({name}), " for name in lists)
    known = "_op_signatures_{}" + f".get(({key}), ())" * signatures.by_key
    guarded = _guard_source(tensors, optional)
    if signatures.optional_keys:
        guarded = f"_op_guard(*[_op_tensor for _op_tensor in ({every},) if _op_tensor is not None])"
    implementation = "_op_kernel, _op_apply, _op_requires, _op_in_cpp, _op_any_layout"
    positional = "".join(f"{name}, " for name in schema.names[: schema.positional])
    keywords = "".join(f"{name}={name}, " for name in schema.names[schema.positional :])
    slow_path = f"_op_call(_op_handle, ({positional}*_op_extra,), _op_dict({keywords}**_op_unknown))"
    signature, defaults = f"/, {_signature(schema.arguments, schema.positional)}", ""
    if not by_name:
        every = "".join(f"{name}=_op_MISSING, " for name in schema.names)
        signature = f"{every}/, *_op_extra, **_op_unknown"
        left_out = [each.name for each in schema.arguments if each.default is not REQUIRED]
        defaults = "".join(
            f"\n        if {name} is _op_MISSING: {name} = _op_default_{name}" for name in left_out
        )
        defaults = f"if not (_op_unknown or _op_compiling()):{defaults}" if left_out else ""
    return f"""
def __call__(_op_handle, {signature}):
    {defaults}
    if _op_compiling():
        return {compiled or slow_path}
    try:
        _op_plain = {" and ".join(plain)}
    except _op_not_tensors:
        _op_plain = False
    if _op_plain:
        for _op_guard, {implementation} in {_by_given(known, optional)}:
            if {guarded}:
                break
        else:
            _, {implementation} = _op_select(({in_order(schema)}))
        {body}
    return {slow_path}

def _op_finish(_op_handle, {implementation}, {"".join(f"{name}, " for name in schema.names)}):
    if True:
        {body}
    return _op_call(_op_handle, ({positional}), _op_dict({keywords}))
"""


def in_order(schema: Schema) -> str:
    """Source of all argument values, as a kernel takes them, in order."""
    return "".join(f"{_kernel_argument(each)}, " for each in schema.arguments)


def _overload(schema: Schema) -> str | None:
    """Source of a call of the overload; None where the slow path prepares its arguments."""
    if schema.lowering is not None:
        return None
    positional = "".join(f"{name}, " for name in schema.names[: schema.positional])
    keywords = "".join(f"{name}={name}, " for name in schema.names[schema.positional :])
    return f"_op_overload({positional}{keywords})"


def _call_body(specification: Specification, contract: ContractSource) -> str:
    """Source of the call of a kernel, or of a node."""
    schema = specification.schema
    to_kernel = "".join(f"{_kernel_argument(each)}, " for each in schema.arguments[: schema.positional])
    to_kernel += "".join(
        f"{each.name}={_kernel_argument(each)}, " for each in schema.arguments[schema.positional :]
    )
    to_node = in_order(schema)
    in_shape = size_condition(specification)
    takes = ["_op_kernel is not None", *([in_shape] if in_shape else [])]
    # Code that is proved to write nowhere is also proved to use no tensors but its arguments.
    captured, returned = "", contract.returned()
    tensors = {each.name: _spread(each) for each in schema.arguments if each.kind.is_tensor}
    spread = "".join(f"{tensors.get(each.name) or _kernel_argument(each)}, " for each in schema.arguments)
    of_node = f"return _op_apply({spread})"
    if schema.written:
        condition = "_op_apply"  # there is no node, and one call of inference mode
        takes += [
            "not (_op_requires and _op_grad_enabled())",
            f"(_op_any_layout or ({contract.contiguous()}))",
            f"(_op_in_cpp or ({contract.apart()}))",
            # Under `__torch_dispatch__` the guard does not tell one mode from the other.
            "(_op_apply is not None) is _op_inference_mode()",
        ]
    else:
        condition = "_op_apply and (not _op_requires or _op_grad_enabled())"
        takes.append("(_op_apply is not False or not _op_grad_enabled())")
        if returned != "_op_result":
            of_node = f"_op_result = _op_apply({spread}); return {returned}"
        if contract.may_write:
            captured = f" and (_op_requires or {contract.captured()})"
            takes.append("(_op_apply or not _op_inference_mode())")
    before = f"_op_before = {contract.before()}" if contract.may_write else "_op_before = None"
    return f"""
        if {" and ".join(takes)}:
            if {condition}:
                {of_node}
            {before}
            _op_result = _op_kernel({to_kernel})
            if {contract.held()}{captured}:
                return {returned}
            return _op_validate(_op_kernel, _op_result, [{to_node}], _op_before)
"""


def _by_given(text: str, optional: Sequence[str]) -> str:
    """Source of a choice by which optional tensors are given: `text` with the number of the case."""
    cases = list(itertools.product((False, True), repeat=len(optional)))
    choice = text.format(len(cases) - 1)
    for number, given in reversed(list(enumerate(cases[:-1]))):
        missing = " and ".join(
            f"{name} is {'not ' * present}None" for name, present in zip(optional, given, strict=True)
        )
        choice = f"{text.format(number)} if {missing} else {choice}"
    return f"({choice})"


def _guard_source(tensors: Sequence[Argument], optional: Sequence[str]) -> str:
    """Source of the call of a guard with the tensors that are given."""
    choice = ""
    for given in itertools.product((False, True), repeat=len(optional)):
        present = dict(zip(optional, given, strict=True))
        guarded = ", ".join(_spread(each) for each in tensors if present.get(each.name, True))
        missing = " and ".join(f"{name} is {'not ' * is_there}None" for name, is_there in present.items())
        choice += f"_op_guard({guarded})" + (f" if {missing} else " if not all(given) else "")
    return choice


def _spread(argument: Argument) -> str:
    """Source of the tensors of an argument, among those of a call."""
    return f"*{argument.name}" if argument.kind.sequence else argument.name


def _signature(arguments: Sequence[Argument], positional: int) -> str:
    pieces = [
        f"{each.name}={'_op_MISSING' if each.default is REQUIRED else f'_op_default_{each.name}'}"
        for each in arguments
    ]
    return ", ".join([*pieces[:positional], "*_op_extra", *pieces[positional:], "**_op_unknown"])


def _kernel_argument(argument: Argument) -> str:
    """Source of an argument of the kernel."""
    name, kind = argument.name, argument.kind
    if kind.base is FLOAT and not kind.sequence:  # the dispatcher converts integers, too
        return f"(None if {name} is None else _op_float({name}))" if kind.optional else f"_op_float({name})"
    if kind.is_tensor and kind.sequence:  # a new one of the annotated kind, which the kernel may change
        return sequence_source(kind, [f"*{name}"])
    if kind.is_tensor or not kind.sequence:
        return name
    spread = "(" + f"{name}, " * (kind.length or 1) + ")"
    if is_int_sequence(kind):
        several = f"_op_tuple({name})" if kind.as_tuple else f"[*{name}]"
        if kind.spread:
            one = spread if kind.as_tuple else f"[*{spread}]"
            several = f"({one} if _op_type({name}) is _op_int else {several})"
        return f"(None if {name} is None else {several})" if kind.optional else several
    if kind.spread:
        return f"(None if {name} is None else {spread})" if kind.optional else spread
    restored = f"_op_restored_{name}"
    # Each call gets a new list.
    return restored if kind.as_tuple else f"({restored} if {restored} is None else [*{restored}])"
