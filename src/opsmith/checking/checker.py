"""Check an operator: run every selected property on its samples and return one report."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from opsmith import errors
from opsmith.checking.effort import Effort, Level, effort_named
from opsmith.checking.exceptions import UncheckableError
from opsmith.checking.output.script import replayed
from opsmith.checking.processes.fork import isolated, limit_of, refuse_isolation
from opsmith.checking.properties import ASKED, EVERY, GROUPS, PROPERTIES
from opsmith.checking.properties.kernels.sizes import kernels_in_cpp
from opsmith.checking.properties.torch.compiled_calls import load_compiler
from opsmith.checking.property import raised
from opsmith.checking.report import Failure, Outcome, Report
from opsmith.checking.run_property import few_threads, referred, run
from opsmith.checking.samples.empty_inputs import failure_of
from opsmith.checking.samples.perturb import DERIVATIVES, among_symmetric, remark
from opsmith.checking.samples.selection import BRIEF, briefly, remarks
from opsmith.checking.samples.variations import Variations, variations
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import ForwardRaisedError, GivenSamples, subject_of
from opsmith.core.calls import shown
from opsmith.core.location import where
from opsmith.core.operator import Operator

Progress = Callable[[str, int, int], None]


# In a caller's inference mode there would be nothing to differentiate, but in the threads of `state`.
@torch.inference_mode(mode=False)
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
) -> Report:
    """Check an operator: results, gradients, second order, side effects and more, each against its reference.

    Args:
        operator: The operator; or an `autograd.Function` class, or an operator of torch.library, which are
            checked as they are, through `apply` or `torch.ops`.
        samples: Tuples of arguments, or a function that returns them; the operator's own samples by default.
            From those of a class the types of its arguments are told, too.
        only: Names of the properties to check, or `integration` for all that ask what torch makes of it; all
            by default.
        skip: Names of properties to leave out.
        seed: Seed of samples and probes: the same seed gives the same report.
        effort: How much to look at: `quick`, `default` or `thorough`; or an `Effort` of one's own.
        progress: Called with a property's name before it runs, how many are done, and how many there are.
        isolate: Whether each property runs in a forked child process, so that the death of one is a failure
            and not the end; a number is how many seconds each may take.
        sanitize: Whether kernels in C++ are run under the compiler's sanitizers too, which is the property
            `sanitized`; without it, it is checked where `only` names it.

    Raises:
        MissingSamplesError: If there are no samples.
        SampleError: If a sample does not fit the arguments, or holds or gives what cannot be compared.
        UsageError: If `operator` is none, a name in `only` or `skip` is no property, they leave nothing to
            check, `effort` is no level, `seed` no whole number that torch takes, or hooks on saved tensors
            are set.
        ToolchainError: If kernels are to be sanitised, and there are no sanitizers here.

    Example:
        >>> import opsmith.ops
        >>> opsmith.check(opsmith.ops.exp, only=["forward", "gradient"]).passed
        True
    """
    wanted = selected(only, skip, ASKED if sanitize else ())
    names = [name for name in EVERY if name in PROPERTIES or name in wanted]
    level = effort if isinstance(effort, Effort) else effort_named(effort)
    limit_s = limit_of(isolate)
    _refuse_seed(seed)
    refuse_hooks()
    loading = load_compiler() if only is None else 0.0  # one property alone may need none of it
    if limit_s:
        fallen = _fallen(operator, samples, seed, level, limit_s)
        if fallen is not None:
            return fallen
    try:
        subject = subject_of(operator, samples, seed, level)
    except ForwardRaisedError as raised_:
        return _unrun(operator, raised_.outcome, seed, level)
    if limit_s and subject.devices:  # looking at the devices is what wakes an accelerator up
        refuse_isolation()
    found: dict[str, Outcome] = {}
    for name in (each for each in ASKED if each in names):  # before anything runs its kernels here
        if progress is not None:
            progress(name, len(found), len(names))
        try:
            found[name] = run(ASKED[name], replace(subject, limit_s=limit_s or subject.limit_s), 0.0)
        except UncheckableError as error:
            raise error.reason from None
    if not limit_s and _damaging(found):
        found |= {name: Outcome(name, "skipped", DAMAGED) for name in PROPERTIES if name in wanted}
        derived, deaths, smooth = Variations((), ()), NONE, subject
    else:
        safe = subject.by_reference() if limit_s else subject
        with few_threads(level):
            derived, deaths = _derived(safe, limit_s)
            smooth = safe if deaths else among_symmetric(safe)
    every = replace(subject, samples=(*subject.samples, *derived.samples))
    for name in sorted(names, key=lambda name: name not in FIRST):
        if name in found:
            continue
        if progress is not None:
            progress(name, len(found), len(names))
        if name not in wanted:
            found[name] = Outcome(name, "skipped", "left out, as asked", left_out=True)
        elif (unsteady := _unsteady(found)) and (name not in FIRST or name == "state"):
            found[name] = Outcome(name, "skipped", unsteady)
        else:
            known = EVERY[name]
            some = every if known.varied else briefly(subject) if name in BRIEF else subject
            moved = smooth.symmetric if name in DERIVATIVES else frozenset()
            found[name] = run(known, replace(some, symmetric=moved) if moved else some, limit_s)
    if progress is not None:
        progress("", len(found), len(names))
    before = found["forward"]
    more = [failure_of("forward", subject, each) for each in derived.unserved]
    if not any(each.cause == "raises" for each in before.failures):
        more += deaths
    if more and not before.left_out:
        found["forward"] = replace(before, status="failed", failures=(*before.failures, *more))
    replaying = not limit_s and not _leaves(found)
    with quiet(), few_threads(level):
        outcomes = tuple(replayed(referred([found[name] for name in names]), every, run=replaying))
    inputs = tuple(map(str, every.samples))
    ran = [name for name in names if found[name].status != "skipped"]
    about = {
        "inputs": inputs,
        "rejected": derived.rejected,
        "remarks": remarks(subject, ran) + remark(smooth),
    }
    return Report(subject.name, outcomes, seed, environment(), level.name, **about, loading=loading)


NONE: tuple[Failure, ...] = ()

SEEDS = range(-(2**32), 2**32)
"""What torch takes, with room for the streams that are drawn apart from a seed."""


def _refuse_seed(seed: Any) -> None:
    """Refuse what no generator can be seeded with."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed not in SEEDS:
        raise errors.UsageError(
            "this is no seed",
            argument="seed",
            expected="a whole number from -2**32 to 2**32 - 1",
            got=shown(seed),
            hint="call `check(operator, seed=0)`",
        )


