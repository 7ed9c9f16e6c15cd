"""Command line: one module for each command, such as `opsmith check`."""

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
        if "doctor" in sys.argv[1:2]:
            _list_missing()
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("opsmith: interrupted\n")
        sys.exit(130)


def _list_missing() -> None:
    """Print a line for each missing package, as in the table of `opsmith doctor`."""
    from opsmith.cli.inventory import inventory

    for each in inventory():
        if each.found is None:
            sys.stdout.write(f"{each.name} is missing, for {each.serves}: {each.hint}\n")
