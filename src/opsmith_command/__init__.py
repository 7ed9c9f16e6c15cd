"""The script `opsmith`: it hears Ctrl-C before torch is imported, which takes a second or more.

It lies beside the package and not inside of it, since whatever lies inside imports the package first.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; Ctrl-C ends it at once, until the command has begun and hears it by itself."""
    # A shell may start it with Ctrl-C switched off, in the background; then that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from opsmith.cli import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"opsmith: interrupted\n")
    os._exit(130)
