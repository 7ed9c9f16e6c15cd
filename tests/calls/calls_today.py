"""Cells of the matrix of calls in which an executor does not yet do what is right, with what it does.

A cell fails when it does anything else: whoever mends it deletes its row.
"""

from __future__ import annotations


def _alike(what: str, *executors: str, **others: str) -> dict[str, str]:
    """One outcome in several executors, and the outcomes in others."""
    return {**dict.fromkeys(executors, what), **others}


_ROWS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    # Another class of error than in the other executors.
    (_alike("PlacementError", "DTensor"), ("call-expanded",)),
    # Torch itself does so: under `vmap` it sets slices, and the argument stays as it is.
    (_alike("accepted", "vmap level", compiled="BackendCompilerFailed"), ("reference-set",)),
    # A call on DTensors that writes runs below autograd, where no graph shows a captured tensor.
    (_alike("accepted", "DTensor"), ("reference-captured-and-written",)),
]

BREACHES = {breach: happens for happens, breaches in _ROWS for breach in breaches}
"""By the name of a breach: what happens in an executor."""

CELLS: dict[tuple[str, str], dict[str, str]] = {
    # After a hook of a saved tensor has stopped a known call on DTensors, the call is begun anew.
    **{(each, "checkpoint"): {"derived": "AssertionError"} for each in ("DTensor", "DTensor rows")},
    # A derived second order of a class on DTensors is traced, and the class compares a traced value.
    **{
        (each, "double-backward"): {"adopted-attributes": "DataDependentOutputException"}
        for each in ("DTensor", "DTensor rows")
    },
    # What a class says of its second order is lost under `vmap`.
    ("vmap level", "double-backward"): {"adopted-once": "RuntimeError"},
}
"""By executor and context: what happens with a subject."""
