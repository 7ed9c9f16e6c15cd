"""AdamW by the bundled operator `adamw_`: one call writes all parameters in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from opsmith import ops


class AdamW:
    """AdamW over all parameters; those with one dimension, such as the weights of norms, do not decay."""

    def __init__(
        self, parameters: Iterable[Tensor], *, weight_decay: float = 0.1, beta2: float = 0.95
    ) -> None:
        everything = list(parameters)
        self.groups = (
            ([each for each in everything if each.ndim > 1], weight_decay),
            ([each for each in everything if each.ndim <= 1], 0.0),
        )
        self.beta2 = beta2
        self.means = [[torch.zeros_like(each) for each in group] for group, _ in self.groups]
        self.squares = [[torch.zeros_like(each) for each in group] for group, _ in self.groups]
        self.steps = [torch.zeros(()) for _ in self.groups]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters by their gradients, which are left as they are."""
        for (group, decay), means, squares, step in zip(
            self.groups, self.means, self.squares, self.steps, strict=True
        ):
            gradients = [each.grad for each in group]
            ops.adamw_(
                group,
                gradients,
                means,
                squares,
                step,
                learning_rate,
                beta2=self.beta2,
                weight_decay=decay,
            )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group, _ in self.groups:
            for each in group:
                each.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means, "squares": self.squares, "steps": self.steps}
