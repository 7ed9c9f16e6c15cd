"""What `opsmith check` checks: each operator or Function of a target, with the samples to check it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opsmith import checking, errors
from opsmith.checking.processes.fork import isolated
from opsmith.checking.report import Outcome, Report
from opsmith.cli.options import value_named
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.locating import Target
from opsmith.locating.target import is_function_class
from opsmith.surveying.samples import Guessed, guessed_samples

GUESSED = "its arguments were guessed: {words}. If it is not meant to take these, give it others: {how}"


@dataclass(frozen=True)
class Checked:
    """One thing to check.

    Args:
        name: What to call it.
        value: An operator, an `autograd.Function` class or an operator of torch.library.
        target: Where it was found.
        samples: What to check it on; None for its own.
    """

    name: str
    value: Any
    target: Target
    samples: Any = None

    def guess(self, seed: int, limit_s: float) -> Guessed | None:
        """Arguments for a Function that has no samples; None for all else.

        Args:
            seed: Seed of the numbers.
            limit_s: Where it is not 0, a child process tries them first, and has so many seconds for it.

        Raises:
            MissingSamplesError: If nothing that was guessed runs, or it kills the process.
        """
        if self.samples is not None or not is_function_class(self.value):
            return None
        hint = self.how()
        if limit_s:

            def dry() -> Outcome:
                guessed_samples(self.value, name=self.name, hint=hint, seed=seed)
                return Outcome("forward", "passed")

            fallen = isolated("forward", dry, where=where(self.value.forward), limit_s=limit_s).failures
            if fallen:
                raise errors.MissingSamplesError(
                    f"there are no samples to check it on, and on guessed arguments {fallen[0].message}",
                    operator=self.name,
                    where=fallen[0].where,
                    hint=hint,
                )
        return guessed_samples(self.value, name=self.name, hint=hint, seed=seed)

    def check(self, options: dict[str, Any]) -> Report:
        """Check it on its own samples, or on those that were named.

        Raises:
            MissingSamplesError: If there are none, with how to give them here.
        """
        try:
            return checking.check(self.value, samples=self.samples, **options)
        except errors.MissingSamplesError as error:
            if isinstance(self.value, Operator):
                raise
            raise errors.MissingSamplesError(
                error.problem, operator=error.operator, where=error.where, hint=self.how()
            ) from error

    def how(self) -> str:
        """How samples are given, for a message."""
        file, where = (self.target.place, "") if self.target.is_file else ("samples.py", "samples.py:")
        return (
            f"write `SAMPLES = [(torch.randn(3, 4), 2.0)]`, a tuple for each call, into {file} and run "
            f"`opsmith check {self.target.place}:{self.name} --samples {where}SAMPLES`"
        )


def everything(target: Target, samples: str | None) -> list[Checked]:
    """All that a target names.

    Args:
        target: The target.
        samples: `[FILE_OR_MODULE:]NAME` of samples, as it stands on the command line.

    Raises:
        UsageError: If there are samples for more than one operator.
        OperatorNotFoundError: If there is nothing to check, or the samples are not there.
    """
    found = target.checkable()
    if samples is not None and len(found) != 1:
        raise errors.UsageError(
            f"`--samples` is for one operator, and `{target.place}` has {len(found)}",
            expected=f"one of {', '.join(f'`{name}`' for name in found)}",
            hint=f"name it: `opsmith check {target.place}:{next(iter(found))} --samples {samples}`",
        )
    given = (
        None
        if samples is None
        else value_named(
            samples,
            target,
            what="no samples",
            expected="a list of tuples of arguments, or a function of nothing that returns one",
            hint="write `{name} = [(torch.randn(3, 4),)]` there, or name what holds them",
        )
    )
    return [Checked(name, value, target, given) for name, value in found.items()]
