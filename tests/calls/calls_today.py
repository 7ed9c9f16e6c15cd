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
    # DTensors, and tensors under `vmap`, have no versions that tell of a write.
    (
        _alike("accepted in inference", "DTensor"),
        (
            "kernel-written",
            "kernel-written-by-a-view",
            "kernel-written-by-out",
            "kernel-written-by-detached",
        ),
    ),
    (
        _alike("accepted", "DTensor"),
        (
            "opaque-written",
            "opaque-written-by-a-view",
            "opaque-written-by-out",
            "opaque-written-by-detached",
            "reference-written-by-out",
            "formulas-written-by-out",
            "kernel-writes-second-of-list",
        ),
    ),
    (
        _alike("accepted", "DTensor", "vmap level"),
        (
            "reference-written",
            "reference-written-by-a-view",
            "reference-written-by-detached",
            "formulas-written",
            "formulas-written-by-a-view",
            "formulas-written-by-detached",
            "reference-writes-the-other",
            "reference-writes-second-of-list",
        ),
    ),
    (_alike("accepted", "DTensor"), ("kernel-writes-the-other",)),
    # Tensors of a transform have no storage, and DTensors are compared by identity.
    (
        _alike("accepted", "grad level", "vmap level", DTensor="accepted in plain, graph, no_grad"),
        (
            "reference-a-part",
            "reference-a-view",
            "reference-a-transpose",
            "reference-detached",
        ),
    ),
    (_alike("accepted in plain, graph, no_grad", "DTensor"), ("reference-one-result-twice",)),
    (
        _alike("accepted", "grad level", DTensor="accepted in plain, graph, no_grad"),
        ("reference-.data",),
    ),
    (_alike("accepted", "grad level", "vmap level", "DTensor"), ("reference-halves-of-one",)),
    (
        _alike("accepted", "vmap level", DTensor="accepted in plain, graph, no_grad"),
        (
            "formulas-a-part",
            "formulas-a-view",
            "formulas-a-transpose",
            "formulas-detached",
        ),
    ),
    (_alike("accepted in plain, graph, no_grad", "DTensor"), ("formulas-.data",)),
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
    # Under `vmap` versions of the wrapped tensors do not tell that a formula writes.
    (
        _alike("accepted", "vmap level"),
        (
            "gradient-writes-the-saved",
            "gradient-writes-grad",
            "gradient-writes-the-saved-list",
        ),
    ),
    # Another class of error than in the other executors.
    (_alike("PlacementError", "DTensor"), ("call-expanded",)),
    # A known call alone sees a result whose graph no argument gave it.
    (_alike("accepted", "grad level", "vmap level", "DTensor"), ("reference-captured",)),
    (_alike("accepted", "vmap level", "DTensor"), ("reference-captured-and-written", "formulas-captured")),
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
