"""`opsmith rule`: print the page of an error class, a cause or a property, or list all."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.text import Text

from opsmith.cli.options import AsJson, Traceback
from opsmith.cli.output import answering, columns

SCHEMA = 1
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


def rule(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The last word of a message; without NAME, all are listed."),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Explain an error, a cause or a property: why it matters, an example, and how to fix or accept it.

    Every message of opsmith ends with the name of its rule. The pages need no network.

    **Examples**

    - `opsmith rule missing-term`

    - `opsmith rule CapturedTensorError`

    - `opsmith rule` lists every rule

    Exit status: 0 printed; 2 there is no such rule.
    """
    with answering(as_json=as_json, traceback=traceback) as printer:
        from opsmith import rules

        if name is None:
            listed = rules.rules()
            if as_json:
                printer.write_json({"schema": SCHEMA, "rules": [each.to_dict() for each in listed]})
                return
            rows = columns("rule", "kind", "")
            for each in listed:
                rows.add_row(Text(each.key), Text(each.kind, style="dim"), Text(each.title))
            printer.console().print(rows)
            return
        found = rules.rule(name)
        if as_json:
            printer.write_json({"schema": SCHEMA, **found.to_dict(), "text": found.text})
        elif printer.console().is_terminal:
            printer.console().print(Markdown(found.text))
        else:
            printer.write(found.text)
