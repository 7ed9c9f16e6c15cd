"""Lines of a model, as torch notes them in its graphs: those of its author, not of torch or opsmith."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Any

import torch

_OURS = Path(__file__).parents[1]
_NOT_THE_AUTHORS = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    *(str(each) for each in _OURS.iterdir() if each.name != "ops"),
    "<",
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)


def authors(file: str) -> bool:
    """Whether a file is the author's of a model or an operator; the bundled operators are sources too.

    Example:
        >>> authors(torch.__file__), authors("network.py")
        (False, True)
    """
    return not file.startswith(_NOT_THE_AUTHORS)


def where_called(node: Any) -> str | None:
    """`file:line` of the call that became a node of torch's graph; None where torch did not note it."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    places = [f"{file}:{line}" for file, line in frames if authors(file)]
    return places[-1] if places else None
