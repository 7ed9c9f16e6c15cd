"""`opsmith cache`: show or remove the kernels that were built on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from opsmith.build.cache import cache_on_disk, parts_of
from opsmith.cli.options import AsJson
from opsmith.cli.output import answering, columns
from opsmith.kernels.languages import own_languages

SCHEMA = 1
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""

KINDS = {
    **{each.key: f"kernel in {each.name}" for each in own_languages()},
    "cuda description": "resources of a kernel in CUDA C++",
    "cuda emulation": "kernel in CUDA C++, for the CPU",
    "cuda emulation header": "header of kernels in CUDA C++ on the CPU, compiled ahead",
    "cuda emulation runtime": "library that runs kernels in CUDA C++ on the CPU",
    "cuda ptx": "kernel in CUDA C++, for later GPUs",
    "kernel object": "kernel in C++, for a library without Python",
    "library for ONNX Runtime": "library of kernels for ONNX Runtime",
    "library for torch": "library that serves operators without Python",
    "library part for ONNX Runtime": "registration of kernels with ONNX Runtime",
    "library part for torch": "registration and calls of operators that are served without Python",
    "runtime": "opsmith's own library",
    "trace": "library that finds the line of a crash",
}


@dataclass(frozen=True, slots=True)
class CacheRow:
    """An entry of the cache.

    Attributes:
        key: Name of its directory.
        kind: Kind of its content.
        operator: Operator of the kernel; empty for a library that serves all.
        bytes: Size of its files.
        built: Time at which it was built, in ISO 8601.
    """

    key: str
    kind: str
    operator: str
    bytes: int
    built: str


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove every entry.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the kernels that were built from source on this machine, or remove them.

    The directory is `opsmith` in your cache directory, or `OPSMITH_CACHE`. A removed kernel is built again
    when it is needed. Programs that have loaded it can continue to run.

    **Examples**

    - `opsmith cache`

    - `opsmith cache --clear`

    Exit status: 0; 2 if other users can write into the directory.
    """
    with answering(as_json=as_json) as printer:
        disk = cache_on_disk()
        entries = [_row(path) for path in disk.entries()]
        if clear:
            disk.clear()
        if as_json:
            answer = {
                "schema": SCHEMA,
                "directory": str(disk.directory),
                "cleared": clear,
                "entries": [asdict(each) for each in entries],
            }
            printer.write_json(answer)
        else:
            _show(printer.console(), entries, disk.directory, cleared=clear)


def _row(path: Path) -> CacheRow:
    parts = parts_of(path)
    state = path.stat()
    return CacheRow(
        path.name,
        KINDS.get(parts.get("kind", ""), parts.get("kind", "")),
        parts.get("operator", ""),
        sum(file.stat().st_size for file in path.iterdir()),
        datetime.fromtimestamp(state.st_mtime).isoformat(timespec="seconds"),
    )


def _show(console: Console, entries: list[CacheRow], directory: Path, *, cleared: bool) -> None:
    if entries and not cleared:
        rows = columns("", "of", "kB", "built", right=["kB"])
        for each in sorted(entries, key=lambda each: each.built):
            rows.add_row(each.kind, each.operator, f"{each.bytes / 1000:.0f}", each.built.replace("T", " "))
        console.print(rows)
    size = sum(each.bytes for each in entries) / 1e6
    total = f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'}, {size:.1f} MB"
    console.print(f"{'removed ' if cleared else ''}{total}")
    console.print(str(directory), soft_wrap=True)
