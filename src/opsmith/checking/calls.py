"""Recorded calls: an operator called under autograd, its results, and the gradients of its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import IN_PLACE, dense, with_gradient
from opsmith.checking.samples.layouts import incoming
from opsmith.checking.samples.sample import Sample, is_inexact, replica
from opsmith.checking.subject import Subject


@dataclass
class Alive:
    """A call.

    Args:
        sample: The sample.
        places: The arguments that require a gradient.
        leaves: Flat arguments that gradients are asked for.
        given: What was passed: the same, or copies that autograd follows, where the operator takes no leaves.
        results: The visible results.
    """

    sample: Sample
    places: tuple[int, ...]
    leaves: list[Any]
    given: list[Any]
    results: list[Any]

    @property
    def open(self) -> list[int]:
        """Positions of the results that a gradient can come in for."""
        return [at for at, result in enumerate(self.results) if result is not None and with_gradient(result)]

    def grads(self, subject: Subject) -> list[Tensor]:
        """Contiguous gradients to come in, the same for the same shapes."""
        generator = subject.generator()
        return [incoming(self.results[at], generator) for at in self.open]

    def backward(self, grads: Sequence[Tensor], **options: Any) -> list[Tensor | None]:
        """The gradient by each place; nothing is accumulated.

        Args:
            grads: What comes in, for each open result.
            options: As of `torch.autograd.grad`.
        """
        return dense(
            torch.autograd.grad(
                [self.results[at] for at in self.open],
                [self.leaves[place] for place in self.places],
                list(grads),
                allow_unused=True,
                **options,
            )
        )

    def answered(self, subject: Subject) -> Answer:
        """The results, as they are now, and the gradients of a backward, kept as copies."""
        results = copies(self.results)
        if not self.open:
            return Answer(results, (None,) * len(self.places))
        return Answer(results, copies(self.backward(self.grads(subject))))


def alive(
    subject: Subject, sample: Sample, flat: Sequence[Any], places: Sequence[int], *, leaf: bool = True
) -> Alive:
    """Call an operator with some of its arguments requiring gradients.

    Args:
        subject: What is under check.
        sample: The sample that the arguments are of.
        flat: Flat arguments; those that require a gradient get the same memory.
        places: Which arguments require a gradient.
        leaf: Whether to pass leaves; else what autograd has computed from them.
    """
    with torch.enable_grad():
        leaves = [
            value.detach().requires_grad_(place in places) if is_inexact(value) else value
            for place, value in enumerate(flat)
        ]
        if leaf:
            before = [leaves[place].detach().clone() for place in places]
            try:
                return Alive(sample, tuple(places), leaves, leaves, subject.call(sample, leaves))
            except RuntimeError as error:
                if IN_PLACE not in str(error):
                    raise
                for place, value in zip(places, before, strict=True):
                    flat[place].detach().copy_(value)  # torch refuses the call only after it has written
        given = [each.clone() if place in places else each for place, each in enumerate(leaves)]
        return Alive(sample, tuple(places), leaves, given, subject.call(sample, given))


@dataclass(frozen=True)
class Answer:
    """What a call and its backward gave.

    Args:
        results: The visible results.
        gradients: The gradient by each place; None for each where no result requires one, so that a call that
            loses its graph is seen beside one that does not.
    """

    results: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...] = ()


def answer(subject: Subject, sample: Sample, flat: Sequence[Any], places: Sequence[int]) -> Answer:
    """The results and gradients of a call, kept as copies."""
    return alive(subject, sample, flat, places).answered(subject)


def copies(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Tensors as nobody can change them any more."""
    return tuple(None if tensor is None else tensor.detach().clone() for tensor in dense(tensors))


def called(
    call: Callable[[list[Any]], Any], flat: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], Any]:
    """Call a function on copies of some arguments, of which some require a gradient.

    Args:
        call: Takes flat arguments.
        flat: Flat arguments, which stay as they are.
        places: The arguments that require a gradient.

    Returns:
        The arguments that gradients can be asked for, and what the call returns. What writes into an argument
        takes no leaves, and gets what autograd has computed from them.
    """
    with torch.enable_grad():
        leaves = _leaves(flat, places)
        try:
            return leaves, call(leaves)
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
        leaves = _leaves(flat, places)
        return leaves, call([leaf.clone() if place in places else leaf for place, leaf in enumerate(leaves)])


def _leaves(flat: Sequence[Any], places: Sequence[int]) -> list[Any]:
    copies = [replica(value) for value in flat]
    return [copy.requires_grad_() if place in places else copy for place, copy in enumerate(copies)]
