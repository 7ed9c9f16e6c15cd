"""`opsmith.draw`: write the graph of a subject in the format of the file's suffix."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

from opsmith import errors
from opsmith.core.output_file import replace_file, writable_file
from opsmith.drawing.graph import Graph
from opsmith.drawing.graphviz import SECONDS, Format, pygraphviz_folder, render, to_dot
from opsmith.drawing.grouping import fitting
from opsmith.drawing.page import to_page
from opsmith.drawing.subject import Options
from opsmith.drawing.tracer import trace

FORMATS = {
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".dot": "dot",
    ".gv": "dot",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
}
"""Formats by suffix."""
PICTURES = ("svg", "png", "pdf")
"""Formats that need Graphviz."""


def draw(
    subject: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    names: Any = None,
    training: bool = False,
    show_attrs: bool = False,
    show_saved: bool = False,
    memory: bool = True,
    depth: int | None = None,
    title: str | None = None,
) -> Graph:
    """Draw the graph of tensors, of a module or function, or of an operator.

    Args:
        subject: Tensors (one, a tuple, a dict), a module or a function, or an operator of opsmith.
        path: Path of the picture: `.svg`, `.png`, `.pdf`, `.html`, `.dot` or `.json`. Without a path nothing
            is written; a notebook displays the returned graph.
        inputs: Arguments for a module or function: a tensor, a tuple, or a dict by name. An operator is
            called with its first sample by default.
        kwargs: Further keyword arguments.
        names: A module, or a dict of tensors and modules; otherwise the caller's variables name tensors.
        training: Draw the graph of the backward instead of the calls of a module or function.
        show_attrs: Write attributes on nodes.
        show_saved: Also draw the tensors that torch's own nodes save.
        memory: Record saved tensors; False draws a graph that was freed.
        depth: Number of levels of modules to unfold; by default as many as fit.
        title: The title of the picture.

    Returns:
        The whole graph, as a value.

    Raises:
        UsageError: If an argument is invalid.
        NoGraphError, FreedGraphError: If a tensor has no graph, or its saved tensors were freed.
        MissingSamplesError: If an operator has neither samples nor `inputs`.
        MissingExtraError, DrawingError: If Graphviz is not installed, or fails.

    Example:
        >>> import tempfile, torch, opsmith
        >>> w = torch.ones(3, requires_grad=True)
        >>> graph = opsmith.draw(opsmith.ops.exp(w).sum(), tempfile.mkdtemp() + "/graph.html")
        >>> [node.label for node in graph.nodes if node.kind == "operator"], graph.kept_bytes
        (['opsmith::exp'], 12)
    """
    file = None if path is None else output_file(path)
    check_depth(depth)
    frame = inspect.currentframe()
    try:
        graph, note = draw_file(
            subject,
            file,
            inputs=inputs,
            kwargs=kwargs,
            names=names,
            training=training,
            show_attrs=show_attrs,
            show_saved=show_saved,
            memory=memory,
            depth=depth,
            title=title,
            frame=None if frame is None else frame.f_back,
        )
    finally:
        del frame  # a reference cycle would keep the subject alive
    if note:
        warnings.warn(f"{file}: {note}", UserWarning, stacklevel=2)
    return graph


def output_file(path: Any) -> Path:
    """Return the file for a picture; an invalid path raises an error before anything is traced.

    Raises:
        UsageError: If the suffix names no format, or no file can be written there.
        MissingExtraError: If the format needs Graphviz, and pygraphviz is not installed.
    """
    file = writable_file(path, "graph.svg")
    form = FORMATS.get(file.suffix.lower())
    if form is None:
        raise errors.UsageError(
            "a graph is not drawn in this format",
            argument="path",
            expected=f"a name that ends in {', '.join(FORMATS)}",
            got=f"`{file}`",
            hint=f"write `{file.with_suffix('.svg')}`",
        )
    if form in PICTURES:
        pygraphviz_folder()
    return file


def check_depth(depth: Any) -> None:
    """Raise an error for a depth that is not a number of levels.

    Raises:
        UsageError: If it is not a number of levels.
    """
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
        raise errors.UsageError(
            "`depth` must be a number of levels",
            argument="depth",
            expected="0 or more, or None",
            got=repr(depth),
            hint="leave it out: as many levels as fit are then unfolded",
        )


def draw_file(
    subject: Any,
    file: Path | None,
    *,
    show_attrs: bool = False,
    depth: int | None = None,
    frame: FrameType | None = None,
    **options: Any,
) -> tuple[Graph, str]:
    """Trace a subject, and write its picture if a file is given; return the graph and a note about it."""
    graph = replace(trace(subject, Options(**options), frame), depth=depth, show_attrs=show_attrs)
    if file is None:
        return graph, ""
    data, note = encoded(graph, FORMATS[file.suffix.lower()], show_attrs=show_attrs, depth=depth)
    replace_file(file, data)
    return graph, note


def encoded(
    graph: Graph,
    form: str,
    *,
    show_attrs: bool = False,
    depth: int | None = None,
    seconds: float = SECONDS,
) -> tuple[bytes, str]:
    """A graph in a file format, and a note about the picture.

    Args:
        graph: The graph.
        form: One of `svg`, `png`, `pdf`, `dot`, `html`, `json`.
        show_attrs: Write attributes on nodes.
        depth: Number of levels of modules to unfold.
        seconds: Time limit of each of Graphviz's two attempts.
    """
    if form == "json":
        return (json.dumps(graph.to_dict(), indent=1) + "\n").encode(), ""
    if form == "html":
        return to_page(graph, depth=depth, show_attrs=show_attrs).encode(), ""
    shown = fitting(graph, depth)
    if form == "dot":
        return to_dot(shown, show_attrs=show_attrs).encode(), ""
    return render(to_dot(shown, show_attrs=show_attrs), cast("Format", form), seconds=seconds)
