"""Paths through a function, whose sum is its gradient, and the gradient with some of them cut.

Each argument of each torch operation in a function is an edge. Cutting an edge with `detach` keeps the
results, and removes from the gradient the part that flows through the edge.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith.checking.diagnosis.decompositions import decomposition
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import Results, vjp
from opsmith.core.cached_property import cached_property
from opsmith.core.tensors import nested_tensors, replace_tensors
from opsmith.judging.attribution import calls_operator
from opsmith.judging.tensors import is_inexact

MOST_EDGES = 200
"""Maximum number of edges."""

RESULT = -1
"""Slot that stands for the result of an operation."""


@dataclass(frozen=True)
class OperandEdge:
    """One argument of one torch operation in a function.

    Args:
        call: Number of the operation in the run, from 0.
        slot: Index of the argument, with lists expanded; `RESULT` for all uses of the result.
        operation: Name of the operation.
        source: Location of the operation.
        alone: True if it is the only tensor of that operation that receives a gradient.
    """

    call: int
    slot: int
    operation: str
    source: SourceExpression
    alone: bool

    def __str__(self) -> str:
        return self.source.named(self.operation, None if self.slot == RESULT or self.alone else self.slot)


class GradientPaths:
    """The gradient of a function of flat arguments with respect to one of them, with edges cut."""

    def __init__(
        self, function: Results, flat: Sequence[Any], argnum: int, grads: Sequence[Tensor | None]
    ) -> None:
        self.function, self.flat, self.argnum, self.grads = function, flat, argnum, grads
        self._through: dict[OperandEdge, Tensor | None] = {}

    @cached_property
    def _uncut(self) -> tuple[Tensor | None, list[OperandEdge]]:
        return self._gradient()

    @property
    def edges(self) -> list[OperandEdge]:
        """Edges in the order of the run; empty if autograd does not record the function."""
        return self._uncut[1][:MOST_EDGES]

    @property
    def uncut(self) -> Tensor | None:
        """The gradient without cuts: the sum over all paths."""
        return self._uncut[0]

    def without(self, *cut: OperandEdge) -> Tensor | None:
        """Compute the gradient with these edges cut; None if the run does not contain them."""
        found, edges = self._gradient(*cut)
        known = {(edge.call, edge.operation) for edge in edges}
        return found if all((edge.call, edge.operation) in known for edge in cut) else None

    def through(self, edge: OperandEdge) -> Tensor | None:
        """Compute the part of the gradient that flows through an edge."""
        if edge not in self._through:
            left = self.without(edge)
            self._through[edge] = None if left is None or self.uncut is None else self.uncut - left
        return self._through[edge]

    def leaving_out(self, edge: OperandEdge) -> Tensor | None:
        """Compute the gradient with a summand replaced by zeros, also in the results."""
        return self._gradient(edge, zeros=True)[0]

    def _gradient(self, *cut: OperandEdge, zeros: bool = False) -> tuple[Tensor | None, list[OperandEdge]]:
        """Compute the gradient of a run, and its edges; None if the function raises."""
        cutting = _Cutting(frozenset((edge.call, edge.slot) for edge in cut), zeros=zeros)

        def function(flat: Sequence[Any]) -> Sequence[Tensor]:
            with cutting:
                return self.function(flat)

        with Overlooking():  # without a summand it may raise, for example for a singular matrix
            found = vjp(function, self.flat, (self.argnum,), self.grads)[0]
            return torch.zeros_like(self.flat[self.argnum]) if found is None else found, cutting.edges
        return None, cutting.edges


class _Cutting(TorchFunctionMode):
    """Records every torch operation, and cuts some of its edges.

    Args:
        cuts: Call and slot of each edge to cut.
        zeros: True to replace the operand by zeros, not by the detached operand.
    """

    def __init__(self, cuts: frozenset[tuple[int, int]], *, zeros: bool = False) -> None:
        super().__init__()
        self.cuts, self.zeros = cuts, zeros
        self.edges: list[OperandEdge] = []
        self.calls = 0

    @calls_operator
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        formula = decomposition(func, args, given)
        if formula is not None:
            with self:
                return formula()
        every = list(_leaves([*args, *given.values()]))
        argnums = [at for at, each in enumerate(every) if is_inexact(each)]
        name = str(getattr(func, "__name__", func))
        if not argnums or name in _NO_OPERATION:
            return func(*args, **given)
        call, self.calls = self.calls, self.calls + 1
        written = _writes(name)
        slots = iter(argnums)

        def cut(each: Tensor) -> Tensor:
            slot = next(slots)
            if (call, slot) not in self.cuts or (written and slot == 0):
                return each
            return torch.zeros_like(each) if self.zeros else each.detach()

        result = func(*_mapped(args, cut), **_mapped(given, cut))
        followed = [at for at in argnums if every[at].requires_grad and not (written and at == 0)]
        if (
            followed
            and torch.is_grad_enabled()
            and (self.cuts or any(each.requires_grad for each in nested_tensors(result)))
        ):
            source = source_of()
            self.edges += [OperandEdge(call, at, name, source, len(followed) == 1) for at in followed]
            if len(followed) > 1 and not written:
                self.edges.append(OperandEdge(call, RESULT, name, source, False))
        if (call, RESULT) in self.cuts:
            result = _mapped(result, lambda each: each.detach())
        return result


_NO_OPERATION = frozenset(
    {"__get__", "__set__", "detach", "requires_grad_", "backward", "size", "dim", "numel", "register_hook"}
)


def _writes(name: str) -> bool:
    """Return True if an operation writes into its first argument, which cannot be cut."""
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name != "__invert__")
        or (name.endswith("_") and not name.endswith("__"))
    )


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the items of nested lists, tuples and dictionaries."""
    if isinstance(values, Mapping):
        yield from _leaves(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every floating tensor of a nested value."""
    tensors = nested_tensors(value)
    return replace_tensors(value, (change(each) if is_inexact(each) else each for each in tensors))


WIDTH = 60
_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[2]
_BETWEEN = tuple(str(_OURS / name) for name in ("checking", "core", "adopting", "torch_library"))
_FORMULAS = str(Path(__file__).with_name("decompositions.py"))


@dataclass(frozen=True)
class SourceExpression:
    """Source of the expression of an operation.

    Args:
        text: Source text; empty if there is none.
        where: Its location, `file:line`.
        inside: Expression of the composite operation that contains it; else empty.
    """

    text: str
    where: str
    inside: str = ""

    def named(self, operation: str, slot: int | None = None) -> str:
        """Name the value of the expression, or one of its operands, in a message."""
        operands, words = _operands(self.text), f"`{_short(self.text or operation)}`"
        if slot is not None:
            operand = f"`{_short(operands[slot])}` in" if slot < len(operands) else f"operand {slot + 1} of"
            words = f"{operand} {words}"
        words += f" inside of `{_short(self.inside)}`" if self.inside else ""
        return f"{words} at {self.where}" if self.where else words


def source_of() -> SourceExpression:
    """Return the innermost expression on the stack that belongs neither to torch nor to opsmith."""
    frame: FrameType | None = inspect.currentframe()
    formula = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _FORMULAS and frame.f_code.co_name != decomposition.__name__:
            formula = formula or _segment(frame)
        elif not name.startswith((str(_TORCH), *_BETWEEN)):
            text, where = _segment(frame), f"{name}:{frame.f_lineno}"
            return SourceExpression(formula, where, text) if formula else SourceExpression(text, where)
        frame = frame.f_back
    return SourceExpression(formula, "")


def _segment(frame: FrameType) -> str:
    """Return the source text that a frame is executing."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end, column, end_column = next(positions, (None, None, None, None))
    if line is None or end is None or column is None or end_column is None:
        return ""
    node = ast.Pass(lineno=1, end_lineno=end - line + 1, col_offset=column, end_col_offset=end_column)
    source = "".join(linecache.getlines(frame.f_code.co_filename)[line - 1 : end])
    return " ".join((ast.get_source_segment(source, node) or "").split())


@cache
def _operands(text: str) -> list[str]:
    """Return the operands of an operator or of a call; the receiver of a method comes first."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return []
    if isinstance(tree, ast.BinOp):
        found: list[ast.expr] = [tree.left, tree.right]
    elif isinstance(tree, ast.Call):
        found = [*tree.args, *(word.value for word in tree.keywords)]
        if isinstance(tree.func, ast.Attribute) and ast.unparse(tree.func.value) not in _MODULES:
            found.insert(0, tree.func.value)
        found = [part for each in found for part in (each.elts if isinstance(each, _LISTS) else [each])]
    else:
        return []
    return [ast.unparse(each) for each in found]


_LISTS = (ast.List, ast.Tuple)
_MODULES = frozenset({"torch", "F", "torch.nn.functional", "nn.functional", "torch.special", "torch.linalg"})


def _short(text: str) -> str:
    return textwrap.shorten(text, WIDTH, placeholder=" ...") if len(text) > WIDTH else text
