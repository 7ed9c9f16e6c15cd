"""Check an operator: run every selected property on its samples and return one report.

A schedule decides the order in which properties run, and the reasons to skip a property.
"""

from __future__ import annotations

import difflib
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from opsmith import errors
from opsmith.checking.accepting import Accepting, accepted_findings, mark_accepted, unused_remarks
from opsmith.checking.causes import CAUSES
from opsmith.checking.effort import Effort, effort_named
from opsmith.checking.exceptions import UncheckableError, watched_calls
from opsmith.checking.first_calls import (
    Inputs,
    compile_kernels,
    declared_at,
    in_single_precision,
    runnable_samples,
    tried_inputs,
    unrunnable,
)
from opsmith.checking.output.replay import with_replays
from opsmith.checking.processes.fork import limit_of, refuse_isolation
from opsmith.checking.processes.watchdog import EndlessCallError, forget_calls
from opsmith.checking.properties import GROUPS, PROPERTIES, USUAL
from opsmith.checking.properties.kernels.sizes import fixed_size_remarks
from opsmith.checking.properties.kernels.unverified import unrun_kernels
from opsmith.checking.properties.torch.compile import load_compiler
from opsmith.checking.property import Property, missing_here
from opsmith.checking.report import Failure, Outcome, Report, unverified_kernels
from opsmith.checking.run_property import few_threads, in_child_process, run
from opsmith.checking.severity import graded, name_roots
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.side_effects.steady_runs import (
    are_steady,
    is_unsteady,
    steady_conditions,
    unsteady_inputs,
)
from opsmith.checking.subject import SteadyRuns, Subject
from opsmith.checking.subject_kinds import ForwardRaisedError, GivenSamples, subject_of
from opsmith.core.call_arguments import shown
from opsmith.core.effort_level import Level
from opsmith.core.operator import Operator
from opsmith.kernels.languages import language
from opsmith.kernels.launches_on_cpu import launches_on_cpu


