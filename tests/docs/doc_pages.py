"""Pages of documentation as programs: their blocks of Python, and what each must print."""

from __future__ import annotations

import io
import linecache
import re
import sys
import traceback
import types
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opsmith import errors

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("python", "text", "sh", "toml", "")
"""What may stand behind an opening fence: `text` is what the Python above it prints, nothing is a drawing."""

_SECONDS = re.compile(r" *\d+\.\d\d s\b")
_FENCE = re.compile(r"(`{3,})(.*)")


def programs() -> list[Path]:
    """Every page whose blocks of Python are one program; README.md shows a file of examples/ instead."""
    return sorted((ROOT / "docs").glob("*.md"))


def pages() -> list[Path]:
    """Every page of documentation."""
    return [ROOT / "README.md", *programs()]


@dataclass(frozen=True)
class Fenced:
    """A fenced block: its language, its lines, and the index of the first of them in the page."""

    language: str
    lines: tuple[str, ...]
    start: int


@dataclass(frozen=True)
class Block:
    """A block of Python, the heading above it, and the block of output that follows it, if one does."""

    code: Fenced
    output: Fenced | None
    heading: str

    @property
    def expected(self) -> str:
        """The output that it must print."""
        return "".join(f"{line}\n" for line in self.output.lines) if self.output else ""


def fenced_blocks(text: str) -> list[Fenced]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: For a fence that stays open, or one with another language than `LANGUAGES`.
    """
    found: list[Fenced] = []
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        fence = _FENCE.fullmatch(lines[position])
        position += 1
        if fence is None:
            continue
        mark, language = fence[1], fence[2].strip()
        if language not in LANGUAGES:
            raise ValueError(f"line {position}: a fence says {language!r}; write one of {LANGUAGES}")
        if mark not in lines[position:]:
            raise ValueError(f"line {position}: a fence stays open")
        end = lines.index(mark, position)
        found.append(Fenced(language, tuple(lines[position:end]), position))
        position = end + 1
    return found


def python_blocks(text: str) -> list[Block]:
    """The blocks of Python of a page, each with the output that follows it.

    Raises:
        ValueError: For output that follows no Python.
    """
    lines, fenced = text.splitlines(), fenced_blocks(text)
    inside = {index for block in fenced for index in range(block.start, block.start + len(block.lines))}
    blocks: list[Block] = []
    for position, block in enumerate(fenced):
        before = fenced[position - 1] if position else None
        if block.language == "text" and (before is None or before.language != "python"):
            raise ValueError(f"line {block.start}: a block of output follows no block of Python")
        if block.language != "python":
            continue
        after = fenced[position + 1] if position + 1 < len(fenced) else None
        headings = [
            line for i, line in enumerate(lines[: block.start]) if line.startswith("#") and i not in inside
        ]
        blocks.append(
            Block(
                block,
                after if after is not None and after.language == "text" else None,
                headings[-1].lstrip("# ") if headings else "",
            )
        )
    for done in blocks:
        if done.output is not None:
            between = lines[done.code.start + len(done.code.lines) + 1 : done.output.start - 1]
            if any(line.strip() for line in between):
                raise ValueError(f"line {done.output.start}: prose stands between Python and its output")
    return blocks


class Program:
    """A page, run: its blocks share one module, and each runs once, after those above it.

    Messages name a page's Python as `PAGE.py`, with lines that count from the top of the block.

    Args:
        page: The page; its name names the module.
        text: Its text, if it is not that of the file.
        shows_errors: An error of opsmith that leaves a block is printed, as Python prints it.
    """

    def __init__(self, page: Path, text: str | None = None, *, shows_errors: bool = False) -> None:
        self.page, self.shows_errors = page, shows_errors
        self.blocks = python_blocks(page.read_text(encoding="utf-8") if text is None else text)
        self._printed: list[str] = []
        self._module = types.ModuleType(f"page_{re.sub(r'[^0-9a-z]', '_', page.stem.lower())}")
        self._module.__file__ = str(page)
        self._stopped: int | None = None

    def printed(self, position: int) -> str:
        """The output of a block."""
        sys.modules[self._module.__name__] = self._module
        while len(self._printed) <= position:
            if self._stopped is not None:
                line = self.blocks[self._stopped].code.start
                raise RuntimeError(f"the block above, at line {line} of {self.page.name}, did not run")
            self._run(self.blocks[len(self._printed)])
        return self._printed[position]

    def _run(self, block: Block) -> None:
        source = "\n".join(block.code.lines) + "\n"
        file = f"{self.page.stem.lower()}.py"
        # torch and tracebacks look for source lines; where blocks share a file's name, the last one wins.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        out = io.StringIO()
        self._stopped = len(self._printed)
        try:
            with redirect_stdout(out):
                exec(compile(source, file, "exec", dont_inherit=True), vars(self._module))
        except Exception as error:
            if not self.shows_errors or not isinstance(error, errors.OpsmithError):
                error.add_note(f"in the block at line {block.code.start} of {self.page.name}")
                raise
            out.writelines(traceback.format_exception_only(error))
        self._stopped = None
        self._printed.append("".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()))


def same(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal, apart from numbers of seconds."""
    return _SECONDS.sub(" ? s", printed) == _SECONDS.sub(" ? s", expected)


@cache
def program(page: Path) -> Program:
    """The page's program, one for each process."""
    return Program(page)
