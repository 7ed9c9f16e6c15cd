"""Small expressions over the sizes of a call, as `ceil(result.numel / 256)`, read without running code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch import Tensor

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: Fraction(left) / right,  # exact, however large
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "len": len,
    "max": max,
    "min": min,
}
_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "dim": lambda tensor: tensor.dim(),
    "itemsize": lambda tensor: tensor.element_size(),
    "numel": lambda tensor: tensor.numel(),
    "shape": lambda tensor: tuple(tensor.shape),
}
ALLOWED = (
    "numbers, arguments and results by name, `x.numel`, `x.shape[0]`, `x.dim`, `x.itemsize`, `+ - * / // %`, "
    "`ceil`, `floor`, `min`, `max`, `len`, comparisons, and `a if b else c`"
)


class ExpressionError(Exception):
    """An expression that cannot be read, or has no value; the text says why."""


@dataclass(frozen=True)
class Expression:
    """A text that has been found to be an expression.

    Args:
        text: For example `ceil(result.numel / 256)`.
        tree: What Python reads in it.
    """

    text: str
    tree: ast.expr

    @cached_property
    def names(self) -> frozenset[str]:
        """The arguments and results in it."""
        called = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        found = [
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and id(node) not in called
        ]
        return frozenset(found)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Its value: a number, or a tuple of them.

        Args:
            values: Arguments and results by name.

        Raises:
            ExpressionError: If it has none.

        Example:
            >>> import torch
            >>> expression("ceil(x.numel / 256)").value({"x": torch.empty(257)})
            2
        """
        try:
            return _value(self.tree, values)
        except ZeroDivisionError:
            raise ExpressionError("it divides by zero") from None
        except (TypeError, IndexError, ValueError) as error:
            raise ExpressionError(str(error)) from None


def expression(text: str) -> Expression:
    """Read an expression.

    Raises:
        ExpressionError: If it is none.

    Example:
        >>> expression("(ceil(x.shape[1] / 16), x.shape[0])").names
        frozenset({'x'})
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: a null character
        raise ExpressionError(f"Python cannot read it: {getattr(error, 'msg', error)}") from None
    _check(tree)
    return Expression(text.strip(), tree)


def _check(node: ast.expr) -> None:
    """Refuse what is no part of the language.

    Raises:
        ExpressionError: With the part.
    """
    allowed = False
    match node:
        case ast.Constant(value=value):
            allowed = value is None or type(value) in (int, bool)
        case ast.Name():
            allowed = node.id not in _FUNCTIONS
        case ast.Attribute(value=ast.Name(), attr=attr):
            allowed = attr in _OF_TENSORS
        case ast.BinOp(op=op):
            allowed = type(op) in _OPERATIONS
        case ast.UnaryOp(op=op):
            allowed = isinstance(op, ast.USub | ast.Not)
        case ast.Compare(ops=ops):
            allowed = len(ops) == 1 and type(ops[0]) in _COMPARISONS
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            allowed = name in _FUNCTIONS
        case ast.Subscript() | ast.IfExp() | ast.Tuple():
            allowed = True
    if not allowed:
        raise ExpressionError(f"`{ast.unparse(node)}` is no part of the language")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not (isinstance(node, ast.Call) and child is node.func):
            _check(child)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    def of(child: ast.expr) -> Any:
        return _value(child, values)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.Attribute(value=ast.Name(id=name), attr=attr):
            if not isinstance(values[name], Tensor):
                raise ExpressionError(f"`{name}` is {values[name]!r}, which has no `{attr}`")
            return _OF_TENSORS[attr](values[name])
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_number(of(left), left), _number(of(right), right))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not of(operand)
        case ast.UnaryOp(operand=operand):
            return -_number(of(operand), operand)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)](of(left), of(right))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*map(of, arguments))
        case ast.Subscript(value=value, slice=at):
            return _item(of(value), of(at), node)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return of(body) if of(test) else of(orelse)
        case ast.Tuple(elts=elements):
            return tuple(map(of, elements))
    raise AssertionError(ast.dump(node))


def _number(value: Any, node: ast.expr) -> Any:
    if not isinstance(value, int | float | Fraction):
        raise ExpressionError(f"`{ast.unparse(node)}` is no number")
    return value


def _item(value: Any, at: Any, node: ast.expr) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ExpressionError(f"`{ast.unparse(node)}` is an item of what has none")
    if not -len(value) <= at < len(value):
        raise ExpressionError(f"`{ast.unparse(node)}` is beyond the last: there are {len(value)}")
    return value[at]