# Inference mode of the caller would prevent derivatives. A warning would appear hundreds of times.
@torch.inference_mode(mode=False)
@without_warnings()
@launches_on_cpu()
def check(
    operator: Any,
    *,
    samples: GivenSamples = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    seed: int = 0,
    effort: Level | Effort = "default",
    progress: Progress | None = None,
    isolate: bool | float = False,
    sanitize: bool = False,
    strict: bool = False,
    accept: Accepting | None = None,
) -> Report:
    """Check an operator's results, gradients, second order, side effects and more against its reference.

    Args:
        operator: The operator. An `autograd.Function` class or an operator of torch.library is checked as it
            is, through `apply` or `torch.ops`.
        samples: Tuples of arguments, or a function that returns them; the operator's own samples by default.
            The samples of a class also determine the types of its arguments.
        only: Names of the properties to check, or `integration` for those that use torch's tools; all by
            default.
        skip: Names of properties to leave out.
        seed: Seed of all random numbers: the same seed gives the same report.
        effort: Level of effort (`quick`, `default` or `thorough`), or an `Effort` that you made.
        progress: Function called before each property with its name, the number of properties that have run,
            and the number of all properties.
        isolate: Run each property in a forked child process: if a property ends its process, this is a
            failure, and the check goes on. A number is the time limit of each property in seconds.
        sanitize: Also run kernels in C++ under the compiler's sanitizers (property `sanitized`). By default,
            this property runs only if `only` names it.
        strict: Let the report pass only if there is no warning either, and every kernel ran.
        accept: Findings to accept, in addition to those that the operator's declaration accepts: the reason
            by `(property, cause)`, or by `(property, cause, input)`. They are listed, but do not count.

    Raises:
        MissingSamplesError: If there are no samples.
        SampleError: If a sample does not fit the arguments, or if its values or results cannot be compared.
        UsageError: If `operator` is not an operator, a name in `only` or `skip` is not a property, these two
            leave nothing to check, `accept` is not a mapping of findings, `effort` is not a level, `seed` is
            not an integer that torch takes, or hooks on saved tensors are active.
        ToolchainError: If `sanitize` is set, and this machine has no sanitizers.

    Example:
        >>> import opsmith.ops
        >>> opsmith.check(opsmith.ops.exp, only=["forward", "gradient"]).passed
        True
    """
    wanted = selected(only, skip, ("sanitized",) if sanitize else ())
    level = effort if isinstance(effort, Effort) else effort_named(effort)
    limit_s = limit_of(isolate)
    _refuse_seed(seed)
    refuse_hooks()
    forget_calls()
    if limit_s:
        first = unrunnable(operator, samples, seed, level, limit_s)
        if first.status != "passed":
            return _unrun(operator, first, seed, level, strict=strict)
    try:
        given = subject_of(operator, samples, seed, level)
    except ForwardRaisedError as raised_:
        return _unrun(operator, raised_.outcome, seed, level, strict=strict)
    accepted = (
        *accepted_findings(given.specification.accept, given.name),
        *accepted_findings(accept, given.name),
    )
    given = in_single_precision(given, limit_s)
    if limit_s and given.devices:  # `devices` initializes an accelerator
        refuse_isolation()
    schedule = Schedule(wanted, limit_s, progress)
    schedule.run_apart(given)
    inputs, loading = Inputs(given), 0.0
    if not limit_s and schedule.damages():
        schedule.skip(PROCESS_DAMAGED)
    else:
        compile_kernels(given)
        subject, refused = runnable_samples(given, limit_s)
        if subject.samples:
            loading = load_compiler() if only is None else 0.0  # some properties need no compiler
            inputs = tried_inputs(subject, refused, limit_s)
            if inputs.read_outside:
                schedule.skip(READ_OUTSIDE)
        else:
            schedule.skip(NOT_RUN)
            inputs = Inputs(subject, refused)
    schedule.run_all(inputs)
    found = schedule.found
    found["forward"] = inputs.reported(found["forward"])
    found = {name: graded(found[name]) for name in schedule.names}
    tried = replace(given, samples=(*given.samples, *inputs.derived.samples))
    with few_threads(level):
        rooted = mark_accepted(name_roots(list(found.values())), accepted)
        replaying = not limit_s and not schedule.exits() and not schedule.hung()
        outcomes = tuple(with_replays(rooted, tried, run=replaying))
    few = [name for name in found if found[name].status != "skipped" and PROPERTIES[name].inputs == "few"]
    given.restore_outside()
    return Report(
        given.name,
        outcomes,
        seed,
        environment(),
        level.name,
        remarks=(
            *inputs.remarks(few),
            *unused_remarks(outcomes, accepted),
            *inputs.precision_remarks(),
            *fixed_size_remarks(tried, outcomes),
            *schedule.remarks,
        ),
        inputs=tuple(map(str, tried.samples)),
        rejected=inputs.derived.rejected,
        loading=loading,
        strict=strict,
        unverified=unverified_kernels(outcomes),
        declared=given.specification.where,
    )


READ_OUTSIDE = "not run: the results depend on memory outside of the operator's tensors (see `forward`)"

NOT_RUN = "the operator could not run at all: see `forward`"

SEEDS = range(-(2**32), 2**32)
"""Range of seeds that torch takes, reduced to leave room for the separate streams of a seed."""


