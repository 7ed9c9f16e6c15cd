"""Console of rich that shows control characters of the code that it reports on, and never sends them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from opsmith.errors import printable


class PrintableConsole(Console):
    """Console whose texts have no control characters; its own styles stay.

    A name, an exception or the output of a compiler could otherwise move the cursor, hide lines or set the
    title of a terminal.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render, with control characters replaced by their pictures."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
