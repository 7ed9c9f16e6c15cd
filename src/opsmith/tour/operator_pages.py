"""Stage: involution is timed, and each operator of both models gets a page."""

from __future__ import annotations

from typing import Any

import torch

import opsmith
from opsmith import ops
from opsmith.checking.report import read_reports
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.core.output_file import replacing
from opsmith.pages.kernels import accesses_of
from opsmith.tour.operators import swish
from opsmith.tour.stage import StageResult, TourContext, progress, write_json

PAGED = (ops.linear, ops.involution, swish)
"""Operators that get pages: the operators in the two models."""

REDNET_STAGES = ((256, 14), (512, 7))
"""Number of channels, and size, of the features in the last two stages of RedNet-50."""


@thread_count(1)
def rednet_samples(seed: int) -> list[tuple[Any, ...]]:
    """Return features and kernels of 7x7 of two stages of RedNet-50, for one image of 224x224."""
    source = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(1, channels, side, side, generator=source),
            torch.randn(1, channels // 16, 7, 7, side, side, generator=source),
            1,
            3,
        )
        for channels, side in REDNET_STAGES
    ]


def build_emulated_kernels() -> None:
    """Build the kernels of involution that its page runs on the CPU."""
    accesses_of(ops.involution)


def run(context: TourContext) -> StageResult:
    """Write the page of the checks, time involution and its reference, and write the pages."""
    from opsmith.benchmarking.plotting import save
    from opsmith.checking.output.html import page

    out = context.out
    reports = read_reports((out / "checks.json").read_text(encoding="utf-8"))
    with progress(context.console, "writing pages", 2 + len(PAGED)) as advance:
        with replacing(out / "checks.html") as temporary:
            temporary.write_text(page([*reports.values()]), encoding="utf-8")
        advance("checks")
        made = opsmith.benchmark(
            ops.involution,
            samples=lambda: rednet_samples(context.seed),
            effort="quick",
            threads=1,
            compiled=False,
            report=reports[ops.involution.name],
        )
        files = [out / "checks.html", write_json(out / "involution.json", made.to_dict())]
        files += save(made, out / "involution.svg")
        advance("benchmark")

        def advance_page(what: str, done: int, total: int) -> None:
            if what.endswith(": benchmark"):  # the last step of each page
                advance(what.partition(":")[0])

        pages = opsmith.page(
            PAGED,
            out / "pages",
            reports=reports,
            benchmarks={made.operator: made},
            architectures=("sm_90",),
            progress=advance_page,
        )
    files += pages
    details = _details(made, len(pages) - 1)
    headline = f"{details['pages']} pages; involution takes {details['involution_beside_reference']:.2f} of "
    headline += "the time of its reference, forward and backward"
    return StageResult(not made.wrong, headline, details, tuple(files))


def _details(made: opsmith.Benchmark, pages: int) -> dict[str, Any]:
    largest = max((case for case in made.cases if case.role == "size"), key=lambda case: case.elements)
    name = next(each.name for each in largest.contenders if each.kind == "operator")
    ratio = largest.ratio(name, "both")
    assert ratio is not None
    return {"pages": pages, "involution_beside_reference": round(ratio.median, 4), "at": largest.label}
