"""Comparison of a file's output with PyTorch's: the difference, and the part that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.exporting.dtypes import DTYPE_BY_NUMBER
from opsmith.exporting.packages import onnx_ir
from opsmith.judging.answer import Answer, Computation
from opsmith.judging.compare import form_difference, in_double, is_same, largest_magnitude
from opsmith.judging.judge import judge


@dataclass(frozen=True)
class Closeness:
    """Difference of an output from PyTorch's, and the difference that rounding explains.

    Args:
        difference: The largest difference, relative to the largest value; infinite if shape, dtype or the
            positions of nan differ.
        allowed: The largest difference that rounding explains, relative to the largest value.
        reason: The derivation of `allowed`.
        close: True if rounding explains the difference of every element.
    """

    difference: float
    allowed: float
    reason: str
    close: bool


def closeness(
    got: Tensor,
    expected: Tensor,
    nodes: int,
    coarsest: torch.dtype | None = None,
    truth: Callable[[torch.dtype], Answer | None] = lambda dtype: None,
) -> Closeness:
    """Compare an output with PyTorch's output, and then with the truth if rounding cannot explain the gap.

    Args:
        got: The output.
        expected: PyTorch's output.
        nodes: Number of nodes that round.
        coarsest: The coarsest floating dtype to which an earlier value was rounded.
        truth: Function that returns the model's result in float64, with a measured bound for a dtype; None
            if the model does not run in float64.

    Example:
        >>> one = torch.ones(2)
        >>> closeness(one, one, 9).reason
        '(8 + 2 √9) roundings of the largest value in float32, for 9 nodes that round'
        >>> closeness(one + 1e-3, one, 9, torch.float16).close
        True
    """
    off = difference(got, expected)
    if not expected.dtype.is_floating_point:
        return Closeness(off, 0.0, "whole numbers are equal", off == 0)
    dtype = expected.dtype
    if coarsest is not None and torch.finfo(coarsest).eps > torch.finfo(dtype).eps:
        dtype = coarsest
    twin = Answer(expected.double(), expected, dtype, None, summands=nodes)
    round_ = "1 node that rounds" if nodes == 1 else f"{nodes} nodes that round"
    name = str(dtype).removeprefix("torch.")
    reason = f"(8 + 2 √{nodes}) roundings of the largest value in {name}, for {round_}"
    if math.isinf(off):
        return Closeness(off, _relative(twin), reason, close=False)
    if not judge(got, twin).wrong:
        return Closeness(off, _relative(twin), reason, close=True)
    answer = truth(dtype)
    if answer is None or any(
        judge(each, answer).kind not in ("equal", "rounding") for each in (got, expected)
    ):
        return Closeness(off, _relative(twin), reason, close=False)
    reason = f"the change of the model's results in float64 if the last digit of its inputs in {name} changes"
    return Closeness(off, _relative(answer), reason, close=True)


def _relative(answer: Answer) -> float:
    """The largest distance that a bound allows, relative to the largest value."""
    assert answer.value is not None
    allowed = answer.distance[answer.value.isfinite()]
    return float(allowed.max()) / (largest_magnitude(answer.value) or 1.0) if allowed.numel() else 0.0


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; inf if shapes, dtypes or nans differ.

    Example:
        >>> difference(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
        0.125
    """
    if form_difference(got, expected) is not None:
        return math.inf
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(got, expected) else math.inf
    actual, wanted = in_double(got), in_double(expected)
    off = torch.where(is_same(actual, wanted), 0.0, (actual - wanted).abs()).nan_to_num(math.inf, math.inf)
    return float(off.max()) / (largest_magnitude(wanted) or 1.0) if off.numel() else 0.0


def in_float64(model: torch.nn.Module, inputs: Sequence[Tensor]) -> Computation | None:
    """The model as a computation in float64; None if it does not run in float64."""

    def function(flat: list[Any]) -> list[Tensor]:
        with torch.no_grad():
            wide = any(each.dtype == torch.float64 for each in flat)
            return [*(double if wide else model)(*flat)]

    try:
        double = deepcopy(model).double()
        return Computation.of(function, inputs, torch.Generator().manual_seed(0))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # the model has a fixed dtype
        return None


@dataclass(frozen=True)
class Rounding:
    """The nodes that round.

    Args:
        nodes: The number of nodes that run; nodes of bodies are counted in every call.
        coarsest: For each value that a node computes, the coarsest floating dtype to which this value or an
            earlier one was rounded.
    """

    nodes: int
    coarsest: Mapping[str, torch.dtype]


def rounding(model: Any) -> Rounding:
    """Count the nodes that round in an onnx_ir model with its functions."""
    functions = {function.identifier(): function for function in model.functions.values()}
    sizes = {name: len(function.graph) for name, function in functions.items()}
    found: dict[str, torch.dtype] = {}
    for node in model.graph:
        within = [each for each in onnx_ir.traversal.RecursiveGraphIterator([node]) if each is not node]
        inside = [value for each in within for value in each.outputs]
        before = [found[value.name] for value in node.inputs if value is not None and value.name in found]
        before += [dtype for value in inside if (dtype := _floating(value.dtype)) is not None]
        before += _in_body(node, functions)
        for value in node.outputs:
            dtype = _floating(value.dtype)
            types = before if dtype is None else [*before, dtype]
            if types:
                found[value.name] = max(types, key=lambda dtype: torch.finfo(dtype).eps)
    return Rounding(sum(sizes.get(node.op_identifier(), 1) for node in model.graph), found)


def _in_body(node: Any, functions: Mapping[Any, Any]) -> list[torch.dtype]:
    """The floating dtypes in the body of a node, from its inputs and casts: other dtypes are unknown."""
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
