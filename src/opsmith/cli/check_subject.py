"""Subjects of `opsmith check`: the operators that a target names, with their samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opsmith import checking, errors
from opsmith.adopting.function_class import is_function_class
from opsmith.adopting.registered import name_of
from opsmith.checking.accepting import project_findings
from opsmith.checking.processes.fork import limit_of, run_isolated
from opsmith.checking.report import Outcome, Report
from opsmith.checking.side_effects.global_settings import ImportChanges, import_changes, settings
from opsmith.cli.options import value_named
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.surveying.trials import GuessedSamples, guessed_samples
from opsmith.targets import Target

GUESSED = "its arguments were guessed: {words}. If they are not valid, give samples: {how}"


@dataclass(frozen=True)
class CheckSubject:
    """An operator or class to check.

    Args:
        name: Its name in messages.
        value: An operator, an `autograd.Function` class or an operator of torch.library.
        target: The target that names it.
        samples: Samples for the check; None for its own samples. imported: Settings that the import of the
            target has changed; None if a different subject of the target has them.
    """

    name: str
    value: Any
    target: Target
    samples: Any = None
    imported: ImportChanges | None = None

    @property
    def reported_name(self) -> str:
        """The name in reports: for a class the qualified name."""
        if isinstance(self.value, Operator):
            return self.value.name
        return self.value.__qualname__ if is_function_class(self.value) else name_of(self.value)

    def guess(self, seed: int, limit_s: float) -> GuessedSamples | None:
        """Guess the arguments of a Function without samples; return None for every other subject.

        Args:
            seed: Seed of the numbers.
            limit_s: Time limit of a child process that tries the guesses first; 0 for no child process.

        Raises:
            MissingSamplesError: If no guess runs, or a guess crashes the process.
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
        """Check the subject on its own samples, or on the given samples.

        Raises:
            MissingSamplesError: If there are none; the hint shows how to give them.
        """
        token = import_changes.set(self.imported)
        try:
            return checking.check(self.value, samples=self.samples, **options)
        except errors.MissingSamplesError as error:
            if isinstance(self.value, Operator):
                raise
            raise errors.MissingSamplesError(
                error.problem, operator=error.operator, where=error.where, hint=self.samples_hint()
            ) from error
        finally:
            import_changes.reset(token)

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
        OperatorNotFoundError: If there is nothing to check, or the samples do not exist.
    """
    before = settings()
    found = target.checkable()
    if samples is not None and len(found) != 1:
        raise errors.UsageError(
            f"`--samples` is for one operator, but `{target.source}` has {len(found)} operators",
            expected=f"one of {', '.join(f'`{name}`' for name in found)}",
            hint=f"name one: `opsmith check {target.source}:{next(iter(found))} --samples {samples}`",
        )
    given = (
        None
        if samples is None
        else value_named(
            samples,
            target,
            what="no samples",
            expected="a list of tuples of arguments, or a function without arguments that returns this list",
            hint="write `{name} = [(torch.randn(3, 4),)]` there, or name the variable that has the samples",
        )
    )
    imported = ImportChanges.since(before, target.source)
    return [
        CheckSubject(name, value, target, given, None if at else imported)
        for at, (name, value) in enumerate(found.items())
    ]


def report_of(subject: CheckSubject, options: dict[str, Any]) -> Report:
    """Check a subject, on guessed arguments if it has no samples.

    Args:
        subject: The subject.
        options: Options of `check`.
    """
    options = {**options, "accept": project_findings(subject.reported_name)}
    guessed = subject.guess(options["seed"], limit_of(options["isolate"]))
    if guessed is None:
        return subject.check(options)
    report = replace(subject, samples=guessed.samples).check(options)
    remark = GUESSED.format(words=guessed.words, how=subject.samples_hint())
    return replace(report, remarks=(*report.remarks, remark))
