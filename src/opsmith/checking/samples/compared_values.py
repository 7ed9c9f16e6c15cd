"""Values that code compares an argument with: `mode == "reflect"`, `k > 3`, `weight is None`.

An argument is followed through other names for it, attributes of `ctx`, and calls of the author's functions.
Where a source cannot be read, as at a prompt, nothing is known.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula
from opsmith.core.operator import Operator
from opsmith.core.reachable import is_library

MOST_CALLS = 4
"""Most calls through which an argument is followed."""

_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUALITIES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
_MEMBERSHIPS = (ast.In, ast.NotIn)
_SAME = frozenset({"lower", "upper", "casefold", "strip", "int", "float", "str", "bool"})
"""Functions and methods whose result is compared in the place of the argument."""
_UNKNOWN = object()


def is_float(number: Any) -> bool:
    """Return True for a number that a float can be: whole numbers of Python may be larger."""
    return isinstance(number, float) or abs(number) <= sys.float_info.max


def is_single(value: Any) -> bool:
    """Return False for a tensor or an array, whose comparison has an answer for each element."""
    return isinstance(value, int | float | complex) or not hasattr(value, "__array__")


@dataclass(frozen=True)
class Comparison:
    """Values that one expression compares an argument with.

    Args:
        values: The values.
        holds: The expression as a function of the argument, where it is more than equality.
        near: Numbers on both sides of the expression, for a value of the argument; None for those around the
            value and around `values`.
        code: The code of the function that compares.
    """

    values: tuple[Any, ...]
    holds: Callable[[Any], Any] | None = None
    near: Callable[[Any], Iterable[Any]] | None = None
    code: types.CodeType | None = None

    def others(self, value: Any) -> list[Any]:
        """Return the values; where the expression is more than equality, those on its other side first.

        Args:
            value: Value of the argument in a sample.

        Example:
            >>> more_than_3 = Comparison((3,), lambda k: k > 3)
            >>> more_than_3.others(2), more_than_3.others(5)
            ([4, 3], [3])
        """
        if self.holds is None or not isinstance(value, int | float):
            return [*self.values]
        side = bool(self.holds(value))
        near = self._around(value) if self.near is None else self.near(value)
        beyond = [other for other in near if bool(self.holds(other)) != side][:1]
        return [*dict.fromkeys((*beyond, *self.values))]

    def _around(self, value: int | float) -> list[Any]:
        found: list[Any] = [*self.values]
        for bound in filter(is_float, (*self.values, value)):
            step = step_beside(bound) if isinstance(value, float) else 1
            found += [bound + step, bound - step]
        return found


def step_beside(number: float) -> float:
    """Return a distance at which another number is unlike this one."""
    return 0.5 * max(1.0, abs(number))


def unnamed_value(comparisons: Iterable[Comparison], value: Any, known: Collection[Any]) -> Any:
    """Return a value that no comparison names, for the branch of all others; None if a known value takes it.

    The function that comes first decides, which is the forward or the reference if they compare it: a known
    value that it does not name takes its branch for others.

    Args:
        comparisons: Those of an argument.
        value: Value of the argument in a sample: a text or a number.
        known: Values that samples show, or that are tried anyway.

    Example:
        >>> doubled = Comparison(("double",))
        >>> unnamed_value([doubled], "double", ["double"])
        'other'
        >>> unnamed_value([doubled], "double", ["double", "triple"])
    """
    equalities = [each for each in comparisons if each.holds is None]
    first = [other for each in equalities if each.code is equalities[0].code for other in each.values]
    if any(one not in first for one in (value, *known)):
        return None
    every = [other for each in equalities for other in each.values]
    if isinstance(value, str):
        return next(text for length in count() if (text := "other" + "_" * length) not in every)
    numbers = [other for other in every if isinstance(other, int | float) and is_float(other)]
    step = step_beside(max(numbers, default=0)) if isinstance(value, float) else 1
    return max(numbers, default=value) + step


def compared_values(subject: Subject) -> Mapping[str, Sequence[Comparison]]:
    """Return the comparisons of each argument in the code of an operator, by the argument's name.

    Example:
        >>> import torch, opsmith
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
        >>> compared_values(subject)
        {}
    """
    code = _ReadCode()
    specification = subject.specification
    names = specification.schema.names
    for brought, skipped in specification.origin.codes():
        code.read_class_function(brought, names, skipped)
    if subject.kind.has_reference:
        same = {name: name for name in names}
        rules = specification.gradients.rules.values()
        formulas = [rule.function for rule in rules if isinstance(rule, Formula)]
        kernels = [kernel.given for kernel in specification.kernels]
        for function in (specification.reference, *formulas, *kernels):
            code.read(function, same, 0)
    return code.found


@dataclass
class _ReadCode:
    """The code that was read so far.

    Attributes:
        found: Comparisons of each argument.
        attributes: The argument that each attribute of a context stands for.
        visited: Functions that were read, with what their parameters stand for.
    """

    found: dict[str, list[Comparison]] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    visited: set[Any] = field(default_factory=set)

    def read_class_function(self, function: Any, names: Sequence[str], skipped: int | None) -> None:
        """Read a function of a class: one that takes the arguments after some others, or a context alone."""
        parameters = _parameters(function)
        stands: dict[str, str] = {}
        if skipped is not None:
            stands = dict(zip(parameters[skipped:], names, strict=False))
        elif len(parameters) == 3:  # of setup_context: the context, the arguments, the results
            stands = {f"{parameters[1]}[{position}]": name for position, name in enumerate(names)}
        self.read(function, stands, 0)

    def read(self, function: Any, stands: Mapping[str, str], depth: int) -> None:
        """Read a function of the author's.

        Args:
            function: The function.
            stands: The argument that each local name stands for.
            depth: Number of calls that led to it.
        """
        if not isinstance(function, types.FunctionType) or is_library(function.__module__):
            return
        key = (function.__code__, *sorted(stands.items()))
        if depth > MOST_CALLS or key in self.visited:
            return
        self.visited.add(key)
        for tree in _trees(function):
            _Reader(self, function, dict(stands), depth).visit(tree)


def _parameters(function: Any) -> Sequence[str]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _trees(function: types.FunctionType) -> Iterator[ast.AST]:
    """Yield the function in the tree of its source; lambdas with its parameters, where it is one."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return
    own = list(_parameters(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__code__.co_name:
            yield node
            return
        if isinstance(node, ast.Lambda) and [each.arg for each in _all_parameters(node.args)] == own:
            yield node


def _all_parameters(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


class _Reader(ast.NodeVisitor):
    """Reads one function.

    Args:
        code: Receives what is found.
        function: The function.
        stands: The argument that each local name stands for; more names are added.
        depth: As of `_ReadCode.read`.
    """

    def __init__(
        self, code: _ReadCode, function: types.FunctionType, stands: dict[str, str], depth: int
    ) -> None:
        self.code, self.function, self.stands, self.depth = code, function, stands, depth
        parameters = _parameters(function)
        self.context = parameters[0] if parameters and parameters[0] not in stands else None

    def visit(self, node: ast.AST) -> None:
        """Read a node and all that it holds."""
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            self._truth(node.test)
        super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, comparison, right in zip(sides, node.ops, sides[1:], strict=False):
            self._compare(left, comparison, right)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        name = self._argument(node.subject)
        if name is not None:
            for case in node.cases:
                self._found(name, *self._matched(case.pattern))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._looked_up(node.slice, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            self._looked_up(node.args[0], node.func.value)
        called = self._value(node.func)
        called = called.reference if isinstance(called, Operator) else called
        parameters = _parameters(called)
        given = [*zip(parameters, node.args, strict=False)]
        given += [(each.arg, each.value) for each in node.keywords if each.arg is not None]
        stands = {name: argument for name, value in given if (argument := self._argument(value)) is not None}
        if stands:
            self.code.read(called, stands, self.depth + 1)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self._truth(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._truth(node.operand)
        self.generic_visit(node)

    def _found(self, name: str, *values: Any) -> None:
        single = tuple(each for each in values if is_single(each))
        if single:
            self._compared(name, Comparison(single, code=self.function.__code__))

    def _compared(self, name: str, comparison: Comparison) -> None:
        self.code.found.setdefault(name, []).append(comparison)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            for position, (each, part) in enumerate(zip(target.elts, parts, strict=False)):
                self._assign(each, part or ast.Subscript(value, ast.Constant(position)))
            return
        name = self._argument(value)
        if name is not None and isinstance(target, ast.Name):
            self.stands[target.id] = name
        elif name is not None and isinstance(target, ast.Attribute) and self._is_context(target.value):
            self.code.attributes[target.attr] = name

    def _is_context(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.context

    def _argument(self, node: ast.expr) -> str | None:
        """Return the name of the argument that an expression stands for; None if it is none."""
        if isinstance(node, ast.Name):
            return self.stands.get(node.id)
        if isinstance(node, ast.Attribute) and self._is_context(node.value):
            return self.code.attributes.get(node.attr)
        if isinstance(node, ast.NamedExpr):
            return self._argument(node.value)
        if isinstance(node, ast.Subscript):
            return self.stands.get(ast.unparse(node)) if isinstance(node.slice, ast.Constant) else None
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Attribute) and node.func.attr in _SAME and not node.args:
            return self._argument(node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id in _SAME and len(node.args) == 1:
            return self._argument(node.args[0])
        return None

    def _compare(self, left: ast.expr, comparison: ast.cmpop, right: ast.expr) -> None:
        if isinstance(comparison, _MEMBERSHIPS):
            name, values = self._argument(left), self._value(right)
            if name is not None and isinstance(values, dict | list | tuple | set | frozenset):
                self._found(name, *values)
            return
        for one, other, reverse in ((left, right, False), (right, left, True)):
            value = self._value(other)
            if value is _UNKNOWN or isinstance(value, dict | list | set):
                continue
            name = self._argument(one)
            if name is not None and isinstance(comparison, _EQUALITIES):
                self._found(name, value)
            elif name is not None and isinstance(value, int | float):
                order = _ORDERS[type(comparison)]
                self._compared(name, Comparison((value,), _ordered(order, value, reverse=reverse)))
            elif isinstance(value, int):
                order = _ORDERS.get(type(comparison), operator.eq)
                self._remainder(one, _ordered(order, value, reverse=reverse), value)

    def _truth(self, node: ast.expr) -> None:
        name = self._argument(node)
        if name is not None:
            self._compared(name, Comparison((0,), bool))
        else:
            self._remainder(node, bool, 0)

    def _remainder(self, node: ast.expr, holds: Callable[[Any], Any], bound: int) -> None:
        """Find a condition on the remainder of an argument, as in `k % 4 >= 2`."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
            return
        name, by = self._argument(node.left), self._value(node.right)
        if name is not None and type(by) is int and by > 1:
            self._compared(name, _of_remainder(by, holds, bound))

    def _looked_up(self, key: ast.expr, table: ast.expr) -> None:
        name, values = self._argument(key), self._value(table)
        if name is not None and isinstance(values, dict):
            self._found(name, *values)

    def _matched(self, pattern: ast.pattern) -> Iterator[Any]:
        if isinstance(pattern, ast.MatchValue):
            value = self._value(pattern.value)
            if value is not _UNKNOWN:
                yield value
        elif isinstance(pattern, ast.MatchSingleton):
            yield pattern.value
        elif isinstance(pattern, ast.MatchOr):
            for inner in pattern.patterns:
                yield from self._matched(inner)

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a constant expression: a literal, a global or a member of one."""
        if isinstance(node, ast.Dict):  # its keys may be looked up, whatever it holds
            keys = [self._value(key) for key in node.keys if key is not None]
            return dict.fromkeys(key for key in keys if key is not _UNKNOWN and key.__hash__ is not None)
        if isinstance(node, ast.Name):
            return _global(self.function, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            known = isinstance(owner, type | types.ModuleType)
            return inspect.getattr_static(owner, node.attr, _UNKNOWN) if known else _UNKNOWN
        if isinstance(node, ast.Call):
            plain = isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1
            return float(self._value(node.args[0])) if plain and _is_number(node.args[0]) else _UNKNOWN
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = [self._value(item) for item in node.elts]
            return _UNKNOWN if _UNKNOWN in items else tuple(items)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            return _UNKNOWN


def _global(function: types.FunctionType, name: str) -> Any:
    """Return the value of a name that a function does not assign."""
    code = function.__code__
    if name in code.co_freevars:
        cell = (function.__closure__ or ())[code.co_freevars.index(name)]
        return next(iter(_contents(cell)), _UNKNOWN)
    return _UNKNOWN if name in code.co_varnames else function.__globals__.get(name, _UNKNOWN)


def _contents(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # not assigned yet
        return


def _ordered(order: Callable[[Any, Any], bool], bound: float, *, reverse: bool) -> Callable[[Any], bool]:
    return (lambda value: order(bound, value)) if reverse else (lambda value: order(value, bound))


def _of_remainder(by: int, holds: Callable[[Any], Any], bound: int) -> Comparison:
    """Make the comparison of a remainder; the nearest remainders to a bound are on both of its sides."""

    def near(value: Any) -> list[Any]:
        return [value - value % by + (bound + step) % by for step in (0, 1, -1)]

    return Comparison((), lambda value: holds(value % by), near)


def _is_number(node: ast.expr) -> bool:
    """Return True for the text in `float("inf")`."""
    return isinstance(node, ast.Constant) and str(node.value).lstrip("+-") in ("inf", "infinity")
