"""Reading of users' code: its uses of the arguments of an operator.

An argument is followed through other names for it, attributes of a context, and calls of the author's
functions. No code is run. A function without source, as at a prompt, cannot be read.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from opsmith.core import source
from opsmith.core.expression import OPERATIONS
from opsmith.core.reachable import Step, function_uses, is_library

MOST_CALLS = 4
"""Maximum number of nested calls through which an argument is followed."""

METHODS = ("forward", "setup_context", "backward", "vjp", "jvp")
"""The methods of a Function class that its author may write, in the order in which torch calls them."""

_SAME = frozenset({"lower", "upper", "casefold", "strip", "int", "float", "str", "bool"})
"""Functions and methods whose result may be compared instead of the argument."""
_UNKNOWN = object()


def is_single(value: Any) -> bool:
    """Return False for a tensor or an array, whose comparison has a result for each element."""
    return isinstance(value, int | float | complex) or not hasattr(value, "__array__")


@dataclass(frozen=True)
class Comparison:
    """A condition on one argument.

    Args:
        values: Values that are compared with the argument, or numbers at which the condition changes.
        code: The code of the function that compares.
        holds: The condition as a function of the argument, if it is not an equality: True, False, or None
            for a value that raises.
    """

    values: tuple[Any, ...]
    code: types.CodeType | None = None
    holds: Callable[[Any], bool | None] | None = None


@dataclass
class Reading:
    """Uses of arguments in the code that was read.

    Attributes:
        called: Arguments that the code calls.
        asked: Attributes that the code reads from arguments, each with the names of these arguments.
        marked: Arguments that the code marks as dirty.
        compared: Comparisons of each argument.
        kept: The argument that is stored as each attribute of a context.
        methods: Readers of the methods of a class.
        before: Readers of all functions, by their code and by the arguments of their names.
    """

    called: set[str] = field(default_factory=set)
    asked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    marked: set[str] = field(default_factory=set)
    compared: dict[str, list[Comparison]] = field(default_factory=lambda: defaultdict(list))
    kept: dict[str, str] = field(default_factory=dict)
    methods: dict[str, FunctionReader | None] = field(default_factory=dict)
    before: dict[Any, FunctionReader] = field(default_factory=dict)

    def read_class(self, function_class: type[torch.autograd.Function], names: Sequence[str]) -> None:
        """Read a Function class.

        Args:
            function_class: The class.
            names: Name of the argument for each parameter of its forward.
        """
        default = torch.autograd.Function
        both = {name: (getattr(function_class, name), getattr(default, name)) for name in METHODS}
        own = {name: method for name, (method, other) in both.items() if method is not other}
        self.read_methods(own, names, with_context="setup_context" not in own)

    def read_methods(
        self, methods: Mapping[str, Any], names: Sequence[str], *, with_context: bool = False
    ) -> None:
        """Read functions with the parameters of a Function class's methods, by the names of the methods."""
        for name, method in methods.items():
            parameters, stands = source.parameters_of(method), dict[str, str]()
            if name == "forward":
                stands = dict(zip(parameters[with_context:], names, strict=False))
            elif name == "setup_context" and len(parameters) > 1:
                stands = {f"{parameters[1]}[{position}]": each for position, each in enumerate(names)}
            self.methods[name] = self.read(method, stands)

    def read(self, function: Any, stands: Mapping[str, str], calls: int = 0) -> FunctionReader | None:
        """Read a function, and the functions that it calls, except functions of libraries.

        Args:
            function: The function.
            stands: The argument that each of its names refers to.
            calls: Number of nested calls that led to it.
        """
        function = inspect.unwrap(function)
        own = not calls or (calls <= MOST_CALLS and not is_library(getattr(function, "__module__", None)))
        tree = source.tree(function) if own else None
        if tree is None:
            return None
        key = (function.__code__, *sorted(stands.items()))
        if key not in self.before:
            self.before[key] = FunctionReader(self, function, dict(stands), calls)
            self.before[key].visit(tree)
        return self.before[key]


