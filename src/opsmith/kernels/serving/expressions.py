"""Launch expressions of CUDA kernels in C++: `expression.h` has the functions that compute them."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping

from opsmith.core.expression import Expression
from opsmith.kernels.cuda.launch import LaunchRule

_ARITHMETIC: Mapping[type[ast.operator], str] = {
    ast.Add: "added",
    ast.Sub: "subtracted",
    ast.Mult: "multiplied",
    ast.Div: "divided",
    ast.FloorDiv: "quotient",
    ast.Mod: "remainder",
}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "less({0}, {1})",
    ast.LtE: "less_or_equal({0}, {1})",
    ast.Gt: "less({1}, {0})",
    ast.GtE: "less_or_equal({1}, {0})",
    ast.Eq: "equal({0}, {1})",
    ast.NotEq: "!equal({0}, {1})",
    ast.Is: "is_none({0}, {1})",
    ast.IsNot: "!is_none({0}, {1})",
}
_FUNCTIONS = {"ceil": "ceiled", "floor": "floored", "len": "length"}
_EXTREMES = {"max": "largest", "min": "least"}


def rule_in_cpp(rule: LaunchRule, places: Mapping[str, int]) -> str:
    """Return the statements of a `Rule` that appends the values of a rule's parts.

    Args:
        rule: Rule of numbers and expressions.
        places: Place of each name among the values of a call.

    Example:
        >>> from opsmith.kernels.cuda.launch import launch_rule
        >>> rule_in_cpp(launch_rule("grid", "ceil(x.numel / 256)", "demo::f", ["x"]), {"x": 0})
        'parts.push_back(ceiled(divided(numel_of(scope.value(0)), whole(256))));'
    """
    return " ".join(f"parts.push_back({_part(each, places)});" for each in rule.parts)


def _part(part: object, places: Mapping[str, int]) -> str:
    if isinstance(part, Expression):
        return _translated(part.tree, places)
    assert isinstance(part, int | float), part
    return f"real({_real(part)})" if isinstance(part, float) else _number(part)


def _real(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"


def _number(value: int) -> str:
    return f"whole({int(value)})"


def _translated(node: ast.expr, places: Mapping[str, int]) -> str:
    """Translate a node that the language of launches allows into C++."""

    def of(child: ast.expr) -> str:
        return _translated(child, places)

    match node:
        case ast.Constant(value=None):
            return "none()"
        case ast.Constant(value=int(value)):
            return _number(value)
        case ast.Name(id=name):
            return f"scope.value({places[name]})"
        case ast.BinOp(left=left, op=op, right=right):
            return f"{_ARITHMETIC[type(op)]}({of(left)}, {of(right)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"negated({of(operand)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"yes(!holds({of(operand)}))"
        case ast.Attribute(value=value, attr=attribute):
            return f"{attribute}_of({of(value)})"
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _EXTREMES:
            return f"{_EXTREMES[name]}({{{', '.join(map(of, arguments))}}})"
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return f"{_FUNCTIONS[name]}({', '.join(map(of, arguments))})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"yes({_COMPARISONS[type(op)].format(of(left), of(right))})"
        case ast.Subscript(value=value, slice=at):
            return f"item({of(value)}, {of(at)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"(holds({of(test)}) ? {of(body)} : {of(orelse)})"
        case ast.Tuple(elts=elements):
            return f"sequence({{{', '.join(map(of, elements))}}})"
    raise AssertionError(ast.dump(node))
