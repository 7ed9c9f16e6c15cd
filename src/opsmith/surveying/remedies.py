"""Words that an author may have to say, told from what a check found; each is tried before it is advised."""

from __future__ import annotations

from opsmith.checking.report import Failure, Report
from opsmith.surveying.draft import Draft
from opsmith.surveying.evidence import is_identity, is_nonlinear, is_piecewise_constant, narrows

LEAVES_TORCH = "TransformError"
"""The exception of code that cannot be run on what stands for tensors."""


OTHER = ("layout", "raises", "nondeterministic", "not-exercised")
"""Causes that are no other numbers than the derivative."""


def remedy(draft: Draft, report: Report) -> str | None:
    """Say one more word in the draft, and why; None where the failures suggest none."""
    failures = [failure for failure in report.failures if failure.follows is None]
    for each in (_random, _narrow, _outside, _on_purpose):
        word = each(draft, failures)
        if word is not None:
            return word
    return None


def _random(draft: Draft, failures: list[Failure]) -> str | None:
    if "stochastic" in draft.kinds or not any(
        failure.property == "randomness" and "draws" in failure.evidence for failure in failures
    ):
        return None
    draft.kinds.append("stochastic")
    return (
        'its forward draws random numbers: say so by `kind="stochastic"`, so that torch never merges two '
        "calls into one"
    )


def _narrow(draft: Draft, failures: list[Failure]) -> str | None:
    reading = draft.reading.function_class
    if "float32" in draft.kinds or not failures:
        return None
    returns = narrows(reading, draft.guess, draft.seed)
    if not returns and not any(failure.cause == "precision" for failure in failures):
        return None
    draft.kinds.append("float32")
    what = "returns" if returns else "computes in"
    return f'it {what} float32 for float64: if that is meant, `kind="float32"` says so'


def _outside(draft: Draft, failures: list[Failure]) -> str | None:
    raised = [failure for failure in failures if failure.evidence.get("exception") == LEAVES_TORCH]
    if draft.opaque or not raised:
        return None
    draft.opaque = True
    lines = raised[0].message.splitlines()
    got = next((line.partition("got: ")[2] for line in lines if line.strip().startswith("got: ")), lines[0])
    return (
        f"torch cannot look into its code ({got}): `opaque=True` says so, and it works, but not under "
        "torch.compile and vmap; `reference=`, the same mathematics in plain PyTorch, adds what is missing"
    )


def _on_purpose(draft: Draft, failures: list[Failure]) -> str | None:
    """A gradient that is not the derivative, where something tells that it is meant."""
    if set(draft.kinds) & {"surrogate", "nonlinear", "approximate"}:
        return None
    for failure in failures:
        place = _place(draft, failure)
        if failure.property not in ("gradient", "linearity") or failure.cause in OTHER or place is None:
            continue
        function_class = draft.reading.function_class
        if is_nonlinear(function_class, draft.guess, draft.seed):
            draft.kinds.append("nonlinear")
            return (
                "twice the incoming gradient does not give twice the gradient, as when one clips gradients: "
                'if that is meant, `kind="nonlinear"` says so; otherwise its backward is wrong'
            )
        if is_piecewise_constant(function_class, draft.guess, place, draft.seed):
            draft.kinds.append("surrogate")
            return (
                f"small steps of `{failure.input}` do not change what its forward gives, so the derivative "
                "is zero, and its backward gives something else: if that is meant (a straight-through "
                'estimator), `kind="surrogate"` says so; otherwise its backward is wrong'
            )
        if is_identity(function_class, draft.guess, place, draft.seed):
            draft.kinds.append("surrogate")
            return (
                f"its forward returns `{failure.input}` as it came, and its backward changes the gradient: "
                'if that is meant (a gradient that is scaled or reversed), `kind="surrogate"` says so; '
                "otherwise its backward is wrong"
            )
    return None


def _place(draft: Draft, failure: Failure) -> int | None:
    """Where the argument that a failure names stands in the guess."""
    return draft.names.index(failure.input) if failure.input in draft.names else None
