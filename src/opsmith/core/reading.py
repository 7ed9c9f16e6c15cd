"""Reading of users' code: what it does with the arguments of an operator.

An argument is followed through other names for it, attributes of a context, and calls of the author's
functions. Nothing of the code is run. Of a function without source, as at a prompt, nothing is known.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from opsmith.core import source
from opsmith.core.expression import OPERATIONS
from opsmith.core.reachable import Step, function_uses, is_library

MOST_CALLS = 4
"""Most calls through which an argument is followed."""

METHODS = ("forward", "setup_context", "backward", "vjp", "jvp")
"""The methods of a Function class that its author may write, in the order in which torch calls them."""

_EQUALITIES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
_SAME = frozenset({"lower", "upper", "casefold", "strip", "int", "float", "str", "bool"})
"""Functions and methods whose result is compared in the place of the argument."""
_UNKNOWN = object()


def is_single(value: Any) -> bool:
    """Return False for a tensor or an array, whose comparison has an answer for each element."""
    return isinstance(value, int | float | complex) or not hasattr(value, "__array__")


@dataclass(frozen=True)
class Comparison:
    """A condition on one argument.

    Args:
        values: Values that the argument itself is compared with.
        code: The code of the function that compares.
        holds: The condition as a function of the argument, where it is more than equality: True, False, or
            None for a value that raises.
        bounds: Numbers in the condition, on both sides of which it may change.
    """

    values: tuple[Any, ...]
    code: types.CodeType | None = None
    holds: Callable[[Any], bool | None] | None = None
    bounds: tuple[Any, ...] = ()


@dataclass
class Reading:
    """What the code that was read does with arguments.

    Attributes:
        called: Arguments that it calls.
        asked: Attributes that it asks of arguments.
        marked: Arguments that it marks as dirty.
        compared: Comparisons of each argument.
        methods: Readers of the methods of a class.
        kept: The argument that each attribute of a context stands for.
        read_before: Functions that were read, with what their names stand for.
    """

    called: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    marked: set[str] = field(default_factory=set)
    compared: dict[str, list[Comparison]] = field(default_factory=dict)
    methods: dict[str, FunctionReader] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    read_before: dict[Any, FunctionReader] = field(default_factory=dict)

    def read_class(self, function_class: type[torch.autograd.Function], names: Sequence[str]) -> None:
        """Read the methods of a Function class.

        Args:
            function_class: The class.
            names: Name of the argument for each parameter of its forward.
        """
        with_context = function_class.setup_context is torch.autograd.Function.setup_context
        for name in METHODS:
            method = getattr(function_class, name)
            if method is not getattr(torch.autograd.Function, name):
                self.read_method(name, method, names, with_context=with_context)

    def read_method(
        self, name: str, method: Any, names: Sequence[str], *, with_context: bool = False
    ) -> None:
        """Read a method of a Function class, or one that has the parameters of such a method."""
        parameters = source.parameters_of(method)
        stands: dict[str, str] = {}
        if name == "forward":
            stands = dict(zip(parameters[with_context:], names, strict=False))
        elif name == "setup_context" and len(parameters) > 1:
            stands = {f"{parameters[1]}[{position}]": each for position, each in enumerate(names)}
        reader = self.read(method, stands)
        if reader is not None:
            self.methods[name] = reader

    def read(self, function: Any, stands: Mapping[str, str], calls: int = 0) -> FunctionReader | None:
        """Read a function; a function that another one calls is read if it is no library's.

        Args:
            function: The function.
            stands: The argument that each of its names stands for.
            calls: Number of calls that led to it.
        """
        function = inspect.unwrap(function)
        tree = source.tree(function)
        if tree is None or calls > MOST_CALLS or (calls and is_library(function.__module__)):
            return None
        key = (function.__code__, *sorted(stands.items()))
        if key not in self.read_before:
            reader = self.read_before[key] = FunctionReader(self, function, dict(stands), calls)
            reader.visit(tree)
        return self.read_before[key]


class FunctionReader(ast.NodeVisitor):
    """Reader of one function.

    Args:
        reading: Receives what it finds.
        function: The function.
        stands: The argument that each name stands for; more names are added.
        calls: As of `Reading.read`.
    """

    def __init__(
        self, reading: Reading, function: types.FunctionType, stands: dict[str, str], calls: int
    ) -> None:
        self.reading, self.function, self.stands, self.calls = reading, function, stands, calls
        first = source.parameters_of(function)[:1]
        self.context = None if first and first[0] in stands else next(iter(first), None)
        outside = (Step.CLOSURE, Step.GLOBAL)
        self.values = {each.name: each.value for each in function_uses(function) if each.step in outside}

    def visit(self, node: ast.AST) -> None:
        """Read a node and all that it holds."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                self._condition(test)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._condition(operand)
            case ast.BoolOp(values=values):
                for value in values:
                    self._condition(value)
            case ast.Compare(left=left, ops=operations, comparators=others):
                for one, operation, other in zip([left, *others], operations, others, strict=False):
                    self._compare(one, operation, other)
            case ast.Match(subject=subject, cases=cases):
                self._equals(subject, [value for each in cases for value in self._matched(each.pattern)])
            case ast.Subscript(value=table, slice=key):
                self._looked_up(key, table)
            case ast.Attribute(value=value, attr=name) if self.argument(value) is not None:
                self.reading.asked.add(name)
            case ast.Call():
                self._call(node)
        self.generic_visit(node)

    def argument(self, node: ast.expr | None) -> str | None:
        """Return the name of the argument that an expression stands for; None if it is none."""
        match node:
            case ast.Name(id=name):
                return self.stands.get(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.context:
                return self.reading.kept.get(attribute)
            case ast.Subscript(slice=ast.Constant()):
                return self.stands.get(ast.unparse(node))
            case ast.NamedExpr(value=value):
                return self.argument(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
                same = (name in _SAME and not args) or (name.endswith("_") and not name.endswith("__"))
                return self.argument(value) if same else None
            case ast.Call(func=ast.Name(id=name), args=[value]) if name in _SAME:
                return self.argument(value)
        return None

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        name = self.argument(value)
        match target:
            case ast.Tuple(elts=targets):
                parts = value.elts if isinstance(value, ast.Tuple) else [None] * len(targets)
                for position, (each, part) in enumerate(zip(targets, parts, strict=False)):
                    self._assign(each, part or ast.Subscript(value, ast.Constant(position)))
            case ast.Name() if name is not None:
                self.stands[target.id] = name
            case ast.Attribute(value=ast.Name(id=owner)) if name is not None and owner == self.context:
                self.reading.kept[target.attr] = name

    def _call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=table, attr="get") if node.args:
                self._looked_up(node.args[0], table)
            case ast.Attribute(attr="mark_dirty"):
                self.reading.marked.update(name for each in node.args for name in self._given(each))
        name = self.argument(node.func)
        if name is not None:
            self.reading.called.add(name)
        called = self._value(node.func)
        given = [*zip(source.parameters_of(called), node.args, strict=False)]
        given += [(each.arg, each.value) for each in node.keywords if each.arg is not None]
        stands = {name: argument for name, value in given if (argument := self.argument(value)) is not None}
        if stands:
            self.reading.read(called, stands, self.calls + 1)

    def _given(self, node: ast.expr) -> Iterator[str]:
        """Yield the arguments that an expression in a call gives: `x`, or each of `*inputs`."""
        if isinstance(node, ast.Starred):
            items = f"{ast.unparse(node.value)}["
            yield from (argument for name, argument in self.stands.items() if name.startswith(items))
        elif (argument := self.argument(node)) is not None:
            yield argument

    def _equals(self, node: ast.expr, values: Any) -> None:
        """Note the values that an argument is compared with, if the expression stands for one."""
        name = self.argument(node)
        known = isinstance(values, dict | list | tuple | set | frozenset)
        single = tuple(each for each in values if each is not _UNKNOWN and is_single(each)) if known else ()
        if name is not None and single:
            self.reading.compared.setdefault(name, []).append(Comparison(single, self.function.__code__))

    def _looked_up(self, key: ast.expr, table: ast.expr) -> None:
        values = self._value(table)
        if isinstance(values, dict):
            self._equals(key, values)

    def _compare(self, left: ast.expr, operation: ast.cmpop, right: ast.expr) -> None:
        if isinstance(operation, ast.In | ast.NotIn):
            self._equals(left, self._value(right))
        elif isinstance(operation, _EQUALITIES) and {self.argument(left), self.argument(right)} != {None}:
            for one, other in ((left, right), (right, left)):
                value = self._value(other)
                self._equals(one, () if isinstance(value, dict | list | set) else [value])
        else:
            self._condition(ast.Compare(left, [operation], [right]))

    def _condition(self, node: ast.expr) -> None:
        """Note a condition that is a function of one argument: on its truth, order or remainder."""
        names = {self.argument(each) for each in ast.walk(node) if isinstance(each, ast.expr)} - {None}
        function = self._function(node)
        if function is None or len(names) != 1:
            return
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node, ast.Constant(0)]
        direct = any(self.argument(side) is not None for side in sides)
        numbers = [self._value(each) for each in (sides if direct else ast.walk(node))]
        bounds = tuple(each for each in numbers if isinstance(each, int | float))
        values, holds = bounds if direct else (), partial(_holds, function)
        found = Comparison(values, self.function.__code__, holds, bounds)
        self.reading.compared.setdefault(str(names.pop()), []).append(found)

    def _function(self, node: ast.expr) -> Callable[[Any], Any] | None:
        """Return an expression as a function of the argument in it; None if more in it is unknown."""
        if self.argument(node) is not None:
            return lambda value: value
        constant = self._value(node)
        if constant is not _UNKNOWN:
            return lambda value: constant
        match node:
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ) if type(op) in OPERATIONS:
                one, other, operation = self._function(left), self._function(right), OPERATIONS[type(op)]
                if one is not None and other is not None:
                    return lambda value: operation(one(value), other(value))
        return None

    def _matched(self, pattern: ast.pattern) -> Iterable[Any]:
        match pattern:
            case ast.MatchValue(value=value):
                return [self._value(value)]
            case ast.MatchSingleton(value=constant):
                return [constant]
            case ast.MatchOr(patterns=patterns):
                return [value for each in patterns for value in self._matched(each)]
        return ()

    def _value(self, node: ast.AST) -> Any:
        """Return the value of a constant expression: a literal, a global or a member of one."""
        match node:
            case ast.Name(id=name):
                return self.values.get(name, _UNKNOWN)
            case ast.Attribute(value=value, attr=name):
                owner = self._value(value)
                known = isinstance(owner, type | types.ModuleType)
                return inspect.getattr_static(owner, name, _UNKNOWN) if known else _UNKNOWN
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
                return float(text) if text.lstrip("+-") in ("inf", "infinity") else _UNKNOWN
            case ast.Dict(keys=keys):  # its keys may be looked up, whatever it holds
                values = [self._value(key) for key in keys if key is not None]
                return dict.fromkeys(
                    each for each in values if each is not _UNKNOWN and each.__hash__ is not None
                )
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                values = [self._value(each) for each in items]
                return _UNKNOWN if any(each is _UNKNOWN for each in values) else tuple(values)
            case ast.expr():
                try:
                    return ast.literal_eval(node)
                except (ValueError, TypeError, SyntaxError):
                    return _UNKNOWN
        return _UNKNOWN


def _holds(condition: Callable[[Any], Any], value: Any) -> bool | None:
    try:
        return bool(condition(value))
    except (ArithmeticError, TypeError, ValueError):
        return None
