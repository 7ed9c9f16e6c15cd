"""The example that README.md shows, and what it really prints."""

from __future__ import annotations

import os
import subprocess
import sys

from doc_pages import ROOT, python_blocks, same

README = ROOT / "README.md"
EXAMPLE = ROOT / "examples" / "quick_start.py"


def printed() -> str:
    """What the example prints as a program of its own, its path shortened."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.replace(f"{EXAMPLE.parent}{os.sep}", "")


def with_example(text: str) -> str:
    """README.md with the example and its output as they are now."""
    (block,) = python_blocks(text)
    assert block.output is not None
    lines = text.splitlines()
    output = printed()
    if not same(output, block.expected):
        lines[block.output.start : block.output.start + len(block.output.lines)] = output.splitlines()
    source = EXAMPLE.read_text(encoding="utf-8").splitlines()
    lines[block.code.start : block.code.start + len(block.code.lines)] = source
    return "\n".join(lines) + "\n"
