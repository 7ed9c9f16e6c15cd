"""Command line: one module for each command, as `opsmith check`."""

from __future__ import annotations

import sys

from opsmith.extras import install

__all__ = ["main"]

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line, as the script `opsmith` does.

    The process exits with the status of the command: 0, 1 or 2, or 130 after Ctrl-C.
    """
    try:
        from opsmith.cli.app import app

        app(prog_name="opsmith")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        sys.stderr.write(f"opsmith: the command line needs `{package}`: {install('cli')}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("opsmith: interrupted\n")
        sys.exit(130)
