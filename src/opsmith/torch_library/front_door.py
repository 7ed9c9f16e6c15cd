"""The front door: code generated for one operator, which calls its kernel with nothing in between.

The dispatcher asks many things of every call. Where the answer to all of them is "nothing special" (plain
dense tensors, no mode, no transform, no autocast, no trace, no profiler), a call from Python goes to the
kernel at once, or to an autograd node written for this operator. Everything else goes through the dispatcher.
So do the first call and the first backward, where what the author's code may not do is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.core.kinds import BOOL, FLOAT, INT, STR
from opsmith.core.operator import MISSING
from opsmith.core.schema import REQUIRED, Argument
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.effects import settle
from opsmith.torch_library.fast_node import fast_node, fresh_source

_SCALARS = {FLOAT: "_op_float", INT: "_op_int", BOOL: "_op_bool", STR: "_op_str"}
_KERNEL_DEVICES = {"cpu": "is_cpu", "cuda": "is_cuda"}


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
    lists = any(argument.kind.is_tensor and argument.kind.sequence for argument in schema.arguments)
    taken = any(name.startswith("_op_") for name in (*schema.names, specification.short_name))
    kernel, conditions = _kernel(specification)
    if lists or taken or kernel is None or specification.random or len(schema.results) > 1:
        return None
    if not schema.results[0].differentiable:
        return None  # the dispatcher's path cuts its graph
    node = fast_node(specification, kernel)
    names: dict[str, Any] = {
        **capabilities.front_door_checks(),
        "_op_MISSING": MISSING,
        "_op_PLAIN": frozenset((Tensor, torch.nn.Parameter)),
        "_op_Tensor": Tensor,
        "_op_type": type,
        "_op_dict": dict,
        "_op_float": float,
        "_op_int": int,
        "_op_bool": bool,
        "_op_str": str,
        "_op_RuntimeError": RuntimeError,
        "_op_strided": torch.strided,
        "_op_compiling": torch.compiler.is_compiling,
        "_op_grad_enabled": torch.is_grad_enabled,
        "_op_overload": overload,
        "_op_call": call,
        "_op_kernel": kernel,
        "_op_node": node and capabilities.direct_apply(node),
        "_op_settle": settle(specification, kernel),
        "_op_in_shape": partial(_in_shape, specification),
    }
    for argument in schema.arguments:
        if argument.default is not REQUIRED:
            names[f"_op_default_{argument.name}"] = argument.default
            names[f"_op_restored_{argument.name}"] = argument.kind.restore(argument.default)
    exec(_source(specification, conditions, with_node=node is not None), names)
    door: Callable[..., Any] = names["__call__"]
    return door


def _kernel(specification: Specification) -> tuple[Callable[..., Any] | None, list[str]]:
    """What the door calls, and what must hold of the tensors for it."""
    tensors = [argument for argument in specification.schema.arguments if argument.kind.is_tensor]
    # torch operations take any tensor; a kernel takes memory as it lies there.
    materialised = [
        _given(each, "not ({0}.is_conj() or {0}.is_neg() or {0}.is_meta or _op_batched({0}))")
        for each in tensors
    ]
    if not specification.kernels:
        batched = [_given(each, "not _op_batched({0})") for each in tensors]
        return specification.reference, materialised if specification.opaque else batched
    first = specification.kernels[0]
    attribute = _KERNEL_DEVICES.get(first.device)
    if attribute is None or first.dtypes is not None:
        return None, []
    return first.function, [*materialised, *[_given(each, "{0}." + attribute) for each in tensors]]


def _in_shape(specification: Specification, *values: Any) -> bool:
    """Whether the tensors have the shapes that the operator was declared with."""
    assert specification.shapes is not None
    return specification.shapes.bind(specification.schema, values)[1] is None


def _source(specification: Specification, conditions: list[str], *, with_node: bool) -> str:
    schema = specification.schema
    tensors = [argument for argument in schema.arguments if argument.kind.is_tensor]
    # Modes are asked for first: one that watches torch functions would see the questions to tensors.
    plain = [*capabilities.FRONT_DOOR_CONDITIONS, *map(_fits, schema.arguments), *conditions]
    if specification.shapes is not None:
        plain.append(f"_op_in_shape({', '.join(schema.names)})")
    requires = " or ".join(
        f"({each.name} is not None and {each.name}.requires_grad)"
        if each.kind.optional
        else f"{each.name}.requires_grad"
        for each in tensors
    )
    fresh = fresh_source(specification)
    versions = capabilities.versions_source(schema.tensor_names)
    to_node = ", ".join(_passed(each) for each in schema.arguments)
    to_kernel = ", ".join(
        f"{each.name}={_passed(each)}" if each.keyword_only else _passed(each) for each in schema.arguments
    )
    positional = "".join(f"{name}, " for name in schema.names[: schema.positional])
    keywords = "".join(f"{name}={name}, " for name in schema.names[schema.positional :])
    # Without formula and kernel it is the reference that autograd records, as it would any function.
    ordinary = not (specification.gradients.given or specification.kernels or specification.opaque)
    return f"""
def __call__(_op_handle, /, {_signature(schema.arguments, schema.positional)}):
    if _op_compiling():
        return _op_overload({positional}{keywords})
    if not _op_extra and not _op_unknown and {" and ".join(plain)}:
        if {"False" if ordinary or not requires else f"_op_grad_enabled() and ({requires})"}:
            {f"return _op_node({to_node})" if with_node else "pass"}
        else:
            try:
                _op_before = {versions}
            except _op_RuntimeError:
                _op_before = None  # an inference tensor does not count how often it was written to
            _op_result = _op_kernel({to_kernel})
            if ({fresh}
                    and (_op_before is None or _op_before == {versions})):
                return _op_result
            return _op_settle(_op_result, [{", ".join(schema.names)}], _op_before)
    return _op_call(_op_handle, ({positional}*_op_extra,), _op_dict({keywords}**_op_unknown))
"""


def _signature(arguments: Sequence[Argument], positional: int) -> str:
    pieces = [
        f"{each.name}={'_op_MISSING' if each.default is REQUIRED else f'_op_default_{each.name}'}"
        for each in arguments
    ]
    return ", ".join([*pieces[:positional], "*_op_extra", *pieces[positional:], "**_op_unknown"])


def _fits(argument: Argument) -> str:
    """A condition: the argument is of a kind that the door passes on as it is."""
    kind = argument.kind
    if kind.is_tensor:
        return _given(
            argument,
            "_op_type({0}) in _op_PLAIN and {0}.layout is _op_strided"
            " and not {0}.is_nested and not {0}.is_quantized",
        )
    if kind.base in _SCALARS and (not kind.sequence or kind.spread):
        return _given(argument, f"_op_type({{0}}) is {_SCALARS[kind.base]}")
    name = argument.name
    return "False" if argument.default is REQUIRED else f"{name} is _op_default_{name}"


def _passed(argument: Argument) -> str:
    """What the kernel gets for an argument that fits."""
    name, kind = argument.name, argument.kind
    if kind.is_tensor or not kind.sequence:
        return name
    if kind.spread:
        spread = "(" + f"{name}, " * (kind.length or 1) + ")"
        return f"(None if {name} is None else {spread})" if kind.optional else spread
    restored = f"_op_restored_{name}"
    # Each call gets a list of its own.
    return restored if kind.as_tuple else f"({restored} if {restored} is None else [*{restored}])"


def _given(argument: Argument, condition: str) -> str:
    """A condition on an argument that holds where an optional one is not given."""
    text = condition.format(argument.name)
    return f"({argument.name} is None or {text})" if argument.kind.optional else f"({text})"