FIRST = ("randomness", "determinism", "effects", "state")
"""What these find can make every comparison meaningless, so they run first."""


DAMAGED = "not run: a kernel would damage this process (see `sanitized`); with `isolate` it runs all the same"


def _damaging(found: Mapping[str, Outcome]) -> bool:
    """Whether a kernel was seen to use memory that is not its own, or to end a process."""
    causes = {failure.cause for outcome in found.values() for failure in outcome.failures}
    return not causes.isdisjoint(("out-of-bounds", "raises"))


UNSTEADYING = ("nondeterministic", "mutates-input", "mutates-grad-output", "stale-state")


def _leaves(found: Mapping[str, Outcome]) -> bool:
    """Whether it calls `sys.exit`, so that no replay can be run here."""
    failures = [failure for outcome in found.values() for failure in outcome.failures]
    return any(failure.evidence.get("exception") == SystemExit.__name__ for failure in failures)


def _unsteady(found: Mapping[str, Outcome]) -> str | None:
    """Why two runs may differ, so that comparing them says nothing; None where they are the same."""
    for name, outcome in found.items():
        for failure in outcome.failures:
            # Results that lie in the same memory, as `effects` tells, need not be others: `state` looks.
            if failure.cause in UNSTEADYING and (name, failure.cause) != ("effects", "stale-state"):
                return f"not compared: two runs give different numbers (see `{name}`)"
    return None


