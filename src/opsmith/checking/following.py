"""What is made of an operator goes wrong where the operator itself is wrong: then that is named first."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.checking.report import Failure

TRACED = frozenset(
    {"fake", "vmap", "batched_gradients", "autocast", "serialization", "compile", "export", "opcheck"}
)
"""Properties whose failures may follow from those of any that stands before them."""

DIFFERENTIATED = frozenset({"gradient", "linearity", "layouts", "values", "second_order", "backward_again"})
"""Properties that hand a gradient of the right shape to every result."""

BROAD = frozenset({"raises", "unknown", "fake-mismatch", "shape", "kernel-mismatch"})
"""Causes under which they report what they do not know the reason of."""

ROOTS = frozenset(
    {
        "raises",
        "mutates-input",
        "mutates-grad-output",
        "mutates-saved",
        "aliases-input",
        "nondeterministic",
        "stale-state",
        "side-effect",
        "gradient-count",
        "shape",
        "dtype",
        "layout",
        "fake-mismatch",
    }
)
"""Causes that leave nothing right of what traces, maps or copies an operator."""


def explained_by(failure: Failure, before: Sequence[Failure]) -> str | None:
    """The property whose failure explains one of another property; None where none does.

    One of tracing, mapping or copying is explained by the first that has the same cause, then by the first
    that is about the same argument or result, then by the first that leaves nothing right. One of
    differentiating is explained by wrong results alone: where the gradient that is right for right results
    does not fit them, or where differences of wrong results contradict forward and reverse mode alike. That a
    second backward gives another gradient says nothing where each run gives another.

    Args:
        failure: The failure.
        before: Those of the properties that stand before it.
    """
    if failure.check not in TRACED:
        about = (failure.check, failure.cause) == ("effects", "mutates-saved") and failure.input is not None
        if about and any((each.cause, each.input) == ("nondeterministic", failure.input) for each in before):
            return "determinism"
        wrong = {each.cause for each in before if each.check == "forward" and each.follows is None}
        misfit = failure.cause == "raises" and "shape" in wrong
        contradicted = failure.evidence.get("reverse mode") == "wrong as well" and "kernel-mismatch" in wrong
        explained = (misfit and failure.check in DIFFERENTIATED) or contradicted
        return "forward" if explained else None
    others = [each for each in before if each.check != failure.check and each.follows is None]
    for each in others:
        if each.cause == failure.cause and each.cause != "unknown":
            return each.check
    for each in others:
        if failure.input is not None and each.input == failure.input:
            return each.check
    if failure.cause in BROAD:
        return next((each.check for each in others if each.cause in ROOTS), None)
    return None
