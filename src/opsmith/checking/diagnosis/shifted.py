"""Its elements stand some places further than they should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.comparable import wide
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen
from opsmith.checking.sample import is_inexact

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
