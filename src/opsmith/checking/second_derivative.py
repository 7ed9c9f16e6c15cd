"""The gradient of a sample as a function of its own: of the inputs, and of the incoming gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import vjp, with_gradient
from opsmith.checking.difference import Difference
from opsmith.checking.numerical_gradient import NumericalGradient, numerical_gradient
from opsmith.checking.packed import Packed, coordinates
from opsmith.checking.probes import plain_probe
from opsmith.checking.sample import Sample, is_inexact
from opsmith.checking.subject import Subject

SHARE = 64
DIRECTIONS = 3
"""A backward is dearer than a call, and what is wrong in second order is seldom one element: what part of the
elements that `effort` names are moved one at a time, and how many random directions stand for the others."""


@dataclass(frozen=True)
class Gradients:
    """The gradients by some inputs of a sample, to be differentiated again.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The inputs that require a gradient.
        device: Where to run.
        chosen: The one place of `values` to differentiate by, if not by every one.
    """

    subject: Subject
    sample: Sample
    places: tuple[int, ...]
    device: torch.device
    chosen: int | None = None

    @cached_property
    def values(self) -> list[Any]:
        """The inputs, and after them the incoming gradients, in float64."""
        flat = self.sample.at(torch.float64, self.device)
        with torch.no_grad():
            results = self.subject.call(self.sample, self.sample.at(torch.float64))
        return [*flat, *plain_probe(self.subject, self.sample, results).at(torch.float64, self.device)]

    @cached_property
    def by(self) -> tuple[int, ...]:
        """What to differentiate the gradients by: places among `values`, of inputs and incoming gradients."""
        if self.chosen is not None:
            return (self.chosen,)
        count = len(self.sample.flat)
        return (*self.places, *(p for p in range(count, len(self.values)) if self.values[p] is not None))

    def only(self, by: int) -> Gradients:
        """The same, to be differentiated by one place alone."""
        return replace(self, chosen=by)

    def label(self, place: int) -> str:
        """How messages call what stands at a place of `values`."""
        count = len(self.sample.flat)
        if place < count:
            return self.sample.labels[place]
        return self.subject.results(self.sample)[place - count].gradient_name()

    def weights(self) -> list[Tensor]:
        """A random direction for each gradient, in which it is differentiated."""
        generator = self.subject.generator(1)
        wide = {True: torch.complex128, False: torch.float64}
        return [
            torch.randn(value.shape, generator=generator, dtype=wide[value.is_complex()]).to(self.device)
            for value in (self.values[place] for place in self.places)
        ]

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """The gradients, as numbers; zeros where there is none."""
        count = len(self.sample.flat)
        found = vjp(self._call, values[:count], self.places, values[count:]) or [None] * len(self.places)
        return [
            torch.zeros_like(values[place]) if gradient is None else gradient.detach()
            for place, gradient in zip(self.places, found, strict=True)
        ]

    def differentiated(self, weights: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """The derivatives of the gradients, times their weights, by autograd.

        Args:
            weights: One for each gradient; None for one that is left out.

        Returns:
            For each place of `by`, the derivative; None where autograd has none.
        """
        count = len(self.sample.flat)
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_(place in self.by) if is_inexact(value) else value
                for place, value in enumerate(self.values)
            ]
            copies = [value.clone() if is_inexact(value) else value for value in leaves]
            pairs = [
                (result, grad)
                for result, grad in zip(self._call(copies[:count]), copies[count:], strict=True)
                if grad is not None and with_gradient(result)
            ]
            if not pairs:
                return dict.fromkeys(self.by)
            results, grads = zip(*pairs, strict=True)
            inputs = [leaves[place] for place in self.places]
            gradients: list[Tensor | None] = [  # torch's types leave the None out
                *torch.autograd.grad(results, inputs, grads, create_graph=True, allow_unused=True)
            ]
            again = [
                (gradient, weight)
                for gradient, weight in zip(gradients, weights, strict=True)
                if weight is not None and gradient is not None and gradient.requires_grad
            ]
        if not again:
            return dict.fromkeys(self.by)
        first, second = zip(*again, strict=True)
        inputs = [leaves[place] for place in self.by]
        found = torch.autograd.grad(first, inputs, second, allow_unused=True, retain_graph=True)
        if any(each is None for each in found):
            # What `once_differentiable` refuses, it refuses in `backward()` alone: asked for some inputs,
            # torch does not come by its refusal, and finds them unused.
            torch.autograd.backward(first, second)
        return dict(zip(self.by, found, strict=True))

    def numerically(self, weights: Sequence[Tensor | None]) -> Numbers:
        """The same by finite differences of the gradients."""
        packed = Packed(self.values, self.by)
        found = numerical_gradient(
            lambda flat: self(packed.unpacked(flat[0])),
            [packed.row],
            0,
            weights,
            elements=max(1, self.subject.effort.moved(self.sample.elements) // SHARE),
            directions=DIRECTIONS,
            generator=self.subject.generator(),
        )
        return Numbers(packed, found)

    def _call(self, flat: Sequence[Any]) -> list[Any]:
        return self.subject.call(self.sample, flat)


@dataclass(frozen=True)
class Numbers:
    """What finite differences say of a function, by several places together.

    Args:
        packed: The places.
        found: The derivative by all of them in a row.
    """

    packed: Packed
    found: NumericalGradient

    def judge(self, got: Mapping[int, Tensor | None]) -> tuple[int, Difference] | None:
        """The place where autograd's derivatives differ most from these, and how; None where they agree."""
        pieces = [got[place] for place in self.packed.places]
        row = [
            torch.zeros(size, dtype=torch.float64) if piece is None else coordinates(piece).cpu().double()
            for piece, size in zip(pieces, self.packed.sizes, strict=True)
        ]
        difference = self.found.judge(torch.cat(row))
        if difference is None or not difference.index:
            return None if difference is None else (self.packed.places[0], difference)
        place, position = self.packed.place_of(difference.index[0])
        return place, replace(difference, index=self._index(place, position))

    def _index(self, place: int, position: int) -> tuple[int, ...]:
        value = self.packed.values[place]
        at = position // 2 if value.is_complex() else position
        return (
            tuple(int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)) if value.dim() else ()
        )

    def kinked(self) -> tuple[int, ...]:
        """The places by which there is a kink."""
        pieces = self.found.kinks.split(self.packed.sizes)
        return tuple(p for p, piece in zip(self.packed.places, pieces, strict=True) if piece.any())
