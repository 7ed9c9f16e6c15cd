"""`opsmith doctor`: what is there, what is missing, and the command that brings it; what of torch works."""

from __future__ import annotations

import json
import sys

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opsmith import __version__
from opsmith.cli.guard import FAILED, guarded, waiting
from opsmith.cli.inventory import Entry, inventory
from opsmith.cli.options import AsJson
from opsmith.cli.output import Output
from opsmith.torch_library.capabilities.listing import Listed, listing

SCHEMA = 1


def doctor(
    as_json: AsJson = False,
) -> None:
    """Show what this machine has for opsmith, what is missing for what, and how to get it.

    **Examples**

    - `opsmith doctor`

    - `opsmith doctor --json`

    Exit status: 0 opsmith works here, though some of what it can do may be missing; 1 it does not.
    """
    with guarded():
        shown = Output(sys.stdout)
        with waiting("looking at this machine"):
            entries, capabilities = inventory(), listing()
        works = all(entry.found for entry in entries if entry.required)
        works = works and not any(each.fatal for each in capabilities)
        if as_json:
            answer = {
                "schema": SCHEMA,
                "opsmith": __version__,
                "works": works,
                "entries": [entry.to_dict() for entry in entries],
                "capabilities": [each.to_dict() for each in capabilities],
            }
            shown.write(json.dumps(answer, indent=2) + "\n")
        else:
            _show(shown.console(), entries, capabilities, works=works)
        shown.close()
    raise typer.Exit(0 if works else FAILED)


def _show(console: Console, entries: list[Entry], capabilities: list[Listed], *, works: bool) -> None:
    console.print(_table(entries))
    console.print()
    console.print(_capabilities(capabilities))
    missing = [entry for entry in entries if not entry.found]
    if not works:
        console.print(
            Text(f"\nopsmith {__version__} does not work here: fix what is marked in red.", style="bold red")
        )
    elif missing or not all(each.on for each in capabilities):
        console.print(
            f"\nopsmith {__version__} works here. "
            "What is missing, or off, is only needed for what stands beside it."
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
            Text(entry.name), here, Text(entry.serves, style="dim"), Text("" if entry.found else entry.hint)
        )
    return rows


def _capabilities(listed: list[Listed]) -> Table:
    """What of torch's private names works here; docs/capabilities.md says what each is."""
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("of torch's private names", "here", "for", "instead"):
        rows.add_column(heading, overflow="fold")
    for each in listed:
        style = "bold red" if each.fatal else "yellow"
        here = Text("on", style="green") if each.on else Text(f"off: {each.why}", style=style)
        instead = "" if each.on else each.capability.instead or "nothing: opsmith cannot do without it"
        rows.add_row(
            Text(each.capability.name), here, Text(each.capability.purpose, style="dim"), Text(instead)
        )
    return rows
