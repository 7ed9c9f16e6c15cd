"""Conditions on the sizes of tensors under which a compiled graph computes a call."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from opsmith.core.expression import Expression, ExpressionError, Language, parse

CONDITIONS = Language(
    "sizes, numbers, comparisons and `+ - * // %` of them",
    functions={"min": min, "max": max},
    attributes={"shape": lambda tensor: tuple(tensor.shape)},
    conditions=True,
)


def read_conditions(text: str) -> list[str]:
    """Return the conditions of a graph over `t0.shape[0]`, ... without conditions that hold for every call.

    Args:
        text: Conditions in Python, as Inductor writes them: `L['t0'].size()[0] == L['t1'].size()[1] and ...`.
            Tensors are contiguous, so conditions on strides and offsets are left out.

    Raises:
        ExpressionError: If a condition cannot be evaluated here.
    """
    tree = ast.parse(text, mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    found = []
    for part in parts:
        called = {each.attr for each in ast.walk(part) if isinstance(each, ast.Attribute)}
        if called & {"stride", "storage_offset"} or _is_trivial(part):
            continue
        found.append(ast.unparse(_Sizes().visit(part)))
        parse(found[-1], CONDITIONS)
    return list(dict.fromkeys(found))


def read_sizes(text: str) -> str:
    """Return the sizes of a tensor as an expression over `t0.shape[0]`, ...

    Args:
        text: The sizes in Python, as Inductor writes them.
    """
    return ast.unparse(_Sizes().visit(ast.parse(text, mode="eval")))


def exact_sizes(tensors: Sequence[Tensor]) -> list[str]:
    """Return the condition that all sizes are the sizes of these tensors."""
    return [f"t{at}.shape == {tuple(each.shape)}" for at, each in enumerate(tensors)]


def holds(conditions: Iterable[Expression], tensors: Sequence[Tensor]) -> bool:
    """Return True if the sizes of tensors meet all conditions."""
    try:
        return all(evaluated(each, tensors) for each in conditions)
    except ExpressionError:  # for example a division by a size of zero
        return False


def evaluated(expression: Expression, tensors: Sequence[Tensor]) -> Any:
    """Evaluate an expression over the sizes of tensors."""
    return expression.value({f"t{at}": each for at, each in enumerate(tensors)})


def _is_trivial(part: ast.expr) -> bool:
    """Return True for `0 <= size` and for a constant that is true."""
    if isinstance(part, ast.Constant):
        return bool(part.value)
    match part:
        case ast.Compare(left=ast.Constant(value=0), ops=[ast.LtE()], comparators=[ast.Subscript()]):
            return True
    return False


class _Sizes(ast.NodeTransformer):
    """Writes `L['t0'].size()[1]` as `t0.shape[1]`, and `a and b` as `b if a else False`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Subscript(slice=ast.Constant(value=str(name))), attr="size")
                ),
                slice=at,
            ):
                return ast.Subscript(ast.Attribute(ast.Name(name), "shape"), at)
        found: ast.AST = self.generic_visit(node)
        return found

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        first: ast.expr
        first, *rest = [self.visit(each) for each in node.values]
        for each in rest:
            both = isinstance(node.op, ast.And)
            first = (
                ast.IfExp(first, each, ast.Constant(False))
                if both
                else ast.IfExp(first, ast.Constant(True), each)
            )
        return first
