"""Samples for a Function whose author gave none: the simplest arguments on which it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.core.adopted import overrides
from opsmith.core.location import where
from opsmith.surveying.draft import argument_names
from opsmith.surveying.guessing import Guess, unguessable
from opsmith.surveying.reading import Reading
from opsmith.surveying.session import SECONDS, one_thread
from opsmith.surveying.trying import run, tried


@dataclass(frozen=True)
class Guessed:
    """Arguments on which a class ran, forward and backward.

    Args:
        samples: Tuples of arguments, as `apply` takes them.
        words: What they are: `x [3, 4], slope=0.5`.
    """

    samples: list[tuple[Any, ...]]
    words: str


def guessed_samples(
    function_class: type[torch.autograd.Function],
    *,
    name: str,
    hint: str,
    seed: int = 0,
    seconds: float = SECONDS,
) -> Guessed:
    """Arguments that a class takes, guessed from its source and tried.

    Args:
        function_class: The class.
        name: How its module calls it.
        hint: What to do where nothing can be guessed, for the message.
        seed: Seed of the numbers.
        seconds: After so many no further guess is begun.

    Raises:
        MissingSamplesError: If nothing that was guessed ran.

    Example:
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, factor=2.0):
        ...         ctx.factor = factor
        ...         return x * factor
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * ctx.factor, None
        >>> guessed_samples(Scale, name="Scale", hint="").words
        'x [3, 4], factor=2.0 and x [2, 5], factor=3.25'
    """
    if not overrides(function_class, "forward"):
        problem = "it has no `forward`, so there is nothing to check"
        raise _missing(name, None, problem, "check what derives from it")
    place = where(function_class.forward)
    reading = Reading.of(function_class, name)
    unknown = unguessable(reading)
    if unknown:
        listed = " and ".join(f"`{each}`" for each in unknown)
        problem = f"there are no samples to check it on, and what {listed} takes cannot be guessed"
        raise _missing(name, place, problem, hint)
    with one_thread():
        trials = tried(reading, seed, seconds)
        if not trials.ran:
            stop = trials.mistake or trials.nearest
            end = f"; the one that came furthest ended in {stop.text}" if stop else ""
            problem = (
                f"there are no samples to check it on, and none of {trials.tried} guessed calls ran{end}"
            )
            raise _missing(name, place, problem, hint)
        chosen = [trials.ran[0]]
        varied = _with_other_numbers(chosen[0])
        for other in (_with_other_sizes(varied or chosen[0]), varied):
            if other is not None and run(function_class, other, seed) == "gradients":
                chosen.append(other)
                break
    names = argument_names(reading, len(chosen[0].values))
    return Guessed([guess.values for guess in chosen], " and ".join(guess.named(names) for guess in chosen))


def _with_other_numbers(guess: Guess) -> Guess | None:
    """The same with other plain numbers: a factor of 1 hides a gradient that forgot it."""
    values = tuple(1.5 * each + 0.25 if type(each) is float else each for each in guess.values)
    return Guess(values, guess.positive) if values != guess.values else None


def _with_other_sizes(guess: Guess) -> Guess | None:
    """The same with an odd last size where it was even: what is left over of pairs is left over of none.

    Sizes that were the same are the same again, and numbers are taken from those that were guessed.
    """
    if not any(isinstance(each, torch.Tensor) and each.dim() for each in guess.values):
        return None
    return Guess(tuple(map(_resized, guess.values)), guess.positive)


def _resized(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    shape = [OTHER_SIZES.get(size, size) for size in value.shape]
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(max(count, value.numel()), generator=generator)[:count]
    return value.flatten()[order % value.numel()].view(shape)


OTHER_SIZES = {3: 2, 4: 5}
"""What stands for the sizes of a guess."""


def _missing(name: str, place: str | None, problem: str, hint: str) -> errors.MissingSamplesError:
    return errors.MissingSamplesError(problem, operator=name, where=place, hint=hint)
