"""Forward mode on a sample: tangents by dual numbers, and what finite differences say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.checking.differentiated import results_with_gradient
from opsmith.checking.layouts import incoming
from opsmith.checking.line import Line
from opsmith.checking.noise import Noise, noise_of
from opsmith.checking.numerical_gradient import Along, derivative_along
from opsmith.checking.packed import Packed, coordinates
from opsmith.checking.quiet import quiet
from opsmith.checking.sample import Sample, is_inexact
from opsmith.checking.subject import Subject


@dataclass(frozen=True)
class Tangents:
    """Forward mode by some inputs of a sample, in float64.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The inputs that have tangents.
        device: Where to run.
    """

    subject: Subject
    sample: Sample
    places: tuple[int, ...]
    device: torch.device

    @cached_property
    def packed(self) -> Packed:
        """The inputs, those with tangents in a row."""
        return Packed(self.sample.at(torch.float64, self.device), self.places)

    @cached_property
    def results(self) -> list[Any]:
        """What the operator returns."""
        with torch.no_grad():
            return self.subject.call(self.sample, self.sample.at(torch.float64, self.device))

    @cached_property
    def weights(self) -> list[list[Tensor | None]]:
        """Random weights of the results that have tangents, several times."""
        generator = self.subject.generator(2)
        open_ = results_with_gradient(self.subject, self.sample, self.results)
        return [
            [incoming(r, generator) if o else None for r, o in zip(self.results, open_, strict=True)]
            for _ in range(1 if self.subject.effort.name == "quick" else 2)
        ]

    @cached_property
    def direction(self) -> Tensor:
        """A random move of the row: each number by about its own size."""
        line, generator = self.line(self.weights[0]), self.subject.generator()
        part = torch.rand(self.packed.row.shape, generator=generator, dtype=torch.float64) + 0.5
        return line.direction(generator) * part

    def line(self, weights: Sequence[Tensor | None]) -> Line:
        """The results as they move with the inputs."""
        return Line(
            lambda flat: self.subject.call(self.sample, self.packed.unpacked(flat[0])),
            [self.packed.row],
            0,
            weights,
        )

    def by_dual_numbers(self, direction: Tensor, values: Sequence[Any] | None = None) -> list[Tensor | None]:
        """The tangents of the results along a direction of the row; None where forward mode has none.

        Args:
            direction: How each number of the row moves.
            values: The inputs, if not those of the sample.
        """
        steps = self.packed.unpacked(direction)
        flat = list(self.packed.values if values is None else values)
        # torch's own operators without forward mode say so of inputs that require a gradient, and of others
        # they silently return zeros.
        with torch.enable_grad(), quiet(), forward_ad.dual_level():
            for place in self.places:
                value = flat[place] if values is not None else flat[place].detach().requires_grad_().clone()
                flat[place] = forward_ad.make_dual(value, steps[place].to(value.device).contiguous())
            results = self.subject.call(self.sample, flat)
            found = [forward_ad.unpack_dual(r).tangent if is_inexact(r) else None for r in results]
        return found if values is not None else [None if each is None else each.detach() for each in found]

    def numerically(self, weights: Sequence[Tensor | None], direction: Tensor) -> Along | None:
        """The derivative of the weighed results along a direction, by differences; None if it is not told."""
        line = self.line(weights)
        return derivative_along(line, self.noise(line), direction)

    def noise(self, line: Line) -> Noise:
        """The noise of the weighed results."""
        return noise_of(line, self.subject.generator())

    def element_by_element(self, position: int, direction: Tensor) -> Tensor:
        """The tangent of one result, by differences: less exact, and of every element."""
        result = self.results[position]
        one = torch.ones_like(result.real if result.is_complex() else result)
        alone: list[Tensor | None] = [None] * len(self.results)
        alone[position] = torch.complex(one, one) if result.is_complex() else one
        line = self.line(alone)
        step = self.noise(line).step
        coarse, fine = (
            (line.along(direction, h) - line.along(direction, -h)) / (2 * h) for h in (step, step / 2)
        )
        found = (4 * fine - coarse) / 3
        shaped = torch.view_as_complex(found.view(-1, 2)) if result.is_complex() else found
        return shaped.view(result.shape)


def weighed(results: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> float:
    """The real inner product of tensors and their weights; None counts as zeros."""
    return sum(
        float(coordinates(result).double() @ coordinates(weight).double())
        for result, weight in zip(results, weights, strict=True)
        if result is not None and weight is not None
    )
