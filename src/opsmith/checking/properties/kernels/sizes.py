"""Sizes for kernels: samples of different sizes, sizes that the reference refuses, and fatal sizes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import Overlooking, Raised, attempt
from opsmith.checking.output.replay import check_again
from opsmith.checking.processes.fork import announce, in_child, run_isolated
from opsmith.checking.property import UNCOMPILED, Findings, Note
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.run import Run
from opsmith.checking.samples.domain import sizes_of
from opsmith.checking.samples.sample import Sample, Variation
from opsmith.checking.samples.variation_kinds import LARGE_SIZES, empties, resized
from opsmith.checking.samples.variations import form_of, refusal
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import generate_like, repeated
from opsmith.core.kernels import BuiltKernel, Kernel, choose
from opsmith.kernels.languages import language_of

MOST_ELEMENTS = 20_000
"""Maximum number of elements of a derived sample."""


def kernel_sizes(subject: Subject) -> tuple[Sample, ...]:
    """Samples of different sizes for the kernels that run on this machine; empty if there is no kernel.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> kernel_sizes(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"]))
        ()
    """
    if not any(subject.kernels_on(device) for device in subject.devices):
        return ()
    own = authored(subject)
    found: list[Sample] = []
    for sample in forms(own):
        for change in _changes(own, sample):
            made = change.sample(1 + max(each.position for each in (*subject.samples, *found)))
            if made.elements <= MOST_ELEMENTS and refusal(own, made, change) is None:
                found.append(made)
    return tuple(found)


def fixed_size_remarks(subject: Subject, outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Return a remark for a report on dimensions that have one size in all inputs of kernels.

    Args:
        subject: The subject of the check, with all its inputs.
        outcomes: Outcomes of all properties, which show if a kernel could not be compiled and so did not run.
    """
    failures = (failure for outcome in outcomes for failure in outcome.failures)
    compiled = not any(UNCOMPILED in failure.evidence for failure in failures)
    kernels = compiled and any(subject.kernels_on(device) for device in subject.devices)
    if not kernels or subject.effort.variations < LEAST_VARIATIONS:
        return ()
    lists = {each.name for each in subject.specification.schema.arguments if each.kind.sequence}
    authors = {each.dims for each in subject.samples if not each.origin}
    seen: dict[tuple[str, int], set[int]] = {}
    for sample in (each for each in subject.samples if each.dims in authors):
        for name, value in zip(sample.names, sample.flat, strict=True):
            shape = value.shape if isinstance(value, Tensor) and name not in lists else ()
            for axis, size in enumerate(shape, -len(shape)):
                seen.setdefault((name, axis), set()).add(size)
    fixed = {
        f"`{name}.shape[{axis}]` at {max(sizes)}"
        for (name, axis), sizes in seen.items()
        if len(sizes - {0}) == 1 and max(sizes) > 1
    }
    shown = ", ".join(sorted(fixed))
    return (
        (f"kernels ran only with {shown}: add a sample of another size, or declare `shapes=`",)
        if fixed
        else ()
    )


LEAST_VARIATIONS = 12
"""Minimum number of variations after which variable sizes are expected to have varied."""


def authored(subject: Subject) -> Subject:
    """The subject with only the author's own samples."""
    return replace(subject, samples=tuple(sample for sample in subject.samples if not sample.origin))


def forms(subject: Subject) -> list[Sample]:
    """Samples with elements: one sample for each choice of ranks, as many as the effort allows."""
    found: dict[object, Sample] = {}
    for sample in subject.samples:
        if sample.elements:
            found.setdefault(sample.ranks, sample)
    return [*found.values()][: subject.effort.samples]


def _changes(subject: Subject, sample: Sample) -> Iterator[Variation]:
    """Make all variable sizes larger than tiles, together or each alone; then set each alone to 1."""
    sizes = sizes_of(subject, sample)
    names, change = sizes.varying, partial(resized, sizes, generator=subject.generator())
    large = {name: LARGE_SIZES[at % len(LARGE_SIZES)] for at, name in enumerate(names)}
    together = [*change(large, most=MOST_ELEMENTS)] if names else []
    yield from together
    for name, size in large.items() if not together else ():
        yield from change({name: size}, most=MOST_ELEMENTS)
    for name in names:
        yield from change({name: 1})


CAUSE = "not-refused"
CPU = torch.device("cpu")
DTYPES = (None, torch.float32, torch.float64)
"""The dtypes of the author's samples, or the dtypes that most kernels take."""

LEAST = 2
"""Smallest changed size; other properties check sizes of 0 and 1."""


Flag = bytearray | mmap.mmap
"""A byte, set to 1 before the first call that the reference refuses and the operator takes, since damage may
show in a later call."""


@dataclass(frozen=True)
class RefusedCall:
    """A call that the reference refuses.

    Args:
        sample: The sample, with a size changed.
        flat: Its arguments.
        argument: The tensor whose size is changed; None if several sizes are changed.
        error: Message of the exception that the reference raises.
    """

    sample: Sample
    flat: list[Any]
    argument: str | None
    error: str


def taken_though_refused(property: str, subject: Subject) -> Findings:
    """Failures for sizes that a kernel in C++ accepts, although the reference refuses them.

    The calls run in a child process, since such a kernel may write outside of its memory.
    """
    if not any(_built(subject)):
        return
    if in_child():
        yield from _taken(property, subject, bytearray(1))
        return
    taking = mmap.mmap(-1, 1)  # both processes see it
    try:
        found = watched_in_child(property, subject, lambda: tuple(_taken(property, subject, taking)))
    except errors.UsageError as error:
        yield Note(f"sizes that the reference refuses were not tried: {error.problem}")
        return
    for failure in found.failures:
        if failure.cause == CAUSE:
            yield failure
        elif "limit" not in failure.evidence and taking[0]:
            words = "in or after a call that the reference refuses"
            yield replace(failure, cause=CAUSE, message=f"{failure.message}, {words}")
        else:  # it exceeds the time limit, or dies of a fault that a different property reports
            yield Note(f"not all sizes that the reference refuses were tried: {failure.message}")


def narrow_index(property: str, subject: Subject, kernel: Any) -> Findings:
    """Yield a limit for each kernel in which a compiler finds 32-bit indices of arguments or results."""
    if not isinstance(kernel, BuiltKernel) or not subject.samples:
        return
    values = subject.samples[0].flattening.pack(subject.samples[0].at(None))
    schema = kernel.operator.specification.schema
    own = {*schema.names, *(each.name for each in schema.results)}
    try:
        found = [each for each in kernel.narrow_indices(values) if not each.tensors or each.tensors & own]
    except errors.OpsmithError as error:
        yield Note(f"no compiler shows if indices of {kernel.where} have 32 bits: {error.problem}")
        return
    for each in found[:1]:
        message = f"{each.reason}; its kernel refuses a tensor of more than 2**31 - 1 elements"
        others = ", ".join(dict.fromkeys(other.where for other in found if other.where != each.where))
        tensor, evidence = min(each.tensors & own, default=None), {"others": others} if others else {}
        # A replay would not show more, since nothing runs.
        yield Failure(property, tensor, "narrow-index", message, each.where, evidence, replay="")


def _built(subject: Subject) -> list[bool]:
    """An item for each CPU kernel that was built from source here: True if it computes sizes."""
    kernels = [each.given for each in subject.kernels_on(CPU) if language_of(each.given) is not None]
    try:
        return [isinstance(kernel, BuiltKernel) and kernel.computes_sizes for kernel in kernels]
    except (errors.ToolchainError, errors.CompileError):  # the properties that run kernels report this
        return []


def watched_in_child(
    property: str,
    subject: Subject,
    run: Callable[[], tuple[Failure, ...]],
    processor_limit_s: float = math.inf,
) -> Outcome:
    """Run kernels in C++ in a child process with limited processor time; its death is a failure.

    Raises:
        UsageError: As for `run_isolated`.
    """

    def outcome() -> Outcome:
        # OpenMP in the forked thread still counts the parent's worker threads, and would wait for them for
        # ever if a kernel uses several. A new thread has none.
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
            return Outcome(property, "passed", failures=thread.submit(run).result())

    return run_isolated(
        property,
        outcome,
        where=subject.specification.where,
        limit_s=subject.limit_s,
        processor_limit_s=processor_limit_s,
        kernels=subject.specification.kernels,
    )


def _taken(property: str, subject: Subject, taking: Flag) -> Iterator[Failure]:
    reported: set[str | None] = set()
    subject = authored(subject)
    for sample in forms(subject):
        served = _served(subject, sample)
        if served is None:
            continue
        kernel, dtype = served
        for refused in refused_calls(subject, sample, dtype):
            known = refused.argument in reported
            result = None if known else _called(subject, sample, dtype, refused, taking)
            if result is None:
                continue
            reported.add(refused.argument)
            message = (
                f"the kernel computes {result} for {refused.sample}, but the reference refuses this "
                f"sample ({refused.error}). The reference does not see sizes that are computed in "
                "C++, and the kernel may read outside of its tensors. Refuse these sizes in "
                "`sizes`, by OPSMITH_CHECK, or in `shapes=`"
            )
            evidence = {"sample": str(refused.sample), "refused": refused.error}
            again = check_again(subject, property)
            yield Failure(property, refused.argument, CAUSE, message, kernel.where, evidence, again)


def _served(subject: Subject, sample: Sample) -> tuple[Kernel, torch.dtype | None] | None:
    """The kernel that serves the sample's call, if it computes sizes itself, and the dtype of the call."""
    for dtype in DTYPES:
        values = sample.flattening.pack(sample.at(dtype, CPU))
        chosen = choose(subject.specification.kernels, values)[0]
        given = None if chosen is None else chosen.kernel.given
        if chosen is not None and isinstance(given, BuiltKernel) and given.computes_sizes:
            return chosen.kernel, dtype
    return None


def refused_calls(
    subject: Subject, sample: Sample, dtype: torch.dtype | None = None
) -> Iterator[RefusedCall]:
    """Yield the calls of a sample with one size changed that the reference refuses."""
    for argument, change in _size_changes(subject, sample):
        changed = change.sample(sample.position)
        error = _refusal(subject, changed, dtype)
        # The reference may refuse the new numbers instead of the size.
        if error is not None and _refusal(subject, _repeated(sample, changed), dtype) is not None:
            yield RefusedCall(changed, changed.at(dtype, CPU), argument, error)


def _refusal(subject: Subject, sample: Sample, dtype: torch.dtype | None) -> str | None:
    """The reference's error for a sample that it refuses; None if it takes the sample."""
    with torch.no_grad():
        found = attempt(lambda: subject.reference(sample, sample.at(dtype, CPU)))
    return str(found) if isinstance(found, Raised) else None


def _repeated(sample: Sample, changed: Sample) -> Sample:
    """The changed sample, with the original sample's numbers in each tensor whose shape changed."""
    flat = [
        repeated(had, now.shape) if isinstance(had, Tensor) and had.shape != now.shape else now
        for had, now in zip(sample.flat, changed.flat, strict=True)
    ]
    return replace(changed, flat=tuple(flat))


def _size_changes(subject: Subject, sample: Sample) -> Iterator[tuple[str | None, Variation]]:
    """Change each size by one: in one tensor alone, then in all tensors that share it.

    With integer tensors, which may be indices, no size becomes smaller.
    """
    tensors = {argnum: value for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)}
    point = any(not (value.is_floating_point() or value.is_complex()) for value in tensors.values())
    steps = (1,) if point else (1, -1)
    generator = subject.generator()
    for argnum, value in tensors.items():
        name = sample.labels[argnum]
        for index, size in enumerate(value.shape):
            for step in steps:
                if size + step >= LEAST:
                    shape = [*value.shape[:index], size + step, *value.shape[index + 1 :]]
                    flat = [*sample.flat]
                    flat[argnum] = generate_like(value, shape, generator)
                    words = f"`{name}.shape[{index}]` = {size + step} instead of {size}"
                    yield name, Variation(sample, words, tuple(flat))
    sizes = sizes_of(subject, sample)
    for symbol in sizes.symbols:
        for step in steps:
            if len(symbol.locations) > 1 and symbol.size + step >= LEAST:
                for change in resized(sizes, {symbol.name: symbol.size + step}, generator):
                    yield None, change


