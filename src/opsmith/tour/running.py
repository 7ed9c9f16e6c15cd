"""All stages, one after the other, and what came of them."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from rich.table import Table

import opsmith
from opsmith import errors
from opsmith.extras import install
from opsmith.tour.files import write_json
from opsmith.tour.index import write_index
from opsmith.tour.stage import Context, Stage, StageResult
from opsmith.tour.stages import STAGES


@dataclass(frozen=True)
class Finished:
    """A stage that has run."""

    stage: Stage
    result: StageResult
    seconds: float


def run_tour(context: Context, stages: Sequence[Stage] = STAGES) -> bool:
    """Run the stages, print a summary, and write it to `summary.json` and to `index.html`, which links all.

    Args:
        context: What the stages are given.
        stages: Which, in this order.

    Returns:
        Whether every stage reached its target.

    Raises:
        MissingExtraError: If a package that a stage needs is missing; before anything has run.
    """
    for stage in stages:
        refuse_missing(stage)
    finished: list[Finished] = []
    for number, stage in enumerate(stages, start=1):
        context.console.print(f"\n[bold]{number}. {stage.title}[/bold]")
        start = perf_counter()
        result = stage.run(context)
        finished.append(Finished(stage, result, perf_counter() - start))
    passed = all(one.result.passed for one in finished)
    summary = _summary(context, finished, passed)
    write_json(context.out / "summary.json", summary)
    path = write_index(context.out, summary)
    context.console.print(_table(finished))
    context.console.print(f"results: {path}", highlight=False, markup=False, soft_wrap=True)
    return passed


def refuse_missing(stage: Stage) -> None:
    """Refuse a stage that needs a package which is not there.

    Raises:
        MissingExtraError: Naming the package and what to install.
    """
    for package in stage.needs:
        if importlib.util.find_spec(package) is None:
            raise errors.MissingExtraError(
                f"the tour's stage `{stage.name}` needs the package `{package}`",
                got=f"no module named {package!r}",
                hint=install("tour"),
            )


def _summary(context: Context, finished: Sequence[Finished], passed: bool) -> dict[str, Any]:
    return {
        "passed": passed,
        "seconds": round(sum(one.seconds for one in finished), 2),
        "device": str(context.device),
        "seed": context.seed,
        "versions": {
            "opsmith": opsmith.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "stages": [
            {
                "name": one.stage.name,
                "title": one.stage.title,
                "passed": one.result.passed,
                "headline": one.result.headline,
                "seconds": round(one.seconds, 2),
                "details": dict(one.result.details),
                "files": [file.relative_to(context.out).as_posix() for file in one.result.files],
            }
            for one in finished
        ],
    }


def _table(finished: Sequence[Finished]) -> Table:
    table = Table("stage", "", "outcome", "seconds", title="The tour")
    for one in finished:
        verdict = "[green]passed" if one.result.passed else "[red]failed"
        table.add_row(one.stage.name, verdict, one.result.headline, f"{one.seconds:.1f}")
    return table
