"""The tour's index: what came of each stage, its pictures, and every file, on one page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opsmith.tour.files import replacing

SEEN = {
    "example-graph.svg": "b + sum(w x): what autograd recorded of two small operators",
    "curves.svg": "Learning curves",
    "involution-roofline.svg": "Involution beside its reference, below what this machine can do",
    "digits-graph.svg": "The network for digits: what its backward runs through",
}
"""Pictures that are shown, in this order, if a stage has drawn them."""

WIDE = ("curves.svg", "involution-roofline.svg")
"""Those that no narrow screen shows whole: they are moved sideways there."""

KINDS = {
    ".html": "pages",
    ".svg": "pictures",
    ".png": "pictures",
    ".onnx": "exported models",
    ".pt": "weights",
    ".json": "figures",
}


def write_index(out: Path, summary: Mapping[str, Any]) -> Path:
    """Write `index.html` beside the files that it links.

    Args:
        out: Where they are.
        summary: What `summary.json` holds.

    Raises:
        MissingExtraError: If the package for pages is missing.
    """
    from opsmith.checking.output.html import source, templates

    made = templates("opsmith.tour", "opsmith.pages")
    names = [name for stage in summary["stages"] for name in stage["files"]]
    text = made.get_template("tour.html").render(
        summary=summary,
        pictures=[
            (title, name in WIDE, _data(out / name), _beside(name, names))
            for name, title in SEEN.items()
            if name in names
        ],
        groups=_grouped([*names, "summary.json"]),
        styles=[source(made, "page.css"), source(made, "operator.css")],
        scripts=[],
    )
    path = out / "index.html"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _data(picture: Path) -> str:
    """A picture as an address that holds it: the page asks for no file."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.read_bytes()).decode()}"


def _beside(name: str, names: Sequence[str]) -> list[str]:
    """The same picture in other formats."""
    stem = name.rpartition(".")[0]
    return [each for each in names if each.rpartition(".")[0] == stem]


def _grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Files by what they are; those of a folder by its index alone."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    for name in names:
        if "/" not in name or name.endswith("/index.html"):
            found.setdefault(KINDS.get(Path(name).suffix, "others"), []).append(name)
    return {kind: files for kind, files in found.items() if files}
