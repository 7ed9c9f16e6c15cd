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
"""Version of the format of `Report.to_json`; it changes if a key is removed or its meaning changes."""

WIDTH = 80
"""Width of the text report, in columns."""

WIDEST = frozenset({"float64", "complex128"})
"""The widest dtypes; a result in a narrower dtype is compared with the result in these."""

Status = Literal["passed", "failed", "skipped"]

Severity = Literal["error", "warning", "limit"]

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The severities; the worst comes first."""

Given = Literal["usual", "undeclared", "strained", "unpromised"]
"""Circumstance of a failure.

`usual`: the author's samples, and similar inputs. `undeclared`: a dtype of few digits, a size of 0 or a value
that no sample and no type shows. `strained`: infinite, huge and tiny numbers. `unpromised`: a feature that
nobody wrote, such as the second order of a formula.
"""

GIVEN: tuple[Given, ...] = get_args(Given)
"""The circumstances; if several apply, the last of them counts."""

UNVERIFIED = "unverified"
"""Evidence of a kernel that ran on no sample: its name, with the reason."""

RESULT = "result"
"""Evidence of a failure that is reported for an argument: the wrong result. The gradient is not meant."""

_HINT = re.compile("^ +hint: ", re.MULTILINE)

REQUIRED = (("forward",), ("gradient", "surrogate"))
"""Groups of properties: a check passes only if one property of each group ran and passed."""


@dataclass(frozen=True)
class Failure:
    """One failure of a property.

    Args:
        property: Name of the property that failed.
        input: Name of the argument or result at fault, if there is one.
        cause: The cause, decided by evidence (`sign`, `transposed`, `layout`); else `unknown`.
        message: Description of the failure, in sentences.
        where: `file:line` of the faulty formula, kernel or reference.
        evidence: Measurements by name.
        replay: A few lines of Python that reproduce the failure, if possible.
        follows: Name of the property whose failure is the root cause of this one.
        dtypes: The dtypes in which it was seen; empty if it does not depend on the dtype.
        given: Circumstance in which it was seen; if there are several, the most usual of them.
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
        """The command that prints the page on its cause."""
        return errors.address(self.cause)

    def is_error(self) -> bool:
        """True if it is an error that nobody accepted."""
        return self.severity == "error" and self.accepted is None

    def ends_process(self) -> bool:
        """True if the process that ran the property died, or did not return in time."""
        return bool({"signal", "status", "limit"} & {*self.evidence})

    def is_whole(self) -> bool:
        """True if reports show all its lines: no other failure explains it, and nobody accepted it."""
        return self.follows is None and self.accepted is None

    def rank(self) -> tuple[bool, bool, int]:
        """Key for sorting: explained and accepted failures come last; the others are sorted by severity."""
        return self.follows is not None, self.accepted is not None, SEVERITIES.index(self.severity)

    def heading(self) -> str:
        """One line: the severity (unless it is an error), the property, the input and the cause."""
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
        status: `failed` if a failure is an error, else `passed`; or `skipped`, which is never success.
        reason: The reason why it was skipped.
        seconds: Seconds that it took.
        failures: Its failures: errors, warnings and limits.
        notes: Parts of it that did not run, each with its reason.
        left_out: True if the caller left it out.
        compiles: True if it compiles: its time is reported separately, since only the first compilation in a
            process takes this time.
        dtypes: The floating and complex dtypes in which the property ran the operator.
        kernels: Positions of the operator's kernels that the property ran, in the order in which opsmith
            tries kernels.
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
        """The status, or the severity `warning` or `limit` if there is nothing worse."""
        found = {failure.severity for failure in self.failures if failure.accepted is None} - {"error"}
        if self.status != "passed" or not found:
            return self.status
        return "warning" if "warning" in found else "limit"

    def in_dtype(self, dtype: str) -> Literal["passed", "failed", "warning", "limit", "unclear", ""]:
        """Status of the property in a dtype.

        Args:
            dtype: Torch's name of it, without `torch.`.

        Returns:
            The worst severity, with `failed` for an error. `unclear` if it ran in this dtype, but a failure
            names no dtype, or names float64 or complex128: then lower precision is not reported. Empty if it
            did not run in this dtype.

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
        outcomes: An outcome for each property, in the order in which they ran.
        seed: Seed of all random numbers: the same seed gives the same report.
        environment: Versions and devices that the check ran with.
        effort: Level of effort: `quick`, `default` or `thorough`.
        remarks: Notes on the whole report, for example that the samples were guessed.
        inputs: All inputs of the check: the author's samples, and the inputs derived from them.
        rejected: Derived inputs that the operator rejects by an error of its own, which is no fault.
        loading: Seconds that torch took to load its compiler, once in a process.
        strict: True if warnings, and kernels that ran on no sample, count as errors.
        unverified: Kernels that ran on no sample and so were not checked, each with the reason.
        declared: `file:line` of the operator's reference, or of a class's forward; None in reports of older
            versions.

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
        """All failures: errors, warnings and limits, then failures that another failure explains."""
        every = [failure for outcome in self.outcomes for failure in outcome.failures]
        return tuple(sorted(every, key=Failure.rank))

    def counted(self, severity: Severity) -> tuple[Failure, ...]:
        """The failures of a severity that no other failure explains and nobody accepted."""
        return tuple(each for each in self.failures if each.is_whole() and each.severity == severity)

    @property
    def errors(self) -> tuple[Failure, ...]:
        """The errors: wrong values or gradients, corrupted memory, crashes, hangs, undeclared randomness."""
        return self.counted("error")

    @property
    def warnings(self) -> tuple[Failure, ...]:
        """The warnings: lost digits, memory held too long, faults at strained values or where unpromised."""
        return self.counted("warning")

    @property
    def limits(self) -> tuple[Failure, ...]:
        """The limits: calls that are refused by an error, and code that no sample exercises."""
        return self.counted("limit")

    @property
    def passed(self) -> bool:
        """True if there is no error, and results and gradients were checked.

        Properties and kernels that did not run do not count. If `strict`, there must be no warning either,
        and every kernel must have run.
        """
        return not self.failed and not self.missing()

    @property
    def passed_as_asked(self) -> bool:
        """True under the conditions of `passed`, but the caller may leave out results or gradients."""
        return not self.failed and not self.unmet()

    @property
    def failed(self) -> bool:
        """True if there is an error; if strict, also for a warning or a kernel that did not run."""
        return any(map(self.fails, self.outcomes))

    def fails(self, outcome: Outcome) -> bool:
        """True if an outcome has an error; if strict, also for a counted warning or an unrun kernel."""
        warned = any(each.severity == "warning" and each.is_whole() for each in outcome.failures)
        strictly = self.strict and (warned or bool(unverified_kernels([outcome])))
        return outcome.status == "failed" or strictly

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating and complex dtypes in which any property ran the operator."""
        return tuple(dict.fromkeys(name for outcome in self.outcomes for name in outcome.dtypes))

    @property
    def seconds(self) -> float:
        """Seconds that the check took, without the properties that compile."""
        return sum(outcome.seconds for outcome in self.outcomes if not outcome.compiles)

    @property
    def compile_seconds(self) -> float:
        """Seconds for loading torch's compiler and compiling; later checks in the process need fewer."""
        return self.loading + sum(outcome.seconds for outcome in self.outcomes if outcome.compiles)

    def missing(self) -> list[str]:
        """The first property of each group of `REQUIRED` in which no property passed."""
        passed = {outcome.property for outcome in self.outcomes if outcome.status == "passed"}
        return [group[0] for group in REQUIRED if passed.isdisjoint(group)]

    def unmet(self) -> list[str]:
        """The requested properties that had to run: the properties of `missing`, or all if none ran."""
        left_out = {outcome.property for outcome in self.outcomes if outcome.left_out}
        unmet = [name for name in self.missing() if name not in left_out]
        if not unmet and all(outcome.status == "skipped" for outcome in self.outcomes):
            asked = [outcome.property for outcome in self.outcomes if not outcome.left_out]
            return asked or self.missing()
        return unmet

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types, with its version under `"schema"`."""
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
        """The outcomes of the properties that ran; properties that compile come last."""
        found = [outcome for outcome in self.outcomes if outcome.status != "skipped"]
        return sorted(found, key=lambda outcome: outcome.compiles)

    def skipped(self) -> dict[str, list[str]]:
        """The requested properties that did not run, by reason."""
        return _by_reason(each for each in self.outcomes if each.status == "skipped" and not each.left_out)

    def skipped_lines(self) -> list[str]:
        """The number of skipped properties, and a line for each reason; empty if none was skipped."""
        every = self.skipped()
        count = sum(map(len, every.values()))
        return [f"skipped: {count}"] * bool(count) + [
            f"  {', '.join(names)}: {reason}" for reason, names in every.items()
        ]

    def omissions(self) -> str:
        """One line: the properties that the caller left out, with the reason; empty if there are none."""
        every = _by_reason(each for each in self.outcomes if each.left_out)
        return "; ".join(f"{reason}: {', '.join(names)}" for reason, names in every.items())

    def rejections(self) -> str:
        """One line: the derived inputs that the operator rejects; empty if there are none."""
        return f"not used as inputs: {'; '.join(self.rejected)}" if self.rejected else ""

    def counts(self) -> str:
        """The numbers of errors, warnings, limits and accepted failures, such as `2 errors, 1 limit`."""
        accepted = [each for each in self.failures if each.follows is None and each.accepted is not None]
        numbers = [(len(self.counted(severity)), severity) for severity in SEVERITIES]
        parts = [f"{number} {word}{'s' if number > 1 else ''}" for number, word in numbers if number]
        return ", ".join(parts + ([f"{len(accepted)} accepted"] if accepted else []))

    def verdict(self) -> str:
        """One line: passed or failed, the counts of failures by severity, properties that could not run."""
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
            return f"{self.operator}: passed the requested properties{beside}; not checked: {missing}"
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


def _by_reason(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """Group the properties of outcomes by the reason why they did not run."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        reason = "; ".join([*filter(None, [outcome.reason]), *outcome.notes])
        found.setdefault(reason or "no reason is known", []).append(outcome.property)
    return found


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    failures = [vars(failure) for failure in outcome.failures]
    more = {"word": outcome.word(), "seconds": round(outcome.seconds, 6), "failures": failures}
    found: dict[str, Any] = plain({**vars(outcome), **more})
    return found


