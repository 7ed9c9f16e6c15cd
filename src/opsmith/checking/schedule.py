"""Schedule of a check: the order in which properties run, and what keeps one from running."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from opsmith.checking.causes import CAUSES
from opsmith.checking.exceptions import UncheckableError, watched_calls
from opsmith.checking.first_calls import Inputs
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.properties import PROPERTIES, USUAL
from opsmith.checking.properties.kernels.unverified import unrun_kernels
from opsmith.checking.property import Property
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.run_property import few_threads, in_child_process, run
from opsmith.checking.side_effects.steady_runs import SteadyRuns, are_steady, is_unsteady, steady_conditions
from opsmith.checking.subject import Subject

Progress = Callable[[str, int, int], None]

MOST_HANGS = 2
"""Number of hangs after which nothing else runs: each takes its time."""

GPU_ERROR = torch.AcceleratorError.__name__

FATAL = (
    "illegal memory access",
    "illegal instruction",
    "illegal address space",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "device-side assert",
    "unspecified launch failure",
)
"""Words of CUDA for errors after which a process cannot use the GPU, by its documentation."""

LIMIT = "limit"
"""Evidence of a call, or a process, that was stopped for its time."""


@dataclass
class Schedule:
    """Schedule of a check, with the outcomes so far.

    Args:
        wanted: Names of the properties that the caller asks for.
        limit_s: Seconds that a property may take in a child process; 0 for none.
        progress: As of `check`.
        found: The outcomes so far, by the property's name.
    """

    wanted: frozenset[str]
    limit_s: float
    progress: Progress | None
    found: dict[str, Outcome] = field(default_factory=dict)
    _stopped: bool = False
    _conditions: dict[Any, SteadyRuns | None] = field(default_factory=dict)
    _used: SteadyRuns | None = None

    @property
    def names(self) -> list[str]:
        """Names of all properties of the report, in its order."""
        return [name for name in PROPERTIES if name in USUAL or name in self.wanted]

    @property
    def failures(self) -> list[Failure]:
        """The failures so far."""
        return [failure for outcome in self.found.values() for failure in outcome.failures]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remark for the report on the conditions under which runs were compared."""
        if self._used is None:
            return ()
        return (f"two runs give different numbers; the rest ran {self._used.words()}",)

    def run_apart(self, subject: Subject) -> None:
        """Run the properties that run kernels in processes of their own, before any kernel runs here.

        Args:
            subject: The subject, with the author's samples.
        """
        subject = replace(subject, limit_s=self.limit_s or subject.limit_s)
        for name in self.names:
            if name not in USUAL:
                self._announce(name)
                try:
                    self.found[name] = run(PROPERTIES[name], subject, 0.0)
                except UncheckableError as error:
                    raise error.reason from None

    def skip(self, reason: str) -> None:
        """Skip every property that is asked for and did not run."""
        self._stopped = True
        for name in USUAL:
            if name in self.wanted:
                self.found[name] = Outcome(name, "skipped", reason)

    def run_all(self, inputs: Inputs) -> None:
        """Run the properties that are left, those first on which others depend.

        Args:
            inputs: The inputs of the check.
        """
        hung_before = _hung([*inputs.refused, *inputs.deaths])
        for name in sorted(self.names, key=lambda name: not PROPERTIES[name].first):
            if name not in self.found:
                self._announce(name)
                self.found[name] = self._outcome(PROPERTIES[name], inputs, hung_before)
        if not self._stopped:  # each stands in the property that would run it, left out or not
            unrun = Property("forward", "", partial(unrun_kernels, {**self.found}))
            for failure in run(unrun, inputs.every, self.limit_s).failures:
                before = self.found[failure.property]
                failures = (*before.failures, failure)
                self.found[failure.property] = replace(before, status="failed", failures=failures)
        self._announce("")

    def _announce(self, name: str) -> None:
        if self.progress is not None:
            self.progress(name, len(self.found), len(self.names))

    def _outcome(self, known: Property, inputs: Inputs, hung_before: list[str]) -> Outcome:
        if known.name not in self.wanted:
            return Outcome(known.name, "skipped", "left out, as asked", left_out=True)
        if len(hung := [*hung_before, *self.hung()]) >= MOST_HANGS:
            names = " and ".join(f"`{each}`" for each in dict.fromkeys(hung))
            return Outcome(known.name, "skipped", f"not run: a call does not return (see {names})")
        if (lost := self._loses_gpu()) is not None:
            words = f"not run: after the error in `{lost}` this process can no longer use the GPU"
            return Outcome(known.name, "skipped", words)
        subject = inputs.of(known)
        if known.compares_runs and (reason := self._unsteady()):
            steady = None if known.compiles else self._steady(inputs.subject)
            # One call of a transformed operator makes several, between which no state can be restored.
            if steady is None or (known.transforms and steady.outside is not None):
                return Outcome(known.name, "skipped", reason)
            self._used, subject = steady, replace(subject, steady=steady)
        return run(known, subject, self.limit_s)

    def damages(self) -> bool:
        """True if a kernel used memory that is not its own, or ended a process."""
        return any(CAUSES[failure.cause].happened in ("raises", "damage") for failure in self.failures)

    def hung(self) -> list[str]:
        """Names of the properties in which a call does not return, each once."""
        return list(dict.fromkeys(_hung(self.failures)))

    def _loses_gpu(self) -> str | None:
        """Name of the property in which a kernel broke the GPU's context; None for none."""
        errors = (each for each in self.failures if each.evidence.get("exception") == GPU_ERROR)
        lost = (each.property for each in errors if any(text in each.message for text in FATAL))
        return next(lost, None)

    def exits(self) -> bool:
        """True if the operator calls `sys.exit`, so that no replay can run here."""
        return any(failure.evidence.get("exception") == SystemExit.__name__ for failure in self.failures)

    def _unsteady(self) -> str | None:
        """The reason why two runs may differ, so that comparing them is meaningless; None for none."""
        for name, outcome in self.found.items():
            for failure in outcome.failures:
                if is_unsteady(failure):
                    return f"not compared: two runs give different numbers (see `{name}`)"
        return None

    def _steady(self, subject: Subject) -> SteadyRuns | None:
        """The conditions under which runs are the same, tried once for the same failures; None for none."""
        failures = self.failures
        key = tuple((each.property, each.cause, each.input) for each in failures)
        if key not in self._conditions:
            conditions = steady_conditions(subject, failures)
            tried = conditions is not None and self._are_steady(replace(subject, steady=conditions))
            self._conditions[key] = conditions if tried else None
        return self._conditions[key]

    def _are_steady(self, subject: Subject) -> bool:
        def begin() -> Outcome:
            return Outcome("forward", "passed" if are_steady(subject) else "skipped")

        if self.limit_s:
            return in_child_process("forward", subject, self.limit_s, begin).status == "passed"
        with suppress(EndlessCallError), few_threads(subject.effort), watched_calls():
            return begin().status == "passed"
        return False


def _hung(failures: list[Failure]) -> list[str]:
    return [each.property for each in failures if LIMIT in each.evidence]
