"""What an operator's author wrote, word for word, with the place where it stands."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any

from opsmith.core.adopted import ClassFormula
from opsmith.core.formula import Formula
from opsmith.core.location import where
from opsmith.core.specification import Specification


@dataclass(frozen=True)
class Code:
    """A piece of source.

    Args:
        title: What it is.
        text: The source; empty where none can be found.
        where: `file:line` of it.
    """

    title: str
    text: str
    where: str


def codes_of(specification: Specification) -> tuple[Code, ...]:
    """Reference, gradient and tangent formulas, fake kernel and samples: all of it that was written."""
    rules = specification.gradients
    kind = "surrogate gradient" if rules.surrogate else "gradient"
    reference = _code(_reference_title(specification), specification.reference)
    found = [replace(reference, text=_without_docstring(reference.text))]
    if specification.adopted is not None:
        found.append(_code(f"forward of {specification.adopted.name}", specification.computed_by))
    found += _formulas(rules.rules, kind)
    if rules.stand_in is not None:
        found.append(_code("stand-in, from which gradients are derived", rules.stand_in))
    found += _formulas(specification.tangents.rules, "tangent")
    others = {
        "fake kernel": specification.fake,
        "count of floating-point operations": specification.flops,
        "samples": specification.samples,
    }
    found += [_code(title, function) for title, function in others.items() if function is not None]
    return tuple(found)


def _without_docstring(text: str) -> str:
    """The source of a function without its docstring, which stands at the top of the page."""
    try:
        function = ast.parse(text).body[0]
    except (SyntaxError, IndexError):
        return text
    if not isinstance(function, ast.FunctionDef) or ast.get_docstring(function) is None:
        return text
    words, lines = function.body[0], text.splitlines()
    if len(function.body) == 1 or function.body[1].lineno == words.lineno:
        return text
    return "\n".join([*lines[: words.lineno - 1], *lines[words.end_lineno :]])


def _reference_title(specification: Specification) -> str:
    return "the function, which is opaque" if specification.opaque else "reference"


def _formulas(rules: Mapping[str, Any], kind: str) -> Iterator[Code]:
    """Each formula once, also where it answers for several inputs."""
    done: list[Formula] = []
    for name, rule in rules.items():
        if not isinstance(rule, Formula):
            yield Code(f"{kind} of `{name}`", repr(rule), "")
        elif rule not in done:
            done.append(rule)
            names = ", ".join(f"`{each}`" for each in rule.answers_for)
            function = getattr(rule.function, "backward", None) if isinstance(rule, ClassFormula) else None
            many = "s" if len(rule.answers_for) > 1 else ""
            yield _code(f"{kind}{many} of {names}", function or rule.function, rule.where)


def _code(title: str, function: Callable[..., Any], place: str = "") -> Code:
    return Code(title, source_of(function), place or where(function))


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function without what stands around it; empty where there is none.

    Example:
        >>> source_of(len)
        ''
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    try:
        lines, _ = inspect.findsource(code)
        if code.co_name == "<lambda>":
            return _lambda("".join(lines), code)
        return textwrap.dedent("".join(inspect.getsourcelines(code)[0])).rstrip()
    except (OSError, SyntaxError):  # no file, or one that has changed since
        return ""


def _lambda(source: str, code: CodeType) -> str:
    """A lambda alone, of a file: several may stand in one line, so their columns tell which it is."""
    spans = set(code.co_positions())
    for node in _lambdas(source):
        body = node.body
        if (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in spans:
            first, *rest = (ast.get_source_segment(source, node) or "").splitlines()
            return "\n".join([first, textwrap.dedent("\n".join(rest))]).rstrip()
    return ""


@lru_cache(maxsize=8)
def _lambdas(source: str) -> tuple[ast.Lambda, ...]:
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda))
