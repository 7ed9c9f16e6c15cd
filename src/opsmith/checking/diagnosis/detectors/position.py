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

from opsmith.checking.diagnosis.evidence import Detection, Evidence
from opsmith.checking.diagnosis.observation import Observation
from opsmith.judging.compare import in_double, largest_magnitude
from opsmith.judging.tensors import is_inexact

FURTHEST = 8
"""Longest shift along one dimension; along two at once, `TOGETHER`."""

TOGETHER = 2
ENOUGH = 3
"""Number of nonzero elements that must have moved on each input."""


@dataclass(frozen=True)
class Shift:
    """A shift along some dimensions, as pairs of dimension and distance; dimension -1 is memory order."""

    steps: tuple[tuple[int, int], ...]

    @property
    def whole(self) -> bool:
        """True if it is over all elements in memory order."""
        return self.steps[0][0] < 0

    def _laid(self, shape: torch.Size) -> tuple[torch.Size, list[int]]:
        """Return the sizes of the dimensions, and those to shift along."""
        laid = torch.Size([shape.numel()]) if self.whole else shape
        return laid, [max(dim, 0) for dim, _ in self.steps]

    def of(self, tensor: Tensor) -> Tensor:
        """Shift a tensor, with wrap-around."""
        laid, dims = self._laid(tensor.shape)
        return tensor.reshape(laid).roll([by for _, by in self.steps], dims).reshape(tensor.shape)

    def inside(self, shape: torch.Size) -> Tensor:
        """Mark the elements that come from inside, and not around the edge."""
        laid, dims = self._laid(shape)
        inner = torch.ones(laid, dtype=torch.bool)
        for dim, (_, by) in zip(dims, self.steps, strict=True):
            inner.narrow(dim, 0 if by > 0 else laid[dim] + by, abs(by)).fill_(False)
        return inner.reshape(shape)

    def fits(self, shape: torch.Size) -> bool:
        """Return True if a tensor of this shape is large enough for the shift."""
        laid, dims = self._laid(shape)
        steps = zip(dims, self.steps, strict=True)
        return all(dim < len(laid) and abs(by) < laid[dim] for dim, (_, by) in steps)

    def __str__(self) -> str:
        if self.whole:
            return f"by {self.steps[0][1]} in memory order"
        return " and ".join(f"by {by} along dimension {dim}" for dim, by in self.steps)


def shifted(evidence: Evidence) -> Iterator[Detection]:
    """Detect shifted elements, or a gradient that is right for a shifted input or grad_output."""
    first, bare = evidence.first, None
    for shift in _shifts(first.expected.shape):
        if not evidence.everywhere(partial(_inside, shift=shift)):
            continue
        here = evidence.everywhere(partial(_is_evidence, shift=shift))
        if not here and not _is_evidence_at_other_sizes(evidence, shift):
            continue
        kept = [words for words, holds in EDGES.items() if evidence.everywhere(partial(holds, shift=shift))]
        words = f"it is the right one shifted {shift}" + "".join(kept[:1])
        found = Detection("shifted", words, {"shift": str(shift)})
        if kept:
            yield found
            return
        bare = bare or found
    if bare is not None:
        yield bare
        return
    yield from evidence.first_fitting(chain(_of_shifted_grads(first), _of_shifted_inputs(first)))


def _shifts(shape: torch.Size) -> Iterator[Shift]:
    steps = [(dim, by) for dim, size in enumerate(shape) for by in _steps(size, FURTHEST)]
    yield from (Shift((step,)) for step in steps)
    if len(shape) > 1:
        yield from (Shift(((-1, by),)) for by in _steps(shape.numel(), FURTHEST))
    for first, second in combinations(range(len(shape)), 2):
        for one, other in product(_steps(shape[first], TOGETHER), _steps(shape[second], TOGETHER)):
            yield Shift(((first, one), (second, other)))


def _steps(size: int, most: int) -> list[int]:
    return [sign * by for by in range(1, min(size - 1, most) + 1) for sign in (1, -1)]


def _inside(pair: Observation, shift: Shift) -> bool:
    if not shift.fits(pair.expected.shape):
        return False
    return bool(pair.agrees_with(shift.of(pair.expected))[shift.inside(pair.expected.shape)].all())


def _is_evidence(pair: Observation, shift: Shift) -> bool:
    """Return True if enough elements have moved; two elements fit a transpose as well as a shift."""
    inside = shift.inside(pair.expected.shape)
    moved = inside & pair.wrong & (pair.got != 0)
    longer = all(dim < 0 or pair.expected.shape[dim] > 2 for dim, _ in shift.steps)
    return longer and int(moved.sum()) >= ENOUGH and 2 * int(inside.sum()) >= inside.numel()


def _is_evidence_at_other_sizes(evidence: Evidence, shift: Shift) -> bool:
    """Return True if larger tensors decide between shifts that small ones leave open."""
    larger = [pair for pair in evidence.other_sizes if shift.fits(pair.expected.shape)]
    informative = [pair for pair in larger if _is_evidence(pair, shift)]
    return bool(informative) and all(_inside(pair, shift) for pair in informative)


EDGES: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        ", with wrap-around": lambda pair, shift: pair.equals(shift.of(pair.expected)),
        ", with zeros at the edge": lambda pair, shift: not bool(_edge(pair.got, shift).any()),
        ", with the edge as it should be": lambda pair, shift: not bool(_edge(pair.wrong, shift).any()),
    }
)


def _edge(values: Tensor, shift: Shift) -> Tensor:
    return values[~shift.inside(values.shape)]


