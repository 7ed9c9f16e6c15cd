"""Which line of a program fixes the size of an axis that should stay open."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

from opsmith.exporting.places import authors

LOGGER = "torch.fx.experimental.symbolic_shapes"
FIXED = "set_replacement"
"""How torch's log begins a line about a symbol that is a number from there on."""


class _Watcher(logging.Handler):
    """Notes where a program was whenever torch fixed a size."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the innermost line that is neither torch's nor opsmith's."""
        text = record.getMessage()
        if not text.startswith(FIXED):
            return
        for frame in reversed(traceback.extract_stack()):
            if authors(frame.filename):
                self.seen.append((text, f"{frame.filename}:{frame.lineno}"))
                return


def culprit(trace: Callable[[], Any], size: int) -> str | None:
    """`file:line` of what fixes the size of an axis; None where torch does not tell.

    torch writes into its log what it decides about sizes, while the line that asks is being run. So the line
    is looked up in the stack at that moment; what torch keeps of it may be a line of its own.

    Args:
        trace: Traces the program, with that axis open.
        size: The size that is fixed.
    """
    logger, watcher = logging.getLogger(LOGGER), _Watcher()
    before = logger.handlers, logger.level, logger.propagate
    try:
        logger.handlers, logger.propagate = [watcher], False
        logger.setLevel(logging.INFO)
        trace()
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    return next((line for text, line in watcher.seen if f"= {size} " in f"{text} "), None)
