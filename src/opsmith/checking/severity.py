"""Severity of failures: an error, a warning or a limit, by one table of rules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from opsmith.checking.calls import leaves_out
from opsmith.checking.causes import CAUSES
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.property import BY_ITSELF, REFUSED, UNCOMPILED
from opsmith.checking.report import SEVERITIES, WIDEST, Failure, Outcome, Severity
from opsmith.checking.subject import Subject
from opsmith.core.source import code_of, names_in

LOW_PRECISION = frozenset({"bfloat16", "float16", "complex32"})
"""Dtypes of few digits, in which a wrong result alone is a warning."""


@dataclass(frozen=True)
class Rule:
    """A rule of the table.

    Args:
        failures: The failures that it is for, as the documentation names them.
        severity: Their severity.
        applies: Decides whether a failure of a subject is one of them.
    """

    failures: str
    severity: Severity
    applies: Callable[[Failure, Subject], bool]


def _damages(failure: Failure, subject: Subject) -> bool:
    return failure.ends_process() if failure.cause == "raises" else CAUSES[failure.cause].damaging


def _limits(failure: Failure, subject: Subject) -> bool:
    return CAUSES[failure.cause].limits


def _caused_by(cause: str) -> Callable[[Failure, Subject], bool]:
    return lambda failure, subject: failure.cause == cause


def _on_an_invented_value(failure: Failure, subject: Subject) -> bool:
    if failure.cause != "raises" or "exception" not in failure.evidence:
        return False
    shown = str(failure.evidence.get("sample", ""))
    return any(sample.invented and shown.startswith(str(sample)) for sample in subject.samples)


def _on_purpose(failure: Failure, subject: Subject) -> bool:
    return failure.cause == "raises" and REFUSED in failure.evidence


def _refused(failure: Failure, subject: Subject) -> bool:
    known = PROPERTIES[failure.property]
    refusable = known.refusable or known.transforms or known.special
    if failure.cause != "raises":
        return False
    if failure.property == "second_order" and BY_ITSELF in failure.evidence:
        return True
    if _promised(failure, subject) is True:
        return False
    return refusable or _seen_only_in(LOW_PRECISION, failure)


def _at_special_values(failure: Failure, subject: Subject) -> bool:
    return PROPERTIES[failure.property].special


def _in_low_precision(failure: Failure, subject: Subject) -> bool:
    return _seen_only_in(LOW_PRECISION, failure)


def _float32_in_float64(failure: Failure, subject: Subject) -> bool:
    narrower = {f"eps of {dtype}" for dtype in LOW_PRECISION}  # as the detector of `precision` names it
    return (
        failure.cause == "precision"
        and _seen_only_in(WIDEST, failure)
        and narrower.isdisjoint(failure.evidence)
    )


def _unpromised(failure: Failure, subject: Subject) -> bool:
    if failure.property == "second_order" and subject.specification.gradients.surrogate:
        return True
    return failure.property in ("second_order", "forward_mode") and _promised(failure, subject) is False


def _promised(failure: Failure, subject: Subject) -> bool | None:
    """True if the author of a class promises what a property checks, False if not; None for all else."""
    if subject.kind.has_reference:
        return None
    origin = subject.specification.origin
    if origin.kind != "class":
        return False
    match failure.property:
        case "second_order":  # its author wrote one, if its backward applies a Function
            code = code_of(origin.subject.backward)
            return code is not None and "apply" in names_in(code)
        case "forward_mode":
            return origin.own("tangent") is not None
        case "vmap":
            return origin.own("vmap") is not None or bool(origin.subject.generate_vmap_rule)
        case _:
            return None


def _seen_only_in(dtypes: Collection[str], failure: Failure) -> bool:
    return bool(failure.dtypes) and {*failure.dtypes} <= {*dtypes}


def _left_out(failure: Failure, subject: Subject) -> bool:
    return failure.cause == "missing-gradient" and leaves_out(subject, failure.input or "")


def _any(failure: Failure, subject: Subject) -> bool:
    return True


def _uncompiled(failure: Failure, subject: Subject) -> bool:
    return UNCOMPILED in failure.evidence


RULES: tuple[Rule, ...] = (
    Rule("a kernel does not compile, or takes other parameters than its operator", "error", _uncompiled),
    Rule("memory that is not its own is used, or the process dies or hangs", "error", _damages),
    Rule(
        "an exception (`raises`) for a value of an argument that the code alone knows, or for a number that "
        "another sample has beside other arguments",
        "limit",
        _on_an_invented_value,
    ),
    Rule(
        "an error of its own (`raise`, `assert`) for a gradient of some samples alone, or for float64 where "
        "samples are in float32",
        "limit",
        _on_purpose,
    ),
    Rule(
        "no sample reaches a formula, a kernel or a claim (`not-exercised`); code is compiled anew for each "
        "size (`recompiles`)",
        "limit",
        _limits,
    ),
    Rule(
        "an exception (`raises`) at special values, in low-precision dtypes alone, in second order, in "
        "forward mode, under autocast, or where it is traced, mapped, copied, compiled or exported; not of a "
        "class that promises it by its own `jvp`, rule for `vmap` or second Function; but a `raise` or an "
        "`assert` of its own refuses a second order all the same",
        "limit",
        _refused,
    ),
    Rule("a line makes a number of a size (`frozen-size`)", "warning", _caused_by("frozen-size")),
    Rule("wrong at special values alone (`values`)", "warning", _at_special_values),
    Rule("wrong in low-precision dtypes alone: bfloat16, float16, complex32", "warning", _in_low_precision),
    Rule("a call that raises has written before (`half-written`)", "warning", _caused_by("half-written")),
    Rule("computed in float32 where float64 comes in (`precision`)", "warning", _float32_in_float64),
    Rule(
        "no gradient by an input for which a class's backward returns None in every return statement",
        "warning",
        _left_out,
    ),
    Rule(
        "wrong second order, or forward mode, of a class that does not promise it: it has no `jvp`, and its "
        "backward applies no Function; wrong second order of surrogate gradients",
        "warning",
        _unpromised,
    ),
    Rule("all else: wrong values, gradients, shapes, dtypes; side effects; exceptions", "error", _any),
)
"""The table: the first rule that applies to a failure decides."""


def graded(outcome: Outcome, subject: Subject) -> Outcome:
    """The outcome with the severity of each failure; without an error, it is not failed.

    Args:
        outcome: The outcome of a property.
        subject: The subject of the check, with derived samples.
    """
    failures = tuple(replace(each, severity=_severity(each, subject)) for each in outcome.failures)
    return with_status(replace(outcome, failures=failures))


def with_status(outcome: Outcome) -> Outcome:
    """The outcome with the status that its failures give."""
    if any(failure.is_error() for failure in outcome.failures):
        return replace(outcome, status="failed")
    if outcome.status != "failed":
        return outcome
    return replace(outcome, status="skipped" if outcome.reason else "passed")


def _severity(failure: Failure, subject: Subject) -> Severity:
    """The severity by the table, or the lower one that the property gave."""
    rule = next(rule for rule in RULES if rule.applies(failure, subject))
    return max(rule.severity, failure.severity, key=SEVERITIES.index)