def _refuse_seed(seed: Any) -> None:
    """Refuse a seed that no generator takes."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed not in SEEDS:
        raise errors.UsageError(
            "`seed` must be a seed of torch's generators",
            argument="seed",
            expected="a whole number from -2**32 to 2**32 - 1",
            got=shown(seed),
            hint="call `check(operator, seed=0)`",
        )


PROCESS_DAMAGED = (
    "not run: a kernel would damage this process (see `sanitized`); use `isolate` to run the property anyway"
)


def _unrun(operator: Any, first: Outcome, seed: int, level: Effort, *, strict: bool) -> Report:
    """The report on an operator that cannot run at all, from the outcome of the property that found this."""
    others = (Outcome(name, "skipped", NOT_RUN) for name in USUAL if name != first.property)
    name = operator.name if isinstance(operator, Operator) else getattr(operator, "__qualname__", operator)
    first = graded(replace(first, reason=missing_here(first.failures)))
    found = {each.property: each for each in (first, *others)}
    outcomes = tuple(found[name] for name in USUAL)
    return Report(
        str(name),
        outcomes,
        seed,
        environment(),
        level.name,
        strict=strict,
        declared=declared_at(operator),
    )


def selected(
    only: Iterable[str] | None, skip: Iterable[str] | None, also: Iterable[str] = ()
) -> frozenset[str]:
    """Names of the properties to check.

    Args:
        only: As for `check`.
        skip: As for `check`.
        also: Names of properties that separate options request.

    Raises:
        UsageError: If a name is not a property or not a string, or nothing is left.

    Example:
        >>> sorted(selected(["forward", "integration"], ["compile", "export", "opcheck"]))
        ['autocast', 'forward', 'serialization']
    """
    chosen, unwanted = _known(only), _known(skip) or frozenset()
    wanted = ((frozenset(USUAL) if chosen is None else chosen) | frozenset(also)) - unwanted
    if not wanted:
        raise errors.UsageError(
            "nothing is left to check",
            expected="at least one property in `only` that is not in `skip`",
            got=f"only={'all' if chosen is None else sorted(chosen)}, skip={sorted(unwanted)}",
            hint="leave `only` or `skip` out, or name other properties",
        )
    return wanted


def _known(names: Iterable[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    given = _names(names)
    found = frozenset(each for name in given for each in GROUPS.get(name, (name,)))
    unknown = sorted(found - set(PROPERTIES))
    for name in unknown:
        language(name)  # the property of a package that no kernel has named yet: loading the package adds it
    unknown = sorted(found - set(PROPERTIES))
    if unknown:
        every = [*PROPERTIES, *GROUPS]
        close = difflib.get_close_matches(unknown[0], every, n=1)
        raise errors.UsageError(
            f"there is no property `{unknown[0]}`",
            expected=", ".join(f"`{name}`" for name in every),
            hint=f"write `{close[0]}`" if close else "use these names in `only` or `skip`",
        )
    return found


def _names(given: Any) -> list[str]:
    """Names that a caller gives as a list or as one string, in which commas separate them."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise errors.UsageError(
            "`only` and `skip` take names of properties",
            expected="a list of strings",
            got=shown(given),
            hint='call `check(operator, only=["forward", "gradient"])`',
        )
    return [name.strip() for each in names for name in each.split(",")]


def environment() -> dict[str, str]:
    """Versions, platform and devices of a check."""
    import opsmith

    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices += [kind.type] * torch.accelerator.device_count()
    return {
        "opsmith": opsmith.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(devices),
    }


def refuse_hooks() -> None:
    """Refuse to run while hooks on saved tensors are active, since torch refuses these under `vmap`.

    Raises:
        UsageError: If the caller is inside of `saved_tensors_hooks`, or of a region that uses it.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("a check allows no hooks"):
            return
    except RuntimeError as error:
        raise errors.UsageError(
            "a check cannot run while hooks on saved tensors are active",
            expected="no hooks: torch refuses them under `vmap` and `torch.func`",
            got="hooks of `saved_tensors_hooks` or `save_on_cpu`",
            hint="call `check` outside of the `with`",
        ) from error


Progress = Callable[[str, int, int], None]

MOST_HANGS = 2
"""Number of hangs after which nothing else runs, since each hang takes the whole time limit."""

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
"""Texts of the CUDA errors after which a process cannot use the GPU, according to CUDA's documentation."""

LIMIT = "limit"
"""Evidence of a call or process that was stopped after its time limit."""


