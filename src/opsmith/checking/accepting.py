"""Accepted findings: failures that an author knows and does not repair, each with the reason."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.checking.causes import CAUSES
from opsmith.checking.properties import PROPERTIES
from opsmith.checking.report import Failure, Outcome, Report, unverified_kernels
from opsmith.checking.severity import with_status
from opsmith.core.call_arguments import shown

Accepting = Mapping[tuple[str, ...], str]
"""Reasons by `(property, cause)`, or by `(property, cause, input)` for one argument or result alone."""


@dataclass(frozen=True)
class AcceptedFinding:
    """An accepted finding.

    Args:
        property: The property that fails.
        cause: The cause.
        input: The argument or result; None for any.
        reason: The reason for accepting it.
        alone: True if an `input` of None covers only failures that name no input.
    """

    property: str
    cause: str
    input: str | None
    reason: str
    alone: bool = False

    def covers(self, failure: Failure) -> bool:
        """True if this finding covers a failure."""
        return (failure.property, failure.cause) == (self.property, self.cause) and (
            failure.input == self.input or (self.input is None and not self.alone)
        )

    def __str__(self) -> str:
        beside = f" of `{self.input}`" if self.input else ""
        return f"{self.property}{beside}: {self.cause}"


def accepted_findings(given: Any, operator: str) -> tuple[AcceptedFinding, ...]:
    """Read the findings that an author accepts.

    Args:
        given: Reasons by `(property, cause)` or `(property, cause, input)`; None for none.
        operator: Name of the operator, for messages.

    Raises:
        UsageError: If `given` is not such a mapping, or if a property or cause of that name does not exist.

    Example:
        >>> [str(each) for each in accepted_findings({("vmap", "raises"): "it reads numbers"}, "demo::op")]
        ['vmap: raises']
    """
    if given is None:
        return ()
    with errors.about(operator):
        if not isinstance(given, Mapping):
            raise _unusable(given)
        return tuple(_finding(key, reason) for key, reason in given.items())


def _finding(key: Any, reason: Any) -> AcceptedFinding:
    parts = list(key) if isinstance(key, tuple) else [key]
    if len(parts) not in (2, 3) or not all(isinstance(part, str) for part in parts):
        raise _unusable(key)
    if not isinstance(reason, str) or not reason.strip():
        raise errors.UsageError(
            "an accepted finding needs a reason",
            argument="accept",
            expected="a text that says why you accept it",
            got=shown(reason),
            hint=f"write `accept={{{key!r}: 'it reads numbers'}}`",
        )
    for word, known, what in ((parts[0], PROPERTIES, "property"), (parts[1], CAUSES, "cause")):
        if word not in known:
            close = difflib.get_close_matches(word, known, n=1)
            raise errors.UsageError(
                f"there is no {what} `{word}`",
                argument="accept",
                expected=", ".join(f"`{name}`" for name in known),
                got=repr(key),
                hint=f"write `{close[0]}`" if close else f"take a {what} from the report of a check",
            )
    return AcceptedFinding(parts[0], parts[1], parts[2] if len(parts) == 3 else None, reason)


def _unusable(given: Any) -> errors.UsageError:
    return errors.UsageError(
        "accepted findings are given by property and cause",
        argument="accept",
        expected="a dict from `(property, cause)`, or `(property, cause, input)`, to the reason",
        got=shown(given),
        hint='write `accept={("vmap", "raises"): "it reads numbers"}`',
    )


def mark_accepted(outcomes: Sequence[Outcome], findings: Sequence[AcceptedFinding]) -> list[Outcome]:
    """Mark accepted failures, and failures that follow only from accepted failures.

    Args:
        outcomes: The outcomes, with severities and root causes.
    """

    def marked(outcome: Outcome, reason: Callable[[Failure], str | None]) -> Outcome:
        """The outcome, with reasons; the author's reason takes precedence over the baseline."""
        new = (replace(each, accepted=each.accepted or reason(each)) for each in outcome.failures)
        return replace(outcome, failures=tuple(new))

    def by_finding(failure: Failure) -> str | None:
        return next((each.reason for each in findings if each.covers(failure)), None)

    def by_root(failure: Failure) -> str | None:
        """The reason, if every failure that may explain this one is accepted."""
        found = [each.accepted for each in roots if each.property == failure.follows]
        return found[0] if found and None not in found else None

    first = [marked(one, by_finding) for one in outcomes]
    roots = [each for one in first for each in one.failures if each.follows is None]
    return [with_status(marked(one, by_root)) for one in first]


def unused_remarks(outcomes: Iterable[Outcome], findings: Iterable[AcceptedFinding]) -> tuple[str, ...]:
    """A remark on each accepted finding that no longer occurs, although its property ran."""
    every = list(outcomes)
    ran = {each.property for each in every if each.status != "skipped"}
    failures = [failure for each in every for failure in each.failures]
    return tuple(
        f"`{each}` is accepted ({each.reason}), but no longer occurs: remove it from `accept`"
        for each in findings
        if each.property in ran and not any(each.covers(failure) for failure in failures)
    )


def with_baseline(report: Report, baseline: Report) -> Report:
    """The report, in which each failure that an earlier report has as well is accepted.

    Args:
        baseline: The earlier report on the same operator.
    """
    known = [
        AcceptedFinding(each.property, each.cause, each.input, BASELINE, alone=True)
        for each in baseline.failures
    ]
    outcomes = tuple(mark_accepted(report.outcomes, known))
    return replace(report, outcomes=outcomes, unverified=unverified_kernels(outcomes))


BASELINE = "it is in the baseline"


def project_findings(operator: str, folder: Path | None = None) -> dict[tuple[str, ...], str]:
    """Read the accepted findings of an operator from a project: `accept` in `[tool.opsmith]` of
    pyproject.toml.

    Args:
        operator: Name of the operator, as its report has it.
        folder: Folder in which to look for the file, before its parents; the current folder by default.

    Raises:
        UsageError: If the file, or an entry, cannot be read.
    """
    start = (folder or Path.cwd()).resolve()
    file = next((each / NAME for each in (start, *start.parents) if (each / NAME).is_file()), None)
    if file is None:
        return {}
    try:
        entries: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last bracket, if there are too many
        raise _bad_entry(file, str(error)) from error
    for key, missing in (("tool", {}), ("opsmith", {}), ("accept", [])):
        if not isinstance(entries, dict):
            raise _bad_entry(file, shown(entries))
        entries = entries.get(key, missing)
    if not isinstance(entries, list):
        raise _bad_entry(file, shown(entries))
    found: dict[tuple[str, ...], str] = {}
    for entry in entries:
        match entry:
            case {
                "operator": str(name),
                "property": str(known),
                "cause": str(cause),
                "reason": str(reason),
                **rest,
            } if not rest or ({*rest} == {"input"} and isinstance(rest["input"], str)):
                if name == operator:
                    finding = (known, cause, *map(str, rest.values()))
                    with errors.about(operator, str(file)):
                        found[finding] = _finding(finding, reason).reason
            case _:
                raise _bad_entry(file, shown(entry))
    return found


NAME = "pyproject.toml"


def _bad_entry(file: Path, got: str) -> errors.UsageError:
    return errors.UsageError(
        f"`accept` in the table `[tool.opsmith]` of {file} cannot be read",
        expected="a list of tables with `operator`, `property`, `cause`, `reason` and, optionally, `input`",
        got=got,
        hint='write `accept = [{operator = "ns::op", property = "vmap", cause = "raises", reason = "..."}]`',
    )