def _called(
    subject: Subject, sample: Sample, dtype: torch.dtype | None, refused: RefusedCall, taking: Flag
) -> str | None:
    """Results of the operator for a call that the reference refuses; None if the operator also refuses it."""
    before = taking[0]

    def call() -> list[Any]:
        for _ in range(2):  # the first call validates the sizes in C++ by the reference
            subject.call(sample, sample.at(dtype, CPU))
        announce(partial(str, refused.sample))
        taking[0] = 1
        return subject.call(refused.sample, refused.flat)

    with torch.no_grad():
        results = attempt(call)
    if isinstance(results, Raised):  # an error of the sample's own call is reported elsewhere
        taking[0] = before
        return None
    return " and ".join(f"a result of the shape {list(each.shape)}" for each in results if each is not None)


@dataclass(frozen=True)
class DeadlySizes:
    """Sizes of 0 with which a kernel ends the process.

    Args:
        survived: The accepted variations that may run.
        deaths: A failure for each input that ends the process.
        note: The reason why sizes of 0 were not tried; empty if they were.
    """

    survived: tuple[Sample, ...]
    deaths: tuple[Failure, ...] = ()
    note: str = ""


EMPTY_LIMIT_S = 20.0
"""Seconds of processor time for all calls without elements: a kernel may never return from one."""


