"""`opsmith draw`: draw the graph of an operator, a module, a function or of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from opsmith import errors
from opsmith.cli.guard import waiting
from opsmith.cli.options import AsJson, Traceback, named_as_options, subject_named
from opsmith.cli.output import answering
from opsmith.core.operator import Operator
from opsmith.drawing.graph import Graph, format_bytes

SCHEMA = 1
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""

FAILURES = ("NoGraphError", "FreedGraphError", "DrawingError")
"""Errors that concern the graph, and not the way the command was called."""


def draw(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE:NAME",
            help="A `.py` file or module, and an object in it: an operator, a tensor, or a function without "
            "arguments that returns tensors, or a model and its arguments.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Path of the picture: `.svg`, `.png`, `.pdf`, `.html`, `.dot` or `.json`.",
        ),
    ],
    training: Annotated[
        bool, typer.Option("--training", help="Draw the autograd graph of a model, not its calls.")
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option(
            metavar="LEVELS",
            min=0,
            help="Number of levels of modules to unfold; by default as many as fit.",
        ),
    ] = None,
    show_attrs: Annotated[bool, typer.Option("--show-attrs", help="Show the attributes of nodes.")] = False,
    show_saved: Annotated[
        bool, typer.Option("--show-saved", help="Also draw the tensors that torch's own nodes save.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Record the tensors that are saved for the backward.")
    ] = True,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Draw a graph: the graph of autograd, the calls of a model, or the parts of an operator.

    An operator is drawn on its first sample. A model comes from a function such as
    `def model(): return network, (torch.zeros(1, 3, 32, 32),)`; a third value may be a dict of arguments by
    keyword. A function may also return a tensor, or a tuple or dict of tensors, whose graph is drawn.

    **Examples**

    - `opsmith draw operators.py:linear -o linear.svg`

    - `opsmith draw mypackage.nets:model -o model.html --training`

    - `opsmith draw example.py:loss -o loss.png --show-saved --json > loss.json`

    Exit status: 0 drawn, 1 there is nothing to draw, or Graphviz fails, 2 the command could not be carried
    out.
    """
    with answering(as_json=as_json, traceback=traceback, failures=FAILURES) as printer:
        from opsmith.drawing.picture import check_depth, draw_file, output_file

        with named_as_options(draw):
            check_depth(depth)
            file = output_file(output)
        with waiting(f"importing {escape(target)}"):
            subject, inputs, kwargs = subject_named(target, "draw")
            _refuse_undrawable(target, subject)
        with (
            waiting(f"drawing {escape(target)}"),
            named_as_options(draw),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            graph, note = draw_file(
                subject,
                file,
                inputs=inputs,
                kwargs=kwargs,
                training=training,
                show_attrs=show_attrs,
                show_saved=show_saved,
                memory=memory,
                depth=depth,
            )
        for each in caught:
            typer.echo(f"opsmith: {each.message}", err=True)
        notes = [*graph.notes, *[note] * bool(note)]
        if as_json:
            printer.write_json({"schema": SCHEMA, "path": str(output), **graph.to_dict(), "notes": notes})
        else:
            printer.write(_report(graph, output, notes) + "\n")


def _report(graph: Graph, path: Path, notes: Sequence[str]) -> str:
    heaviest = [f"  {format_bytes(node.own_bytes)} {node.name or node.label}" for node in graph.heaviest(3)]
    lines = [f"{path}: {graph.title}: {graph.summary()}", *(f"  {each}" for each in notes)]
    return "\n".join([*lines, *["  keep the most:"] * bool(heaviest), *heaviest])


def _refuse_undrawable(text: str, subject: Any) -> None:
    if not isinstance(subject, torch.nn.Module | Operator | torch.Tensor | tuple | list | dict):
        raise errors.UsageError(
            f"`{text}` must return an object that can be drawn",
            expected="a tensor, a tuple or dict of tensors, (model, args), or (model, args, kwargs)",
            got=type(subject).__name__,
            hint="write `def model(): return network, (torch.zeros(1, 3, 32, 32),)`",
        )
