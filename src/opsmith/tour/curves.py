"""The learning curves of both models, drawn without a display."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from opsmith.tour.files import replacing

# M. Okabe and K. Ito's colours, which people who are blind to some colours tell apart; markers differ, too.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#666666"


def figure(line: dict[str, Any], digits: dict[str, Any]) -> Figure:
    """The loss of the plane, the loss of the digits, and how many of them are read right.

    Args:
        line: What `linear.json` holds.
        digits: What `digits.json` holds.
    """
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
    """Draw what `linear.json` and `digits.json` hold, as `curves.svg` and `curves.png`."""
    line, digits = (json.loads((out / f"{name}.json").read_text("utf-8")) for name in ("linear", "digits"))
    drawn = figure(line, digits)
    paths = [out / "curves.svg", out / "curves.png"]
    with rc_context({"svg.hashsalt": "opsmith-tour"}):
        for path in paths:
            kind = path.suffix.removeprefix(".")
            undated = {"Date": None} if kind == "svg" else {}
            with replacing(path) as temporary:
                drawn.savefig(temporary, format=kind, dpi=150, metadata=undated, facecolor="white")
    return paths
