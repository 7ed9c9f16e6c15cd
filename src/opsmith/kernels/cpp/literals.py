"""Literals of C++ in generated tables."""

from __future__ import annotations

from collections.abc import Iterable


def array(declared: str, items: Iterable[str]) -> str:
    """Return the definition of an array.

    Example:
        >>> array("const int sizes", ["2", "3"])
        'const int sizes[2] = {2, 3};'
    """
    listed = list(items)
    # C++ has no empty arrays.
    return f"{declared}[{max(len(listed), 1)}] = {{{', '.join(listed)}}};"


def flag(value: bool) -> str:
    """Return a bool in C++."""
    return "true" if value else "false"


def text(value: str) -> str:
    """Return a string literal in C++, with octal escapes of three digits."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{"".join(plain)}"'
