"""`opsmith doctor`: what is there, what is missing, and the command that brings it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opsmith import __version__
from opsmith.cli.guard import FAILED, guarded, waiting
from opsmith.cli.inventory import Entry, inventory

SCHEMA = 1


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")
    ] = False,
) -> None:
    """Show what this machine has for opsmith, what is missing for what, and how to get it.

    **Examples**

    - `opsmith doctor`

    - `opsmith doctor --json`

    Exit status: 0 opsmith works here, though some of what it can do may be missing; 1 it does not.
    """
    with guarded():
        with waiting("looking at this machine"):
            entries = inventory()
        works = all(entry.found for entry in entries if entry.required)
        if as_json:
            listed = [entry.to_dict() for entry in entries]
            answer = {"schema": SCHEMA, "opsmith": __version__, "works": works, "entries": listed}
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        else:
            _show(entries, works)
    raise typer.Exit(0 if works else FAILED)


def _show(entries: list[Entry], works: bool) -> None:
    console = Console()
    console.print(_table(entries))
    missing = [entry for entry in entries if not entry.found]
    if not works:
        console.print(
            Text(f"\nopsmith {__version__} does not work here: mend what is marked in red.", style="bold red")
        )
    elif missing:
        console.print(
            f"\nopsmith {__version__} works here. What is missing is only needed for what stands beside it."
        )
    else:
        console.print(f"\nopsmith {__version__} works here, and nothing is missing.")


def _table(entries: list[Entry]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("", "here", "for", "to get it"):
        rows.add_column(heading, overflow="fold")
    for entry in entries:
        style = "bold red" if entry.required else "yellow"
        here = Text(entry.found, style="green") if entry.found else Text("missing", style=style)
        rows.add_row(
            Text(entry.name), here, Text(entry.serves, style="dim"), Text("" if entry.found else entry.mend)
        )
    return rows
