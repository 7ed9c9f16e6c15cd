"""Property of an operator: its name, its promise, and the driver over the samples."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from opsmith import errors
from opsmith.checking.exceptions import WrongCountError, WrongFormError, named_by, refuse_own
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject


@dataclass(frozen=True, slots=True)
class Skipped:
    """The property could not be looked at."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A part of the property could not be looked at; the rest was."""

    text: str


Finding = Failure | Note | Skipped
Findings = Iterator[Finding]


@dataclass(frozen=True)
class Property:
    """One thing that holds of a right operator.

    Args:
        name: One word, as in `only=["forward"]`.
        title: What is promised, in one sentence.
        run: Yields what is wrong, what was left out, or that nothing could be looked at; nothing is a pass.
        apart: Whether its time is told apart, since it compiles.
        varied: Whether it looks at the inputs that were derived from the author's samples as well.
    """

    name: str
    title: str
    run: Callable[[Subject], Findings]
    apart: bool = False
    varied: bool = False


def each_sample(check: str, subject: Subject, look: Callable[[Subject, Sample], Findings]) -> Findings:
    """Look at every sample; what the operator raises is a finding, and not the end of the check."""
    for sample in subject.samples:
        try:
            yield from look(subject, sample)
        except BaseException as error:
            refuse_own(error)
            yield raised(check, subject, error, str(sample))


def raised(
    check: str, subject: Subject, error: BaseException, when: str, input: str | None = None
) -> Failure:
    """The failure for an exception inside the operator.

    Args:
        check: Name of the property.
        subject: What is under check.
        error: What was raised.
        when: What was being done, for the message.
        input: Argument that was being looked at.
    """
    found = raised_at(check, subject.specification.where, error, when, input)
    # A class has a name of the check's own, which nobody knows.
    return replace(found, message=found.message.replace(subject.specification.name, subject.name))


def raised_at(check: str, place: str, error: BaseException, when: str, input: str | None = None) -> Failure:
    """The same, where all that is known of the operator is its place.

    Args:
        check: Name of the property.
        place: `file:line` of the operator.
        error: What was raised.
        when: What was being done, for the message.
        input: Argument that was being looked at.
    """
    if isinstance(error, WrongCountError | WrongFormError):
        return Failure(check, error.result, "shape", str(error), error.where, {"sample": when})
    where = error.where if isinstance(error, errors.OpsmithError) else None
    if isinstance(error, errors.OpsmithError):
        input = error.argument or input
    named = named_by(error)
    notes = [note for note in getattr(error, "__notes__", ()) if note not in str(error)]
    evidence: dict[str, Any] = {"sample": when, "exception": type(error).__name__}
    if notes:
        evidence["notes"] = " ".join(notes)
    return Failure(
        property=check,
        input=input,
        cause=named.cause,
        message="; ".join(
            filter(None, [f"{type(error).__name__}: {_text(error)}", named.reason, _end(error)])
        ),
        where=where or innermost(error, place),
        evidence=evidence,
    )


ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def first_line(error: BaseException) -> str:
    """What an exception says first, without the lines that help to fix it, and without addresses.

    Example:
        >>> first_line(ValueError(f"no room in {object()}\\nbuy more"))
        'no room in <object object>'
    """
    # An address is another one in each process, and the same seed is to give the same report.
    return ADDRESS.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__


def _end(error: BaseException) -> str:
    """What an exception is about that is no error."""
    return (
        "" if isinstance(error, Exception) else "it ends the process instead of returning or raising an error"
    )


def _text(error: BaseException) -> str:
    """What an exception says, without the place, which stands elsewhere."""
    lines = [line for line in str(error).splitlines() if not line.startswith("  where: ")]
    return "\n".join(lines) or "without a message"


def innermost(error: BaseException, place: str) -> str:
    """The last line, in the file at `place`, that an exception passed through; else `place`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == place.rpartition(":")[0]]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else place
