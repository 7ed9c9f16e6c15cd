"""Findings at lines of source code, for editors and for the logs of GitHub Actions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opsmith.checking.report import Failure, Report, Severity
from opsmith.core.location import SourceLine, parsed, user_line_of_traceback
from opsmith.errors import printable


@dataclass(frozen=True)
class Unchecked:
    """An operator, a file or a command that could not be checked.

    Args:
        operator: Name of the operator; None for a file that could not be imported, or for the whole command.
        file: The file or module that contains it; empty for the whole command.
        message: The reason, and what to do about it.
        where: `file:line` of its declaration, where it is known.
    """

    operator: str | None
    file: str
    message: str
    where: str | None = None

    @property
    def subject(self) -> str:
        """The operator, the file, or the command."""
        return self.operator or self.file or "opsmith check"


NOT_CHECKED = "not-checked"
"""Rule of the annotation of an operator that could not be checked; the rule of a failure is its cause."""


@dataclass(frozen=True)
class Annotation:
    """A finding at a line.

    Args:
        rule: The cause, or `NOT_CHECKED`.
        severity: The severity of the failure.
        subject: Name of the operator, or of the file.
        title: The property, the input and the cause.
        message: Description in sentences.
        line: File, as an absolute path, and number of the line; None if no line is known.
        failure: The failure; None for an `Unchecked`.
    """

    rule: str
    severity: Severity
    subject: str
    title: str
    message: str
    line: SourceLine | None
    failure: Failure | None = None

    def message_with_address(self, separator: str) -> str:
        """Return the message, and the command that prints the page of the cause."""
        return self.message if self.failure is None else f"{self.message}{separator}{self.failure.address()}"


def annotated(reports: Sequence[Report], unchecked: Sequence[Unchecked]) -> Iterator[Annotation]:
    """Yield the failures that no other failure explains, and everything that could not be checked.

    A failure without a line is shown at the declaration of its operator.

    Example:
        >>> from opsmith.checking.report import Outcome
        >>> found = Failure("gradient", "x", "sign", "it has the other sign", __file__ + ":1")
        >>> report = Report("demo::twice", (Outcome("gradient", "failed", failures=(found,)),), seed=0)
        >>> [(each.title, each.line[1]) for each in annotated([report], [])]
        [('gradient of `x`: sign', 1)]
    """
    for report in reports:
        declared = _line(report.declared)
        for failure in report.failures:
            if failure.follows is None:
                yield Annotation(
                    failure.cause,
                    failure.severity,
                    report.operator,
                    replace(failure, severity="error", accepted=None).heading(),
                    printable(failure.message),
                    _line(failure.where) or declared,
                    failure,
                )
        if not (report.passed_as_asked or report.failed):
            verdict = report.verdict().removeprefix(f"{report.operator}: ")
            yield Annotation(NOT_CHECKED, "error", report.operator, "not passed", verdict, declared)
    for each in unchecked:
        line = _line(each.where) or _line_raised(each.message) or _line(f"{each.file}:1")
        yield Annotation(NOT_CHECKED, "error", each.subject, "could not be checked", each.message, line)


def _line(where: str | None) -> SourceLine | None:
    """Return the absolute path and the line number of `file:line`; None if the file does not exist here."""
    found = parsed(where)
    return (str(Path(found[0]).absolute()), found[1]) if found and os.path.isfile(found[0]) else None


def _line_raised(message: str) -> SourceLine | None:
    """Return the last line of user code in the traceback of a message; None if there is no such line."""
    found = user_line_of_traceback(message)
    return None if found is None else _line(f"{found[0]}:{found[1]}")


def counted(found: Iterator[Annotation]) -> Iterator[Annotation]:
    """Yield the annotations of failures that are not accepted."""
    return (each for each in found if each.failure is None or each.failure.accepted is None)


WORDS: dict[Severity, tuple[str, str]] = {
    "error": ("error", "error"),
    "warning": ("warning", "warning"),
    "limit": ("notice", "note"),
}
"""GitHub's workflow command, and the level in SARIF and in compiler-style lines, by severity."""


def workflow_commands(reports: Sequence[Report], unchecked: Sequence[Unchecked]) -> str:
    """Return the commands with which GitHub Actions shows each finding at its line in a pull request.

    Source: "Workflow commands for GitHub Actions". Paths are absolute, so that the folder in which the
    command runs does not matter.
    """
    rows = []
    for each in counted(annotated(reports, unchecked)):
        properties = {} if each.line is None else {"file": each.line[0], "line": str(each.line[1])}
        properties["title"] = f"{each.subject}: {each.title}"
        given = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
        message = _escaped(each.message_with_address("\nmore: "))
        rows.append(f"::{WORDS[each.severity][0]} {given}::{message}\n")
    return "".join(rows)


def _escaped(text: str, more: str = "") -> str:
    """Escape the characters that end a workflow command, or one of its properties."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def lines(reports: Sequence[Report], unchecked: Sequence[Unchecked]) -> str:
    """Return a line for each finding, in the format of compilers: `file:line: level: subject: title:
    message`.

    Paths below the current folder are relative to it.
    """
    rows = []
    for each in counted(annotated(reports, unchecked)):
        place = "opsmith" if each.line is None else f"{_near(each.line[0])}:{each.line[1]}"
        message = each.message_with_address("; more: ")
        row = f"{place}: {WORDS[each.severity][1]}: {each.subject}: {each.title}: {message}".rstrip()
        rows.append(f"{printable(_BREAK.sub(' ', row))}\n")
    return "".join(rows)


_BREAK = re.compile(r"[^\S ]\s*")
"""White space other than a space, with the spaces after it; paths may contain several spaces."""


def _near(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
