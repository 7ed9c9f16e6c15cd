"""Render DOT as SVG, PNG or PDF with pygraphviz, in a subprocess with a time limit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from opsmith import errors
from opsmith.extras import install

Format = Literal["svg", "png", "pdf"]

SECONDS = 30.0
"""Time limit of one attempt."""

ATTEMPTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("", {}),
    (
        "laid out in haste, with straight lines, since Graphviz took too long",
        {"splines": "line", "nslimit": "1", "nslimit1": "1", "mclimit": "0.05", "concentrate": "false"},
    ),
)
"""Attempts in order: the note about the picture, and additional attributes of the graph."""

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import pygraphviz
try:
    graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
except pygraphviz.DotError as error:
    sys.exit(f"it cannot read the graph: {error}")
for pair in sys.argv[3:]:
    name, _, value = pair.partition("=")
    graph.graph_attr[name] = value
sys.stdout.buffer.write(graph.draw(format=sys.argv[2], prog="dot"))
"""


@dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        data: The file.
        note: A remark about the picture; empty for none.
    """

    data: bytes
    note: str = ""


def render(dot: str, form: Format, *, seconds: float = SECONDS) -> Picture:
    """Render DOT with Graphviz.

    Args:
        dot: The graph.
        form: The format.
        seconds: Time limit of each of two attempts, the second one with less optimisation.

    Raises:
        MissingExtraError: If pygraphviz is not installed.
        DrawingError: If Graphviz fails, or takes too long.
    """
    folder = _package()
    more = {"dpi": "144"} if form == "png" else {}
    for note, attributes in ATTEMPTS:
        pairs = [f"{name}={value}" for name, value in {**attributes, **more}.items()]
        # -P: do not import modules from the working folder.
        command = [sys.executable, "-P", "-c", _PROGRAM, folder, form, *pairs]
        try:
            done = subprocess.run(
                command, input=dot.encode(), capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode:
            output = done.stderr.decode(errors="replace").strip().splitlines()
            raise errors.DrawingError(
                "Graphviz failed",
                got=output[-1] if output else f"exit status {done.returncode}",
                hint="draw an HTML page, which needs no Graphviz, and report it with the graph as `.dot`",
            )
        small = b"too large for cairo-renderer" in done.stderr
        scaled = "made smaller, since it had too many points for a picture" if small else ""
        return Picture(done.stdout, "; ".join(filter(None, (note, scaled))))
    raise errors.DrawingError(
        "Graphviz took too long to lay the graph out",
        expected=f"a picture in {seconds:g} seconds, or in as many with less care",
        hint="fold it, `depth=1`, or draw an HTML page, in which modules unfold one by one",
    )


def require_pygraphviz() -> None:
    """Refuse to continue without pygraphviz.

    Raises:
        MissingExtraError: If it is not installed.
    """
    _package()


def _package() -> str:
    """The folder that pygraphviz is in.

    Raises:
        MissingExtraError: If it is not installed.
    """
    found = importlib.util.find_spec("pygraphviz")
    if found is None or found.origin is None:
        raise errors.MissingExtraError(
            "a picture needs the package `pygraphviz`, which brings Graphviz",
            got="no module named 'pygraphviz'",
            hint=f"{install('draw')}; or write `.html`, `.dot` or `.json`, which need nothing",
        )
    return str(Path(found.origin).parent.parent)
