"""The learning curve: loss and accuracy over the epochs, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from files import replacing
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from training import Record

# M. Okabe and K. Ito's colours, which people who are blind to some colours tell apart; markers differ, too.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#666666"


def figure(history: Sequence[Record], target: float) -> Figure:
    """A picture of a history: the losses on the left, the accuracy on the right."""
    drawn = Figure(figsize=(9, 3.6), layout="constrained")
    losses, accuracies = drawn.subplots(1, 2)
    epochs = [record["epoch"] for record in history]

    for name, label, colour, style in (
        ("training_loss", "training", BLUE, "o-"),
        ("held_out_loss", "held out", VERMILION, "s--"),
    ):
        losses.plot(epochs, [record[name] for record in history], style, color=colour, label=label)
    losses.set(xlabel="epoch", ylabel="cross-entropy, smoothed labels (nats)", title="Loss")

    percent = [100 * record["accuracy"] for record in history]
    accuracies.plot(epochs, percent, "s--", color=VERMILION, label="held out")
    accuracies.axhline(100 * target, color=GREY, linestyle=":", label=f"target, {target:.0%}")
    accuracies.set(xlabel="epoch", ylabel="images read right (%)", title="Accuracy")

    for panel in (losses, accuracies):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend()
    return drawn


def draw(history: Sequence[Record], target: float, out: Path) -> list[Path]:
    """Write the picture to `curve.png` and `curve.svg`, the same bytes for the same history."""
    drawn = figure(history, target)
    paths = [out / "curve.png", out / "curve.svg"]
    with rc_context({"svg.hashsalt": "rednet_digits"}):
        for path in paths:
            kind = path.suffix.removeprefix(".")
            undated = {"Date": None} if kind == "svg" else {}
            with replacing(path) as temporary:
                drawn.savefig(temporary, format=kind, dpi=150, metadata=undated)
    return paths
