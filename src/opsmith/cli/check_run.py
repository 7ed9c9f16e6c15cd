"""A run of `opsmith check`: its subjects with their samples, and its reports with the exit status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opsmith import checking, errors
from opsmith.checking.processes.fork import run_isolated
from opsmith.checking.report import SCHEMA, Outcome, Report
from opsmith.cli.guard import FAILED, INTERRUPTED, UNUSABLE
from opsmith.cli.options import value_named
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.surveying.trials import GuessedSamples, guessed_samples
from opsmith.targets import Target
from opsmith.targets.target import is_function_class

GUESSED = "its arguments were guessed: {words}. If it is not meant to take these, give it others: {how}"


@dataclass(frozen=True)
class CheckSubject:
    """One thing to check.

    Args:
        name: Its name in messages.
        value: An operator, an `autograd.Function` class or an operator of torch.library.
        target: The target that names it.
        samples: Samples to check it on; None for its own.
    """

    name: str
    value: Any
    target: Target
    samples: Any = None

    def guess(self, seed: int, limit_s: float) -> GuessedSamples | None:
        """Guess the arguments of a Function that has no samples; return None for all else.

        Args:
            seed: Seed of the numbers.
            limit_s: Seconds of a child process that tries them first; 0 for none.

        Raises:
            MissingSamplesError: If no guess runs, or a guess kills the process.
        """
        if self.samples is not None or not is_function_class(self.value):
            return None
        hint = self.samples_hint()
        if limit_s:

            def dry() -> Outcome:
                guessed_samples(self.value, name=self.name, hint=hint, seed=seed)
                return Outcome("forward", "passed")

            fallen = run_isolated("forward", dry, where=where(self.value.forward), limit_s=limit_s).failures
            if fallen:
                raise errors.MissingSamplesError(
                    f"there are no samples to check it on, and on guessed arguments {fallen[0].message}",
                    operator=self.name,
                    where=fallen[0].where,
                    hint=hint,
                )
        return guessed_samples(self.value, name=self.name, hint=hint, seed=seed)

    def check(self, options: dict[str, Any]) -> Report:
        """Check it on its own samples, or on those that were given.

        Raises:
            MissingSamplesError: If there are none; the hint shows how to give them.
        """
        try:
            return checking.check(self.value, samples=self.samples, **options)
        except errors.MissingSamplesError as error:
            if isinstance(self.value, Operator):
                raise
            raise errors.MissingSamplesError(
                error.problem, operator=error.operator, where=error.where, hint=self.samples_hint()
            ) from error

    def samples_hint(self) -> str:
        """Return the hint of a message: the way to give samples."""
        file, where = (self.target.source, "") if self.target.is_file else ("samples.py", "samples.py:")
        return (
            f"write `SAMPLES = [(torch.randn(3, 4), 2.0)]`, a tuple for each call, into {file} and run "
            f"`opsmith check {self.target.source}:{self.name} --samples {where}SAMPLES`"
        )


def subjects_of(target: Target, samples: str | None) -> list[CheckSubject]:
    """Return all subjects that a target names.

    Args:
        target: The target.
        samples: Value of `--samples`: `[FILE_OR_MODULE:]NAME`.

    Raises:
        UsageError: If there are samples for more than one operator.
        OperatorNotFoundError: If there is nothing to check, or the samples are not there.
    """
    found = target.checkable()
    if samples is not None and len(found) != 1:
        raise errors.UsageError(
            f"`--samples` is for one operator, and `{target.source}` has {len(found)}",
            expected=f"one of {', '.join(f'`{name}`' for name in found)}",
            hint=f"name it: `opsmith check {target.source}:{next(iter(found))} --samples {samples}`",
        )
    given = (
        None
        if samples is None
        else value_named(
            samples,
            target,
            what="no samples",
            expected="a list of tuples of arguments, or a function without arguments that returns one",
            hint="write `{name} = [(torch.randn(3, 4),)]` there, or name what holds them",
        )
    )
    return [CheckSubject(name, value, target, given) for name, value in found.items()]


@dataclass
class CheckRun:
    """Results of the subjects so far.

    Args:
        reports: Reports of those that were checked.
        unchecked: Errors of those that could not be checked.
        interrupted: Names of those that Ctrl-C left unchecked.
    """

    reports: list[Report] = field(default_factory=list)
    unchecked: list[errors.OpsmithError] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        if self.interrupted:
            return INTERRUPTED
        if self.unchecked:
            return UNUSABLE
        return 0 if all(report.passed_as_asked for report in self.reports) else FAILED

    def summary(self) -> str:
        """Return the counts in one line."""
        passed = sum(report.passed_as_asked for report in self.reports)
        parts = [f"{passed} passed", f"{len(self.reports) - passed} not passed"]
        parts += [f"{len(self.unchecked)} could not be checked"] if self.unchecked else []
        parts += [f"{len(self.interrupted)} interrupted"] if self.interrupted else []
        every = len(self.reports) + len(self.unchecked) + len(self.interrupted)
        return f"{every} operators: {', '.join(parts)}"

    def unchecked_entries(self) -> list[dict[str, Any]]:
        """Return the name of each subject that was not checked, and the reason."""
        left = [{"operator": name, "message": INTERRUPTION} for name in self.interrupted]
        return [{"operator": error.operator, "message": str(error)} for error in self.unchecked] + left

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints; `report.schema.json` of `opsmith.checking` describes it."""
        return {
            "schema": SCHEMA,
            "passed": self.status == 0,
            "reports": [report.to_dict() for report in self.reports],
            "unchecked": self.unchecked_entries(),
            "interrupted": bool(self.interrupted),
        }


INTERRUPTION = "interrupted by Ctrl-C before it was checked"
