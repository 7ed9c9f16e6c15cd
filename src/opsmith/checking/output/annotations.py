"""Findings at lines of source code, for editors and for the logs of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opsmith.checking.report import Failure, Report, Severity
from opsmith.core.location import SourceLine, user_line_of_traceback
from opsmith.errors import printable


@dataclass(frozen=True)
class Unchecked:
    """Something that could not be checked.

    Args:
        operator: Its name; None for a file that could not be imported, or for the whole command.
        file: The file or module that holds it; empty for the whole command.
        message: The reason, and what to do about it.
        where: `file:line` of its declaration, where it is known.
    """

    operator: str | None
    file: str
    message: str
    where: str | None = None


NOT_CHECKED = "not-checked"
"""Rule of an annotation for what could not be checked; those of failures are causes."""


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
        failure: The failure; None for what could not be checked.
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
    """Yield the failures that no other explains, and everything that could not be checked.

    A failure without a line of its own stands at the declaration of its operator.

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
        subject = each.operator or each.file or "opsmith check"
        line = _line(each.where) or _line_raised(each.message) or _line(f"{each.file}:1")
        yield Annotation(NOT_CHECKED, "error", subject, "could not be checked", each.message, line)


def _line(where: str | None) -> SourceLine | None:
    """Return the absolute path and the number of `file:line`; None if it names no file that is here."""
    file, _, number = (where or "").rpartition(":")
    if not number.isdigit() or not Path(file).is_file():
        return None
    return str(Path(file).absolute()), int(number)


def _line_raised(message: str) -> SourceLine | None:
    """Return the last line of user code in a traceback; None if a message has none."""
    found = user_line_of_traceback(message)
    return None if found is None else _line(f"{found[0]}:{found[1]}")


def counted(found: Iterator[Annotation]) -> Iterator[Annotation]:
    """Yield the annotations that nobody accepted."""
    return (each for each in found if each.failure is None or each.failure.accepted is None)


NOTICES: dict[Severity, str] = {"error": "error", "warning": "warning", "limit": "notice"}
"""Workflow commands by severity."""


def workflow_commands(reports: Sequence[Report], unchecked: Sequence[Unchecked]) -> str:
    """Return the commands by which GitHub Actions shows each finding at its line in a pull request.

    Source: "Workflow commands for GitHub Actions". Paths are absolute, so that the folder in which the
    command runs does not matter.
    """
    rows = []
    for each in counted(annotated(reports, unchecked)):
        properties = {} if each.line is None else {"file": each.line[0], "line": str(each.line[1])}
        properties["title"] = f"{each.subject}: {each.title}"
        given = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
        message = _escaped(each.message_with_address("\nmore: "))
        rows.append(f"::{NOTICES[each.severity]} {given}::{message}\n")
    return "".join(rows)


def _escaped(text: str, more: str = "") -> str:
    """Escape the characters that end a workflow command, or one of its properties."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def lines(reports: Sequence[Report], unchecked: Sequence[Unchecked]) -> str:
    """Return a line for each finding, as of a compiler: `file:line: severity: subject: title: message`.

    Paths below the current folder are relative to it. A limit is a `note`, as in a compiler.
    """
    rows = []
    for each in counted(annotated(reports, unchecked)):
        place = "opsmith" if each.line is None else f"{_near(each.line[0])}:{each.line[1]}"
        level = "note" if each.severity == "limit" else each.severity
        text = " ".join(each.message_with_address("; more: ").split())
        rows.append(f"{place}: {level}: {each.subject}: {each.title}: {text}\n")
    return "".join(rows)


def _near(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
