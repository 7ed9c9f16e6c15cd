"""Values that show themselves: as one short line in a REPL, as a page in a notebook."""

from __future__ import annotations

import html
import reprlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

LONGEST = 500
"""Largest number of characters of the `repr` of a public object."""

_FIELD = 60
_MOST_BITS = 4000
"""Size up to which an int is shown in digits: Python refuses to convert larger ones."""


class _Parts(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return super().repr_int(x, level) if bits <= _MOST_BITS else f"<int of {bits} bits>"


_PARTS = _Parts()
_PARTS.maxlevel = 2
_PARTS.maxtuple = _PARTS.maxlist = _PARTS.maxdict = _PARTS.maxset = _PARTS.maxfrozenset = 3
_PARTS.maxstring = _PARTS.maxother = _PARTS.maxlong = _FIELD


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text in one line and with at most `longest` characters; "..." replaces the part that was cut.

    Example:
        >>> shortened("first line\\nand a second one", 20)
        'first line and a ...'
    """
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def short_repr(value: Any) -> str:
    """The `repr` of a dataclass, in which the `repr` of a long field is cut.

    A class takes it as `__repr__ = short_repr`.

    Example:
        >>> from dataclasses import make_dataclass
        >>> shown = {"__repr__": short_repr}
        >>> Squares = make_dataclass("Squares", ["unit", "values"], repr=False, namespace=shown)
        >>> Squares("m", tuple(n * n for n in range(100)))
        Squares(unit='m', values=(0, 1, 4, ...))
    """
    parts = [f"{each.name}={_part(getattr(value, each.name))}" for each in fields(value) if each.repr]
    return shortened(f"{type(value).__qualname__}({', '.join(parts)})")


def _part(value: Any) -> str:
    whole = repr(value) if isinstance(value, str | bytes | float | type(None)) else ""
    return whole if 0 < len(whole) <= _FIELD else shortened(_PARTS.repr(value), 2 * _FIELD)


def titled_repr(title: Callable[[Any], str]) -> Callable[[Any], str]:
    """A `__repr__` that shows the type and one line; `print` shows the whole value.

    Args:
        title: Returns the line for a value.

    Example:
        >>> class Square:
        ...     def size(self):
        ...         return "4 by 4"
        ...     __repr__ = titled_repr(size)
        >>> Square()
        <Square: 4 by 4>
    """

    def shown(value: Any) -> str:
        return f"<{type(value).__name__}: {shortened(title(value), LONGEST - 60)}>"

    return shown


def text_block(text: str) -> str:
    """A text as HTML for a notebook, line by line as `print` shows it.

    Example:
        >>> text_block("a < b")
        '<pre>a &lt; b</pre>'
    """
    return f"<pre>{html.escape(text)}</pre>"


def framed(page: str, height: int, title: str) -> str:
    """A page as a frame in a notebook.

    The styles and scripts of the page can neither change nor read those of the notebook. The page is the text
    of an attribute, so the browser requests nothing.

    Args:
        page: The whole page; it needs no network.
        height: Height in CSS pixels; the reader can drag the lower edge.
        title: Description for screen readers.

    Example:
        >>> framed('<p title="a">', 100, "a page").partition(" style")[0]
        '<iframe title="a page" sandbox="allow-scripts" srcdoc="&lt;p title=&quot;a&quot;&gt;"'
    """
    style = f"width: 100%; height: {height}px; border: 0; resize: vertical; overflow: auto"
    content = html.escape(page)
    return (
        f'<iframe title="{html.escape(title)}" sandbox="allow-scripts" srcdoc="{content}" style="{style}">'
        "</iframe>"
    )
