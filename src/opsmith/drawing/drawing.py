"""`opsmith.draw`: a graph, as a file."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast

from opsmith import errors
from opsmith.drawing.dot import to_dot
from opsmith.drawing.folding import fitting
from opsmith.drawing.graph import Graph
from opsmith.drawing.layout import SECONDS, Format, rendered, require
from opsmith.drawing.page import to_page
from opsmith.drawing.request import PICTURES, Target, read_target
from opsmith.drawing.tracing import Options, trace


def draw(
    subject: Any,
    path: str | os.PathLike[str],
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
    """Draw the graph behind tensors, of a module or function, or of an operator.

    Args:
        subject: Tensors (one, a tuple, a dict), a module or a function, or an operator of opsmith.
        path: Where the picture goes: `.svg`, `.png`, `.pdf`, `.html`, `.dot` or `.json`.
        inputs: What a module or function is called with: a tensor, a tuple, or a dict by name. An operator
            is called as its first sample says.
        kwargs: What it is called with by keyword, besides.
        names: A module, or a dict of tensors and modules; otherwise the caller's variables name tensors.
        training: Draw what a backward runs through, instead of the calls of a module or function.
        show_attrs: Write the attributes of nodes on them.
        show_saved: Draw also what torch's own nodes save; what operators and Functions save always is.
        memory: Look at what is kept; a graph that was freed can be drawn without.
        depth: How many levels of modules to unfold; by default as many as can be looked at.
        title: What stands above the picture.

    Returns:
        The whole graph, as a value.

    Raises:
        UsageError, NoGraphError, FreedGraphError, MissingSamplesError, MissingExtraError, DrawingError: As
            their names say.

    Example:
        >>> import tempfile, torch, opsmith
        >>> w = torch.ones(3, requires_grad=True)
        >>> graph = opsmith.draw(opsmith.ops.exp(w).sum(), tempfile.mkdtemp() + "/graph.html")
        >>> [node.label for node in graph.nodes if node.kind == "operator"], graph.kept_bytes
        (['opsmith::exp'], 12)
    """
    target = checked(path, depth)
    frame = inspect.currentframe()
    try:
        graph, note = drawn(
            subject,
            target,
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
        del frame  # a circle, which would keep the subject until garbage is collected
    if note:
        warnings.warn(f"{target.path}: {note}", UserWarning, stacklevel=2)
    return graph


def checked(path: Any, depth: Any) -> Target:
    """The file that a picture goes to, seen to be possible before anything is traced.

    Raises:
        UsageError, MissingExtraError: If it is not.
    """
    target = read_target(path)
    _check_depth(depth)
    if target.form in PICTURES:
        require()
    return target


def drawn(
    subject: Any,
    target: Target,
    *,
    show_attrs: bool = False,
    depth: int | None = None,
    frame: FrameType | None = None,
    **looked_at: Any,
) -> tuple[Graph, str]:
    """Trace, draw and write; return the graph, and what has to be said of the picture."""
    graph = trace(subject, Options(**looked_at), frame)
    data, note = encoded(graph, target.form, show_attrs=show_attrs, depth=depth)
    target.write(data)
    return graph, note


def encoded(
    graph: Graph,
    form: str,
    *,
    show_attrs: bool = False,
    depth: int | None = None,
    seconds: float = SECONDS,
) -> tuple[bytes, str]:
    """A graph in a format, and what has to be said of the picture.

    Args:
        graph: The graph.
        form: One of `svg`, `png`, `pdf`, `dot`, `html`, `json`.
        show_attrs: Whether attributes stand on nodes.
        depth: How many levels of modules are unfolded.
        seconds: How long each of two attempts of Graphviz may take.
    """
    if form == "json":
        return (json.dumps(graph.to_dict(), indent=1) + "\n").encode(), ""
    if form == "html":
        return to_page(graph, depth=depth, show_attrs=show_attrs).encode(), ""
    shown = fitting(graph, depth)
    if form == "dot":
        return to_dot(shown, show_attrs=show_attrs).encode(), ""
    picture = rendered(to_dot(shown, show_attrs=show_attrs), cast("Format", form), seconds=seconds)
    return picture.data, picture.note


def _check_depth(depth: Any) -> None:
    if depth is None or (isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0):
        return
    raise errors.UsageError(
        "`depth` is no number of levels",
        argument="depth",
        expected="0 or more, or None",
        got=repr(depth),
        hint="leave it out, and as much is unfolded as can be looked at",
    )
