"""Gradients under `vmap`: those of every example, and those of a whole batch, each beside a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.derivative import vjp
from opsmith.checking.differentiated import results_with_gradient
from opsmith.checking.examples import replicas, side_by_side
from opsmith.checking.layouts import incoming
from opsmith.checking.loop import OneByOne
from opsmith.checking.mapping import map_over
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject


@dataclass(frozen=True)
class Differentiation:
    """Some examples with incoming gradients, to be differentiated.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The arguments to differentiate by.
        rows: The flat arguments of each example.
        dims: For each argument that has a batch, its dimension.
    """

    subject: Subject
    sample: Sample
    places: Sequence[int]
    rows: Sequence[list[Any]]
    dims: Mapping[int, int]

    @cached_property
    def with_grads(self) -> list[list[Any]]:
        """The flat arguments of each example, and behind them a gradient for each result."""
        generator = self.subject.generator()
        answers = []
        for row in self.rows:
            results = self.subject.call(self.sample, replicas(row))
            open_ = results_with_gradient(self.subject, self.sample, results)
            grads = [incoming(r, generator) if o else None for r, o in zip(results, open_, strict=True)]
            answers.append([*row, *grads])
        return answers

    @property
    def count(self) -> int:
        """How many flat arguments there are, before the gradients."""
        return len(self.sample.flat)

    @cached_property
    def every_dim(self) -> dict[int, int]:
        """The dimensions of all batches, those of incoming gradients too."""
        grads = enumerate(self.with_grads[0][self.count :], self.count)
        return {**self.dims, **{place: 0 for place, grad in grads if grad is not None}}

    @cached_property
    def batch(self) -> list[Any]:
        """The flat arguments of the whole batch, and the incoming gradients."""
        return side_by_side(self.with_grads, self.every_dim)

    def one(self, function: Callable[..., Any]) -> OneByOne:
        """The gradients of one example, from its flat arguments and incoming gradients."""
        return partial(gradients_of, function, self.places, self.count)

    def by_examples(self) -> list[Tensor | None]:
        """The gradients of every example: `vmap` over `torch.func.vjp`."""
        return map_over(self._pulled, self.batch, self.every_dim)

    def _pulled(self, flat: list[Any]) -> list[Tensor]:
        pull = torch.func.vjp(partial(self._followed, flat), *(flat[place] for place in self.places))[1]
        return list(pull(tuple(grad for grad in flat[self.count :] if grad is not None)))

    def _followed(self, flat: Sequence[Any], *given: Tensor) -> tuple[Tensor, ...]:
        """The results that a gradient can come in for, as a function of some arguments."""
        values = list(flat[: self.count])
        for place, value in zip(self.places, given, strict=True):
            values[place] = value
        results = self.subject.call(self.sample, values)
        pairs = zip(results, flat[self.count :], strict=True)
        return tuple(result for result, grad in pairs if grad is not None)

    def through(self) -> list[Tensor | None]:
        """The gradients of the whole batch, by a backward through `vmap`; the batch comes first."""

        def mapped(flat: Sequence[Any]) -> list[Any]:
            return map_over(partial(self.subject.call, self.sample), flat, self.dims)

        found = gradients_of(mapped, self.places, self.count, self.batch)
        return [
            gradient.movedim(self.dims[place], 0) if place in self.dims else gradient
            for place, gradient in zip(self.places, found, strict=True)
        ]

    @cached_property
    def summed(self) -> frozenset[int]:
        """Which of the gradients of a whole batch are sums over its examples."""
        return frozenset(at for at, place in enumerate(self.places) if place not in self.dims)


def gradients_of(
    function: Callable[..., Any], places: Sequence[int], count: int, values: Sequence[Any]
) -> list[Tensor]:
    """The gradients by some arguments, zeros where autograd has none.

    Args:
        function: Takes flat arguments.
        places: The arguments to differentiate by.
        count: How many flat arguments there are.
        values: Flat arguments, and behind them a gradient for each result.
    """
    flat, grads = values[:count], values[count:]
    found = vjp(function, flat, places, grads) or [None] * len(places)
    return [
        torch.zeros_like(flat[place]) if gradient is None else gradient
        for place, gradient in zip(places, found, strict=True)
    ]
