"""Source of functions: their code, their syntax trees and their text.

The source of a function consists of the lines that a traceback would show: of a file, a notebook's cell, a
doctest. For a decorated function, it is the source of the author's function. A lambda is found by the columns
in its code. If there are no such lines, as under `exec`, or if they have changed, there is no tree and no
text. The code always exists.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
"""A function in a syntax tree."""


def code_of(function: Any) -> types.CodeType | None:
    """Return the code of a function without its decorators; None if it is not written in Python.

    Example:
        >>> code_of(functools.cache(lambda x: x)).co_name, code_of(len)
        ('<lambda>', None)
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def decorated_in(function: Any, file: str) -> bool:
    """Return True if a function has a decorator that is defined in this file."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == file:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return all names in code, including names of attributes."""
    return frozenset().union(*(each.co_names for each in nested(code)))


def may_name(function: Any, names: Collection[str]) -> bool:
    """Return True if the code of a function has one of these names, or if it is not written in Python.

    Example:
        >>> may_name(lambda x: x.detach(), {"detach"}), may_name(lambda x: x * 2, {"detach"})
        (True, False)
    """
    code = code_of(function)
    return code is None or not names_in(code).isdisjoint(names)


def parameters_of(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a function or of code, without `*args` and `**kwargs`.

    The first parameter of a bound method is left out.
    """
    code = function if isinstance(function, types.CodeType) else code_of(function)
    names = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names[inspect.ismethod(function) :]


def file_tree(file: str, scope: dict[str, Any] | None = None) -> ast.Module | None:
    """Return the syntax tree of a file, or of another source that a traceback can show; None without one.

    Args:
        file: Name of the file, as in code.
        scope: Globals of the code, whose loader may have the text.
    """
    return _parsed("".join(_lines(file, scope)))


def tree(function: Any) -> Definition | None:
    """Return a function in the syntax tree of its file; None if there is no source.

    Example:
        >>> tree(len) is None
        True
    """
    code = code_of(function)
    if code is None:
        return None
    parsed = file_tree(code.co_filename, getattr(inspect.unwrap(function), "__globals__", None))
    found = () if parsed is None else _definitions(parsed).get(code.co_firstlineno, ())
    # Python puts instructions that it adds to a function, such as the first one, at column 0.
    spans = [span for span in code.co_positions() if None not in span and span[2:] != (0, 0)]
    own = [each for each in found if _is_of(each, code) and all(_holds(each, span) for span in spans)]
    # For nested lambdas, the inner one; for several lambdas without columns, none.
    return own[-1] if len(own) == 1 or (own and spans) else None


def text(function: Any, *, docstring: bool = True) -> str:
    """Return the source of only a function, with its decorators; empty if there is none.

    Args:
        function: The function.
        docstring: False to leave its docstring out.

    Example:
        >>> text(len)
        ''
    """
    node = tree(function)
    if node is None:
        return ""
    function = inspect.unwrap(function)
    lines = _lines(function.__code__.co_filename, function.__globals__)[: node.end_lineno]
    if isinstance(node, ast.Lambda):
        first, *rest = (ast.get_source_segment("".join(lines), node) or "").splitlines()
        return "\n".join([first, textwrap.dedent("\n".join(rest))]).rstrip()
    words, *others = node.body
    if not docstring and ast.get_docstring(node) is not None and others and others[0].lineno > words.lineno:
        del lines[words.lineno - 1 : words.end_lineno]
    return textwrap.dedent("".join(lines[function.__code__.co_firstlineno - 1 :])).rstrip()


def returns(function: ast.AST) -> Iterator[ast.expr | None]:
    """Yield the expression of each return statement of a function, except in nested functions."""
    if isinstance(function, ast.Lambda):
        yield function.body
        return
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return):
            yield node.value
        elif not isinstance(node, Definition | ast.ClassDef):
            yield from returns(node)


def _lines(file: str, scope: dict[str, Any] | None = None) -> list[str]:
    linecache.checkcache(file)
    return linecache.getlines(file, scope)


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=8)
def _definitions(parsed: ast.Module) -> Mapping[int, list[Definition]]:
    """The functions of a file by their first line, including decorators; outer functions come first."""
    found: dict[int, list[Definition]] = {}
    for node in ast.walk(parsed):
        if isinstance(node, Definition):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            found.setdefault(min(each.lineno for each in (*decorators, node)), []).append(node)
    return found


def _is_of(node: Definition, code: types.CodeType) -> bool:
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    own = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return name == code.co_name and tuple(each.arg for each in own) == parameters_of(code)


def _holds(node: Definition, span: tuple[Any, Any, Any, Any]) -> bool:
    """Return True if the body of a function contains a span of its file: two lines, and two columns."""
    first, last = (node.body, node.body) if isinstance(node, ast.Lambda) else (node.body[0], node.body[-1])
    begin, end = (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)
    return begin <= (span[0], span[2]) and (span[1], span[3]) <= end
