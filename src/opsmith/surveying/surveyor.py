"""Survey of one Function: guess arguments, adopt it, check it, and find the declarations that it needs."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import torch

from opsmith import errors
from opsmith.adopting.function_class import keeps_state_in_init
from opsmith.adopting.signature import value_names
from opsmith.checking.properties import GROUPS
from opsmith.checking.report import Failure, Report
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.core.location import parsed, where
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import class_of, overrides
from opsmith.surveying.abilities import abilities
from opsmith.surveying.declarations import Declaration, add_declaration
from opsmith.surveying.finding import Finding, Verdict, adopting_line
from opsmith.surveying.guesses import ClassSource, placeholder_code, unguessable
from opsmith.surveying.trials import SECONDS, Trials, has_backward, run_guesses

ROUNDS = 4
"""Maximum number of declarations that are tried for one class."""


def survey(
    function_class: type[torch.autograd.Function],
    *,
    seed: int = 0,
    seconds: float = SECONDS,
    name: str | None = None,
) -> Finding:
    """Classify a Function: it can be adopted unchanged, needs a declaration from its author, or is wrong.

    Args:
        function_class: The class; its forward and backward run on guessed arguments.
        seed: Seed of these arguments and of the check.
        seconds: Time after which no further guess is tried.
        name: Its name in its module, for a class that a factory made; by default its qualified name.

    Example:
        >>> class Twice(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> survey(Twice).verdict
        'works'
    """
    known = name or function_class.__qualname__
    with thread_count(1):
        try:
            return _survey(function_class, seed, seconds, known)
        # An exception for one class must not prevent the report on the remaining classes.
        except (Exception, SystemExit) as error:
            reason = f"the survey of this class raised {type(error).__name__}: {errors.message_of(error)}"
            return Finding(known, _where(function_class), "needs a declaration", (reason, UNFINISHED))


def _survey(function_class: type[torch.autograd.Function], seed: int, seconds: float, name: str) -> Finding:
    if not overrides(function_class, "forward"):
        reason = "it has no `forward`, so there is nothing to adopt; if classes derive from it, adopt them"
        return Finding(name, _where(function_class), "needs a declaration", (reason,))
    source = ClassSource.of(function_class, name)
    if keeps_state_in_init(function_class):
        reason = (
            "it has an `__init__`, but torch's `apply` makes no instance: let forward take the arguments of "
            "`__init__`"
        )
        return Finding(source.name, where(function_class.forward), "wrong", (reason,))
    unknown = unguessable(source)
    if unknown:
        return _samples_needed(source, unknown)
    trials = run_guesses(source, seed, seconds)
    if not trials.ran:
        return _nothing_ran(source, trials)
    first = _check_and_declare(Declaration(source, trials.ran[0], seed))
    if first.verdict != "wrong":
        return first
    # Its domain may be smaller: try different shapes, and positive numbers.
    for guess in [trials.ran[0].made_positive(), *run_guesses(source, seed, seconds, wanted=3).ran[1:]]:
        other = _check_and_declare(Declaration(source, guess, seed))
        if other.verdict != "wrong":
            return _wrong_for_some(first, other)
    return first


def _check_and_declare(declaration: Declaration) -> Finding:
    """Check a class and add declarations that the failures suggest, until it passes or none is left."""
    function_class = declaration.source.function_class
    reasons: list[str] = []
    try:
        operator = declaration.operator()
    except errors.OpsmithError as error:
        return _finding(declaration, "needs a declaration", [_text(error)], None, None)
    report = declaration.check(operator)
    for _ in range(ROUNDS):
        reason = add_declaration(declaration, report)
        if reason is None:
            break
        reasons.append(reason)
        operator = declaration.operator()
        report = declaration.check(operator)
    faults = _faults(report)
    if faults and all(map(_is_cut, report.errors)):
        reasons.append(CUT)
    elif faults:
        return _finding(declaration, "wrong", faults, None, report)
    reasons += _written(operator)
    verdict: Verdict = "needs a declaration" if reasons else "works"
    if not has_backward(function_class):
        reasons.append("it has no backward: its gradient is the derivative of its forward")
    reasons += _missing_abilities(operator, report)
    found, mends = abilities(declaration, report)
    finding = _finding(declaration, verdict, reasons, operator, report)
    return replace(finding, abilities=found, mends=tuple(mends))


def _finding(
    declaration: Declaration,
    verdict: Verdict,
    reasons: list[str],
    operator: Operator[..., object] | None,
    report: Report | None,
) -> Finding:
    name = declaration.source.name
    return Finding(
        name,
        where(declaration.source.function_class.forward),
        verdict,
        tuple(dict.fromkeys(reasons)),
        declaration.guess.named(declaration.names),
        None if operator is None else adopting_line(name, declaration.options()),
        report=report,
    )


def _samples_needed(source: ClassSource, unknown: list[str]) -> Finding:
    """Return the finding for a class whose arguments cannot be guessed."""
    called = [name for name in unknown if name in source.called]
    other = [name for name in unknown if name not in called]
    reasons = []
    if called:
        are = (
            "is called by its code, so it is a function"
            if len(called) == 1
            else "are called by its code, so they are functions"
        )
        reasons.append(f"{_listed(called)} {are}, and a function cannot be guessed")
    if other:
        reasons.append(f"the values of {_listed(other)} cannot be guessed")
    capitals = [name.upper() for name in unknown]
    reasons.append(
        f"give `samples=`: in the line below, replace {' and '.join(capitals)} by real arguments; "
        "then `opsmith.check` can judge it too"
    )
    return _with_samples(source, tuple(reasons), unknown)


def _with_samples(source: ClassSource, reasons: tuple[str, ...], unknown: list[str]) -> Finding:
    name = source.name
    sample = f"lambda: [({placeholder_code(source, unknown)})]"
    line = adopting_line(name, {"samples": sample})
    return Finding(name, where(source.function_class.forward), "needs a declaration", reasons, None, line)


def _nothing_ran(source: ClassSource, trials: Trials) -> Finding:
    """Return the finding for a class that ran on no guess: the class or the guesses are wrong."""
    name, location = source.name, where(source.function_class.forward)
    stop = trials.mistake or trials.nearest
    file, _ = parsed(location) or ("", 0)
    if stop is None:
        reason = f"on all {trials.tried} guesses its results or gradients were not finite numbers"
        return _with_samples(source, (reason, SAMPLES), [p.name for p in source.parameters])
    words = stop.guess.named(value_names(source.function_class, len(stop.guess.values)))
    method = getattr(source.function_class, stop.method, source.function_class.forward)
    at = stop.where(file) or where(method)
    if stop.is_left_out:
        reason = (
            f"its backward raises {stop.text} ({at}): if it is a base class, adopt its subclasses; if it "
            f"has no gradient, remove the backward"
        )
        return Finding(name, location, "needs a declaration", (reason,), words)
    if trials.mistake is not None:
        reason = f"its {stop.method} {stop.fault}, for all arguments ({at})"
        return Finding(name, location, "wrong", (reason,), words)
    reason = (
        f"none of {trials.tried} guessed calls ran; the call that came furthest ({words}) "
        f"stopped in its {stop.method}: {stop.text} ({at})"
    )
    if stop.method == "backward":
        reason += "; either its backward is wrong, or its forward accepts arguments that it should refuse"
    return _with_samples(source, (reason, SAMPLES), [p.name for p in source.parameters])


SAMPLES = "give `samples=`: in the line below, replace the names in capitals by real arguments"


def _wrong_for_some(wrong: Finding, right: Finding) -> Finding:
    reasons = (
        f"it is wrong for {wrong.tried}: {wrong.reasons[0]}",
        f"it is right for {right.tried}: if only such arguments are valid, let forward raise an error for "
        f"all others",
        *right.reasons,
    )
    return replace(right, verdict="needs a declaration", reasons=reasons, report=wrong.report)


def _where(function_class: type) -> str:
    """Return the `file:line` of a class without methods."""
    try:
        return f"{inspect.getsourcefile(function_class)}:{inspect.getsourcelines(function_class)[1]}"
    except (OSError, TypeError):
        return function_class.__module__


def _written(operator: Operator[..., object]) -> list[str]:
    adopted = class_of(operator.specification.origin)
    names = adopted.schema.names
    written = [names[min(index, len(names) - 1)] for index in sorted(adopted.facts.written or ())]
    written = [name for name in written if name not in adopted.schema.new_values]
    if not written:
        return []
    return [
        f"its forward writes into {_listed(written)}; the operator works on a copy, and does not change "
        f"{_listed(written)}: callers that need the change must use the result"
    ]


def _missing_abilities(operator: Operator[..., object], report: Report) -> list[str]:
    """Describe missing abilities by the reasons of the check; one reason may cover several.

    Surrogate gradients differ from the derivative on purpose, so their check leaves derivatives out.
    """
    origin, surrogate = operator.specification.origin, operator.specification.gradients.surrogate
    once, found = origin.once_differentiable, dict[str, list[str]]()
    for outcome in report.outcomes:
        of_surrogate = surrogate and not (once and outcome.property == "second_order")
        if outcome.property in TITLES and outcome.status == "skipped" and not of_surrogate:
            reason = outcome.reason.removeprefix(f"{report.operator}: ")
            found.setdefault(reason, []).append(TITLES[outcome.property])
    remedy = f"; {DERIVED}" if once and "stochastic" not in origin.claims else ""
    return [f"no {' and no '.join(which)}: {reason}{remedy}" for reason, which in found.items()]


CUT = (
    "its backward cannot be differentiated, because its code leaves torch: mark the backward with "
    "`once_differentiable`: then second derivatives raise a clear error; or give `reference=`"
)

UNFINISHED = "adopt it with `samples=` of valid arguments, and run `opsmith.check` on the operator"

DERIVED = (
    "give `reference=`, the same mathematics in plain PyTorch: the operator then derives the missing part"
)

TITLES = {"second_order": "second order", "forward_mode": "forward mode"}


def _faults(report: Report) -> list[str]:
    """Describe the failures, merged by property, cause and location."""
    failures = list(report.errors)
    if any(failure.property not in GROUPS["integration"] for failure in failures):
        failures = [failure for failure in failures if failure.property not in GROUPS["integration"]]
    if any("state" in failure.evidence for failure in failures):
        failures = [
            failure
            for failure in failures
            if failure.cause != "nondeterministic" or failure.property == "randomness"
        ]
    merged: dict[tuple[str, str, str | None], list[Failure]] = {}
    for failure in failures:
        merged.setdefault((failure.property, failure.cause, failure.where), []).append(failure)
    return [_fault(report, group) for group in merged.values()]


def _is_cut(failure: Failure) -> bool:
    """Return True if a failure only reports a missing second order, because the code leaves torch."""
    late = failure.property in TITLES and failure.cause == "raises"
    return (
        late
        or failure.cause in ("second-order", "forward-mode")
        or failure.evidence.get("exception") == "GraphCutError"
    )


def _fault(report: Report, group: list[Failure]) -> str:
    first = group[0]
    text = (
        re.sub(r"\s*\n\s*", "; ", first.message)
        .replace(f"{report.operator}: ", "")
        .replace(report.operator, "it")
    )
    also = [f"`{failure.input}`" for failure in group[1:] if failure.input]
    text += f"; the same for {', '.join(also)}" if also else ""
    text += f" ({first.where})" if first.where else ""
    if first.property == "gradient" and first.cause not in ("layout", "raises", "nondeterministic"):
        text += '; if it differs from the derivative on purpose, declare `kind="surrogate"`'
    return text


def _listed(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _text(error: errors.OpsmithError) -> str:
    lines = str(error).splitlines()
    return f"{lines[0].partition(': ')[2]}" + (f"; {error.hint}" if error.hint else "")