def verdict_of(report: Report, outcome: Outcome) -> tuple[Status, str]:
    """Status of a test of one outcome, for JUnit and pytest, and the reason in one line.

    An outcome fails if the report does not pass because of it. A property that did not run is skipped, unless
    the report requires it.

    Example:
        >>> skipped = Outcome("forward", "skipped", "there are no samples")
        >>> verdict_of(Report("demo::twice", (skipped,), seed=0), skipped)
        ('failed', 'the property could not be checked: there are no samples')
    """
    if report.fails(outcome):
        return "failed", min(outcome.failures, key=Failure.rank).heading()
    if outcome.status == "skipped" and not outcome.left_out and outcome.property in report.missing():
        return "failed", f"the property could not be checked: {outcome.reason}"
    return outcome.status, outcome.reason


def unverified_kernels(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Names of the kernels that ran on no sample, with the reasons; accepted kernels are left out."""
    failures = (each for outcome in outcomes for each in outcome.failures if each.accepted is None)
    return tuple(
        dict.fromkeys(str(each.evidence[UNVERIFIED]) for each in failures if UNVERIFIED in each.evidence)
    )


def plain(value: Any) -> Any:
    """A value in JSON's types; numbers that JSON lacks (nan, infinity, complex) become text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def _indented(text: str, by: str = "  ") -> list[str]:
    return [f"{by}{line}" for line in text.splitlines()]


ORDER = ("float64", "float32", "bfloat16", "float16", "complex128", "complex64")
"""The order in which reports name dtypes; all other dtypes follow."""


@dataclass
class SeenCalls:
    """The dtypes with which an operator, or one of its kernels, was called, and the kernels that ran.

    Attributes:
        seen: The dtypes.
        kernels: The kernels that ran, and the kernels of which a finding says why they did not run.
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
    """Names of dtypes, without repetition, in the order of reports.

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
        ReportFormatError: If the text is not a report, or if its version differs.

    Example:
        >>> from opsmith.checking.report import Outcome
        >>> text = Report("demo::twice", (Outcome("forward", "passed"),), seed=0).to_json()
        >>> read_reports(text)["demo::twice"].outcomes[0].status
        'passed'
    """
    reports = {}
    for each in FORMAT.read(text, file).values():
        made = from_json(each, Report)
        # The loading time is written as a part of the time of all properties that compile.
        loading = max(each["compile_seconds"] - made.compile_seconds, 0.0)
        reports[made.operator] = replace(made, loading=round(loading, 6))
    return reports


def shown(value: Any) -> str:
    """A piece of evidence as text: numbers have six digits, in lists as well.

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
        evidence: The evidence by name; a mapping in it, such as the other causes that fit, is nested one
            level deeper.
        depth: Nesting depth of the mapping.
    """
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield depth, str(name), ""
            yield from evidence_rows(value, depth + 1)
        else:
            yield depth, str(name), shown(value)


def folded(code: str, width: int) -> str:
    """Python code in lines that fit: they are broken only inside brackets, so that the code still runs.

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
    """The spaces at which a line of Python may be broken: inside brackets, not in strings or comments."""
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
