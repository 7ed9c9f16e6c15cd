"""`opsmith adopt`: sort the Functions of a file: they work, need a declaration, or are wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from opsmith.checking.output.terminal import rendered
from opsmith.cli.guard import FAILED, waiting
from opsmith.cli.options import AsJson, Seed, Traceback
from opsmith.cli.output import answering
from opsmith.surveying import Finding, survey
from opsmith.targets import Target, classes_of

SCHEMA = 2
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""

STYLES = {"works": "bold green", "needs a declaration": "bold yellow", "wrong": "bold red"}

COUNTED = {
    "works": ("works", "work"),
    "needs a declaration": ("needs a declaration", "need a declaration"),
    "wrong": ("is wrong", "are wrong"),
}

VERBS = {"new": "gains", "mended": "mends", "kept": "keeps"}
"""Verb for the abilities of each state."""

NEXT = {
    "works": "Copy the line into your code, with `import opsmith` above it and your package's name for "
    "`mypackage`. The operator has the arguments and results of `apply`. The abilities that it "
    "gains were tried: `apply` does not have them. To check the operator on your own arguments, add "
    "for example `samples=lambda: [(torch.randn(3, 4),)]`, and run `opsmith check` on that file.",
    "needs a declaration": "Read the reasons first. The line below them has the declaration that was tried, "
    "or capitals where only you know the value. Copy the line in the same way. This report is about the "
    "class, and stays the same.",
    "wrong": "Fix the class at the location in brackets, and run this again; `-v` shows the measurements.",
}
"""Next step for the classes of each verdict."""


def adopt(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE[:CLASS]",
            help="A `.py` file or a module, with the name of one Function; without `:CLASS`, all of them.",
        ),
    ],
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the whole report of each check.")
    ] = False,
    seed: Seed = 0,
    traceback: Traceback = False,
) -> None:
    """Sort `autograd.Function` classes: they work as operators, need a declaration, or are wrong.

    The file is imported and not changed. The forward and backward of each class run on guessed arguments,
    and are checked as by `opsmith check`. Every declaration in the report was tried.

    **Examples**

    - `opsmith adopt functions.py` every Function that the file defines

    - `opsmith adopt functions.py:Swish` only this class; `functions.py:Outer.Inner` for a nested class

    - `opsmith adopt mypackage.functions --json > report.json`

    Exit status: 0 all work, 1 some need a declaration or are wrong, 2 the file could not be imported.
    """
    with answering(as_json=as_json, traceback=traceback) as printer:
        with waiting(f"importing {escape(target)}"):
            parsed = Target.of(target)
            module = parsed.module()
            classes = classes_of(module, parsed.name, inside=not parsed.is_file)
        console = printer.console()
        findings = []
        for name, function_class in classes.items():
            with waiting(f"looking at {escape(name)}"):
                found = survey(function_class, seed=seed, name=name)
            findings.append(found)
            if not as_json:
                _show(console, found, verbose=verbose)
        if as_json:
            printer.write_json(_to_dict(findings))
        else:
            _close(console, findings)
    raise typer.Exit(0 if all(found.verdict == "works" for found in findings) else FAILED)


def _show(console: Console, finding: Finding, *, verbose: bool) -> None:
    """Print the finding on one class, and the line to write."""
    console.print(Text.assemble((finding.name, "bold"), ": ", (finding.verdict, STYLES[finding.verdict])))
    remarks = [_near(finding.where) + (f", tried on {finding.tried}" if finding.tried else ", not run")]
    remarks += [_abilities(finding)] if finding.abilities else []
    rows = Table.grid(padding=(0, 1))
    for remark in remarks:
        rows.add_row(" ", Text(remark, style="dim"))
    for reason in (*finding.mends, *finding.reasons):
        rows.add_row(" -", Text(_near(reason), overflow="fold"))
    console.print(rows)
    if finding.line is not None:
        code = "\n".join(f"      {line}" for line in finding.line.splitlines())
        console.print(Text(f"\n{code}", style="cyan"), soft_wrap=True)  # unbroken, to be copied
    if verbose and finding.report is not None:
        console.print()
        console.print(rendered(finding.report))
    console.print()


def _abilities(finding: Finding) -> str:
    named = {state: [name for name, each in finding.abilities.items() if each == state] for state in VERBS}
    return "; ".join(f"{verb} {', '.join(named[state])}" for state, verb in VERBS.items() if named[state])


def _close(console: Console, findings: list[Finding]) -> None:
    """Print a line for each class, the counts of the verdicts, and the next steps."""
    rows = Table(box=box.SIMPLE, show_header=False, show_edge=False)
    for finding in findings:
        rows.add_row(finding.name, Text(finding.verdict, style=STYLES[finding.verdict]), _near(finding.where))
    counts = _counts(findings)
    parts = [f"{count} {COUNTED[verdict][count != 1]}" for verdict, count in counts.items() if count]
    if len(findings) > 1:
        console.print(rows)
        console.print(f"\n{len(findings)} Functions: {', '.join(parts)}\n")
    steps = Table.grid(padding=(0, 1))
    for verdict, count in counts.items():
        if count:
            steps.add_row(Text(verdict, style=STYLES[verdict]), NEXT[verdict])
    console.print(steps)


def _counts(findings: list[Finding]) -> dict[str, int]:
    return {verdict: sum(found.verdict == verdict for found in findings) for verdict in STYLES}


def _to_dict(findings: list[Finding]) -> dict[str, Any]:
    counts = _counts(findings)
    return {
        "schema": SCHEMA,
        "works": counts["works"] == len(findings),
        "counts": counts,
        "functions": [found.to_dict() for found in findings],
    }


def _near(text: str) -> str:
    """Make the paths of files below the current directory relative to it."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")
