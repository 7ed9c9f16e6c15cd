"""Tolerance of a comparison: the error of an output that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.exporting.dtypes import DTYPE_BY_NUMBER

ONCE, EACH = 16, 4
"""Tolerance in eps: a constant part, and a factor of the square root of the number of nodes."""

ERROR_RATIO = 4
"""Largest allowed ratio of the file's error to PyTorch's own, both measured against float64."""


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of an output.

    Args:
        relative: The largest difference, relative to the largest value.
        reason: The derivation of the number.
    """

    relative: float
    reason: str


def tolerance(dtype: torch.dtype, nodes: int) -> Tolerance:
    """The tolerance of an output of a file with this number of nodes.

    Each node rounds once, and the two sides sum in different orders: independent errors grow with the square
    root of their number.

    Example:
        >>> tolerance(torch.int64, 9).relative
        0.0
    """
    if not dtype.is_floating_point:
        return Tolerance(0.0, "whole numbers are equal")
    unit = torch.finfo(dtype).eps
    allowed = unit * (ONCE + EACH * math.sqrt(nodes))
    name = str(dtype).removeprefix("torch.")
    round_ = "1 node that rounds" if nodes == 1 else f"{nodes} nodes that round"
    return Tolerance(allowed, f"eps({name}) × ({ONCE} + {EACH} √{nodes}), for {round_}")


def in_coarser(dtype: torch.dtype, coarsest: torch.dtype | None, nodes: int) -> Tolerance | None:
    """The tolerance of an output that is computed from values of a coarser dtype; None without such values.

    Example:
        >>> in_coarser(torch.float32, torch.float16, 9).reason
        'eps(float16) × (16 + 4 √9), for 9 nodes that round, some of them to float16'
    """
    if not dtype.is_floating_point or coarsest is None:
        return None
    if torch.finfo(coarsest).eps <= torch.finfo(dtype).eps:
        return None
    allowed = tolerance(coarsest, nodes)
    name = str(coarsest).removeprefix("torch.")
    return Tolerance(allowed.relative, f"{allowed.reason}, some of them to {name}")


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; inf if shapes, dtypes or nans differ.

    Example:
        >>> difference(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
        0.125
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(got, expected) else math.inf
    actual, wanted = got.double(), expected.double()
    special = ~torch.isfinite(wanted)
    if not torch.equal(special, ~torch.isfinite(actual)):
        return math.inf
    if not torch.equal(actual[special].nan_to_num(2.0), wanted[special].nan_to_num(2.0)):
        return math.inf
    finite = wanted[~special]
    if not finite.numel():
        return 0.0
    largest = finite.abs().max().item()
    return float((actual[~special] - finite).abs().max().item() / (largest or 1.0))


def in_float64(model: torch.nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The results of a model in float64; None if it does not run in float64."""
    inputs_in_float64 = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    try:
        with torch.no_grad():
            results: Any = deepcopy(model).double()(*inputs_in_float64)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # it has a fixed dtype
        return None
    return tuple(results)


def explained(got: Tensor, expected: Tensor, truth: Tensor) -> Tolerance | None:
    """The tolerance that PyTorch's own error against float64 explains; None if it explains nothing.

    Rounding leaves at least half of the digits. A larger error of PyTorch, for example of a wrong kernel that
    does not take float64, explains nothing.
    """
    if not expected.dtype.is_floating_point or truth.shape != expected.shape:
        return None
    pytorch_error = difference(expected.double(), truth)
    file_error = difference(got.double(), truth)
    half = math.sqrt(torch.finfo(expected.dtype).eps)
    if not pytorch_error <= half or not file_error <= ERROR_RATIO * pytorch_error:  # nan explains nothing
        return None
    return Tolerance(
        (ERROR_RATIO + 1) * pytorch_error,
        f"{ERROR_RATIO + 1} times what PyTorch itself is off from float64, {pytorch_error:.1e}",
    )


@dataclass(frozen=True)
class Rounding:
    """The nodes that round.

    Args:
        nodes: The number of nodes that run, those of bodies counted in every call.
        coarsest: For each value that a node computes, the coarsest floating dtype that it or a value before
            it was rounded to.
    """

    nodes: int
    coarsest: Mapping[str, torch.dtype]


def rounding(model: Any) -> Rounding:
    """Count the nodes that round in an onnx_ir model with its functions."""
    functions = {function.identifier(): function for function in model.functions.values()}
    sizes = {name: len(function.graph) for name, function in functions.items()}
    found: dict[str, torch.dtype] = {}
    for node in model.graph:
        inside = [value for each in _inside(node) for value in each.outputs]
        before = [found[value.name] for value in node.inputs if value is not None and value.name in found]
        before += [dtype for value in inside if (dtype := _floating(value.dtype)) is not None]
        before += _in_body(node, functions)
        for value in node.outputs:
            dtype = _floating(value.dtype)
            types = before if dtype is None else [*before, dtype]
            if types:
                found[value.name] = max(types, key=lambda dtype: torch.finfo(dtype).eps)
    return Rounding(sum(sizes.get(node.op_identifier(), 1) for node in model.graph), found)


def _inside(node: Any) -> list[Any]:
    """The nodes in the subgraphs of a node: branches, and bodies of loops."""
    graphs = [graph for attribute in node.attributes.values() for graph in _graphs(attribute)]
    return [each for graph in graphs for each in graph.all_nodes()]


def _graphs(attribute: Any) -> Sequence[Any]:
    if attribute.is_ref():
        return ()
    if attribute.type.name == "GRAPH":
        return (attribute.value,)
    return tuple(attribute.value) if attribute.type.name == "GRAPHS" else ()


def _in_body(node: Any, functions: Mapping[Any, Any]) -> list[torch.dtype]:
    """The floating dtypes in the body of a node, from its inputs and casts: other values have none."""
    function = functions.get(node.op_identifier())
    if function is None:
        return []
    found = [
        _floating(given.dtype)
        for given, formal in zip(node.inputs, function.inputs, strict=False)
        if given is not None and not all(map(_is_cast, formal.consumers()))
    ]
    for each in function.graph.all_nodes():
        if _is_cast(each):
            found.append(_floating(each.attributes["to"].value))
        found += _in_body(each, functions)
    return [dtype for dtype in found if dtype is not None]


def _is_cast(node: Any) -> bool:
    return node.op_type == "Cast" and not node.domain


def _floating(number: Any) -> torch.dtype | None:
    dtype = None if number is None else DTYPE_BY_NUMBER.get(int(number))
    return dtype if dtype is not None and dtype.is_floating_point else None
