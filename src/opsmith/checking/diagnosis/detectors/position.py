"""Its elements stand some places further than they should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen
from opsmith.checking.numerics.compare import peak, wide
from opsmith.checking.samples.sample import is_inexact

FURTHEST = 8
"""Most places along one dimension; along two at once, `TOGETHER`."""

TOGETHER = 2
ENOUGH = 3
"""Elements that must have moved, other than zeros, on each input."""


@dataclass(frozen=True)
class Shift:
    """Elements that stand so many places further along some dimensions; none of them: in memory order."""

    places: tuple[tuple[int, int], ...]

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor shifted, with wrap-around."""
        flat = tensor.flatten() if self.whole else tensor
        dims = [0] if self.whole else [dim for dim, _ in self.places]
        return flat.roll([by for _, by in self.places], dims).reshape(tensor.shape)

    @property
    def whole(self) -> bool:
        """Whether it is over all elements in memory order."""
        return self.places[0][0] < 0

    def inside(self, shape: torch.Size) -> Tensor:
        """The elements that come from inside, and not around the edge."""
        inner = torch.ones(shape.numel() if self.whole else shape, dtype=torch.bool)
        for dim, by in self.places:
            axis, size = (0, shape.numel()) if self.whole else (dim, shape[dim])
            edge = inner.narrow(axis, 0 if by > 0 else size + by, abs(by))
            edge.fill_(False)
        return inner.reshape(shape)

    def fits(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape is large enough to shift so far and keep something inside."""
        if self.whole:
            return abs(self.places[0][1]) < shape.numel()
        return all(dim < len(shape) and abs(by) < shape[dim] for dim, by in self.places)

    def __str__(self) -> str:
        if self.whole:
            by = self.places[0][1]
            return f"by {by} in memory order"
        return " and ".join(f"by {by} along dimension {dim}" for dim, by in self.places)


def shifted(seen: Seen) -> Iterator[Found]:
    """Shifted elements, with whatever stands at the edge; or what is right for something that was shifted."""
    if not seen.first.same_shape:
        return
    bare: Found | None = None
    for shift in _shifts(seen.first.right.shape):
        if not seen.everywhere(partial(_inside, shift=shift)):
            continue
        if not seen.everywhere(partial(_tells, shift=shift)) and not _tells_elsewhere(seen, shift):
            continue
        kept = [words for words, holds in EDGES.items() if seen.everywhere(partial(holds, shift=shift))]
        words = f"it is the right one shifted {shift}" + "".join(kept[:1])
        found = Found("shifted", words, {"shift": str(shift)})
        if kept:
            yield found
            return
        bare = bare or found
    if bare is not None:
        yield bare
        return
    yield from _of_shifted_grads(seen)
    yield from _of_shifted_inputs(seen)


def _shifts(shape: torch.Size) -> Iterator[Shift]:
    steps = [(dim, by) for dim, size in enumerate(shape) for by in _steps(size, FURTHEST)]
    yield from (Shift((step,)) for step in steps)
    if len(shape) > 1:
        yield from (Shift(((-1, by),)) for by in _steps(shape.numel(), FURTHEST))
    for first in range(len(shape)):
        for second in range(first + 1, len(shape)):
            for one, other in product(_steps(shape[first], TOGETHER), _steps(shape[second], TOGETHER)):
                yield Shift(((first, one), (second, other)))


def _steps(size: int, most: int) -> list[int]:
    return [sign * by for by in range(1, min(size - 1, most) + 1) for sign in (1, -1)]


def _inside(pair: Pair, shift: Shift) -> bool:
    if not shift.fits(pair.right.shape):
        return False
    return bool(pair.agrees(shift.of(pair.right))[shift.inside(pair.right.shape)].all())


def _tells(pair: Pair, shift: Shift) -> bool:
    """Whether enough elements have moved, and most of them; of two, a shift is as good as another order."""
    inside = shift.inside(pair.right.shape)
    moved = inside & pair.wrong & (pair.mine != 0)
    longer = all(dim < 0 or pair.right.shape[dim] > 2 for dim, _ in shift.places)
    return longer and int(moved.sum()) >= ENOUGH and 2 * int(inside.sum()) >= inside.numel()


def _tells_elsewhere(seen: Seen, shift: Shift) -> bool:
    """Whether larger tensors show what small ones leave open."""
    larger = [pair for pair in seen.elsewhere if pair.same_shape and shift.fits(pair.right.shape)]
    telling = [pair for pair in larger if _tells(pair, shift)]
    return bool(telling) and all(_inside(pair, shift) for pair in telling)


def _wraps(pair: Pair, shift: Shift) -> bool:
    return pair.is_(shift.of(pair.right))


def _zeros(pair: Pair, shift: Shift) -> bool:
    return not bool(pair.mine[~shift.inside(pair.right.shape)].any())


def _stays(pair: Pair, shift: Shift) -> bool:
    return not bool(pair.wrong[~shift.inside(pair.right.shape)].any())


EDGES: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        ", with wrap-around": _wraps,
        ", with zeros at the edge": _zeros,
        ", with the edge as it should be": _stays,
    }
)


def _of_shifted_grads(seen: Seen) -> Iterator[Found]:
    for label, grad in seen.observation.grads.items():
        if grad is None:
            continue
        for shift in _shifts(grad.shape):
            if len(shift.places) > 1 or abs(shift.places[0][1]) > TOGETHER:
                continue
            for padded in (False, True):
                come = partial(_for_grad, label=label, shift=shift, padded=padded)
                if seen.everywhere(come):
                    edge = "zeros at the edge" if padded else "wrap-around"
                    words = f"it is right for what comes in for `{label}` shifted {shift}, with {edge}"
                    yield Found("shifted", words, {"shift": str(shift)})
                    return


def _for_grad(pair: Pair, label: str, shift: Shift, padded: bool) -> bool:
    right, grads = pair.observation.right, dict(pair.observation.grads)
    grad = grads[label]
    if right is None or grad is None or not shift.fits(grad.shape):
        return False
    grads[label] = _moved(grad, shift, padded=padded)
    return _enough(pair) and pair.is_(wide(right(list(grads.values()))))


def _of_shifted_inputs(seen: Seen) -> Iterator[Found]:
    for label, value in seen.observation.inputs.items():
        if not is_inexact(value):
            continue
        for dim, size in enumerate(value.shape):
            for by in _steps(size, 1):
                shift = Shift(((dim, by),))
                if size > 2 and seen.everywhere(partial(_for_input, label=label, shift=shift)):
                    words = f"it is right for `{label}` shifted {shift}, with wrap-around"
                    yield Found("shifted", words, {"shift": str(shift)})
                    return


def _for_input(pair: Pair, label: str, shift: Shift) -> bool:
    at = pair.observation.right_at
    if at is None:
        return False
    found = at({label: _moved(pair.observation.inputs[label], shift, padded=False)})
    return found is not None and _enough(pair) and pair.is_(wide(found))


def _moved(tensor: Tensor, shift: Shift, *, padded: bool) -> Tensor:
    rolled = shift.of(tensor)
    return rolled * shift.inside(tensor.shape) if padded else rolled


def _enough(pair: Pair) -> bool:
    return int(pair.right.count_nonzero()) >= ENOUGH


MOST_INPUTS = 15
"""Pairs of arguments that are tried in each other's places."""


def swapped(seen: Seen) -> Iterator[Found]:
    """What is right for another input, or if two inputs or two incoming gradients change places."""
    others = seen.observation.others
    if others is not None:
        for label, (_, right) in others().items():
            if right.shape != seen.first.mine.shape:
                continue
            if seen.everywhere(partial(_is_of, label=label)):
                back = seen.everywhere(partial(_has_mine, label=label))
                mine = seen.observation.about
                more = f", and that of `{label}` is the right one of `{mine}`" if back else ""
                reason = f"it is the right one of `{label}`{more}"
                yield Found("swapped-inputs", reason, {"that of": label}, weak=not back)
                return
    for first, second in list(_places(seen))[:MOST_INPUTS]:
        if seen.everywhere(partial(_is_with, first=first, second=second)):
            words = f"it is the right one if `{first}` and `{second}` change places"
            yield Found("swapped-inputs", words, {"swapped": f"{first}, {second}"}, weak=True)
            return
    names = [name for name, grad in seen.observation.grads.items() if grad is not None]
    for first, second in combinations(names, 2):
        if seen.everywhere(partial(_is_for, first=first, second=second)):
            words = f"it is the right one if what comes in for `{first}` and for `{second}` change places"
            yield Found("swapped-inputs", words, {"swapped": f"{first}, {second}"})
            return


def _is_of(pair: Pair, label: str) -> bool:
    others = pair.observation.others
    return others is not None and pair.is_(wide(others()[label][1]))


def _has_mine(pair: Pair, label: str) -> bool:
    others = pair.observation.others
    if others is None:
        return False
    got, right = others()[label]
    return got is not None and Pair(replace(pair.observation, got=got, expected=right)).is_(pair.right)


def _places(seen: Seen) -> list[tuple[str, str]]:
    """Pairs of arguments that may stand in each other's places: tensors of one form, or plain numbers."""
    inputs = seen.observation.inputs
    return [
        (first, second)
        for first, second in combinations(inputs, 2)
        if _form(inputs[first]) is not None and _form(inputs[first]) == _form(inputs[second])
    ]


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return type(value) if isinstance(value, int | float) else None


def _is_with(pair: Pair, first: str, second: str) -> bool:
    at, inputs = pair.observation.right_at, pair.observation.inputs
    found = None if at is None else at({first: inputs[second], second: inputs[first]})
    return found is not None and pair.is_(wide(found))


def _is_for(pair: Pair, first: str, second: str) -> bool:
    right, grads = pair.observation.right, dict(pair.observation.grads)
    one, other = grads[first], grads[second]
    if right is None or one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    grads[first], grads[second] = other, one
    return pair.is_(wide(right(list(grads.values()))))


MOST_TURNS = 4
"""Of how many dimensions every order is tried."""


def transposed(seen: Seen) -> Iterator[Found]:
    """Two dimensions swapped, dimensions in another order, or right numbers in the order of the transpose."""
    for words, turn in _turns(seen.first.right.dim()):
        if seen.everywhere(lambda pair, turn=turn: pair.is_(turn(pair.right))):  # type: ignore[misc]
            yield Found("transposed", _said(seen.first, words, turn))
            return
    for first, second in combinations(range(seen.first.right.dim()), 2):
        lay = partial(_laid, first=first, second=second)
        if seen.everywhere(lambda pair, lay=lay: pair.is_(lay(pair.right))):  # type: ignore[misc]
            words = f"it is laid out as if dimensions {first} and {second} were swapped"
            yield Found("transposed", _said(seen.first, words, lay))
            return
    for label, grad in seen.observation.grads.items():
        if grad is None:
            continue
        for first, second in combinations(range(grad.dim()), 2):
            come = partial(_of_turned, label=label, first=first, second=second)
            if seen.everywhere(lambda pair, come=come: pair.is_(come(pair))):  # type: ignore[misc]
                words = f"it is right with dimensions {first} and {second} of `{label}`'s gradient swapped"
                yield Found("transposed", words)
                return


def _turns(dims: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    for first, second in combinations(range(dims), 2):
        words = "it is the transpose of the right one" if dims == 2 else ""
        words = words or f"it has dimensions {first} and {second} swapped"
        yield words, partial(torch.transpose, dim0=first, dim1=second)
    if 2 < dims <= MOST_TURNS:
        for order in permutations(range(dims)):
            if sum(at != place for at, place in enumerate(order)) > 2:
                yield f"it has its dimensions in the order {list(order)}", partial(torch.permute, dims=order)


def _laid(right: Tensor, first: int, second: int) -> Tensor:
    """Right numbers in the memory order of the transpose: reshaped where it should have been transposed."""
    turned = right.transpose(first, second)
    return turned.reshape(right.shape)


def _of_turned(pair: Pair, label: str, first: int, second: int) -> Tensor | None:
    right, grads = pair.observation.right, dict(pair.observation.grads)
    grad = grads[label]
    if right is None or grad is None or grad.shape[first] != grad.shape[second]:
        return None
    grads[label] = grad.transpose(first, second).contiguous()
    return wide(right(list(grads.values())))


def _said(pair: Pair, words: str, turn: Callable[[Tensor], Tensor]) -> str:
    size = peak(pair.right) or 1.0
    after = peak(pair.mine - turn(pair.right)) / size
    return f"{words} (error {after:.1g} of its largest element then, {peak(pair.error) / size:.2g} before)"
