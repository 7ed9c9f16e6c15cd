"""Why a gradient is not the derivative: what tells one that is wrong on purpose from a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.compare import alike
from opsmith.surveying.guessing import Guess
from opsmith.surveying.trying import fresh, leaves, seeded

STEP = 1e-7
COARSE = 1e-6

Class = type[torch.autograd.Function]


def is_piecewise_constant(function_class: Class, guess: Guess, place: int, seed: int) -> bool:
    """Whether a small step of one argument leaves every result as it is, in nearly all elements."""
    moved = list(guess.values)
    moved[place] = moved[place] * (1 + STEP)
    pairs = zip(
        _results(function_class, guess.values, seed),
        _results(function_class, tuple(moved), seed),
        strict=True,
    )
    return all(torch.equal(one, other) for one, other in pairs)


def is_identity(function_class: Class, guess: Guess, place: int, seed: int) -> bool:
    """Whether the forward returns this argument as it came."""
    results = _results(function_class, guess.values, seed)
    return any(torch.equal(each, guess.values[place]) for each in results)


def is_nonlinear(function_class: Class, guess: Guess, seed: int) -> bool:
    """Whether twice the incoming gradient gives another gradient than twice the one that comes out."""
    small, large = _gradients(function_class, guess, seed, 1.0), _gradients(function_class, guess, seed, 2.0)
    return not all(alike(2 * one, two, COARSE) for one, two in zip(small, large, strict=True))


def narrows(function_class: Class, guess: Guess, seed: int) -> bool:
    """Whether it returns float32 for what is float64."""
    wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in guess.values)
    return wide and any(
        result.dtype == torch.float32 for result in _results(function_class, guess.values, seed)
    )


def _results(function_class: Class, values: tuple[Any, ...], seed: int) -> list[Tensor]:
    apply: Callable[..., Any] = function_class.apply
    with seeded(seed), torch.no_grad():
        return [each for each in leaves(apply(*fresh(values)[1])) if isinstance(each, Tensor)]


def _gradients(function_class: Class, guess: Guess, seed: int, factor: float) -> list[Tensor]:
    apply: Callable[..., Any] = function_class.apply
    with seeded(seed):
        inputs, given = fresh(guess.values)
        results = [each for each in leaves(apply(*given)) if isinstance(each, Tensor) and each.requires_grad]
        grads = [factor * torch.randn_like(result) for result in results]
        found: tuple[Tensor | None, ...] = torch.autograd.grad(results, inputs, grads, allow_unused=True)
    return [each for each in found if each is not None]
