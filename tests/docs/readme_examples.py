"""Examples that README.md shows: files of examples/readme, and what each prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from doc_pages import ROOT, python_blocks, same

README = ROOT / "README.md"
FOLDER = ROOT / "examples" / "readme"
EXAMPLES = tuple(FOLDER / name for name in ("wrong.py", "rms.py"))
"""The files, in the order in which README.md shows them."""


def printed(example: Path) -> str:
    """Run an example as a program and return its output, see `without_folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return without_folder(run.stdout)


def without_folder(output: str) -> str:
    """Return the output of an example with the names of its files alone."""
    return output.replace(f"{FOLDER}{os.sep}", "")


def with_examples(text: str) -> str:
    """Return README.md with the examples and their output as they are now."""
    lines = text.splitlines()
    for block, example in reversed([*zip(python_blocks(text), EXAMPLES, strict=True)]):
        output = printed(example)
        if block.output is not None and not same(output, block.expected):
            end = block.output.start + len(block.output.lines)
            lines[block.output.start : end] = output.splitlines()
        source = example.read_text(encoding="utf-8").splitlines()
        lines[block.code.start : block.code.start + len(block.code.lines)] = source
    return "\n".join(lines) + "\n"
