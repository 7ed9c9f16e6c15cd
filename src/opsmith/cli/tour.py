"""`opsmith tour`: show opsmith on real input, start to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from opsmith.cli.guard import FAILED, guarded


def tour(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
    linear_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the linear fit.")] = 300,
    digits_epochs: Annotated[int, typer.Option(min=1, help="Passes over the handwritten digits.")] = 15,
    seed: Annotated[int, typer.Option(help="Seed of every random number.")] = 0,
    decoder_seconds: Annotated[
        float, typer.Option(min=0, help="Number of seconds in which the language model writes text.")
    ] = 5.0,
) -> None:
    """Check the bundled operators, train with them, export, draw, and write text: a minute on two cores.

    **Examples**

    - `opsmith tour` results in `out/`: begin with `index.html`, which shows or links all of them

    - `opsmith tour --linear-steps 5000` fits the plane until the error is below 0.02

    - `opsmith check opsmith.ops --thorough` checks the same operators thoroughly, in minutes

    Exit status: 0 every check passed and every accuracy was reached, 1 not, 2 it could not be run.
    """
    with guarded():
        from opsmith.tour import TourContext, run_tour

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        context = TourContext(out, device, Console(), linear_steps, digits_epochs, seed, decoder_seconds)
        passed = run_tour(context)
    if not passed:
        raise typer.Exit(FAILED)
