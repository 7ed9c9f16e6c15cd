"""Lines of a reference that turn a symbolic size into a number, and what keeps the symbol instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from opsmith.core.source import file_tree

_BY_METHOD = "write it in a function outside of the class: what a method computes of a size is a number"

INSTEAD = {
    "exp": "math.e ** n",
    "exp2": "2.0 ** n",
    "hypot": "math.sqrt(a * a + b * b)",
    "isqrt": "int(math.sqrt(n))",
    "log": "math.log2(n) * math.log(2)",
    "log10": "math.log2(n) * math.log10(2)",
    "log1p": "math.log2(1 + n) * math.log(2)",
}
"""Functions of `math` that make a number of a symbol, and an expression that keeps it."""

KEPT = ("sqrt", "log2", "sin", "cos", "tan", "len", "float", "int", "isinstance")
"""Functions that keep a symbol, but in a method of a class."""


def frozen(file: str, line: int, function: str) -> tuple[str, str] | None:
    """The call that turns a size into a number at a line of the author, and what to write instead.

    Args:
        file: The file.
        line: The line at which a trace was fixed to the number.
        function: The name of the function around it.

    Returns:
        The source of the call, and a hint; None where nothing else would keep the symbol, as for `range(n)`.

    Example:
        >>> frozen(__file__, 1, "reference") is None
        True
    """
    tree = file_tree(file)
    if tree is None:
        return None
    in_method = _is_method(tree, line, function)
    for call in _calls(tree, line):
        name = ast.unparse(call.func).rpartition(".")[2]
        numbers = [each for each in call.args if not isinstance(each, ast.Constant)]
        if not numbers or (name == "log" and len(call.args) > 1):
            continue
        if name in INSTEAD:
            return ast.unparse(call), f"write `{INSTEAD[name]}`"
        if name in KEPT and in_method:
            return ast.unparse(call), _BY_METHOD
    return None


def _calls(tree: ast.AST, line: int) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            yield node


def _is_method(tree: ast.AST, line: int, name: str) -> bool:
    """Return True if the function around a line is defined in a class."""
    return any(
        isinstance(each, ast.FunctionDef)
        and each.name == name
        and each.lineno <= line <= (each.end_lineno or each.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
    )
