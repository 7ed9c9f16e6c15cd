"""Comparison of built kernels with the references of their operators, before they are written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.packaged import FOLDER, looking_in
from opsmith.checking import Report, check
from opsmith.checking.report import UNVERIFIED
from opsmith.core.operator import Operator
from opsmith.shipping import PackageBuild

COMPARED = ("forward", "values")
"""Properties that compare the kernels of the CPU with the reference, on samples and at special values."""


@dataclass(frozen=True)
class Verification:
    """Result of the comparison.

    Attributes:
        verified: Kernels that agree with their references, such as `demo::scale for x86-64-v3`. unverified:
            Kernels that could not be run here, with the reason. differences: Kernels that differ, with the
            finding.
    """

    verified: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def verified(made: PackageBuild, advance: Callable[[str, int, int], None]) -> Verification:
    """Run each built library that this machine can run on the samples of its operator.

    Args:
        made: The build.
        advance: Function that is called with the current activity, the number of finished activities, and
            their total.
    """
    result = Verification()
    levels = {file.target: file.misfit for file in made.files if file.features}
    for level, misfit in levels.items():
        if misfit is not None:
            result.unverified.append(f"libraries for {level}: {misfit}")
    runnable = [level for level, misfit in levels.items() if misfit is None]
    steps: list[tuple[str, Operator[..., Any], list[Any], str, tuple[str, ...]]] = []
    shipped = {each.language for each in made.rows}
    for language, kernels in made.package.by_language().items():
        for operator in dict.fromkeys(each.operator for each in kernels):
            given = [each for each in kernels if each.operator is operator]
            if language.on_cpu is not None and given[0].language in shipped:
                how = f"in {language.name}, {language.on_cpu.manner}"
                steps.append((f"{operator.name} {how}", operator, given, "", (language.key,)))
            elif language.ahead is not None and "cpu" in language.devices:
                steps += [
                    (f"{operator.name} for {level}", operator, given, level, COMPARED) for level in runnable
                ]
    with _in_place(made) as folder:
        for done, (name, operator, given, level, asked) in enumerate(steps):
            advance(f"checking {name}", done, len(steps))
            _compare(made, folder, result, name, operator, given, level, asked)
    return result


@contextmanager
def _in_place(made: PackageBuild) -> Iterator[Path]:
    """Context manager with the built kernels in a copy of the package, where libraries find its files."""
    root = made.package.root
    if made.directory.parent == root:
        yield made.directory
        return
    with tempfile.TemporaryDirectory(prefix="opsmith-") as scratch:
        for path in root.iterdir():
            if path.name != FOLDER:
                (Path(scratch) / path.name).symlink_to(path)
        yield Path(shutil.copytree(made.directory, Path(scratch) / FOLDER))


def _compare(
    made: PackageBuild,
    folder: Path,
    result: Verification,
    name: str,
    operator: Operator[..., Any],
    kernels: list[Any],
    level: str,
    asked: tuple[str, ...],
) -> None:
    """Compare one operator with its reference: its libraries for one level, or its kernels on the CPU."""
    try:
        with looking_in(made.package.root, folder, (level,)):
            operator.reload()
            report = check(operator, only=asked)
    except errors.MissingSamplesError as error:
        result.differences.append(f"{name}: it has no samples for the comparison; {error.hint}")
        return
    finally:
        origins = {each.origin_of(()) for each in kernels} if level else set()
        operator.reload()
    wanted = f"built into the package for {level}"
    found = _findings(report)
    skipped = [each for each in report.outcomes if each.property == asked[0] and each.status == "skipped"]
    own = {each.where for each in kernels}
    idle = [each for each in report.failures if UNVERIFIED in each.evidence and each.where in own]
    if found:
        result.differences.extend(f"{name}: {each}" for each in found)
    elif skipped:
        result.unverified.append(f"{name}: {skipped[0].reason}")
    elif origins - {wanted}:
        others = ", ".join(each or "none" for each in sorted(origins - {wanted}))
        result.differences.append(f"{name}: it did not run the samples; the kernel that ran is {others}")
    elif idle:
        unrun = result.differences if level else result.unverified
        unrun += [f"{name}: {each.message}" for each in idle]
    else:
        result.verified.append(name)


def _findings(report: Report) -> list[str]:
    return [
        f"{each.property}, {each.cause}: {each.message}"
        for each in report.failures
        if each.severity == "error"
    ]
