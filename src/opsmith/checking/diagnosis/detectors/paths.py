"""The ways through a function that its gradient is a sum over, and that sum with some of them cut.

Each argument of each torch operation that a function runs is an edge. Cutting one, by `detach`, leaves the
results as they are and takes from the gradient what flows through that edge.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith.checking.diagnosis.detectors.unrolled import unrolled
from opsmith.checking.exceptions import Overlooking, calls_operator
from opsmith.checking.numerics.autodiff import Results, vjp
from opsmith.checking.samples.sample import is_inexact

MOST = 200
"""Edges that are looked at, at most."""

RESULT = -1
"""The slot that stands for what an operation returns."""


@dataclass(frozen=True)
class Edge:
    """One argument of one torch operation that a function runs.

    Args:
        call: Which operation it is, counted from 0.
        slot: Which of its arguments, lists spread out; `RESULT` for all that use what it returns.
        operation: Its name.
        source: Where it stands.
        alone: Whether it is the only tensor of that operation that a gradient flows to.
    """

    call: int
    slot: int
    operation: str
    source: Source
    alone: bool

    @property
    def key(self) -> tuple[int, int, str]:
        """What makes it the same edge in another run of the same function."""
        return self.call, self.slot, self.operation

    def __str__(self) -> str:
        if self.slot == RESULT or self.alone:
            return self.source.whole(self.operation)
        return self.source.operand(self.slot, self.operation)


class Paths:
    """The gradient of a function by one argument, with edges of it cut.

    Args:
        function: From flat arguments to visible results.
        flat: Arguments.
        place: Which one to differentiate by.
        grads: What comes in for each result.
    """

    def __init__(
        self, function: Results, flat: Sequence[Any], place: int, grads: Sequence[Tensor | None]
    ) -> None:
        self.function, self.flat, self.place, self.grads = function, flat, place, grads
        self._through: dict[tuple[int, int, str], Tensor | None] = {}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The edges in the order in which they are run; none where autograd does not follow the function."""
        cutting = _Cutting(frozenset())
        self._gradient(cutting)
        return tuple(cutting.edges[:MOST])

    @cached_property
    def every(self) -> Tensor | None:
        """The gradient with nothing cut, as the sum over all paths."""
        return self._gradient(_Cutting(frozenset()))

    def without(self, *edges: Edge) -> Tensor | None:
        """The gradient with these edges cut; None if the run is another one than that which they are of."""
        cutting = _Cutting(frozenset((edge.call, edge.slot) for edge in edges))
        found = self._gradient(cutting)
        known = {(edge.call, edge.operation) for edge in cutting.edges}
        return found if all((edge.call, edge.operation) in known for edge in edges) else None

    def through(self, edge: Edge) -> Tensor | None:
        """What of the gradient flows through an edge."""
        if edge.key not in self._through:
            left = self.without(edge)
            self._through[edge.key] = None if left is None or self.every is None else self.every - left
        return self._through[edge.key]

    def leaving_out(self, edge: Edge) -> Tensor | None:
        """The gradient of the function without a summand: zeros stand in its place, in the results too."""
        return self._gradient(_Cutting(frozenset({(edge.call, edge.slot)}), zeros=True))

    def _gradient(self, cutting: _Cutting) -> Tensor | None:
        """The gradient of a run; None where the function raises in it."""

        def function(flat: Sequence[Any]) -> Sequence[Tensor]:
            with cutting:
                return self.function(flat)

        with Overlooking():  # without a summand it may come upon what it never does: a singular matrix
            found = vjp(function, self.flat, (self.place,), self.grads)
            return torch.zeros_like(self.flat[self.place]) if found is None or found[0] is None else found[0]
        return None


