"""Detect right numbers at wrong positions: shifted, transposed, swapped between inputs, or not summed.

If a broadcast input aligns with the last dimensions of a result, the terms of its gradient are the right
gradient with respect to the input expanded to the shape of that result. Otherwise they are computed for one
element of the result at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations, permutations, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.decompositions import NAMED
from opsmith.checking.diagnosis.observation import FEW, Detection, Evidence, Observation, Prediction
from opsmith.judging.compare import all_close, in_double, share_of_largest
from opsmith.judging.tensors import is_inexact

FURTHEST = 8
"""Longest shift along one dimension; `TOGETHER` is the longest along two at once, or of a grad_output."""

TOGETHER = 2


@dataclass(frozen=True)
class Shift:
    """A shift along some dimensions, as pairs of dimension and distance; dimension -1 is memory order."""

    steps: tuple[tuple[int, int], ...]

    def _laid(self, shape: torch.Size) -> tuple[torch.Size, list[int]]:
        """Return the sizes of the dimensions, and the dimensions to shift along."""
        laid = torch.Size([shape.numel()]) if self.steps[0][0] < 0 else shape
        return laid, [max(dim, 0) for dim, _ in self.steps]

    def of(self, tensor: Tensor, *, padded: bool = False) -> Tensor | None:
        """Shift a tensor, with wrap-around or with zeros at the edge; None if it is too small."""
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
        ", with the right numbers at the edge": lambda shift, pair: _at_edge(shift, pair, pair.expected),
    }
)
"""The shifted right gradient, for each kind of elements that may fill the edge."""


def _at_edge(shift: Shift, pair: Observation, edge: Tensor) -> Tensor | None:
    moved = shift.of(pair.expected)
    return None if moved is None else torch.where(shift.inside(moved.shape), moved, edge)


def shifted(evidence: Evidence) -> Iterator[Detection]:
    """Detect shifted elements, or a gradient that is right for a shifted input or grad_output."""
    first = evidence.first
    shifts = [each for each in _shifts(first.expected.shape) if _is_shown(evidence, each)]
    for shift, edge in product(shifts, EDGES):
        yield _shifted("it is the right tensor", shift, edge, partial(EDGES[edge], shift))
    if not evidence.everywhere(lambda pair: int(pair.expected.count_nonzero()) >= FEW):
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
    """Return True if enough elements moved; larger tensors decide between the shifts of a small tensor."""
    if not _holds(evidence.first, shift):
        return False
    if evidence.everywhere(partial(_is_evidence, shift=shift)):
        return True
    fitting = (pair for pair in evidence.other_sizes if shift.of(pair.expected) is not None)
    larger = [pair for pair in fitting if _is_evidence(pair, shift)]
    return bool(larger) and all(_holds(pair, shift) for pair in larger)


def _holds(pair: Observation, shift: Shift) -> bool:
    """Return True if the elements that do not come from the edge are shifted."""
    return pair.equals(_at_edge(shift, pair, pair.got))


def _is_evidence(pair: Observation, shift: Shift) -> bool:
    """Return True if enough elements moved: two elements fit a transpose as well as a shift."""
    inside = shift.inside(pair.expected.shape)
    moved = inside & pair.wrong & (pair.got != 0)
    longer = all(dim < 0 or pair.expected.shape[dim] > 2 for dim, _ in shift.steps)
    return longer and int(moved.sum()) >= FEW and 2 * int(inside.sum()) >= inside.numel()


def swapped(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient of the wrong input, or exchanged inputs or grad_outputs."""
    first = evidence.first
    for label in first.other_gradients:
        back = evidence.everywhere(partial(_is_exchanged, label=label))
        more = f", and the gradient of `{label}` is the right gradient of `{first.argument}`" if back else ""
        reason, predicted = f"it is the right gradient of `{label}`{more}", partial(_of_another, label=label)
        yield Detection("swapped-inputs", reason, {"that of": label}, weak=not back, predicted=predicted)
    for one, other in _exchangeable(first.inputs):
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
    reason = f"it is right if {words} are exchanged"
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
"""Maximum number of dimensions for which every order is tried."""


ERRORS = " (relative error {:.1g} after the exchange, {:.2g} before)"


def transposed(evidence: Evidence) -> Iterator[Detection]:
    """Detect swapped dimensions, dimensions in a different order, or the memory order of the transpose."""
    first = evidence.first
    for words, turn in _turns(first.expected.dim()):
        after = replace(first, right=turn(first.expected))
        if after.same_shape:
            errors = (after.relative_error, first.relative_error)
            yield Detection(
                "transposed", words + ERRORS.format(*errors), predicted=partial(_turned, turn=turn)
            )
    for label, grad in first.given.items():
        for one, other in combinations(range(grad.dim()), 2):
            words = f"it is right if dimensions {one} and {other} of the grad_output of `{label}` are swapped"
            change = partial(torch.transpose, dim0=one, dim1=other)
            if grad.shape[one] == grad.shape[other]:
                predicted = partial(Observation.if_changed, change=change, grad=label)
                yield Detection("transposed", words, predicted=predicted)


