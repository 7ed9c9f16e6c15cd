"""Stage: graphs, learning curves, a benchmark, and a page about each operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import opsmith
from opsmith import ops
from opsmith.checking.output.json import read_reports
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.core.output_file import replacing
from opsmith.pages.kernels import accesses_of
from opsmith.tour.digits import DigitNetwork, split_digits
from opsmith.tour.operators import swish
from opsmith.tour.stage import StageResult, TourContext, progress, read_weights, write_json

# matplotlib is imported by the functions that draw: the command `opsmith tour --help` does without it.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGED = (ops.linear, ops.involution, swish)
"""Operators that get pages: those that both models consist of."""

FORMATS = ("svg", "png", "html")

REDNET_STAGES = ((256, 14), (512, 7))
"""Channels, and height and width, of the features in the last two stages of RedNet-50."""

# Colours of M. Okabe and K. Ito, which are distinct for colour-blind readers; markers differ, too.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#666666"


def draw_example(out: Path) -> list[Path]:
    """Draw the graph of b + sum(w x): x needs no gradient, and is saved for that of w."""
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
    """Draw the training graph of the network for digits."""
    network = DigitNetwork()
    read_weights(out / "digits.pt", network)
    paths = [out / f"digits-graph.{each}" for each in FORMATS]
    title = "reading digits: training graph"
    for path in paths:  # a page unfolds; a picture must be readable as a whole
        depth = None if path.suffix == ".html" else 1
        opsmith.draw(network, path, inputs=pixels, training=True, depth=depth, title=title)
    return paths


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
    """Draw graphs and curves, time involution beside its reference, and write the pages."""
    from opsmith.benchmarking.plotting import save
    from opsmith.checking.output.html import page

    out = context.out
    reports = read_reports((out / "checks.json").read_text(encoding="utf-8"))
    _, test = split_digits(context.seed)
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
            samples=lambda: rednet_samples(context.seed),
            effort="quick",
            threads=1,
            compiled=False,
            report=report,
        )
        files += [write_json(out / "involution.json", made.to_dict()), *save(made, out / "involution.svg")]
        advance("benchmark")

        def advance_page(what: str, done: int, total: int) -> None:
            if what.endswith(": benchmark"):  # the last part of each page
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


def learning_curves(line: dict[str, Any], digits: dict[str, Any]) -> Figure:
    """Draw the losses of the plane and of the digits, and the accuracy of the digits.

    Args:
        line: Content of `linear.json`.
        digits: Content of `digits.json`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = Figure(figsize=(11, 3.4), layout="constrained")
    plane, loss, accuracy = drawn.subplots(1, 3)
    plane.semilogy(line["curve"]["step"], line["curve"]["loss"], color=BLUE)
    plane.set(xlabel="step", ylabel="mean squared error", title="A plane, with the linear operator")
    epochs = digits["curve"]["epoch"]
    loss.plot(epochs, digits["curve"]["loss"], "o-", color=BLUE)
    loss.set(xlabel="epoch", ylabel="cross-entropy, smoothed labels (nats)", title="Digits, training")
    accuracy.plot(epochs, [100 * each for each in digits["curve"]["accuracy"]], "s--", color=VERMILION)
    required = digits["required_accuracy"]
    accuracy.axhline(100 * required, color=GREY, linestyle=":", label=f"required, {required:.0%}")
    accuracy.set(xlabel="epoch", ylabel="images read right (%)", title="Digits, held out")
    accuracy.legend()
    for panel in (loss, accuracy):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (plane, loss, accuracy):
        panel.grid(alpha=0.3)
    return drawn


def draw_curves(out: Path) -> list[Path]:
    """Draw the curves in `linear.json` and `digits.json` as `curves.svg` and `curves.png`."""
    from matplotlib import rc_context

    line, digits = (json.loads((out / f"{name}.json").read_text("utf-8")) for name in ("linear", "digits"))
    drawn = learning_curves(line, digits)
    paths = [out / "curves.svg", out / "curves.png"]
    with rc_context({"svg.hashsalt": "opsmith-tour"}):
        for path in paths:
            kind = path.suffix.removeprefix(".")
            undated = {"Date": None} if kind == "svg" else {}
            with replacing(path) as temporary:
                drawn.savefig(temporary, format=kind, dpi=150, metadata=undated, facecolor="white")
    return paths
