"""Detect a wrong sign, of the whole tensor or of the imaginary part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair, Prediction


def sign(evidence: Evidence) -> Iterator[Detection]:
    """Detect the negative, the complex conjugate, or the result of a forgotten conjugate."""
    if evidence.first.expected.any():
        yield from evidence.first_fitting(_hypotheses(evidence))


def _hypotheses(evidence: Evidence) -> Iterator[tuple[Detection, Prediction]]:
    yield Detection("sign", "it is the right one times -1", {"factor": -1.0}), lambda pair: -pair.expected
    tensors = (evidence.first.expected, *evidence.observation.grads.values())
    if any(each is not None and each.is_complex() for each in tensors):
        yield from ((Detection("sign", reason), predicted) for reason, predicted in CONJUGATES.items())


def _conjugate(pair: Pair) -> Tensor:
    return pair.expected.conj().resolve_conj()


def _holomorphic(pair: Pair) -> Tensor | None:
    """Compute grad * f' by two conjugations; for a holomorphic f, grad * conj(f') is right."""
    found = pair.with_grads(lambda _, grad: grad.conj())
    return None if found is None else found.conj().resolve_conj()


CONJUGATES: dict[str, Prediction] = {
    "it is the complex conjugate of the right one: its imaginary part has the other sign": _conjugate,
    "it is minus the complex conjugate of the right one: its real part has the other sign": (
        lambda pair: -_conjugate(pair)
    ),
    "it lacks a conjugate: it is grad * f'(x), where grad * conj(f'(x)) is right": _holomorphic,
}
