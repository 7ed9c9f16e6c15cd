"""Runs of `opsmith check`: check subjects one after the other or several at once; collect results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from opsmith import errors
from opsmith.checking.accepting import with_baseline
from opsmith.checking.output.annotations import Unchecked
from opsmith.checking.output.terminal import rendered
from opsmith.checking.processes.workers import Advance, Answered, Progressed, Task, run_in_workers
from opsmith.checking.report import SCHEMA, Report
from opsmith.cli.check_subject import CheckSubject, report_of
from opsmith.cli.guard import FAILED, INTERRUPTED, UNUSABLE, complain, fatal_ends_reported, raise_interruption
from opsmith.cli.options import named_as_options
from opsmith.cli.output import Output, progress_bar


@dataclass
class CheckRun:
    """Results of the subjects so far.

    Args:
        reports: Reports of the checked subjects. refused: Errors of the subjects that could not be checked,
            each with its file or module. interrupted: Subjects that were not checked because of Ctrl-C.
        refusal: The error that ended the command before anything was checked; None if there was none.
        refused_in: The file or module of `refusal`; empty if it concerns the whole command.
    """

    reports: list[Report] = field(default_factory=list)
    refused: list[tuple[errors.OpsmithError, str]] = field(default_factory=list)
    interrupted: list[CheckSubject] = field(default_factory=list)
    refusal: errors.OpsmithError | None = None
    refused_in: str = ""

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        if self.refused:
            return UNUSABLE
        return 0 if all(report.passed_as_asked for report in self.reports) else FAILED

    def summary(self) -> str:
        """Return the counts in one line."""
        passed = sum(report.passed_as_asked for report in self.reports)
        parts = [f"{passed} passed", f"{len(self.reports) - passed} not passed"]
        parts += [f"{len(self.refused)} could not be checked"] if self.refused else []
        parts += [f"{len(self.interrupted)} interrupted"] if self.interrupted else []
        every = len(self.reports) + len(self.refused) + len(self.interrupted)
        return f"{every} operators: {', '.join(parts)}"

    def unchecked(self) -> list[Unchecked]:
        """Return each subject that was not checked, with the reason."""
        refused = [*self.refused, *([(self.refusal, self.refused_in)] if self.refusal is not None else [])]
        found = [Unchecked(error.operator, file, str(error), error.where) for error, file in refused]
        return found + [Unchecked(each.name, each.target.source, INTERRUPTION) for each in self.interrupted]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints; `report.schema.json` of `opsmith.checking` describes it."""
        return {
            "schema": SCHEMA,
            "passed": self.status == 0,
            "reports": [report.to_dict() for report in self.reports],
            "unchecked": [asdict(each) for each in self.unchecked()],
            "interrupted": bool(self.interrupted),
        }


INTERRUPTION = "interrupted by Ctrl-C before it was checked"


@dataclass(frozen=True)
class Checking:
    """Subjects, the options of their checks, and their results.

    Args:
        subjects: The subjects.
        run: Object that collects the results. output: Output to which each report is printed at once; None to
            print none.
        options: Options of `check`.
        known: Reports of the baseline by operator.
    """

    subjects: list[CheckSubject]
    run: CheckRun
    output: Output | None
    options: dict[str, Any]
    known: Mapping[str, Report]

    def finish(self, report: Report) -> None:
        """Add a report, and print it."""
        if report.operator in self.known:
            report = with_baseline(report, self.known[report.operator])
        self.run.reports.append(report)
        if self.output is not None:
            self.output.show(rendered(report))

    def refuse(self, error: errors.OpsmithError, file: str) -> None:
        """Add the reason why a subject of a file or module was not checked, and print it."""
        self.run.refused.append((error, file))
        complain(error)


def check_in_turn(checked: Checking, command: Callable[..., Any]) -> None:
    """Check subjects one after the other, and print each report at once.

    A subject that cannot be checked is reported, and the check continues; Ctrl-C ends the loop.

    Args:
        checked: The subjects.
        command: The command; messages name its options.
    """
    apart = checked.options["isolate"] is not False
    for at, each in enumerate(checked.subjects):
        ends = nullcontext() if apart else fatal_ends_reported(f"`{each.name}`")
        try:
            with ends, named_as_options(command), progress_bar(each.name) as progress:
                report = report_of(each, {**checked.options, "progress": progress})
        except errors.OpsmithError as error:
            checked.refuse(error, each.target.source)
        except KeyboardInterrupt:
            checked.run.interrupted += checked.subjects[at:]
            return
        else:
            checked.finish(report)


def check_at_once(checked: Checking, jobs: int, command: Callable[..., Any]) -> None:
    """Check subjects in several processes; results and their order are the same as with one process.

    Args:
        checked: The subjects.
        jobs: Number of processes.
        command: The command; messages name its options.
    """

    def task(subject: CheckSubject) -> Task:
        def run(advance: Advance) -> Report:
            with named_as_options(command):
                return report_of(subject, {**checked.options, "progress": advance})

        return run

    answers: dict[int, Answered] = {}
    at = 0
    with fatal_ends_reported(), closing(run_in_workers([*map(task, checked.subjects)], jobs)) as events:
        try:
            while at < len(checked.subjects):
                with progress_bar(checked.subjects[at].name) as progress:
                    _await(at, events, answers, progress)
                _take(checked, at, answers.pop(at))
                at += 1
        except KeyboardInterrupt:
            for left in range(at, len(checked.subjects)):
                if left in answers:
                    _take(checked, left, answers[left])
                else:
                    checked.run.interrupted.append(checked.subjects[left])


def _await(
    at: int, events: Iterator[Progressed | Answered | None], answers: dict[int, Answered], progress: Advance
) -> None:
    """Collect answers until the answer of a given subject is there; show the progress of this subject."""
    while at not in answers:
        event = next(events)
        raise_interruption()
        if isinstance(event, Answered):
            answers[event.task] = event
        elif event is not None and event.task == at:
            progress(event.activity, event.done, event.total)


def _take(checked: Checking, at: int, answer: Answered) -> None:
    if answer.report is not None:
        checked.finish(answer.report)
    elif isinstance(answer.error, errors.OpsmithError):
        subject = checked.subjects[at]
        checked.refuse(answer.error.of(subject.name), subject.target.source)
    else:
        assert answer.error is not None
        raise answer.error
