"""The earlier benchmarks in a file that `--against` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opsmith import errors


def earlier_in(file: Path, operators: Sequence[str]) -> dict[str, Any]:
    """The benchmarks of a file, by the names of their operators.

    Args:
        file: What `opsmith benchmark --json` printed, or `Benchmark.to_json()` gave.
        operators: Those that are to be compared.

    Raises:
        UsageError: If it cannot be read, or has none of these operators.
        BenchmarkFormatError: If it is no benchmark.
    """
    from opsmith.benchmarking.result import benchmarks_in

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UsageError(
            f"`{file}` cannot be read",
            argument="--against",
            expected="what `opsmith benchmark --json` printed, or `-o` wrote",
            got=getattr(error, "strerror", None) or str(error),
            hint="measure first: `opsmith benchmark ... -o before.json`",
        ) from error
    found: dict[str, Any] = {**benchmarks_in(text)}
    if not any(name in found for name in operators):
        raise errors.UsageError(
            f"`{file}` has no earlier benchmark of what is to be measured",
            argument="--against",
            expected=f"one of {', '.join(f'`{name}`' for name in operators)}",
            got=", ".join(f"`{name}`" for name in found) or "no benchmark at all",
            hint="measure it first, and keep that: `opsmith benchmark ... -o before.json`",
        )
    return found
