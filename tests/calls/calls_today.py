"""Cells of the matrix of calls in which an executor does not yet do what is right, with what it does.

A cell fails when it does anything else: whoever mends it deletes its row.
"""

from __future__ import annotations


def _alike(what: str, *executors: str, **others: str) -> dict[str, str]:
    """One outcome in several executors, and the outcomes in others."""
    return {**dict.fromkeys(executors, what), **others}


_ROWS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    # Metadata and storages of arguments that are declared as written are not looked at.
    (
        _alike("ShapeError", "compiled", "grad level"),
        (
            "kernel-resized",
            "kernel-unsqueezed",
            "kernel-shrunk",
            "kernel-transposed",
            "kernel-out-of-another-size",
        ),
    ),
    (
        _alike("accepted", "compiled", "grad level"),
        (
            "kernel-storage-grown",
            "kernel-set",
            "kernel-data-replaced",
        ),
    ),
    (_alike("accepted", "grad level"), ("reference-data-replaced",)),
    (
        _alike("RuntimeError in plain, no_grad, inference", "grad level", **{"vmap level": "RuntimeError"}),
        ("reference-resized",),
    ),
    (
        _alike("accepted in plain, no_grad, inference", "grad level", **{"vmap level": "accepted"}),
        ("reference-shrunk",),
    ),
    (_alike("accepted", "grad level"), ("reference-storage-grown",)),
    (
        _alike("accepted", "grad level", "vmap level", compiled="BackendCompilerFailed"),
        ("reference-set",),
    ),
    (_alike("RuntimeError", "grad level", "vmap level"), ("reference-transposed",)),
    (_alike("accepted", "vmap level", **{"grad level": "RuntimeError"}), ("reference-unsqueezed",)),
    (_alike("RuntimeError in plain, no_grad, inference", "grad level"), ("reference-out-of-another-size",)),
    # A transform computes the functional form, and what the function returns is dropped.
    (
        _alike("accepted", "compiled", "grad level"),
        (
            "kernel-returns-another",
            "kernel-returns-something",
        ),
    ),
    (
        _alike("accepted", "grad level", "vmap level"),
        (
            "reference-returns-another",
            "reference-returns-something",
        ),
    ),
    # Another class of error than in the other executors.
    (_alike("PlacementError", "DTensor"), ("call-expanded",)),
    # A known call alone sees a result whose graph no argument gave it.
    (_alike("accepted", "grad level", "vmap level"), ("reference-captured",)),
    (_alike("accepted", "vmap level"), ("formulas-captured",)),
    (_alike("accepted", "vmap level", "DTensor"), ("reference-captured-and-written",)),
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
