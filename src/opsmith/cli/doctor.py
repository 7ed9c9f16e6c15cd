"""`opsmith doctor`: installed and missing packages, and the capabilities of torch."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opsmith import __version__
from opsmith.cli.guard import FAILED, waiting
from opsmith.cli.inventory import InventoryItem, inventory
from opsmith.cli.kernel_origins import KernelOrigin, PackageOrigins, kernel_origins
from opsmith.cli.options import AsJson
from opsmith.cli.output import answering, columns
from opsmith.torch_library.capabilities.capability import CapabilityStatus, capability_statuses

SCHEMA = 2
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


def doctor(
    package: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE]",
            help="A package: also show where each of its kernels comes from on this machine.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show installed and missing packages, the features that need them, and how to install them.

    Of a package it also shows where each kernel comes from: built into the package, from the cache, compiled
    now, or missing, so that the reference runs.

    **Examples**

    - `opsmith doctor`

    - `opsmith doctor mypackage`

    - `opsmith doctor --json`

    Exit status: 0 opsmith works here (packages for some features may be missing), 1 it does not work.
    """
    with answering(as_json=as_json) as printer:
        with waiting("looking at this machine"), warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=RuntimeWarning)  # such as a damaged library
            entries, capabilities = inventory(), capability_statuses()
            origins = None if package is None else kernel_origins(package)
        warned = list(dict.fromkeys(str(each.message) for each in caught))
        works = all(entry.found for entry in entries if entry.required)
        works = works and not any(each.fatal for each in capabilities)
        if as_json:
            answer = {
                "schema": SCHEMA,
                "opsmith": __version__,
                "works": works,
                "entries": [entry.to_dict() for entry in entries],
                "capabilities": [each.to_dict() for each in capabilities],
                "kernels": None if origins is None else [asdict(each) for each in origins.kernels],
                "broken": None if origins is None else origins.broken,
                "warnings": warned,
            }
            printer.write_json(answer)
        else:
            console = printer.console()
            if origins is not None:
                _show_origins(console, origins)
            for text in warned:
                console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
            if origins is not None or warned:
                console.print()
            _show(console, entries, capabilities, works=works)
    raise typer.Exit(0 if works else FAILED)


def _show_origins(console: Console, origins: PackageOrigins) -> None:
    if origins.kernels:
        console.print(_kernels(origins.kernels))
    else:
        console.print(f"{origins.package}: no kernel from a source is declared, and none is built")
    for text in origins.broken:
        console.print(Text(f"not inspected: {text}", style="yellow"), soft_wrap=True)


def _show(
    console: Console, entries: list[InventoryItem], capabilities: list[CapabilityStatus], *, works: bool
) -> None:
    console.print(_table(entries))
    console.print()
    console.print(_capabilities(capabilities))
    missing = [entry for entry in entries if not entry.found]
    if not works:
        console.print(
            Text(
                f"\nopsmith {__version__} does not work here: fix the lines marked in red.", style="bold red"
            )
        )
    elif missing or not all(each.on for each in capabilities):
        console.print(
            f"\nopsmith {__version__} works here. "
            "A missing package, or a capability that is off, is only needed for the features next to it."
        )
    else:
        console.print(f"\nopsmith {__version__} works here, and nothing is missing.")


def _table(entries: list[InventoryItem]) -> Table:
    rows = columns("", "here", "for", "to get it")
    for entry in entries:
        style = "bold red" if entry.required else "yellow"
        status = Text(entry.found, style="green") if entry.found else Text("missing", style=style)
        rows.add_row(
            Text(entry.name), status, Text(entry.serves, style="dim"), Text("" if entry.found else entry.hint)
        )
    return rows


def _kernels(listed: list[KernelOrigin]) -> Table:
    rows = columns("kernel", "in", "comes from")
    for each in listed:
        style = "bold red" if each.missing else "green"
        words = f"the reference runs: {each.origin}" if each.missing else each.origin
        rows.add_row(Text(each.operator), each.language, Text(words, style=style))
    return rows


def _capabilities(listed: list[CapabilityStatus]) -> Table:
    """Return a table of the uses of torch's private names; docs/capabilities.md describes each."""
    rows = columns("of torch's private names", "here", "for", "instead")
    for each in listed:
        style = "bold red" if each.fatal else "yellow"
        status = Text("on", style="green") if each.on else Text(f"off: {each.why}", style=style)
        instead = "" if each.on else each.capability.instead or "nothing: opsmith needs it"
        rows.add_row(
            Text(each.capability.name), status, Text(each.capability.purpose, style="dim"), Text(instead)
        )
    return rows
