"""What a C++ compiler warns of in a kernel that was seen to be wrong: it knows lines that a run does not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from opsmith.build.cpp.compiling import HEADER
from opsmith.build.cpp.generating import DEFAULT, generated
from opsmith.build.cpp.source import CppSource
from opsmith.build.toolchain import FLAGS, find_toolchain

_WARNING = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):\d+: warning: (?P<words>.*) \[-W(?:maybe-)?uninitialized\]$", re.MULTILINE
)


def unset_lines(
    source: CppSource, operator: str, dtypes: Sequence[torch.dtype] | None
) -> list[tuple[int, str]]:
    """The lines of a kernel in which a variable is used that may not be set, with the compiler's words.

    Args:
        source: The kernel.
        operator: Name of the operator.
        dtypes: Those that a template is made for; None for the usual ones.

    Raises:
        ToolchainError: As `compiled`.
    """
    instances = tuple(dtypes or DEFAULT) if source.template else ()
    with tempfile.TemporaryDirectory(prefix="opsmith-") as name:
        folder = Path(name)
        (folder / HEADER.name).write_bytes(HEADER.read_bytes())
        (folder / "kernel.cpp").write_text(generated(source, operator, instances), encoding="utf-8")
        warned = ["-Wuninitialized", "-Wmaybe-uninitialized", "-S", "-o", "kernel.s"]
        printed = find_toolchain().run([*FLAGS, *warned, "kernel.cpp"], folder).printed
    found = {
        (int(match["line"]), match["words"].replace("\N{LEFT SINGLE QUOTATION MARK}", "`"))
        for match in _WARNING.finditer(printed)
        if match["file"] == source.path
    }
    return sorted(found)
