"""Whether contenders compute the same: what is not compared is not ranked.

All are held to the reference in float64, on the same numbers. An element may be off by what rounding
explains: `checking.rounding` says how much, here with the largest element of a result for the terms that it
was summed of, and with all elements of the largest tensor for their number. That is wider than a check's
bounds, which hold at the samples: here a rival is to be told apart that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opsmith.benchmarking.contenders import Arguments, differentiated, results_of
from opsmith.checking.numerics.compare import form_fault, unequal
from opsmith.checking.numerics.rounding import Bound, bound
from opsmith.checking.samples.sample import is_inexact, replica

Function = Callable[..., object]


@dataclass(frozen=True)
class Right:
    """What is right in one size.

    Args:
        results: The results of the reference, in the dtype that is measured.
        gradients: Its gradients; none where there is no backward.
        bounds: Of results, then of gradients; None where values are to be equal.
        came: What comes back for each result that has a gradient.
    """

    results: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    bounds: tuple[Bound | None, ...]
    came: tuple[Tensor, ...]

    def fault(self, results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> str | None:
        """What is wrong with a contender's results and gradients; None where nothing is."""
        if len(results) != len(self.results):
            return f"it returns {len(results)} tensors, and the reference {len(self.results)}"
        for at, (got, expected) in enumerate(zip(results, self.results, strict=True)):
            fault = _fault(got, expected, self.bounds[at])
            if fault is not None:
                return f"result {at}: {fault}" if len(results) > 1 else f"its result: {fault}"
        rest = self.bounds[len(self.results) :]
        for at, (mine, theirs, within) in enumerate(zip(gradients, self.gradients, rest, strict=True)):
            one, other = _filled(mine, theirs), _filled(theirs, mine)
            fault = None if one is None or other is None else _fault(one, other, within)
            if fault is not None:
                return f"its gradient {at}: {fault}" if len(gradients) > 1 else f"its gradient: {fault}"
        return None


def right(reference: Function, arguments: Arguments, seed: int, *, backward: bool, exact: bool) -> Right:
    """What is right, by the reference.

    Args:
        reference: The reference, without hidden results.
        arguments: What all contenders are called with.
        seed: Seed of torch's generator, and of what comes back.
        backward: Whether gradients are compared.
        exact: Whether a run in float64 is a better answer than one in the dtype itself.
    """
    seeded(seed)
    with torch.set_grad_enabled(backward):
        kept = results_of(arguments.call(reference, leaves=backward)())
    generator = torch.Generator().manual_seed(seed)
    came = tuple(_like(each, generator) for each in kept if each.requires_grad)
    gradients: tuple[Tensor | None, ...] = ()
    if came:
        asked = [each for each in kept if each.requires_grad]
        gradients = torch.autograd.grad(asked, arguments.sought, came, allow_unused=True)
    results = tuple(each.detach() for each in kept)
    most = max(each.numel() for each in (*results, *arguments.tensors))
    wide = _truth(reference, arguments, came, seed) if exact else None
    truths = wide if wide is not None else (*results, *gradients)
    bounds = tuple(
        _bound(truth, ordinary, most, known=wide is not None)
        for truth, ordinary in zip(truths, (*results, *gradients), strict=True)
    )
    return Right(results, gradients, bounds, came)


def seeded(seed: int) -> None:
    """Let a random operator draw the same for each contender."""
    torch.manual_seed(seed)


def computed(
    function: Function, arguments: Arguments, right: Right, seed: int
) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """What a contender computes: results, and gradients where they are compared."""
    seeded(seed)
    with torch.no_grad():
        results = results_of(arguments.call(function)())
    if not right.came:
        return results, ()
    if len(results) != len(right.results) or any(
        got.shape != expected.shape for got, expected in zip(results, right.results, strict=True)
    ):
        return results, ()  # which is told; what comes back is of the right shapes
    seeded(seed)
    gradients = differentiated(arguments.call(function, leaves=True), arguments.sought, right.came)
    return results, tuple(gradients)


def _truth(
    reference: Function, arguments: Arguments, came: Sequence[Tensor], seed: int
) -> tuple[Tensor | None, ...] | None:
    """Results and gradients in float64; None where the reference does not run in it, or has another form."""
    flat = [replica(value, torch.float64) for value in arguments.flat]
    leaves = tuple(
        value.requires_grad_() if isinstance(leaf, Tensor) and leaf.requires_grad else value
        for value, leaf in zip(flat, arguments.leaves, strict=True)
    )
    again = Arguments(arguments.sample, tuple(flat), leaves)
    seeded(seed)
    try:
        with torch.set_grad_enabled(bool(came)):
            results = results_of(again.call(reference, leaves=bool(came))())
        asked = [each for each in results if each.requires_grad]
        back = [replica(each, torch.float64) for each in came]
        gradients = torch.autograd.grad(asked, again.sought, back, allow_unused=True) if came else ()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # it has a dtype written in it
        return None
    return (*(each.detach() for each in results), *gradients)


def _bound(truth: Tensor | None, ordinary: Tensor | None, most: int, *, known: bool) -> Bound | None:
    if truth is None or ordinary is None or not is_inexact(ordinary) or truth.shape != ordinary.shape:
        return None
    mine = ordinary.detach().cpu() if known else None
    return bound(replica(truth, torch.float64).cpu(), mine, ordinary.dtype, None, most)


def _fault(got: Tensor, expected: Tensor, within: Bound | None) -> str | None:
    fault = form_fault(got, expected, strides=False)
    if fault is not None:
        aspect, mine, theirs = fault
        return f"it has the {aspect} {mine}, and the reference's {theirs}"
    difference = unequal(got, expected) if within is None else within.judge(got.cpu())
    return None if difference is None else str(difference)


def _filled(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient, zeros for one that there is none of."""
    return torch.zeros_like(like) if tensor is None and like is not None else tensor


def _like(result: Tensor, generator: torch.Generator) -> Tensor:
    """What comes back for a result: numbers of its form, dense whatever the result's strides."""
    wide = torch.complex128 if result.is_complex() else torch.float64
    drawn = torch.randn(result.shape, generator=generator, dtype=wide)
    return torch.empty_like(result).copy_(drawn).detach()
