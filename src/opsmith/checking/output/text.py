"""Evidence and code as text, for a terminal or a page."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any


def shown(value: Any) -> str:
    """A piece of evidence in text: numbers to six digits, in lists as well.

    Example:
        >>> shown([1 / 3, 2])
        '[0.333333, 2]'
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def rows(evidence: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """Rows of evidence: depth, name, and value as text.

    Args:
        evidence: By name; a mapping in it, such as the other causes that fit, lies deeper.
        depth: Nesting depth of the mapping.
    """
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield depth, str(name), ""
            yield from rows(value, depth + 1)
        else:
            yield depth, str(name), shown(value)


def folded(code: str, width: int) -> str:
    """Python code in lines that fit: they are broken at spaces inside brackets, so that they still run.

    Args:
        code: The code.
        width: Number of columns.

    Example:
        >>> print(folded("f(first, second, third)  # all", 18))
        f(first, second,
            third)  # all
    """
    return "\n".join(_folded(line, width) for line in code.splitlines())


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    breaks = _spaces_inside(line)
    lines, start, indent = [], 0, ""
    while len(indent) + len(line) - start > width:
        room = start + width - len(indent)
        fitting = [column for column in breaks if start < column <= room]
        later = [column for column in breaks if column > start]
        if not later:
            break
        end = fitting[-1] if fitting else later[0]
        lines.append(indent + line[start:end])
        start, indent = end + 1, "    "
    return "\n".join([*lines, indent + line[start:]])


def _spaces_inside(line: str) -> list[int]:
    """The spaces at which a line of Python may be broken: inside brackets, outside strings and comments."""
    found: list[int] = []
    depth = 0
    before = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if depth > 0 and token.start[0] == 1 and token.start[1] == before + 1 and line[before] == " ":
                found.append(before)
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
            before = token.end[1]
    except (tokenize.TokenError, SyntaxError):
        return []  # part of a longer statement, left as it is
    return found
