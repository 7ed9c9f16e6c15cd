"""The right one with the other sign, of all of it or of the imaginary part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen
from opsmith.checking.numerics.compare import wide


def sign(seen: Seen) -> Iterator[Found]:
    """Minus the right one; its complex conjugate; or what comes of a conjugate that was forgotten."""
    if not seen.first.right.any():
        return
    if seen.everywhere(lambda pair: pair.is_(-pair.right)):
        yield Found("sign", "it is the right one times -1", {"factor": -1.0})
        return
    if not seen.first.right.is_complex() and not any(map(_complex, seen.observation.grads.values())):
        return
    guesses = {
        "it is the complex conjugate of the right one: its imaginary part has the other sign": _conjugate,
        "it is minus the complex conjugate of the right one: its real part has the other sign": _mirrored,
        "it lacks a conjugate: it is grad * f'(x), where grad * conj(f'(x)) is right": _holomorphic,
    }
    for reason, guess in guesses.items():
        if seen.everywhere(lambda pair, guess=guess: pair.is_(guess(pair))):  # type: ignore[misc]
            yield Found("sign", reason)
            return


def _complex(grad: Tensor | None) -> bool:
    return grad is not None and grad.is_complex()


def _conjugate(pair: Pair) -> Tensor:
    return pair.right.conj().resolve_conj()


def _mirrored(pair: Pair) -> Tensor:
    return -_conjugate(pair)


def _holomorphic(pair: Pair) -> Tensor | None:
    """For a holomorphic f the right one is grad * conj(f'), of which grad * f' comes by two conjugations."""
    right = pair.observation.right
    if right is None:
        return None
    grads = [None if grad is None else grad.conj() for grad in pair.observation.grads.values()]
    return wide(right(grads)).conj().resolve_conj()
