"""Report of a check: one outcome for each property, with its failures."""

from __future__ import annotations

import io
import json
import math
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from opsmith import errors
from opsmith.checking.causes import CAUSES
from opsmith.core.json_documents import DocumentFormat, from_json
from opsmith.core.kernels import Kernel
from opsmith.core.location import line_at
from opsmith.display import framed, short_repr, titled_repr
from opsmith.errors import printable

SCHEMA = 4
"""Version of the format of `Report.to_json`; it changes when a key changes its meaning or is removed."""

WIDTH = 80
"""Columns of the report in text."""

WIDEST = frozenset({"float64", "complex128"})
"""Widest dtypes: a result in a narrower one is held to that in these."""

Status = Literal["passed", "failed", "skipped"]

Severity = Literal["error", "warning", "limit"]

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The severities, the worst first."""

Given = Literal["usual", "undeclared", "strained", "unpromised"]
"""Circumstance of a failure.

`usual`: the author's samples, and inputs like them. `undeclared`: a dtype of few digits, a size of 0 or a
value that no sample and no type shows. `strained`: infinite, huge and tiny numbers. `unpromised`: what nobody
wrote, as the second order of a formula.
"""

GIVEN: tuple[Given, ...] = get_args(Given)
"""The circumstances: where several apply, the last one counts."""

UNVERIFIED = "unverified"
"""Evidence of a kernel that ran on no sample: its name, with the reason."""

RESULT = "result"
"""Evidence of a failure that is reported under an argument: the result that is wrong, and no gradient."""

_HINT = re.compile("^ +hint: ", re.MULTILINE)

REQUIRED = (("forward",), ("gradient", "surrogate"))
"""A check only passes if one property of each group was really run and passed."""


@dataclass(frozen=True)
class Failure:
    """One failure of a property.

    Args:
        property: Name of the property that failed.
        input: Name of the argument or result at fault, where it is one.
        cause: The cause, decided by evidence (`sign`, `transposed`, `layout`); else `unknown`.
        message: Description of the failure, in sentences.
        where: `file:line` of the formula, kernel or reference at fault.
        evidence: Measurements by name.
        replay: A few lines of Python that show the failure again, where that is possible.
        follows: Name of the property whose failure is the root cause of this one.
        dtypes: The dtypes in which it was seen; empty where it is bound to none.
        given: Circumstance in which it was seen; of several, the most usual one.
        minor: True if the numbers agree to half of the digits of their dtype.
        severity: `error`, `warning` or `limit`; the table in docs/checking.md decides it.
        accepted: The reason why the author accepts it; None if it counts.
    """

    property: str
    input: str | None
    cause: str
    message: str
    where: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)
    replay: str | None = None
    follows: str | None = None
    dtypes: tuple[str, ...] = ()
    given: Given = "usual"
    minor: bool = False
    severity: Severity = "error"
    accepted: str | None = None

    def address(self) -> str:
        """The command that prints the page of its cause."""
        return errors.address(self.cause)

    def is_error(self) -> bool:
        """True if it is an error that nobody accepted."""
        return self.severity == "error" and self.accepted is None

    def ends_process(self) -> bool:
        """True if the process that ran it died, or did not return in time."""
        return bool({"signal", "status", "limit"} & {*self.evidence})

    def is_whole(self) -> bool:
        """True if reports show all of it: no other failure explains it, and nobody accepted it."""
        return self.follows is None and self.accepted is None

    def rank(self) -> tuple[bool, bool, int]:
        """Key for sorting: what another failure explains and what is accepted last, then by severity."""
        return self.follows is not None, self.accepted is not None, SEVERITIES.index(self.severity)

    def heading(self) -> str:
        """One line: the severity if it is no error, the property, the input and the cause."""
        severity = "" if self.severity == "error" else f"{self.severity}: "
        subject = f" of `{self.input}`" if self.input else ""
        after = f", which follows from `{self.follows}`" if self.follows else ""
        accepted = f", accepted: {self.accepted}" if self.accepted is not None else ""
        return f"{severity}{self.property}{subject}: {self.cause}{after}{accepted}"

    __repr__ = titled_repr(heading)

    def _repr_html_(self) -> str:
        from opsmith.checking.output.html import failure_page

        return framed(failure_page(self), 480, f"failure: {self.heading()}")

    def guidance(self) -> list[tuple[str, str]]:
        """The rows below the message, each a label and a text: the place, its line, the cause, the fix.

        The hint of an error in the message is about this very failure: it stands for the fix of the cause.
        """
        cause = CAUSES.get(self.cause)
        rows = [("where", self.where or ""), ("line", line_at(self.where or ""))]
        if cause is not None:
            rows += [("cause", cause.meaning), ("fix", "" if _HINT.search(self.message) else cause.fix)]
        return [(label, text) for label, text in rows if text]

    def __str__(self) -> str:
        if not self.is_whole():
            return self.heading()
        lines = [self.heading(), *_indented(self.message)]
        lines += [f"  {label}: {text}" for label, text in self.guidance()]
        for depth, name, value in evidence_rows(self.evidence):
            lines += _indented(f"{name}: {value}".rstrip(), "  " * (depth + 1))
        if self.replay:
            lines += ["  replay:", *_indented(folded(self.replay, WIDTH - 4), "    ")]
        lines.append(f"  more: {self.address()}")
        return printable("\n".join(lines))


@dataclass(frozen=True)
class Outcome:
    """Outcome of one property.

    Args:
        property: Its name.
        status: `failed` if a failure is an error, else `passed`, or `skipped`, which is never success.
        reason: The reason for skipping it.
        seconds: Seconds that it took.
        failures: Everything that is wrong: errors, warnings and limits.
        notes: Parts of it that did not run, each with its reason.
        left_out: True if the caller left it out.
        compiles: True if it compiles: its time is reported apart, since all later checks of a process share
            what the first compilation takes.
        dtypes: The floating and complex dtypes in which the operator was run for it.
        kernels: Positions, in the order in which they are tried, of the operator's kernels that ran for it.
    """

    __repr__ = short_repr

    property: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: bool = False
    compiles: bool = False
    dtypes: tuple[str, ...] = ()
    kernels: tuple[int, ...] = ()

    def word(self) -> Literal["passed", "failed", "skipped", "warning", "limit"]:
        """The status, or the worst severity where nothing is worse than a warning or a limit."""
        found = {failure.severity for failure in self.failures if failure.accepted is None} - {"error"}
        if self.status != "passed" or not found:
            return self.status
        return "warning" if "warning" in found else "limit"

    def in_dtype(self, dtype: str) -> Literal["passed", "failed", "warning", "limit", "unclear", ""]:
        """Status of the property in a dtype.

        Args:
            dtype: As torch calls it, without `torch.`.

        Returns:
            The worst severity, with `failed` for an error; `unclear` if it ran in this dtype, and a failure
            names no dtype, or names float64 or complex128, after which lower precision is not reported;
            empty if it did not run in this dtype.

        Example:
            >>> Outcome("forward", "passed", dtypes=("float32",)).in_dtype("float32")
            'passed'
        """
        found = {failure.severity for failure in self.failures if dtype in failure.dtypes}
        if found:
            return "failed" if "error" in found else "warning" if "warning" in found else "limit"
        if dtype not in self.dtypes or self.status == "skipped":
            return ""
        below_float64 = all(failure.dtypes and not WIDEST & {*failure.dtypes} for failure in self.failures)
        return "passed" if below_float64 else "unclear"


@dataclass(frozen=True)
class Report:
    """Report of `opsmith.check`; printing it shows it.

    Args:
        operator: The operator's name.
        outcomes: One for each property, in the order in which they ran.
        seed: Seed of all random numbers: the same seed gives the same report.
        environment: Versions and devices that the check ran with.
        effort: Level of effort: `quick`, `default` or `thorough`.
        remarks: Notes on the whole report: that the samples were guessed, for example.
        inputs: Every input that it was run on: the author's samples, and those that were derived from them.
        rejected: Derived inputs that the operator rejects by an error of its own, which is not a fault.
        loading: Seconds that torch took to load its compiler, which it does once in a process.
        strict: True if warnings, and kernels that ran on no sample, count as errors do.
        unverified: Kernels that ran on no sample, each with the reason: nothing is known of these.
        declared: `file:line` of its reference, or of the forward of a class; None in earlier reports.

    Example:
        >>> Report("demo::twice", (Outcome("forward", "passed"),), seed=0).passed  # no gradient was run
        False
    """

    operator: str
    outcomes: tuple[Outcome, ...]
    seed: int
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    effort: str = "default"
    remarks: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    loading: float = 0.0
    strict: bool = False
    unverified: tuple[str, ...] = ()
    declared: str | None = None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Every failure: errors, warnings, limits; then those that another one explains."""
        every = [failure for outcome in self.outcomes for failure in outcome.failures]
        return tuple(sorted(every, key=Failure.rank))

    def counted(self, severity: Severity) -> tuple[Failure, ...]:
        """The failures of a severity that no other explains and nobody accepted."""
        return tuple(each for each in self.failures if each.is_whole() and each.severity == severity)

    @property
    def errors(self) -> tuple[Failure, ...]:
        """The errors: wrong values or gradients, corrupted memory, crashes, hangs, undeclared randomness."""
        return self.counted("error")

    @property
    def warnings(self) -> tuple[Failure, ...]:
        """The warnings: digits, memory held longer, wrong at strained values or in what nobody promised."""
        return self.counted("warning")

    @property
    def limits(self) -> tuple[Failure, ...]:
        """The limits: what is refused by an error, and what no sample exercises."""
        return self.counted("limit")

    @property
    def passed(self) -> bool:
        """True if there is no error, and results and gradients were really checked.

        It covers what ran, unless `strict`: then there is no warning either, and every kernel ran.
        """
        return not self.failed and not self.missing()

    @property
    def passed_as_asked(self) -> bool:
        """True as `passed` is, but not missing results or gradients that the caller left out."""
        return not self.failed and not self.unmet()

    @property
    def failed(self) -> bool:
        """True if there is an error; strict: or a warning, or a kernel that did not run."""
        return any(map(self.fails, self.outcomes))

    def fails(self, outcome: Outcome) -> bool:
        """True if an outcome has an error; strict: or a warning that counts, or a kernel that did not run."""
        warned = any(each.severity == "warning" and each.is_whole() for each in outcome.failures)
        strictly = self.strict and (warned or bool(unverified_kernels([outcome])))
        return outcome.status == "failed" or strictly

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating and complex dtypes in which the operator was run, for any property."""
        return tuple(dict.fromkeys(name for outcome in self.outcomes for name in outcome.dtypes))

    @property
    def seconds(self) -> float:
        """Seconds that the check took, without what compiles."""
        return sum(outcome.seconds for outcome in self.outcomes if not outcome.compiles)

    @property
    def compile_seconds(self) -> float:
        """Seconds that loading torch's compiler and compiling took, which later checks in a process share."""
        return self.loading + sum(outcome.seconds for outcome in self.outcomes if outcome.compiles)

    def missing(self) -> list[str]:
        """The first property of each group of `REQUIRED` of which none passed."""
        passed = {outcome.property for outcome in self.outcomes if outcome.status == "passed"}
        return [group[0] for group in REQUIRED if passed.isdisjoint(group)]

    def unmet(self) -> list[str]:
        """The requested properties that had to run: those of `missing`, or all where none ran."""
        asked = [outcome.property for outcome in self.outcomes if not outcome.left_out]
        if all(outcome.status == "skipped" for outcome in self.outcomes):
            return asked or self.missing()
        left_out = {outcome.property for outcome in self.outcomes if outcome.left_out}
        return [name for name in self.missing() if name not in left_out]

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types, versioned by `"schema"`."""
        return {
            "schema": SCHEMA,
            "operator": self.operator,
            "declared": self.declared,
            "passed": self.passed,
            "strict": self.strict,
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "limits": len(self.limits),
            "seed": self.seed,
            "effort": self.effort,
            "seconds": round(self.seconds, 6),
            "compile_seconds": round(self.compile_seconds, 6),
            "unverified": list(self.unverified),
            "remarks": list(self.remarks),
            "inputs": list(self.inputs),
            "rejected": list(self.rejected),
            "environment": dict(self.environment),
            "outcomes": [_outcome_dict(outcome) for outcome in self.outcomes],
        }

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def times(self) -> str:
        """One line: the times, the seed and the effort."""
        compiled = any(outcome.compiles and outcome.status != "skipped" for outcome in self.outcomes)
        action = "compiling" if compiled else "loading torch's compiler"
        beside = f"; {action}: {self.compile_seconds:.2f} s" if compiled or self.loading else ""
        return f"{self.seconds:.2f} s{beside}; seed {self.seed}, {self.effort} effort"

    def ran(self) -> list[Outcome]:
        """The outcomes of the properties that ran, those that compile last."""
        found = [outcome for outcome in self.outcomes if outcome.status != "skipped"]
        return sorted(found, key=lambda outcome: outcome.compiles)

    def skipped(self) -> dict[str, list[str]]:
        """The requested properties that did not run, by the reason."""
        return _by_reason(each for each in self.outcomes if each.status == "skipped" and not each.left_out)

    def skipped_lines(self) -> list[str]:
        """The number of skipped properties, and a line for each reason; empty where none was skipped."""
        every = self.skipped()
        count = sum(map(len, every.values()))
        return [f"skipped: {count}"] * bool(count) + [
            f"  {', '.join(names)}: {reason}" for reason, names in every.items()
        ]

    def omissions(self) -> str:
        """One line: the properties that were left out, with the reason; empty where none was."""
        every = _by_reason(each for each in self.outcomes if each.left_out)
        return "; ".join(f"{reason}: {', '.join(names)}" for reason, names in every.items())

    def rejections(self) -> str:
        """One line: the derived inputs that the operator rejects; empty where there is none."""
        return f"not used as inputs: {'; '.join(self.rejected)}" if self.rejected else ""

    def counts(self) -> str:
        """The numbers of errors, warnings, limits and accepted failures, such as `2 errors, 1 limit`."""
        accepted = [each for each in self.failures if each.follows is None and each.accepted is not None]
        numbers = [(len(self.counted(severity)), severity) for severity in SEVERITIES]
        parts = [f"{number} {word}{'s' if number > 1 else ''}" for number, word in numbers if number]
        return ", ".join(parts + ([f"{len(accepted)} accepted"] if accepted else []))

    def verdict(self) -> str:
        """One line: passed or failed, how many errors, warnings and limits, and what could not run."""
        counts = self.counts()
        unverified = f"unverified: {', '.join(self.unverified)}" if self.unverified else ""
        beside = "".join(f"; {part}" for part in (counts, unverified) if part)
        if self.failed:
            wrong = [outcome.property for outcome in self.outcomes if self.fails(outcome)]
            shown = f": {', '.join(wrong)}" if wrong else ""
            return f"{self.operator}: FAILED{shown}{beside}"
        if self.passed:
            return f"{self.operator}: passed{beside}"
        if self.passed_as_asked:
            missing = ", ".join(self.missing())
            return f"{self.operator}: passed as far as asked{beside}; not checked: {missing}"
        return f"{self.operator}: NOT PASSED: {' and '.join(self.unmet())} could not be checked{beside}"

    __repr__ = titled_repr(verdict)

    def _repr_html_(self) -> str:
        from opsmith.checking.output.html import page

        return framed(page([self]), 560, f"check of {self.operator}")

    def __str__(self) -> str:
        lines = [self.verdict()]
        for failure in self.failures:
            lines += ["", str(failure)]
        lines += [""] * bool(self.failures) + [f"  note: {remark}" for remark in self.remarks]
        for outcome in self.ran():
            lines.append(f"  {outcome.property:<17} {outcome.word():<8} {outcome.seconds:6.2f} s")
            lines += [f"    {note}" for note in outcome.notes]
        closing = (*self.skipped_lines(), self.omissions(), self.times(), self.rejections())
        lines += [f"  {line}" for line in closing if line]
        return printable("\n".join(lines))


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    failures = [vars(failure) for failure in outcome.failures]
    more = {"word": outcome.word(), "seconds": round(outcome.seconds, 6), "failures": failures}
    found: dict[str, Any] = plain({**vars(outcome), **more})
    return found


def verdict_of(report: Report, outcome: Outcome) -> tuple[Status, str]:
    """Status of a test of one outcome, as JUnit and pytest have it, and one line that says why.

    An outcome fails if the report does not pass because of it. Whether any property ran is no question about
    one outcome, so that what did not run is skipped, unless a report needs it.

    Example:
        >>> skipped = Outcome("forward", "skipped", "there are no samples")
        >>> verdict_of(Report("demo::twice", (skipped,), seed=0), skipped)
        ('failed', 'it could not be checked: there are no samples')
    """
    if report.fails(outcome):
        return "failed", min(outcome.failures, key=Failure.rank).heading()
    if outcome.status == "skipped" and not outcome.left_out and outcome.property in report.missing():
        return "failed", f"it could not be checked: {outcome.reason}"
    return outcome.status, outcome.reason


def unverified_kernels(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Names of the kernels that ran on no sample, with the reasons; without those that are accepted."""
    failures = (each for outcome in outcomes for each in outcome.failures if each.accepted is None)
    return tuple(
        dict.fromkeys(str(each.evidence[UNVERIFIED]) for each in failures if UNVERIFIED in each.evidence)
    )


