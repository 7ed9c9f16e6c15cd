"""The nodes of a file that a library of kernels computes; those that are left to their bodies, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.compiling import toolchain_here
from opsmith.build.ort.generating import NodeArgument, NodeOperator, NodeType
from opsmith.build.ort.packaging import KernelObject
from opsmith.core.specification import Specification
from opsmith.exporting.calls import Call, size_items
from opsmith.exporting.result_sizes import sizes_in_cpp
from opsmith.exporting.tensors import ONNX_TYPES
from opsmith.kernels.cpp import CppKernel
from opsmith.kernels.signature import arguments_of

Place = tuple[str, str]
"""Domain and type of a node."""


@dataclass(frozen=True)
class Natives:
    """What a library is to hold.

    Args:
        types: The nodes that it computes.
        kernels: The kernels for them.
        operators: The operator of each type of node.
        left: For each operator of which nodes are left to their bodies, why.
    """

    types: tuple[NodeType, ...]
    kernels: tuple[KernelObject, ...]
    operators: Mapping[Place, str]
    left: Mapping[str, str]


def natives(
    calls: Mapping[Place, Sequence[Call]],
    places: Iterable[Place],
    within: Mapping[Place, Iterable[Place]] | None,
) -> Natives:
    """What a library holds for the nodes of a file.

    A type of node is taken if a kernel takes each of its calls: ONNX Runtime does not go back to the body
    where a kernel refuses a node. Of the bodies that are left, it may compute nodes in turn.

    Args:
        calls: The calls that nodes of each type stand for.
        places: The types of nodes in the file's graph.
        within: Those in the body of each; None where nodes have no bodies.

    Raises:
        ExportError: If nothing can be packaged, or a node without a body cannot.
        CompileError: If the compiler refuses a kernel.
        ToolchainError: If there is no compiler.
    """
    toolchain_here()  # without a compiler that is what is wrong, and not the operators
    chosen: dict[Place, list[CppKernel]] = {}
    left: dict[str, str] = {}
    waiting, seen = list(places), set()
    while waiting:
        place = waiting.pop(0)
        if place in seen or place not in calls:
            continue
        seen.add(place)
        specification = calls[place][0].specification
        found = _kernels_for(calls[place])
        if not isinstance(found, str):
            chosen[place] = found
            continue
        if within is None:
            raise _unpackaged(specification, found)
        left.setdefault(specification.name, found)
        waiting += within.get(place, ())
    if not chosen:
        raise errors.ExportError(
            "no operator of the model can be packaged into a library",
            expected="an operator with a kernel in C++ that takes its calls",
            got="; ".join(f"{name}: {reason}" for name, reason in left.items()) or "no operators",
            hint="give one a kernel, `op.kernel('cpu', cpp=...)`, or leave `library=` out",
        )
    operators = _operators(calls, chosen)
    objects = dict.fromkeys(kernel for each in operators.values() for kernel in each[1])
    types = [
        made
        for place in chosen
        for made in _types(place, calls[place], operators[calls[place][0].specification.name][0])
    ]
    named = {place: calls[place][0].specification.name for place in chosen}
    return Natives(tuple(types), tuple(objects), named, left)


def _kernels_for(calls: Sequence[Call]) -> list[CppKernel] | str:
    """The kernels that take some calls of an operator, or why there are none for all of them."""
    specification = calls[0].specification
    kernels = [
        each.function
        for each in specification.kernels
        if each.device == "cpu" and isinstance(each.function, CppKernel)
    ]
    if not kernels:
        return "it has no kernel in C++"
    taken: list[CppKernel] = []
    for call in calls:
        if call.named is not None:
            return "its node is named by `symbolic`, which may write its attributes in any form"
        if any(size_items(value) for leaf, value in call.values() if not leaf.kind.is_tensor):
            return "a whole number follows from a dynamic axis: it is an input of the node, no attribute"
        values = [_value(value) if leaf.kind.is_tensor else value for leaf, value in call.values()]
        refusals = []
        for kernel in kernels:
            refusal = kernel.refusal(values)
            if refusal is None:
                break
            refusals.append(refusal)
        else:
            return refusals[-1]
        if not kernel.tells_sizes and not sizes_in_cpp([call]):
            return "neither its kernel nor the sizes of its tensors tell the sizes of its results"
        taken.append(kernel)
    return [kernel for kernel in kernels if kernel in taken]


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    return None if value is None else value.meta["val"]


def _unpackaged(specification: Specification, reason: str) -> errors.ExportError:
    return errors.ExportError(
        "it cannot be packaged into a library, and its node has no body",
        operator=specification.name,
        expected="a kernel in C++ that takes its calls",
        got=reason,
        where=specification.where,
        hint="give it one, `op.kernel('cpu', cpp=...)`, or write `body='function'`, and its body computes it",
    )


def _operators(
    calls: Mapping[Place, Sequence[Call]], chosen: Mapping[Place, Iterable[CppKernel]]
) -> dict[str, tuple[NodeOperator, list[KernelObject]]]:
    """Each operator as a library has it, with its compiled kernels, by name."""
    found: dict[str, list[Call]] = {}
    taken: dict[str, set[CppKernel]] = {}
    for place, kernels in chosen.items():
        name = calls[place][0].specification.name
        found.setdefault(name, []).extend(calls[place])
        taken.setdefault(name, set()).update(kernels)
    made = {}
    for name, of in found.items():
        specification = of[0].specification
        functions = [each.function for each in specification.kernels]
        objects = [
            each.for_library() for each in functions if isinstance(each, CppKernel) and each in taken[name]
        ]
        parameters = arguments_of(specification.schema, name, specification.where)
        arguments = tuple(
            NodeArgument(argument, parameter.form, parameter.optional)
            for argument, parameter in zip(specification.schema.names, parameters, strict=True)
        )
        tables = tuple(each.table for each in objects)
        shapes = specification.shapes.text if specification.shapes is not None else ""
        made[name] = NodeOperator(name, tables, arguments, _outputs(of[0]), shapes), objects
    return made


def _outputs(call: Call) -> tuple[int, ...]:
    """For each result which output of a node it is; a hidden one is none."""
    specification = call.specification
    shown = [each.name for each in specification.schema.results if not each.hidden]
    return tuple(-1 if each.hidden else shown.index(each.name) for each in specification.schema.results)


def _types(place: Place, calls: Sequence[Call], operator: NodeOperator) -> list[NodeType]:
    """A type of node, once for each choice of element types among its calls."""
    inputs = [
        [None if node is None else node.meta["val"].dtype for _, node in call.slots()] for call in calls
    ]
    count = max(map(len, inputs))
    padded = [each + [None] * (count - len(each)) for each in inputs]
    optional = tuple(any(each[at] is None for each in padded) for at in range(count))
    found: dict[tuple[Any, ...], NodeType] = {}
    sizes = sizes_in_cpp(calls)
    for call, dtypes in zip(calls, padded, strict=True):
        outputs = tuple(ONNX_TYPES[result.dtype] for result in call.results())
        filled = tuple(ONNX_TYPES[_type_of(at, dtypes, padded)] for at in range(count))
        found[filled] = NodeType(*place, operator, filled, optional, outputs, sizes)
    return list(found.values())


def _type_of(at: int, dtypes: Sequence[Any], others: Sequence[Sequence[Any]]) -> torch.dtype:
    """The dtype of an input; of one that is left out, what it may have: another call's, or a neighbour's."""
    alike = [each[at] for each in others if _agree(each, dtypes)]
    dtype: torch.dtype = next(each for each in (dtypes[at], *alike, *dtypes) if each is not None)
    return dtype


def _agree(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return all(a is None or b is None or a == b for a, b in zip(one, two, strict=True))
