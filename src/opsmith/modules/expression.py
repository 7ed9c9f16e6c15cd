"""One dimension of a parameter: a number, a size, or arithmetic on sizes, read without running any code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
ALLOWED = "numbers, sizes, and `+ - * // %` of them"


@dataclass(frozen=True)
class Expression:
    """A dimension, as text that has been found to be one.

    Args:
        text: For example `channels // groups`.
    """

    text: str

    @cached_property
    def _tree(self) -> ast.expr:
        return ast.parse(self.text, mode="eval").body

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in it, in order."""
        found = [node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
        return tuple(dict.fromkeys(found))

    def value(self, sizes: Mapping[str, int]) -> int:
        """Its value.

        Raises:
            ZeroDivisionError: If it divides by zero.

        Example:
            >>> expression("channels // groups").value({"channels": 8, "groups": 2})
            4
        """
        return _value(self._tree, sizes)

    def renamed(self, names: Mapping[str, str]) -> Expression:
        """The same with other names.

        Example:
            >>> expression("C//G").renamed({"C": "channels", "G": "groups"}).text
            'channels // groups'
        """
        tree = ast.parse(self.text, mode="eval").body
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
        return Expression(ast.unparse(tree))


def expression(dimension: Any) -> Expression | None:
    """Read a dimension; None where it is none.

    Example:
        >>> expression("2 * hidden").names, expression("open('file')")
        (('hidden',), None)
    """
    if isinstance(dimension, int) and not isinstance(dimension, bool):
        dimension = str(dimension)
    if not isinstance(dimension, str):
        return None
    try:
        tree = ast.parse(dimension.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: a null character
        return None
    return Expression(dimension.strip()) if _readable(tree) else None


def _readable(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _OPERATIONS and _readable(node.left) and _readable(node.right)
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Name):
        return sizes[node.id]
    assert isinstance(node, ast.Constant)
    number: Any = node.value
    return int(number)