def _derived(subject: Subject, limit_s: float) -> tuple[Variations, tuple[Failure, ...]]:
    """More inputs; none where trying them kills the child process that does it first, and how it dies."""
    if limit_s:

        def begin() -> Outcome:
            variations(subject)
            return Outcome("forward", "passed")

        place = subject.specification.where
        deaths = isolated(
            "forward", begin, where=place, limit_s=limit_s, kernels=kernels_in_cpp(subject.specification)
        ).failures
        if deaths:
            return Variations((), ()), deaths
    try:
        return variations(subject), ()
    except SystemExit as error:
        return Variations((), ()), (raised("forward", subject, error, "an input derived from the samples"),)


def _fallen(operator: Any, samples: GivenSamples, seed: int, level: Effort, limit_s: float) -> Report | None:
    """The report on what kills the process before any property runs; None where nothing does.

    A class may, since a run of it tells its types.
    """

    def begin() -> Outcome:
        try:
            subject_of(operator, samples, seed, level)
        except ForwardRaisedError as raised_:
            return raised_.outcome
        return Outcome("forward", "passed")

    forward = getattr(operator, "forward", None)
    place = operator.specification.where if isinstance(operator, Operator) else where(forward or operator)
    first = isolated("forward", begin, where=place, limit_s=limit_s)
    return None if first.status == "passed" else _unrun(operator, first, seed, level)


def _unrun(operator: Any, first: Outcome, seed: int, level: Effort) -> Report:
    """The report on what could not be run at all, as one property found."""
    others = (Outcome(name, "skipped", FALLEN) for name in PROPERTIES if name != first.property)
    name = operator.name if isinstance(operator, Operator) else getattr(operator, "__qualname__", operator)
    found = {each.property: each for each in (first, *others)}
    return Report(str(name), tuple(found[name] for name in PROPERTIES), seed, environment(), level.name)


FALLEN = "it could not be run at all: see `forward`"


def selected(
    only: Iterable[str] | None, skip: Iterable[str] | None, also: Iterable[str] = ()
) -> frozenset[str]:
    """The properties that are to be checked.

    Args:
        only: As of `check`.
        skip: As of `check`.
        also: Names of properties that are asked for by options of their own.

    Raises:
        UsageError: If a name is no property or no string, or nothing is left.

    Example:
        >>> sorted(selected(["forward", "integration"], ["compile", "export", "opcheck"]))
        ['autocast', 'forward', 'serialization']
    """
    chosen, unwanted = _known(only), _known(skip) or frozenset()
    wanted = ((frozenset(PROPERTIES) if chosen is None else chosen) | frozenset(also)) - unwanted
    if not wanted:
        raise errors.UsageError(
            "nothing is left to check",
            expected="one property at least that `only` has and `skip` has not",
            got=f"only={'all' if chosen is None else sorted(chosen)}, skip={sorted(unwanted)}",
            hint="leave `only` or `skip` out, or name other properties",
        )
    return wanted


def _known(names: Iterable[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    given = _names(names)
    found = frozenset(each for name in given for each in GROUPS.get(name, (name,)))
    unknown = sorted(found - set(EVERY))
    if unknown:
        every = [*EVERY, *GROUPS]
        close = difflib.get_close_matches(unknown[0], every, n=1)
        raise errors.UsageError(
            f"there is no property `{unknown[0]}`",
            expected=", ".join(f"`{name}`" for name in every),
            hint=f"write `{close[0]}`" if close else "take one of those names for `only` or `skip`",
        )
    return found


def _names(given: Any) -> list[str]:
    """The names that a caller gives, in a list or alone."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise errors.UsageError(
            "`only` and `skip` take names of properties",
            expected="a list of strings",
            got=shown(given),
            hint='call `check(operator, only=["forward", "gradient"])`',
        )
    return names


def environment() -> dict[str, str]:
    """What a check runs with: versions, platform, devices."""
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
    """Refuse to run among hooks on saved tensors: torch refuses them under `vmap`, whatever the operator.

    Raises:
        UsageError: If the caller is inside of `saved_tensors_hooks`, or of what is made of them.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("a check has none"):
            return
    except RuntimeError as error:
        raise errors.UsageError(
            "a check was begun among hooks on saved tensors",
            expected="none: torch refuses them under `vmap` and `torch.func`",
            got="hooks, of `saved_tensors_hooks` or `save_on_cpu`",
            hint="call `check` outside of the `with`",
        ) from error