def plain(value: Any) -> Any:
    """A value in JSON's types; numbers that JSON lacks (nan, infinity, complex) as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def _by_reason(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """Group the properties of outcomes by the reason why they did not run."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        reason = "; ".join([*filter(None, [outcome.reason]), *outcome.notes])
        found.setdefault(reason or "no reason is known", []).append(outcome.property)
    return found


def _indented(text: str, by: str = "  ") -> list[str]:
    return [f"{by}{line}" for line in text.splitlines()]


ORDER = ("float64", "float32", "bfloat16", "float16", "complex128", "complex64")
"""The order in which reports name dtypes; others follow."""


@dataclass
class SeenCalls:
    """The dtypes of the tensors that an operator, or a kernel of it, was called with, and what kernels ran.

    Attributes:
        seen: The dtypes.
        kernels: The kernels, and those of which a finding says why they did not run.
    """

    seen: set[torch.dtype] = field(default_factory=set)
    kernels: set[Kernel] = field(default_factory=set)

    def note(self, values: Iterable[Any]) -> None:
        """Record the dtypes of a call."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self.seen.add(value.dtype)
            elif isinstance(value, list | tuple):
                self.note(value)

    def names(self) -> tuple[str, ...]:
        """The names of the floating and complex dtypes, in order."""
        inexact = (each for each in self.seen if each.is_floating_point or each.is_complex)
        return ordered(str(each).removeprefix("torch.") for each in inexact)


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Names of dtypes, each once, in the order of reports.

    Example:
        >>> ordered(["float16", "float64", "float16"])
        ('float64', 'float16')
    """
    found = set(names)
    return (*(name for name in ORDER if name in found), *sorted(found.difference(ORDER)))