def _turned(pair: Observation, turn: Callable[[Tensor], Tensor]) -> Tensor:
    return turn(pair.expected)


def _turns(dims: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    for first, second in combinations(range(dims), 2):
        words = "it is the transpose of the right tensor" if dims == 2 else ""
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
    """Return the right numbers in the memory order of the transpose, as by a reshape in its place."""
    return right.transpose(first, second).reshape(right.shape)


@dataclass(frozen=True)
class BroadcastTerms:
    """Terms of the gradient of a broadcast input.

    Args:
        values: Terms, in the shape of the result.
        dims: Dimensions that are summed over.
        shape: Shape of the sum.
    """

    values: Tensor
    dims: tuple[int, ...]
    shape: torch.Size

    def part(self, dims: Sequence[int], kept: slice) -> Tensor | None:
        """Sum the terms: a slice of them along some dimensions, all of them along the other dimensions."""
        if not {*dims} <= {*self.dims}:
            return None
        index = [kept if dim in dims else slice(None) for dim in range(self.values.dim())]
        return self.values[tuple(index)].sum(self.dims).reshape(self.shape)

    def by_torch(self) -> Tensor | None:
        """Sum the terms as autograd does for a gradient of that shape; None if this fails."""
        try:
            return self.values.sum_to_size(self.shape)
        except RuntimeError:  # the shape does not broadcast to it
            return None


def _terms(pair: Observation) -> BroadcastTerms | None:
    """Compute the terms whose sum is the right gradient; None if its input was not broadcast."""
    right = pair.expected
    if not isinstance(pair.own, Tensor) or not pair.own.numel():
        return None
    for name, result in pair.results.items():
        if result.numel() <= pair.own.numel() or result.dim() < pair.own.dim():
            continue
        for make in (_written_out, _put_together):
            values = make(pair, name)
            for dims in _sets(range(result.dim())):
                if values is None:
                    break
                total, bound = values.sum(dims), share_of_largest(NAMED, values)
                if total.numel() == right.numel() and all_close(total.reshape(right.shape), right, bound):
                    return BroadcastTerms(values, dims, right.shape)
    return None


def _written_out(pair: Observation, name: str) -> Tensor | None:
    own, shape = pair.own, pair.results[name].shape
    if not all(mine in (1, size) for mine, size in zip(reversed(own.shape), reversed(shape), strict=False)):
        return None
    found = pair.right_for(inputs={str(pair.argument): own.detach().expand(shape).contiguous()})
    return None if found is None or found.shape != shape else found


def _put_together(pair: Observation, name: str) -> Tensor | None:
    values: list[Tensor] = []
    for part in pair.parts(name):
        if int(part.count_nonzero()) > 1:
            return None  # not broadcast: a result depends on several elements
        values.append(part.sum())
    shape = pair.results[name].shape
    return torch.stack(values).reshape(shape) if 0 < len(values) == shape.numel() else None


def _sets(dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of some dimensions, from small to large."""
    return chain.from_iterable(combinations(dims, count) for count in range(1, len(dims) + 1))


def broadcast(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that is not summed over broadcast dimensions, or only in part."""
    known, about = cache(_terms), f"`{evidence.first.argument}`"
    terms = known(evidence.first)
    if terms is None:
        return

    def made(words: str, make: Callable[[BroadcastTerms], Tensor | None], **measured: Any) -> Detection:
        def predicted(pair: Observation) -> Tensor | None:
            found = known(pair)
            return None if found is None else make(found)

        return Detection("unreduced-broadcast", words, measured, predicted=predicted)

    yield made(
        f"it is summed over the wrong dimensions: {about} was broadcast along {_listed(terms.dims)}, "
        "but autograd summed other dimensions, because the backward returned a gradient without the "
        "sum",
        BroadcastTerms.by_torch,
        dimensions=[*terms.dims],
    )
    for some in _sets([dim for dim in terms.dims if terms.values.shape[dim] > 1]):
        size, alone = terms.values.shape[some[0]], len(some) == 1
        whole = f"the {size} slices that" if alone else "what"
        whole = f"{whole} the broadcast of {about} along {_listed(some)} makes"
        for index, which in ((0, "the first"), (-1, "the last")):
            part = partial(BroadcastTerms.part, dims=some, kept=slice(index, index + 1 or None))
            yield made(f"it is {which} of {whole}, and not their sum", part, slice=index, dimensions=[*some])
        for kept, left in (
            ((slice(1, None), "first"), (slice(None, -1), "last")) if alone and size > 2 else ()
        ):
            part = partial(BroadcastTerms.part, dims=some, kept=kept)
            yield made(f"it lacks the {left} of {whole} in its sum", part, left_out=left, dimensions=[*some])


def _listed(dims: Sequence[int]) -> str:
    return f"dimension{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
