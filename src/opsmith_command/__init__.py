"""The script `opsmith`, which handles Ctrl-C before torch is imported, which takes a second or more.

It is not part of the package `opsmith`, because importing a part imports the package first.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; until the command handles Ctrl-C by itself, Ctrl-C ends it at once."""
    # A shell starts a background job with Ctrl-C ignored; that is kept.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from opsmith.cli import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"opsmith: interrupted\n")
    os._exit(130)
