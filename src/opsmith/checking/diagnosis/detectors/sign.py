"""Detect a wrong sign, of the whole tensor or of the imaginary part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair


def sign(evidence: Evidence) -> Iterator[Detection]:
    """Detect the negative, the complex conjugate, or the result of a forgotten conjugate."""
    if not evidence.first.expected.any():
        return
    if evidence.everywhere(lambda pair: pair.equals(-pair.expected)):
        yield Detection("sign", "it is the right one times -1", {"factor": -1.0})
        return
    if not evidence.first.expected.is_complex() and not any(
        map(_complex, evidence.observation.grads.values())
    ):
        return
    guesses = {
        "it is the complex conjugate of the right one: its imaginary part has the other sign": _conjugate,
        "it is minus the complex conjugate of the right one: its real part has the other sign": _mirrored,
        "it lacks a conjugate: it is grad * f'(x), where grad * conj(f'(x)) is right": _holomorphic,
    }
    for reason, guess in guesses.items():
        if evidence.everywhere(lambda pair, guess=guess: pair.equals(guess(pair))):  # type: ignore[misc]
            yield Detection("sign", reason)
            return


def _complex(grad: Tensor | None) -> bool:
    return grad is not None and grad.is_complex()


def _conjugate(pair: Pair) -> Tensor:
    return pair.expected.conj().resolve_conj()


def _mirrored(pair: Pair) -> Tensor:
    return -_conjugate(pair)


def _holomorphic(pair: Pair) -> Tensor | None:
    """Compute grad * f' by two conjugations; for a holomorphic f, grad * conj(f') is right."""
    grads = pair.observation.grads.items()
    found = pair.with_grads({name: None if grad is None else grad.conj() for name, grad in grads})
    return None if found is None else found.conj().resolve_conj()
