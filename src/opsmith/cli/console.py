"""Console of rich that makes control characters in texts visible, and never sends them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from opsmith.errors import printable


class PrintableConsole(Console):
    """Console that replaces control characters in texts; its own styles still work.

    A name, an exception or the output of a compiler could otherwise move the cursor, hide lines or set the
    title of a terminal.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render, with control characters replaced by visible symbols."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
