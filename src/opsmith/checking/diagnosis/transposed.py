"""The right one with dimensions swapped, or laid out as if they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, permutations

import torch
from torch import Tensor

from opsmith.checking.diagnosis.comparable import peak, wide
from opsmith.checking.diagnosis.found import Found
from opsmith.checking.diagnosis.pair import Pair
from opsmith.checking.diagnosis.seen import Seen

MOST = 4
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
    if 2 < dims <= MOST:
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