@dataclass
class Schedule:
    """Schedule of a check, with the outcomes so far.

    Args:
        wanted: Names of the properties that the caller asks for.
        limit_s: Seconds that a property may take in a child process; 0 for none.
        progress: As for `check`.
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
        """Names of all properties of the report, in order."""
        return [name for name in PROPERTIES if name in USUAL or name in self.wanted]

    @property
    def failures(self) -> list[Failure]:
        """The failures so far."""
        return [failure for outcome in self.found.values() for failure in outcome.failures]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remark for the report on the conditions under which runs were compared."""
        found, left = [], unsteady_inputs(self.failures)
        if left:
            names = f"sample{'s' * (len(left) > 1)} {', '.join(map(str, sorted(left)))}"
            words = f"a call writes into an argument or two runs differ, but only on derived inputs ({names})"
            found.append(f"{words}: the other properties ran without these inputs")
        if self._used is not None:
            found.append(f"two runs give different numbers; the other properties ran {self._used.words()}")
        return tuple(found)

    def run_apart(self, subject: Subject) -> None:
        """Run the properties that run kernels in separate processes, before any kernel runs in this one."""
        subject = replace(subject, limit_s=self.limit_s or subject.limit_s)
        for name in self.names:
            if name not in USUAL:
                self._announce(name)
                try:
                    self.found[name] = run(PROPERTIES[name], subject, 0.0)
                except UncheckableError as error:
                    raise error.reason from None

    def skip(self, reason: str) -> None:
        """Skip every requested property that did not run."""
        self._stopped = True
        for name in USUAL:
            if name in self.wanted:
                self.found[name] = Outcome(name, "skipped", reason)

    def run_all(self, inputs: Inputs) -> None:
        """Run the remaining properties; those on which others depend run first."""
        hung_before = _hung([*inputs.refused, *inputs.deaths])
        for name in sorted(self.names, key=lambda name: "first" not in PROPERTIES[name].traits):
            if name not in self.found:
                self._announce(name)
                self.found[name] = self._outcome(PROPERTIES[name], inputs, hung_before)
        if not self._stopped:  # each is reported by the property that would run it, even if that was left out
            unrun = Property("forward", "", partial(unrun_kernels, {**self.found}))
            for failure in run(unrun, inputs.whole, self.limit_s).failures:
                before = self.found[failure.property]
                failures = (*before.failures, failure)
                self.found[failure.property] = replace(before, status="failed", failures=failures)
        self._announce("")

    def _announce(self, name: str) -> None:
        if self.progress is not None:
            self.progress(name, len(self.found), len(self.names))

    def _outcome(self, known: Property, inputs: Inputs, hung_before: list[str]) -> Outcome:
        if known.name not in self.wanted:
            return Outcome(known.name, "skipped", "left out on request", left_out=True)
        if len(hung := [*hung_before, *self.hung()]) >= MOST_HANGS:
            names = " and ".join(f"`{each}`" for each in dict.fromkeys(hung))
            return Outcome(known.name, "skipped", f"not run: a call does not return (see {names})")
        if (lost := self._first(_loses_gpu)) is not None:
            words = f"not run: after the error in `{lost}` this process can no longer use the GPU"
            return Outcome(known.name, "skipped", words)
        subject = inputs.of(known)
        compares = "compares-no-runs" not in known.traits
        if compares and (left := unsteady_inputs(self.failures)):
            samples = tuple(each for each in subject.samples if each.position not in left)
            subject = replace(subject, samples=samples)
        unsteady = self._first(is_unsteady) if compares else None
        if unsteady is not None:
            reason = f"not compared: two runs give different numbers (see `{unsteady}`)"
            steady = None if "compiles" in known.traits else self._steady(inputs.subject)
            # A transformed operator is called several times in one call; no state can be restored in between.
            if steady is None or ("transforms" in known.traits and steady.outside is not None):
                return Outcome(known.name, "skipped", reason)
            self._used, subject = steady, replace(subject, steady=steady)
        return run(known, subject, self.limit_s)

    def damages(self) -> bool:
        """True if a kernel used memory that is not its own, or ended a process."""
        return any(CAUSES[failure.cause].happened in ("raises", "damage") for failure in self.failures)

    def hung(self) -> list[str]:
        """Names of the properties in which a call does not return, each once."""
        return list(dict.fromkeys(_hung(self.failures)))

    def exits(self) -> bool:
        """True if the operator calls `sys.exit`, so that no replay can run here."""
        return self._first(lambda each: each.evidence.get("exception") == SystemExit.__name__) is not None

    def _first(self, shows: Callable[[Failure], bool]) -> str | None:
        """Name of the first property with a failure for which `shows` is true; None if there is none."""
        return next((each.property for each in self.failures if shows(each)), None)

    def _steady(self, subject: Subject) -> SteadyRuns | None:
        """The conditions under which runs agree, tried once for the same failures; None if there are none."""
        failures = self.failures
        key = tuple((each.property, each.cause, each.input) for each in failures)
        if key not in self._conditions:
            conditions = steady_conditions(subject, failures)
            tried = conditions is not None and self._are_steady(replace(subject, steady=conditions))
            self._conditions[key] = conditions if tried else None
        return self._conditions[key]

    def _are_steady(self, subject: Subject) -> bool:
        def begin() -> Outcome:
            with suppress(EndlessCallError), few_threads(subject.effort), watched_calls():
                return Outcome("forward", "passed" if are_steady(subject) else "skipped")
            return Outcome("forward", "skipped")

        return in_child_process("forward", subject, self.limit_s, begin).status == "passed"


def _loses_gpu(failure: Failure) -> bool:
    """True if a kernel's error made the GPU unusable for this process."""
    fatal = any(text in failure.message for text in FATAL)
    return fatal and failure.evidence.get("exception") == torch.AcceleratorError.__name__


def _hung(failures: list[Failure]) -> list[str]:
    return [each.property for each in failures if LIMIT in each.evidence]
