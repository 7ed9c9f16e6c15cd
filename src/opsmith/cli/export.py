"""`opsmith export`: export an operator or a model to ONNX, and compare the file with PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from opsmith import errors
from opsmith.cli.guard import FAILED, waiting
from opsmith.cli.options import AsJson, Traceback, named_as_options, subject_named
from opsmith.cli.output import answering
from opsmith.core.operator import Operator
from opsmith.core.samples import first_call

SCHEMA = 2
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""

FAILURES = ("ExportError", "ExportMismatchError", "DynamicAxisError", "OnnxRuntimeError")
"""Errors that concern the export, and not the way the command was called."""


def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE:NAME",
            help="A `.py` file or module, and an object in it: an operator, exported on its first sample, or "
            "a function without arguments that returns a model and its arguments.",
        ),
    ],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Path of the file: `model.onnx`.")],
    body: Annotated[
        str,
        typer.Option("--body", help="Form of an operator: `function`, `inline` or `node`.", metavar="BODY"),
    ] = "function",
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT:AXIS=NAME",
            help="An axis that may have any size, as `x:0=batch`; may be given again.",
        ),
    ] = None,
    opset: Annotated[int | None, typer.Option(help="Version of ONNX's operators.", show_default="20")] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare the file with PyTorch.")
    ] = True,
    library: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Package the operators' kernels in C++ into a library, `ops.so`, which ONNX Runtime uses "
            "instead of bodies.",
        ),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Export an operator or a model as a file for ONNX Runtime, and compare the file with PyTorch.

    No file is written to PATH if the two differ. A model comes from a function such as
    `def model(): return network.eval(), (torch.zeros(1, 3, 32, 32),)`; a third value may be a dict of
    arguments by keyword.

    **Examples**

    - `opsmith export operators.py:linear linear.onnx --dynamic x:0=batch`

    - `opsmith export mypackage.nets:model model.onnx --dynamic images:0=batch --body inline`

    - `opsmith export operators.py:linear linear.onnx --library ops.so`

    - `opsmith export operators.py:linear linear.onnx --json > export.json`

    Exit status: 0 written, and equal to PyTorch (with `--no-verify`, written), 1 it cannot be exported,
    differs, or could not be compared, 2 the command could not be carried out.
    """
    with answering(as_json=as_json, traceback=traceback, failures=FAILURES) as printer:
        with waiting(f"importing {escape(target)}"):
            model, args, kwargs = _model_and_arguments(target)
        from opsmith.exporting import export_onnx  # slow to import

        with (
            waiting(f"exporting {escape(target)}"),
            named_as_options(export),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "`.*` is not verified: ")  # reported below
            made = export_onnx(
                model,
                args,
                path,
                kwargs=kwargs,
                body=body,  # type: ignore[arg-type]  # checked by export_onnx
                dynamic=_axes(dynamic or []),
                opset=opset,
                verify=verify,
                library=library,
            )
        if as_json:
            printer.write_json({"schema": SCHEMA, **made.to_dict()})
        else:
            printer.write(f"{made}\n")
    if verify and made.unverified:
        raise typer.Exit(FAILED)


def _model_and_arguments(text: str) -> tuple[Any, Any, Any]:
    """Return the model or operator that a target names, with the arguments of a call.

    Raises:
        UsageError, OperatorNotFoundError, ModuleImportError, MissingSamplesError: If it cannot be exported.
    """
    model, args, kwargs = subject_named(text, "export")
    if not isinstance(model, torch.nn.Module | Operator) or not isinstance(kwargs, dict | None):
        raise errors.UsageError(
            f"`{text}` must return a model with its arguments",
            expected="(model, args), or (model, args, kwargs)",
            got=type(model).__name__,
            hint="write `def model(): return network, (torch.zeros(1, 3, 32, 32),)`",
        )
    if isinstance(model, Operator) and args is None:
        call = first_call(model.specification, "exported")
        return model, tuple(call.args), dict(call.kwargs)
    return model, args, kwargs


def _axes(given: list[str]) -> dict[str, dict[int, str]]:
    """Parse axes such as `x:0=batch` into the form of `dynamic=`."""
    axes: dict[str, dict[int, str]] = {}
    for text in given:
        position, _, title = text.partition("=")
        name, _, axis = position.rpartition(":")
        if not (name and title and axis.lstrip("-").isdigit()):
            raise errors.UsageError(
                f"`{text}` must name a dynamic axis",
                argument="--dynamic",
                expected="INPUT:AXIS=NAME",
                got=text,
                hint="write `--dynamic x:0=batch`",
            )
        axes.setdefault(name, {})[int(axis)] = title
    return axes