def deadly_sizes(property: str, subject: Subject, derived: Sequence[Sample]) -> DeadlySizes:
    """Find inputs without elements that end the process in a kernel in C++, in child processes.

    A kernel is called with sizes of 0 for which the reference returns a result, such as the nan of a mean:
    dividing an integer by such a size ends the process. Calls that the reference refuses, such as an index
    into an empty tensor, are not tried.

    Args:
        property: Name of the property that reports them.
        subject: The subject of the check.
        derived: Accepted variations, from which variations that end the process are removed.
    """
    if not _built(subject):
        return DeadlySizes(tuple(derived))
    own = authored(subject)
    tried = [sample for sample in derived if sample.is_empty]
    known = {form_of(sample) for sample in tried}
    position = 1 + max(each.position for each in (*subject.samples, *derived))
    for sample in forms(own):
        for change in empties(sizes_of(own, sample), subject.generator()):
            made = change.sample(position)
            if form_of(made) not in known:
                tried.append(made)
                known.add(form_of(made))
    deaths: list[Failure] = []
    deadly: set[str] = set()
    note = ""
    while tried:
        run = partial(_call_all, subject, tuple(tried))
        try:
            found = watched_in_child(property, subject, run, EMPTY_LIMIT_S)
        except errors.UsageError as error:
            note = f"sizes of 0 were not tried in a process of their own: {error.problem}"
            break
        if not found.failures:
            break
        (death,) = found.failures
        shown = str(death.evidence.get("sample", ""))
        fatal = next((at for at, sample in enumerate(tried) if shown.startswith(str(sample))), None)
        if fatal is None:
            note = f"not all sizes of 0 were tried: {death.message}"
            break
        deaths.append(death)
        deadly.add(str(tried[fatal]))
        tried = tried[fatal + 1 :]
    survived = tuple(each for each in derived if str(each) not in deadly)
    return DeadlySizes(survived, tuple(deaths), note)


def _call_all(subject: Subject, samples: Sequence[Sample]) -> tuple[Failure, ...]:
    """Call the operator and its backward on calls that the reference takes; errors are reported elsewhere."""
    for sample in samples:
        dtypes = DTYPES if sample.inexact else DTYPES[:1]
        taken = [dtype for dtype in dtypes if _refusal(subject, sample, dtype) is None]
        for dtype in taken:
            # `seeded` may run the author's samples; the sample that dies is the sample announced last.
            with Overlooking(), torch.no_grad(), subject.seeded():
                subject.call(sample, sample.at(dtype, CPU))
        if None not in taken:
            continue
        with Overlooking():
            Run(subject, sample, place=CPU).call().backward()
    return ()