def _of_shifted_grads(first: Observation) -> Iterator[Detection]:
    for label, grad in first.given.items():
        for shift, padded in product(_shifts(grad.shape), (False, True)):
            if len(shift.steps) == 1 and abs(shift.steps[0][1]) <= TOGETHER:
                edge = "zeros at the edge" if padded else "wrap-around"
                words = f"it is right for the grad_output of `{label}` shifted {shift}, with {edge}"
                predicted = partial(_for_grad, label=label, shift=shift, padded=padded)
                yield Detection("shifted", words, {"shift": str(shift)}, predicted=predicted)


def _for_grad(pair: Observation, label: str, shift: Shift, padded: bool) -> Tensor | None:
    grad = pair.given[label]
    if not shift.fits(grad.shape) or not _enough(pair):
        return None
    kept = shift.inside(grad.shape) if padded else 1
    return pair.with_grads(lambda name, each: shift.of(each) * kept if name == label else each)


def _of_shifted_inputs(first: Observation) -> Iterator[Detection]:
    for label, value in first.inputs.items():
        for dim, size in enumerate(value.shape if is_inexact(value) else ()):
            for by in _steps(size, 1) if size > 2 else ():
                shift = Shift(((dim, by),))
                words = f"it is right for `{label}` shifted {shift}, with wrap-around"
                predicted = partial(_for_input, label=label, shift=shift)
                yield Detection("shifted", words, {"shift": str(shift)}, predicted=predicted)


def _for_input(pair: Observation, label: str, shift: Shift) -> Tensor | None:
    return pair.with_inputs({label: shift.of(pair.inputs[label])}) if _enough(pair) else None


def _enough(pair: Observation) -> bool:
    return int(pair.expected.count_nonzero()) >= ENOUGH


MOST_INPUTS = 15
"""Largest number of pairs of arguments that are exchanged."""


def swapped(evidence: Evidence) -> Iterator[Detection]:
    """Detect the gradient of another input, or exchanged inputs or grad_outputs."""
    for label in evidence.first.other_gradients:
        if evidence.fits(partial(_of_another, label=label)):
            back = evidence.everywhere(partial(_is_exchanged, label=label))
            more = f", and that of `{label}` is the right one of `{evidence.first.argument}`" if back else ""
            reason = f"it is the right one of `{label}`{more}"
            yield Detection("swapped-inputs", reason, {"that of": label}, weak=not back)
            return
    yield from evidence.first_fitting(_exchanges(evidence.first))


def _of_another(pair: Observation, label: str) -> Tensor:
    return in_double(pair.other_gradients[label][1])


def _is_exchanged(pair: Observation, label: str) -> bool:
    got, right = pair.other_gradients[label]
    return got is not None and replace(pair, computed=got, right=right).equals(pair.expected)


def _exchanges(first: Observation) -> Iterator[Detection]:
    for one, other in _exchangeable(first.inputs)[:MOST_INPUTS]:
        words = f"it is the right one if `{one}` and `{other}` are exchanged"
        predicted = partial(_with_exchanged_inputs, one=one, other=other)
        yield Detection("swapped-inputs", words, {"swapped": f"{one}, {other}"}, True, predicted)
    for one, other in _exchangeable(first.given):
        words = f"it is the right one if the grad_outputs of `{one}` and `{other}` are exchanged"
        predicted = partial(_for_exchanged_grads, one=one, other=other)
        yield Detection("swapped-inputs", words, {"swapped": f"{one}, {other}"}, predicted=predicted)


def _exchangeable(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of values that could be exchanged: tensors of one shape and dtype, or numbers."""
    return [
        (one, other)
        for one, other in combinations(values, 2)
        if _form(values[one]) is not None and _form(values[one]) == _form(values[other])
    ]


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return type(value) if isinstance(value, int | float) else None


def _with_exchanged_inputs(pair: Observation, one: str, other: str) -> Tensor | None:
    return pair.with_inputs({one: pair.inputs[other], other: pair.inputs[one]})


def _for_exchanged_grads(pair: Observation, one: str, other: str) -> Tensor | None:
    exchanged = {one: pair.given[other], other: pair.given[one]}
    return pair.with_grads(lambda name, grad: exchanged.get(name, grad))


MOST_TURNS = 4
"""Largest number of dimensions for which every order is tried."""


def transposed(evidence: Evidence) -> Iterator[Detection]:
    """Detect exchanged dimensions, dimensions in another order, or the memory order of the transpose."""
    first = evidence.first
    for words, turn in _turns(first.expected.dim()):
        if evidence.fits(partial(_turned, turn=turn)):
            yield Detection("transposed", _reason(first, words, turn))
            return
    yield from evidence.first_fitting(
        Detection(
            "transposed",
            f"it is right with dimensions {one} and {other} of `{label}`'s gradient swapped",
            predicted=partial(_for_turned_grad, label=label, dims=(one, other)),
        )
        for label, grad in first.given.items()
        for one, other in combinations(range(grad.dim()), 2)
    )


def _turned(pair: Observation, turn: Callable[[Tensor], Tensor]) -> Tensor:
    return turn(pair.expected)


def _for_turned_grad(pair: Observation, label: str, dims: tuple[int, int]) -> Tensor | None:
    grad = pair.given[label]
    if grad.shape[dims[0]] != grad.shape[dims[1]]:
        return None
    return pair.with_grads(lambda name, each: each.transpose(*dims).contiguous() if name == label else each)


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
    turned = right.transpose(first, second)
    return turned.reshape(right.shape)


def _reason(pair: Observation, words: str, turn: Callable[[Tensor], Tensor]) -> str:
    size = largest_magnitude(pair.expected) or 1.0
    after = largest_magnitude(pair.got - turn(pair.expected)) / size
    before = largest_magnitude(pair.error) / size
    return f"{words} (error {after:.1g} of its largest element then, {before:.2g} before)"
