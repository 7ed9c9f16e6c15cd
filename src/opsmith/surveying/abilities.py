"""Abilities that an adopted Function gains over its class, or mends: a check of each says so."""

from __future__ import annotations

from opsmith.checking import check
from opsmith.checking.report import Report
from opsmith.surveying.declarations import ON_THE_GUESS, Declaration

COMPARED = {"second_order": "second order", "forward_mode": "jvp", "vmap": "vmap"}
"""Properties that a class may have by its own `apply`, with the names of the abilities."""


def abilities(declaration: Declaration, report: Report) -> tuple[dict[str, str], list[str]]:
    """Compare the abilities of an adopted operator with those of `apply` of its class.

    Args:
        declaration: The class, and the arguments to try.
        report: Report of the operator's check.

    Returns:
        Each ability `new`, `mended` if that of `apply` is wrong or raises, or `kept` if both have it; and a
        sentence on each that is mended.
    """
    passed = {outcome.property: outcome for outcome in report.outcomes if outcome.word() == "passed"}
    found: dict[str, str] = {}
    mends: list[str] = []
    own = check(
        declaration.source.function_class,
        samples=[declaration.guess.values],
        seed=declaration.seed,
        only=[*COMPARED],
        effort=ON_THE_GUESS,
    )
    by_property = {outcome.property: outcome for outcome in own.outcomes}
    if "stochastic" in declaration.kinds:
        passed.pop("vmap", None)  # torch's vmap refuses random numbers unless it is told how to draw them
    for name, title in COMPARED.items():
        if name in passed:
            outcome = by_property[name]
            found[title] = {"passed": "kept", "skipped": "new"}.get(outcome.word(), "mended")
            mends += [f"mends {title}: with `apply`, {failure.message}" for failure in outcome.failures[:1]]
    if "opcheck" in passed and not passed["opcheck"].notes:
        found["torch.compile"] = "kept"
    return found, mends
