"""Detect elements at wrong positions: shifted, transposed, or those of another input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, permutations, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.evidence import Detection, Evidence, Prediction
from opsmith.checking.diagnosis.observation import Observation
from opsmith.judging.compare import in_double, largest_magnitude
from opsmith.judging.tensors import is_inexact

FURTHEST = 8
"""Longest shift along one dimension; along two at once, and of a grad_output, `TOGETHER`."""

TOGETHER = 2
ENOUGH = 3
"""Number of nonzero elements that must have moved on each input."""


@dataclass(frozen=True)
class Shift:
    """A shift along some dimensions, as pairs of dimension and distance; dimension -1 is memory order."""

    steps: tuple[tuple[int, int], ...]

    def _laid(self, shape: torch.Size) -> tuple[torch.Size, list[int]]:
        """Return the sizes of the dimensions, and those to shift along."""
        laid = torch.Size([shape.numel()]) if self.steps[0][0] < 0 else shape
        return laid, [max(dim, 0) for dim, _ in self.steps]

    def of(self, tensor: Tensor, *, padded: bool = False) -> Tensor | None:
        """Shift a tensor, with wrap-around or with zeros at the edge; None where it is too small."""
        laid, dims = self._laid(tensor.shape)
        if not all(
            dim < len(laid) and abs(by) < laid[dim] for dim, (_, by) in zip(dims, self.steps, strict=True)
        ):
            return None
        moved = tensor.reshape(laid).roll([by for _, by in self.steps], dims).reshape(tensor.shape)
        return moved * self.inside(tensor.shape) if padded else moved

    def inside(self, shape: torch.Size) -> Tensor:
        """Mark the elements that come from inside, and not around the edge."""
        laid, dims = self._laid(shape)
        inner = torch.ones(laid, dtype=torch.bool)
        for dim, (_, by) in zip(dims, self.steps, strict=True):
            inner.narrow(dim, 0 if by > 0 else laid[dim] + by, abs(by)).fill_(False)
        return inner.reshape(shape)

    def __str__(self) -> str:
        along = (f"by {by} along dimension {dim}" for dim, by in self.steps)
        return f"by {self.steps[0][1]} in memory order" if self.steps[0][0] < 0 else " and ".join(along)


WRAPPED = ", with wrap-around"
EDGES: Mapping[str, Callable[[Shift, Observation], Tensor | None]] = MappingProxyType(
    {
        WRAPPED: lambda shift, pair: shift.of(pair.expected),
        ", with zeros at the edge": lambda shift, pair: shift.of(pair.expected, padded=True),
        ", with the edge as it should be": lambda shift, pair: _at_edge(shift, pair, pair.expected),
        "": lambda shift, pair: _at_edge(shift, pair, pair.got),
    }
)
"""The right gradient, shifted, for each kind of elements that may stand where it has none from inside."""


def _at_edge(shift: Shift, pair: Observation, edge: Tensor) -> Tensor | None:
    moved = shift.of(pair.expected)
    return None if moved is None else torch.where(shift.inside(moved.shape), moved, edge)


def shifted(evidence: Evidence) -> Iterator[Detection]:
    """Detect shifted elements, or a gradient that is right for a shifted input or grad_output."""
    first = evidence.first
    shifts = [each for each in _shifts(first.expected.shape) if _is_shown(evidence, each)]
    *known, other = EDGES
    for shift, edge in chain(product(shifts, known), product(shifts, [other])):
        yield _shifted("it is the right one", shift, edge, partial(EDGES[edge], shift))
    if not evidence.everywhere(lambda pair: int(pair.expected.count_nonzero()) >= ENOUGH):
        return
    for label, grad in first.given.items():
        for shift, edge in product(_shifts(grad.shape, TOGETHER, most=1), [*EDGES][:2]):
            change = partial(shift.of, padded=edge != WRAPPED)
            predicted = partial(Observation.if_changed, change=change, grad=label)
            yield _shifted(f"it is right for the grad_output of `{label}`", shift, edge, predicted)
    for label, value in first.inputs.items():
        for shift in _shifts(value.shape, 1, most=1) if is_inexact(value) else ():
            if value.shape[shift.steps[0][0]] > 2:
                predicted = partial(Observation.if_changed, change=shift.of, input=label)
                yield _shifted(f"it is right for `{label}`", shift, WRAPPED, predicted)


def _shifted(words: str, shift: Shift, edge: str, predicted: Prediction) -> Detection:
    return Detection("shifted", f"{words} shifted {shift}{edge}", {"shift": str(shift)}, predicted=predicted)


def _shifts(shape: torch.Size, furthest: int = FURTHEST, *, most: int = 2) -> Iterator[Shift]:
    """Yield shifts along one dimension, in memory order, and along two dimensions."""
    steps = [(dim, by) for dim, size in enumerate(shape) for by in _steps(size, furthest)]
    yield from (Shift((step,)) for step in steps)
    if len(shape) > 1:
        yield from (Shift(((-1, by),)) for by in _steps(shape.numel(), furthest))
    for one, other in combinations(steps, 2) if most > 1 else ():
        if one[0] != other[0] and max(abs(one[1]), abs(other[1])) <= TOGETHER:
            yield Shift((one, other))


def _steps(size: int, most: int) -> list[int]:
    return [sign * by for by in range(1, min(size - 1, most) + 1) for sign in (1, -1)]


def _is_shown(evidence: Evidence, shift: Shift) -> bool:
    """Return True if enough elements have moved; larger tensors decide between shifts of small ones."""
    holds = partial(EDGES[""], shift)
    if not evidence.first.equals(holds(evidence.first)):
        return False
    if evidence.everywhere(partial(_is_evidence, shift=shift)):
        return True
    larger = [pair for pair in evidence.other_sizes if holds(pair) is not None and _is_evidence(pair, shift)]
    return bool(larger) and all(pair.equals(holds(pair)) for pair in larger)


def _is_evidence(pair: Observation, shift: Shift) -> bool:
    """Return True if enough elements have moved; two elements fit a transpose as well as a shift."""
    inside = shift.inside(pair.expected.shape)
    moved = inside & pair.wrong & (pair.got != 0)
    longer = all(dim < 0 or pair.expected.shape[dim] > 2 for dim, _ in shift.steps)
    return longer and int(moved.sum()) >= ENOUGH and 2 * int(inside.sum()) >= inside.numel()


MOST_INPUTS = 15
"""Largest number of pairs of arguments that are exchanged."""


def swapped(evidence: Evidence) -> Iterator[Detection]:
    """Detect the gradient of another input, or exchanged inputs or grad_outputs."""
    first = evidence.first
    for label in first.other_gradients:
        back = evidence.everywhere(partial(_is_exchanged, label=label))
        more = f", and that of `{label}` is the right one of `{first.argument}`" if back else ""
        reason, predicted = f"it is the right one of `{label}`{more}", partial(_of_another, label=label)
        yield Detection("swapped-inputs", reason, {"that of": label}, weak=not back, predicted=predicted)
    for one, other in _exchangeable(first.inputs)[:MOST_INPUTS]:
        yield _exchanged(f"`{one}` and `{other}`", one, other, "inputs", weak=True)
    for one, other in _exchangeable(first.given):
        yield _exchanged(f"the grad_outputs of `{one}` and `{other}`", one, other, "grads")


def _of_another(pair: Observation, label: str) -> Tensor:
    return in_double(pair.other_gradients[label][1])


def _is_exchanged(pair: Observation, label: str) -> bool:
    got, right = pair.other_gradients[label]
    return got is not None and replace(pair, computed=got, right=right).equals(pair.expected)


def _exchanged(words: str, one: str, other: str, of: str, *, weak: bool = False) -> Detection:
    def predicted(pair: Observation) -> Tensor | None:
        values = getattr(pair, of)
        return pair.right_for(**{of: {one: values[other], other: values[one]}})

    measured = {"swapped": f"{one}, {other}"}
    reason = f"it is the right one if {words} are exchanged"
    return Detection("swapped-inputs", reason, measured, weak, predicted)


def _exchangeable(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of values that could be exchanged: tensors of one shape and dtype, or numbers."""
    forms = {
        label: (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
        for label, value in values.items()
        if isinstance(value, Tensor | int | float)
    }
    return [(one, other) for one, other in combinations(forms, 2) if forms[one] == forms[other]]


MOST_TURNS = 4
"""Largest number of dimensions for which every order is tried."""


def transposed(evidence: Evidence) -> Iterator[Detection]:
    """Detect exchanged dimensions, dimensions in another order, or the memory order of the transpose."""
    first = evidence.first
    size = largest_magnitude(first.expected) or 1.0
    before = largest_magnitude(first.error) / size
    for words, turn in _turns(first.expected.dim()):
        if turn(first.expected).shape == first.got.shape:
            after = largest_magnitude(first.got - turn(first.expected)) / size
            words += f" (error {after:.1g} of its largest element then, {before:.2g} before)"
            yield Detection("transposed", words, predicted=partial(_turned, turn=turn))
    for label, grad in first.given.items():
        for one, other in combinations(range(grad.dim()), 2):
            words = f"it is right with dimensions {one} and {other} of `{label}`'s gradient swapped"
            change = partial(torch.transpose, dim0=one, dim1=other)
            if grad.shape[one] == grad.shape[other]:
                predicted = partial(Observation.if_changed, change=change, grad=label)
                yield Detection("transposed", words, predicted=predicted)


def _turned(pair: Observation, turn: Callable[[Tensor], Tensor]) -> Tensor:
    return turn(pair.expected)


def _turns(dims: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    for first, second in combinations(range(dims), 2):
        words = "it is the transpose of the right one" if dims == 2 else ""
        words = words or f"it has dimensions {first} and {second} swapped"
        yield words, partial(torch.transpose, dim0=first, dim1=second)
    if 2 < dims <= MOST_TURNS:
        for order in permutations(range(dims)):
            if sum(at != dim for at, dim in enumerate(order)) > 2:
                yield f"it has its dimensions in the order {list(order)}", partial(torch.permute, dims=order)
    for first, second in combinations(range(dims), 2):
        words = f"it is laid out as if dimensions {first} and {second} were swapped"
        yield words, partial(_laid, first=first, second=second)


def _laid(right: Tensor, first: int, second: int) -> Tensor:
    """Return the right numbers in the memory order of the transpose: a reshape instead of a transpose."""
    return right.transpose(first, second).reshape(right.shape)
