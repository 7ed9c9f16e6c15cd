"""Stage: graphs of an example and of a network, and learning curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import opsmith
from opsmith import ops
from opsmith.core.output_file import replacing
from opsmith.tour.digits import DigitNetwork
from opsmith.tour.stage import StageResult, TourContext, progress, read_weights

# The functions that draw import matplotlib, so that `opsmith tour --help` works without it.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "html")

# Colours of M. Okabe and K. Ito, which colour-blind readers can distinguish; markers differ, too.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#666666"


def draw_example(out: Path) -> list[Path]:
    """Draw the graph of b + sum(w x): x needs no gradient, and is saved for the gradient of w."""
    w = torch.tensor([[2.0, 3.0]], requires_grad=True)
    b = torch.tensor([3.0], requires_grad=True)
    x = torch.tensor([[4.0, 5.0]])
    y = ops.add(b, ops.mul(w, x).sum())
    names = {"w": w, "b": b, "x": x}
    paths = [out / f"example-graph.{each}" for each in FORMATS]
    for path in paths:
        opsmith.draw({"y": y}, path, names=names, title="y = b + sum(w x)")
    return paths


def draw_network(out: Path) -> list[Path]:
    """Draw the training graph of the network for digits, for four images."""
    network, pixels = DigitNetwork(), torch.zeros(4, 1, 8, 8)
    read_weights(out / "digits.pt", network)
    paths = [out / f"digits-graph.{each}" for each in FORMATS]
    title = "reading digits: training graph"
    for path in paths:  # on a page the reader opens parts; a picture must be readable as a whole
        depth = None if path.suffix == ".html" else 1
        opsmith.draw(network, path, inputs=pixels, training=True, depth=depth, title=title)
    return paths


def run(context: TourContext) -> StageResult:
    """Draw the graphs and the curves."""
    with progress(context.console, "drawing", 3) as advance:
        files = draw_example(context.out)
        advance("the graph of an example")
        files += draw_network(context.out)
        advance("the graph of the network")
        files += draw_curves(context.out)
        advance("learning curves")
    return StageResult(True, f"{len(files)} pictures of 2 graphs and of the training", {}, tuple(files))


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
