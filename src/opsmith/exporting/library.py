"""Library of C++ kernels for the nodes of a file: choose, package, load and compare with PyTorch."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.exporting.calls import OperatorCall, size_items
from opsmith.exporting.dtypes import ONNX_TYPES
from opsmith.exporting.packages import onnx_ir
from opsmith.exporting.report import Export
from opsmith.exporting.result_sizes import sizing_of_call
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.verification import Verification
from opsmith.kernels.common.ahead import Ahead, LinkedKernel
from opsmith.kernels.common.parameters import Parameter
from opsmith.kernels.languages import language_of
from opsmith.kernels.runtime.linked_library import KernelObject, LaunchedKernel, require_compiler
from opsmith.kernels.runtime.onnx import LIBRARY, NodeType, link_library
from opsmith.kernels.runtime.operators import LinkedOperator
from opsmith.kernels.runtime.recipe import sizing_of

NodeName = tuple[str, str]
"""Domain and type of a node."""


@dataclass(frozen=True)
class LibraryPlan:
    """The contents of a library.

    Args:
        types: The node types that the library computes.
        operators: The operator of each node type.
        left: For each operator whose nodes are computed by their bodies, the reason.
    """

    types: tuple[NodeType, ...]
    operators: Mapping[NodeName, str]
    left: Mapping[str, str]


def plan_library(
    calls: Mapping[NodeName, Sequence[OperatorCall]],
    names: Iterable[NodeName],
    within: Mapping[NodeName, Iterable[NodeName]] | None,
) -> LibraryPlan:
    """Choose the node types of a file that a library computes.

    A node type is chosen only if kernels take all of its calls: ONNX Runtime does not fall back to the body
    if a kernel refuses a node. If a node type is not chosen, the nodes inside its body may be chosen.

    Args:
        calls: The calls behind the nodes of each type.
        names: The node types in the graph of the file.
        within: The node types inside the body of each node type; None if nodes have no bodies.

    Raises:
        ExportError: If no operator can be packaged, or a node without a body cannot be packaged.
        CompileError: If the compiler refuses a kernel.
        ToolchainError: If there is no compiler.
    """
    require_compiler()  # report a missing compiler before anything about operators
    chosen: dict[NodeName, dict[Any, LinkedKernel]] = {}
    left: dict[str, str] = {}
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in calls:
            continue
        seen.add(name)
        specification = calls[name][0].specification
        found = _kernels_for(calls[name])
        if not isinstance(found, str):
            chosen[name] = found
            continue
        if within is None:
            raise _unpackaged(specification, found)
        left.setdefault(specification.name, found)
        waiting += within.get(name, ())
    if not chosen:
        raise errors.ExportError(
            "no operator of the model can be packaged into a library",
            expected="an operator with a kernel in C++ that takes its calls",
            got="; ".join(f"{name}: {reason}" for name, reason in left.items()) or "no operators",
            hint="give an operator a kernel, `op.kernel('cpu', cpp=...)`, or leave `library=` out",
        )
    operators = {name: calls[name][0].specification.name for name in chosen}
    types: list[NodeType] = []
    for operator in dict.fromkeys(operators.values()):
        names = [name for name in chosen if operators[name] == operator]
        specification = calls[names[0]][0].specification
        taken = {kernel: linked for name in names for kernel, linked in chosen[name].items()}
        tried = dict.fromkeys(each.function for each in specification.kernels if each.function in taken)
        objects = [taken[kernel].build() for kernel in tried]
        arguments = next(iter(taken.values())).arguments
        for name in names:
            types += _types(name, calls[name], _linked_operator(arguments, calls[name]), objects)
    return LibraryPlan(tuple(types), operators, left)


def _kernels_for(calls: Sequence[OperatorCall]) -> dict[Any, LinkedKernel] | str:
    """The kernels that together take all of these calls, or the reason why no kernel takes one of them."""
    kernels: list[tuple[Any, Ahead]] = []
    for each in calls[0].specification.kernels:
        language = language_of(each.function) if each.device == "cpu" else None
        if language is not None and language.ahead is not None:
            kernels.append((each.function, language.ahead))
    if not kernels:
        return "it has no kernel in C++"
    taken: dict[Any, LinkedKernel] = {}
    for call in calls:
        if call.named is not None:
            return "`symbolic` names its node, and may write the attributes in any form"
        if any(size_items(value) for leaf, value in call.values() if not leaf.kind.is_tensor):
            return "a whole number depends on a dynamic axis: it is an input of the node, not an attribute"
        values = [_value(value) if leaf.kind.is_tensor else value for leaf, value in call.values()]
        refusals = []
        for kernel, ahead in kernels:
            refusal = kernel.refusal(values)
            linked = ahead.linked(kernel, ("native",)) if refusal is None else refusal
            if isinstance(linked, LinkedKernel):
                break
            refusals.append(linked)
        else:
            return refusals[-1]
        if linked.unsized and sizing_of_call(call) is None:
            return "neither its kernel nor the sizes of its tensors determine the sizes of its results"
        taken[kernel] = linked
    return taken


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
        hint="give the operator a kernel, `op.kernel('cpu', cpp=...)`, or write `body='function'` to "
        "compute its body",
    )


def _linked_operator(arguments: tuple[Parameter, ...], calls: Sequence[OperatorCall]) -> LinkedOperator:
    """The operator for the nodes of one type, from their calls."""
    specification = calls[0].specification
    schema, shapes = specification.schema, specification.shapes
    return LinkedOperator(
        name=specification.name,
        names=schema.names,
        arguments=arguments,
        accepted=("any",) * len(schema.names),  # all inputs are contiguous
        results=len(schema.results),
        shapes="" if shapes is None else shapes.text,
        sizing=sizing_of(shapes, schema) or (),
        calls=tuple(dict.fromkeys(filter(None, map(sizing_of_call, calls)))),
    )


def _types(
    name: NodeName,
    calls: Sequence[OperatorCall],
    operator: LinkedOperator,
    kernels: Sequence[KernelObject | LaunchedKernel],
) -> list[NodeType]:
    """One node type for each combination of element types in the calls."""
    results = calls[0].specification.schema.results
    shown = [each.name for each in results if not each.hidden]
    indices = tuple(-1 if each.hidden else shown.index(each.name) for each in results)
    inputs = [
        [None if node is None else node.meta["val"].dtype for _, node in call.slots()] for call in calls
    ]
    count = max(map(len, inputs))
    padded = [each + [None] * (count - len(each)) for each in inputs]
    optional = tuple(any(each[at] is None for each in padded) for at in range(count))
    objects = tuple(each for each in kernels if isinstance(each, KernelObject))
    assert len(objects) == len(kernels), operator.name  # kernels for the CPU are linked
    found: dict[tuple[Any, ...], NodeType] = {}
    for call, dtypes in zip(calls, padded, strict=True):
        outputs = tuple(ONNX_TYPES[result.dtype] for result in call.results())
        filled = tuple(ONNX_TYPES[_type_of(at, dtypes, padded)] for at in range(count))
        found[filled] = NodeType(*name, operator, objects, indices, filled, optional, outputs)
    return list(found.values())


def _type_of(at: int, dtypes: Sequence[Any], others: Sequence[Sequence[Any]]) -> torch.dtype:
    """The dtype of an input; for an omitted input, the dtype in another call or of another input."""
    alike = [each[at] for each in others if _agree(each, dtypes)]
    dtype: torch.dtype = next(each for each in (dtypes[at], *alike, *dtypes) if each is not None)
    return dtype


def _agree(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return all(a is None or b is None or a == b for a, b in zip(one, two, strict=True))


def calls_by_type(pairs: Iterable[tuple[Any, OperatorCall]]) -> dict[NodeName, list[OperatorCall]]:
    """The different calls behind the nodes of each type.

    Args:
        pairs: Nodes and their calls.
    """
    found: dict[NodeName, dict[Any, OperatorCall]] = {}
    for node, call in pairs:
        found.setdefault((node.domain, node.op_type), {}).setdefault(call.signature(), call)
    return {name: list(calls.values()) for name, calls in found.items()}


def needs_library(pairs: Iterable[tuple[Any, OperatorCall]]) -> bool:
    """Return True if ONNX Runtime can compute the nodes of a file only with a library.

    This is true for opaque operators, which have no body, and for bfloat16, for which ONNX Runtime has
    almost no kernels.
    """
    return any(call.specification.opaque or torch.bfloat16 in call.dtypes() for _, call in pairs)


def with_library(
    export: Export,
    model: Any,
    file: Path,
    library: Path,
    calls: Mapping[NodeName, Sequence[OperatorCall]],
    verification: Verification | None,
) -> Export:
    """Write a library with the kernels of a file's nodes, and compare the two with PyTorch.

    Args:
        export: The export so far.
        model: The onnx_ir model in the file.
        file: The current path of the file.
        library: The path of the library.
        calls: The calls behind the nodes of each type, bodies included.
        verification: The comparison; None if the file is not compared.

    Raises:
        ExportError, CompileError, ToolchainError: If the kernels cannot be packaged.
        ExportMismatchError: If the results differ from PyTorch's.
        OnnxRuntimeError: If ONNX Runtime refuses the library, or does not use a kernel.
    """
    within = {function.identifier()[:2]: _node_names(function) for function in model.functions.values()}
    plan = plan_library(calls, _node_names(model.graph), within if export.body == "function" else None)
    shutil.copyfile(link_library(plan.types).directory / LIBRARY, library)
    library.chmod(0o755)
    native = dict(Counter(_named(model.graph, plan)))
    export = replace(export, native=native, left_to_bodies=plan.left)
    if verification is None:
        return export
    with tempfile.TemporaryDirectory() as folder:
        optimised = Path(folder) / "optimised.onnx"
        runtime = Runtime(file, export.path.name, library=library, optimised=optimised)
        used = Counter(_named(onnx_ir.load(optimised).graph, plan))
    refuse_unused(native, used, export.path.name)
    return verification.compare(export, runtime)


def refuse_unused(native: Mapping[str, int], used: Mapping[str, int], name: str) -> None:
    """Refuse a library if ONNX Runtime does not use its kernels for every node.

    Args:
        native: Number of nodes of each operator that have a kernel.
        used: Number of these nodes in the optimised graph, where bodies replace all other nodes.
        name: Name of the file.

    Raises:
        OnnxRuntimeError: If `used` is smaller than `native` for an operator.
    """
    for operator, count in native.items():
        if used.get(operator, 0) < count:
            raise errors.OnnxRuntimeError(
                f"ONNX Runtime computes nodes of `{name}` by their bodies, though the library has a kernel",
                operator=operator,
                expected=f"{count} node{'s' * (count != 1)} of the operator in the optimised graph",
                got=str(used.get(operator, 0)),
                hint="leave `library=` out, and report this fault to opsmith with the model",
            )


def _named(graph: Any, plan: LibraryPlan) -> Iterator[str]:
    """The operator of each node of a graph that the library computes."""
    return (plan.operators[name] for name in _node_names(graph) if name in plan.operators)


def _node_names(graph: Any) -> list[NodeName]:
    """The types of the nodes of a graph or function, subgraphs included."""
    return [(node.domain, node.op_type) for node in graph.all_nodes()]
