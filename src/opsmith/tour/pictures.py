"""Stage: what was built and learned, to look at: graphs, curves, a benchmark, and pages of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import opsmith
from opsmith import ops
from opsmith.checking.output.json import read_reports
from opsmith.tour.dataset import digits
from opsmith.tour.files import read_weights, replacing, write_json
from opsmith.tour.network import DigitNetwork
from opsmith.tour.progress import progress
from opsmith.tour.stage import Context, StageResult
from opsmith.tour.swish import swish
from opsmith.tour.threads import single_thread

PAGED = (ops.linear, ops.involution, swish)
"""Those that have pages: what both models are made of."""

FORMATS = ("svg", "png", "html")

STAGES = ((256, 14), (512, 7))
"""Channels, and height and width, of what RedNet-50 computes in its last two stages."""


def draw_example(out: Path) -> list[Path]:
    """Draw b + sum(w x), of two small operators: x takes no gradient, and is saved for that of w."""
    w = torch.tensor([[2.0, 3.0]], requires_grad=True)
    b = torch.tensor([3.0], requires_grad=True)
    x = torch.tensor([[4.0, 5.0]])
    y = ops.add(b, ops.mul(w, x).sum())
    names = {"w": w, "b": b, "x": x}
    paths = [out / f"example-graph.{each}" for each in FORMATS]
    for path in paths:
        opsmith.draw({"y": y}, path, names=names, title="y = b + sum(w x)")
    return paths


def draw_network(out: Path, pixels: torch.Tensor) -> list[Path]:
    """Draw what a backward of the network for digits runs through."""
    network = DigitNetwork()
    read_weights(out / "digits.pt", network)
    paths = [out / f"digits-graph.{each}" for each in FORMATS]
    title = "reading digits: training graph"
    for path in paths:  # a page unfolds; a picture has to be looked at whole
        depth = None if path.suffix == ".html" else 1
        opsmith.draw(network, path, inputs=pixels, training=True, depth=depth, title=title)
    return paths


@single_thread()
def stages(seed: int) -> list[tuple[Any, ...]]:
    """Images and kernels of 7x7 of two stages of a network, for one image of 224x224."""
    source = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(1, channels, side, side, generator=source),
            torch.randn(1, channels // 16, 7, 7, side, side, generator=source),
            1,
            3,
        )
        for channels, side in STAGES
    ]


def run(context: Context) -> StageResult:
    """Draw graphs and curves, time involution beside its reference, and write pages with all of it."""
    # What draws is imported here: other stages need none of it.
    from opsmith.benchmarking.plotting import save
    from opsmith.checking.output.html import page
    from opsmith.tour.curves import draw_curves

    out = context.out
    reports = read_reports((out / "checks.json").read_text(encoding="utf-8"))
    _, test = digits(context.seed)
    with progress(context.console, "drawing", 4 + len(PAGED)) as advance:
        files = [*draw_example(out), *draw_network(out, test.pixels[:4])]
        advance("graphs")
        files += draw_curves(out)
        advance("learning curves")
        with replacing(out / "checks.html") as temporary:
            temporary.write_text(page([*reports.values()]), encoding="utf-8")
        files.append(out / "checks.html")
        advance("checks")
        report = reports[ops.involution.name]
        made = opsmith.benchmark(
            ops.involution,
            samples=lambda: stages(context.seed),
            effort="quick",
            compiled=False,
            report=report,
        )
        files += [write_json(out / "involution.json", made.to_dict()), *save(made, out / "involution.svg")]
        advance("benchmark")

        def say(what: str, done: int, total: int) -> None:
            if what.endswith(": benchmark"):  # the last thing that is looked at of each operator
                advance(what.partition(":")[0])

        pages = opsmith.page(
            PAGED, out / "pages", reports=reports, benchmarks={made.operator: made}, progress=say
        )
    files += pages
    details = _details(made, len(pages) - 1)
    headline = f"{details['pages']} pages; involution takes {details['involution_beside_reference']:.2f} of "
    headline += "the time of its reference, forward and backward"
    return StageResult(not made.wrong, headline, details, tuple(files))


def _details(made: opsmith.Benchmark, pages: int) -> dict[str, Any]:
    largest = max((case for case in made.cases if case.role == "size"), key=lambda case: case.elements)
    own = next(each.name for each in largest.contenders if each.kind == "operator")
    ratio = largest.ratio(own, "both")
    assert ratio is not None
    return {"pages": pages, "involution_beside_reference": round(ratio.median, 4), "at": largest.label}
