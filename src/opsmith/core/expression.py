"""Expressions over named sizes, such as `H//stride`, `channels // groups` or `ceil(x.numel / 256)`.

One parser and evaluator serves `shapes=`, the dimensions of a module's parameters, and the launch of CUDA
kernels. Each use has its own `Language`. Python parses the text; the language must allow each node of the
tree, so that an expression cannot run other code.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Rational
from typing import Any

from torch import SymInt, Tensor

from opsmith.core.cached_property import cached_property

_Evaluate = Callable[[Mapping[str, Any]], Any]

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
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
OPERATIONS: Mapping[Any, Callable[[Any, Any], Any]] = {**_COMPARISONS, **_ARITHMETIC}
"""Operations and comparisons of two values, by type of node."""


def _divide(left: Any, right: Any) -> Any:
    """Divide exactly, for numbers of any size."""
    from fractions import Fraction  # slow to import

    return Fraction(left) / right


class ExpressionError(Exception):
    """A text that is not an expression, or an expression without a value; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class Language:
    """The parts of an expression that one use allows; integers, names and `+ - * // %` are always allowed.

    Args:
        description: The allowed parts, for messages.
        functions: Functions that may be called, by name.
        attributes: Attributes of a tensor, by name.
        conditions: True if `/`, negation, comparisons, `not`, `a if b else c`, None, tuples and items of
            tuples are allowed too.
    """

    description: str
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    attributes: Mapping[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    conditions: bool = False

    @cached_property
    def operations(self) -> Mapping[type[ast.operator], Callable[[Any, Any], Any]]:
        """Binary operations, by type of node."""
        return {**_ARITHMETIC, ast.Div: _divide} if self.conditions else _ARITHMETIC


SIZES = Language("numbers, sizes, and `+ - * // %` of them")
"""The language of `shapes=` and of the dimensions of a module's parameters."""


@dataclass(frozen=True)
class Expression:
    """An expression that its language allows.

    Args:
        text: The expression, as its author wrote it.
        language: The language that it was read in.
    """

    text: str
    language: Language = field(default=SIZES, repr=False)

    @cached_property
    def tree(self) -> ast.expr:
        """The syntax tree of the text.

        Raises:
            ExpressionError: If Python cannot read it.
        """
        try:
            return ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError) as error:  # ValueError: a null character
            raise ExpressionError(f"Python cannot read it: {getattr(error, 'msg', error)}") from None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sizes and arguments that it names, each once, in order."""
        found = [node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        return tuple(dict.fromkeys(name for name in found if name not in self.language.functions))

    @cached_property
    def compiled(self) -> _Evaluate:
        """The function that computes it from the values of its names.

        Raises:
            ExpressionError: If the language does not allow it.
        """
        return _compiled(self.tree, self.language)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Evaluate it.

        Args:
            values: The value of each name.

        Raises:
            ExpressionError: If it has no value.

        Example:
            >>> parse("channels // groups").value({"channels": 8, "groups": 2})
            4
        """
        try:
            return self.compiled(values)
        except ZeroDivisionError:
            raise ExpressionError("it divides by zero") from None
        except (TypeError, IndexError, ValueError, OverflowError) as error:
            raise ExpressionError(str(error)) from None

    def renamed(self, names: Mapping[str, str]) -> Expression:
        """Return the same expression with other names.

        Example:
            >>> parse("C//G").renamed({"C": "channels", "G": "groups"}).text
            'channels // groups'
        """
        tree = ast.parse(self.text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
        return Expression(ast.unparse(tree), self.language)


@functools.lru_cache(maxsize=256)  # an operator's shapes, module and kernels share expressions
def parse(text: str, language: Language = SIZES) -> Expression:
    """Read an expression.

    Raises:
        ExpressionError: If the text is not an expression of this language.

    Example:
        >>> parse("2 * hidden").names
        ('hidden',)
    """
    expression = Expression(text.strip(), language)
    expression.compiled  # noqa: B018  refuses what the language does not allow
    return expression


def _compiled(node: ast.expr, language: Language) -> _Evaluate:
    """Return a function that evaluates a node of an expression's tree.

    Raises:
        ExpressionError: If the language does not allow the node.
    """

    def of(child: ast.expr) -> _Evaluate:
        return _compiled(child, language)

    match node:
        case ast.Constant(value=int(value)) if type(value) is int or language.conditions:
            return lambda values: value
        case ast.Name(id=name) if name not in language.functions:
            return lambda values: values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in language.operations:
            return _binary(language.operations[type(op)], of(left), of(right), node)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in language.attributes:
            return lambda values: language.attributes[attribute](_tensor(values[name], name, attribute))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in language.functions:
            function, parts = language.functions[name], [of(each) for each in arguments]
            return lambda values: function(*(part(values) for part in parts))
    if not language.conditions:
        raise _refusal(node)
    return _condition(node, of)


def _condition(node: ast.expr, of: Callable[[ast.expr], _Evaluate]) -> _Evaluate:
    """Return a function that evaluates a node that only languages with conditions allow."""
    match node:
        case ast.Constant(value=None):
            return lambda values: None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = of(operand)
            return lambda values: -_number(inner(values), operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = of(operand)
            return lambda values: not inner(values)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            compare, first, second = _COMPARISONS[type(op)], of(left), of(right)
            return lambda values: compare(first(values), second(values))
        case ast.Subscript(value=sequence, slice=at):
            whole, index = of(sequence), of(at)
            return lambda values: _item(whole(values), index(values), node)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            holds, yes, no = of(test), of(body), of(orelse)
            return lambda values: yes(values) if holds(values) else no(values)
        case ast.Tuple(elts=elements):
            items = [of(each) for each in elements]
            return lambda values: tuple(item(values) for item in items)
    raise _refusal(node)


def _refusal(node: ast.expr) -> ExpressionError:
    return ExpressionError(f"`{ast.unparse(node)}` is not allowed")


def _binary(
    operation: Callable[[Any, Any], Any], left: _Evaluate, right: _Evaluate, node: ast.BinOp
) -> _Evaluate:
    return lambda values: operation(_number(left(values), node.left), _number(right(values), node.right))


def _number(value: Any, node: ast.expr) -> Any:
    if not isinstance(value, int | float | SymInt | Rational):
        raise ExpressionError(f"`{ast.unparse(node)}` is not a number")
    return value


def _tensor(value: Any, name: str, attribute: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ExpressionError(f"`{name}` is {value!r}, which has no `{attribute}`")
    return value


def _item(value: Any, at: Any, node: ast.expr) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ExpressionError(f"`{ast.unparse(node)}` indexes a value that has no items")
    if not -len(value) <= at < len(value):
        raise ExpressionError(f"`{ast.unparse(node)}` is out of range: there are {len(value)} items")
    return value[at]
