"""Stage: the linear operator learns y = 2 x1 + 3 x2 + 4 by gradient descent.

SGD with learning rate 0.01, momentum 0.9 and weight decay 5e-4; mean squared error; 64 new points in each
step, uniform in [0, 1)²; float64. Weight decay moves the optimum off the target: `optimum` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.modules import OperatorModule
from opsmith.ops import Linear
from opsmith.tour.stage import StageResult, TourContext, progress, write_json, write_weights

TARGET = (2.0, 3.0, 4.0)
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, BATCH = 0.01, 0.9, 5e-4, 64
ENOUGH_STEPS = 5000
"""Number of steps from which on the error must be below 0.02; with fewer steps, below 0.05."""

POINTS_OF_CURVE = 500


@dataclass(frozen=True)
class FitStep:
    """One step of the descent."""

    number: int
    loss: float


def descend(model: OperatorModule[Tensor], steps: int, seed: int) -> Iterator[FitStep]:
    """Train a model on points that are drawn on the CPU, so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    weight, bias = model.weight.new_tensor([TARGET[:2]]), TARGET[2]
    for number in range(1, steps + 1):
        x = torch.rand(BATCH, 2, generator=generator, dtype=torch.float64).to(weight.device)
        loss = torch.nn.functional.mse_loss(model(x), x @ weight.mT + bias)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield FitStep(number, loss.item())


def optimum() -> Tensor:
    """Return the limit of the descent: the minimum of the mean squared error plus weight decay / 2 |p|².

    With X = (x1, x2, 1) and A = 2 E[X Xᵀ], whose entries follow from E[x] = 1/2 and E[x²] = 1/3, it is the
    solution p of (A + weight decay) p = A target.

    Example:
        >>> print([round(value, 4) for value in optimum().tolist()])
        [2.0, 2.997, 4.0005]
    """
    moments = torch.tensor([[1 / 3, 1 / 4, 1 / 2], [1 / 4, 1 / 3, 1 / 2], [1 / 2, 1 / 2, 1]]).double()
    right = 2 * moments @ torch.tensor(TARGET).double()
    solution: Tensor = torch.linalg.solve(2 * moments + WEIGHT_DECAY * torch.eye(3).double(), right)
    return solution


@thread_count(1)
def run(context: TourContext) -> StageResult:
    """Train, print the parameters and the target, and write `linear.json` and `linear.pt`."""
    steps = context.linear_steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        model = Linear(2, 1, dtype=torch.float64).to(context.device)
    every = max(1, steps // POINTS_OF_CURVE)
    curve: list[FitStep] = []
    with progress(context.console, "fitting a plane", steps) as advance:
        for step in descend(model, steps, context.seed):
            if step.number % every == 0 or step.number == 1:
                curve.append(step)
            advance(f"loss {step.loss:.2e}")
    learned = [*model.weight.detach().flatten().tolist(), model.bias.item()]
    error = max(abs(value - target) for value, target in zip(learned, TARGET, strict=True))
    allowed = 0.02 if steps >= ENOUGH_STEPS else 0.05
    context.console.print(_table(learned))
    details = {
        "steps": steps,
        "batch": BATCH,
        "learned": learned,
        "target": list(TARGET),
        "optimum_under_weight_decay": optimum().tolist(),
        "error": error,
        "allowed_error": allowed,
    }
    drawn = {"step": [step.number for step in curve], "loss": [step.loss for step in curve]}
    files = (
        write_json(context.out / "linear.json", {**details, "curve": drawn}),
        write_weights(context.out / "linear.pt", model),
    )
    headline = f"off by {error:.4f} after {steps} steps (allowed: {allowed})"
    return StageResult(error < allowed, headline, details, files)


def _table(learned: list[float]) -> Table:
    table = Table("parameter", "learned", "target", "optimum under weight decay")
    for name, *values in zip(("w1", "w2", "b"), learned, TARGET, optimum().tolist(), strict=True):
        table.add_row(name, *(f"{value:.4f}" for value in values))
    return table