class FunctionReader(ast.NodeVisitor):
    """Reader of one function.

    Args:
        reading: Receives the findings.
        function: The function.
        stands: The argument that each name refers to; more names are added.
        calls: As for `Reading.read`.
    """

    def __init__(
        self, reading: Reading, function: types.FunctionType, stands: dict[str, str], calls: int
    ) -> None:
        self.reading, self.function, self.stands, self.calls = reading, function, stands, calls
        self.context = next((each for each in source.parameters_of(function)[:1] if each not in stands), None)
        outside = (Step.CLOSURE, Step.GLOBAL)
        self.values = {each.name: each.value for each in function_uses(function) if each.step in outside}

    def visit(self, node: ast.AST) -> None:
        """Read a node and everything in it."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                self._truth(test)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._truth(operand)
            case ast.BoolOp(values=values):
                self._truth(*values)
            case ast.Compare(left=left, ops=operations, comparators=others):
                for one, operation, other in zip([left, *others], operations, others, strict=False):
                    self._condition(ast.Compare(one, [operation], [other]))
            case ast.Match(subject=subject, cases=cases):
                every = [each for case in cases for each in ast.walk(case.pattern)]
                self._equals(subject, [self.value(each) for each in every if isinstance(each, ast.pattern)])
            case ast.Subscript(value=table, slice=key):
                self._looked_up(key, table)
            case ast.Attribute(value=value, attr=name) if (argument := self.argument(value)) is not None:
                self.reading.asked[name].add(argument)
            case ast.Call(func=function, args=args):
                self._called(function, args)
                self._follow(node)
        self.generic_visit(node)

    def argument(self, node: ast.AST | None) -> str | None:
        """Return the name of the argument that an expression refers to; None if it is not an argument."""
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

    def value(self, node: ast.AST) -> Any:
        """Return the value of a constant expression: a literal, a global, a global's member, or a pattern."""
        match node:
            case ast.Name(id=name):
                return self.values.get(name, _UNKNOWN)
            case ast.Attribute(value=value, attr=name):
                owner = self.value(value)
                known = isinstance(owner, type | types.ModuleType)
                return inspect.getattr_static(owner, name, _UNKNOWN) if known else _UNKNOWN
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "-inf" as text)]):
                return float(text)
            case ast.Dict(keys=keys):  # its keys may be looked up, whatever its values are
                return dict.fromkeys(filter(_is_known, map(self.value, filter(None, keys))))
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                values = tuple(map(self.value, items))
                return values if all(map(_is_known, values)) else _UNKNOWN
            case ast.MatchValue(value=value):
                return self.value(value)
            case ast.MatchSingleton(value=constant):
                return constant
            case ast.Constant() | ast.UnaryOp() | ast.BinOp():
                try:
                    return ast.literal_eval(node)
                except (ValueError, TypeError):
                    return _UNKNOWN
        return _UNKNOWN

    def _arguments(self, *nodes: ast.AST) -> set[str]:
        return {name for node in nodes if (name := self.argument(node)) is not None}

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        name = self.argument(value)
        match target:
            case ast.Tuple(elts=targets):
                parts = value.elts if isinstance(value, ast.Tuple) else [None] * len(targets)
                for position, (each, part) in enumerate(zip(targets, parts, strict=False)):
                    self._assign(each, part or ast.Subscript(value, ast.Constant(position)))
            case ast.Name(id=other) if name is not None:
                self.stands[other] = name
            case ast.Attribute(value=ast.Name(id=owner), attr=other) if name and owner == self.context:
                self.reading.kept[other] = name

    def _called(self, function: ast.expr, args: Sequence[ast.expr]) -> None:
        self.reading.called.update(self._arguments(function))
        match function:
            case ast.Attribute(value=table, attr="get") if args:
                self._looked_up(args[0], table)
            case ast.Attribute(attr="mark_dirty"):
                lists = [ast.unparse(each.value) for each in args if isinstance(each, ast.Starred)]
                items = {name for at, name in self.stands.items() if at.partition("[")[0] in lists}
                self.reading.marked.update(self._arguments(*args), items)

    def _follow(self, node: ast.Call) -> None:
        function = self.value(node.func)
        given = [*zip(source.parameters_of(function), node.args, strict=False)]
        given += [(each.arg, each.value) for each in node.keywords if each.arg is not None]
        stands = {name: argument for name, value in given if (argument := self.argument(value)) is not None}
        if stands:
            self.reading.read(function, stands, self.calls + 1)

    def _looked_up(self, key: ast.expr, table: ast.expr) -> None:
        values = self.value(table)
        self._equals(key, values if isinstance(values, dict) else ())

    def _equals(self, node: ast.expr, values: Any) -> None:
        """Note values that an expression is compared with, if the expression is an argument."""
        name = self.argument(node)
        known = tuple(filter(_is_known, values)) if isinstance(values, _CONTAINERS) else ()
        if name is not None and known:
            self.reading.compared[name].append(Comparison(known, self.function.__code__))

    def _truth(self, *nodes: ast.expr) -> None:
        for node in nodes:
            if not isinstance(node, ast.Compare):  # comparisons are read elsewhere
                self._condition(node)

    def _condition(self, node: ast.expr) -> None:
        """Note a condition on one argument: its equality, or its order, remainder or truth."""
        match node:
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]):
                return self._equals(left, self.value(right))
            case ast.Compare(
                left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()], comparators=[right]
            ) if self.argument(left) or self.argument(right):
                self._equals(left, [self.value(right)])
                return self._equals(right, [self.value(left)])
        function = self._function(node)
        parts = [*ast.walk(node)]
        names = self._arguments(*parts)
        if function is not None and len(names) == 1:
            numbers = tuple(each for each in map(self.value, parts) if isinstance(each, int | float))
            found = Comparison(numbers or (0,), self.function.__code__, partial(_holds, function))
            self.reading.compared[names.pop()].append(found)
        return None

    def _function(self, node: ast.expr) -> Callable[[Any], Any] | None:
        """Return an expression as a function of the argument in it; None if another part is unknown."""
        constant = self.value(node)
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
        return None if self.argument(node) is None else lambda value: value


_CONTAINERS = (dict, list, tuple, set, frozenset)


def _is_known(value: Any) -> bool:
    """Return True for a value that an argument may have; comparing an array has no single result."""
    return value is not _UNKNOWN and isinstance(value, Hashable) and is_single(value)


def _holds(condition: Callable[[Any], Any], value: Any) -> bool | None:
    try:
        return bool(condition(value))
    except (ArithmeticError, TypeError, ValueError):
        return None