FORMAT = DocumentFormat(
    errors.ReportFormatError,
    "report",
    Path(__file__).with_name("report.schema.json"),
    "check again with this version: `opsmith check ... --json > FILE`, or `Report.to_json()`",
)


def read_reports(text: str | bytes, file: Path | None = None) -> dict[str, Report]:
    """Read reports, by the names of their operators.

    Args:
        text: JSON: one report, a list of reports, or the output of the command.
        file: The file that has it, for messages.

    Raises:
        ReportFormatError: If it is something else, or of another version.

    Example:
        >>> from opsmith.checking.report import Outcome
        >>> text = Report("demo::twice", (Outcome("forward", "passed"),), seed=0).to_json()
        >>> read_reports(text)["demo::twice"].outcomes[0].status
        'passed'
    """
    reports = {}
    for each in FORMAT.read(text, file).values():
        made = from_json(each, Report)
        # The time of loading is written as a part of the time of all properties that compile.
        loading = max(each["compile_seconds"] - made.compile_seconds, 0.0)
        reports[made.operator] = replace(made, loading=round(loading, 6))
    return reports


def shown(value: Any) -> str:
    """A piece of evidence in text: numbers to six digits, in lists as well.

    Example:
        >>> shown([1 / 3, 2])
        '[0.333333, 2]'
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def evidence_rows(evidence: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """Rows of evidence: depth, name, and value as text.

    Args:
        evidence: By name; a mapping in it, such as the other causes that fit, lies deeper.
        depth: Nesting depth of the mapping.
    """
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield depth, str(name), ""
            yield from evidence_rows(value, depth + 1)
        else:
            yield depth, str(name), shown(value)


def folded(code: str, width: int) -> str:
    """Python code in lines that fit: they are broken at spaces inside brackets, so that they still run.

    Example:
        >>> print(folded("f(first, second, third)  # all", 18))
        f(first, second,
            third)  # all
    """
    return "\n".join(_folded(line, width) for line in code.splitlines())


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    breaks = _spaces_inside(line)
    lines, start, indent = [], 0, ""
    while len(indent) + len(line) - start > width:
        room = start + width - len(indent)
        fitting = [column for column in breaks if start < column <= room]
        later = [column for column in breaks if column > start]
        if not later:
            break
        end = fitting[-1] if fitting else later[0]
        lines.append(indent + line[start:end])
        start, indent = end + 1, "    "
    return "\n".join([*lines, indent + line[start:]])


def _spaces_inside(line: str) -> list[int]:
    """The spaces at which a line of Python may be broken: inside brackets, outside strings and comments."""
    found: list[int] = []
    depth = 0
    before = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if depth > 0 and token.start[0] == 1 and token.start[1] == before + 1 and line[before] == " ":
                found.append(before)
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
            before = token.end[1]
    except (tokenize.TokenError, SyntaxError):
        return []  # part of a longer statement, left as it is
    return found