class _Cutting(TorchFunctionMode):
    """Sees every torch operation, and cuts some of its edges.

    Args:
        cuts: Call and slot of each edge to cut.
        zeros: Whether to put zeros there, in place of the same numbers.
    """

    def __init__(self, cuts: frozenset[tuple[int, int]], *, zeros: bool = False) -> None:
        super().__init__()
        self.cuts, self.zeros = cuts, zeros
        self.edges: list[Edge] = []
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
        formula = unrolled(func, args, given)
        if formula is not None:
            with self:
                return formula()
        every = list(_leaves([*args, *given.values()]))
        places = [at for at, each in enumerate(every) if is_inexact(each)]
        name = str(getattr(func, "__name__", func))
        if not places or name in _NO_OPERATION:
            return func(*args, **given)
        call, self.calls = self.calls, self.calls + 1
        written = _writes(name)
        slots = iter(places)

        def cut(each: Tensor) -> Tensor:
            slot = next(slots)
            if (call, slot) not in self.cuts or (written and slot == 0):
                return each
            return torch.zeros_like(each) if self.zeros else each.detach()

        result = func(*_mapped(args, cut), **_mapped(given, cut))
        followed = [at for at in places if every[at].requires_grad and not (written and at == 0)]
        if followed and torch.is_grad_enabled() and (self.cuts or _followed(result)):
            source = source_of()
            self.edges += [Edge(call, at, name, source, len(followed) == 1) for at in followed]
            if len(followed) > 1 and not written:
                self.edges.append(Edge(call, RESULT, name, source, False))
        if (call, RESULT) in self.cuts:
            result = _mapped(result, lambda each: each.detach())
        return result


_NO_OPERATION = frozenset(
    {"__get__", "__set__", "detach", "requires_grad_", "backward", "size", "dim", "numel", "register_hook"}
)


def _writes(name: str) -> bool:
    """Whether an operation writes into its first argument, which cannot be cut from what it is."""
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name != "__invert__")
        or (name.endswith("_") and not name.endswith("__"))
    )


def _followed(result: Any) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in _leaves(result))


def _leaves(values: Any) -> Iterator[Any]:
    """What nested lists, tuples and dictionaries hold."""
    if isinstance(values, Mapping):
        yield from _leaves(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same, with every floating tensor changed."""
    if isinstance(value, Tensor):
        return change(value) if is_inexact(value) else value
    if isinstance(value, Mapping):
        return {name: _mapped(each, change) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    if isinstance(value, tuple):  # one with named fields, as `torch.max(x, 0)` returns
        return type(value)([_mapped(each, change) for each in value])
    return value


WIDTH = 60
_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[3]
_BETWEEN = tuple(str(_OURS / name) for name in ("checking", "core", "adopting", "torch_library"))
_FORMULAS = str(Path(__file__).with_name("unrolled.py"))


@dataclass(frozen=True)
class Source:
    """An expression.

    Args:
        text: Its source; empty where there is none.
        where: `file:line` of it.
        inside: The expression that a composite operation, of which it is a part, stands as; else empty.
    """

    text: str
    where: str
    inside: str = ""

    def whole(self, operation: str) -> str:
        """What a message calls the value of the expression."""
        return f"`{_short(self.text or operation)}`" + self._end()

    def operand(self, slot: int, operation: str) -> str:
        """What a message calls one operand of it."""
        names = _operands(self.text)
        if slot < len(names):
            return f"`{_short(names[slot])}` in `{_short(self.text)}`" + self._end()
        return f"operand {slot + 1} of `{_short(self.text or operation)}`" + self._end()

    def _end(self) -> str:
        inside = f" inside of `{_short(self.inside)}`" if self.inside else ""
        return f"{inside} at {self.where}" if self.where else inside


def source_of() -> Source:
    """Where the operation that is being run stands: the innermost expression outside of torch and of us."""
    frame: FrameType | None = inspect.currentframe()
    formula = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _FORMULAS and frame.f_code.co_name != "unrolled":
            formula = formula or _segment(frame)
        elif not name.startswith((str(_TORCH), *_BETWEEN)):
            text, where = _segment(frame), f"{name}:{frame.f_lineno}"
            return Source(formula, where, text) if formula else Source(text, where)
        frame = frame.f_back
    return Source(formula, "")


def _segment(frame: FrameType) -> str:
    """The source of what a frame is executing."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(positions, (None, None, None, None))
    if line is None or end_line is None or column is None or end_column is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, at) for at in range(line, end_line + 1)]
    encoded = [each.encode() for each in lines]
    encoded[-1] = encoded[-1][:end_column]
    encoded[0] = encoded[0][column:]
    return " ".join(b"".join(encoded).decode(errors="replace").split())


def _operands(text: str) -> list[str]:
    """The operands of an operator or of a call, the receiver of a method first."""
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
