"""`opsmith.benchmark`: time an operator, its reference, the compiled reference, and baselines."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from opsmith import errors
from opsmith.benchmarking import machine
from opsmith.benchmarking.contenders import refuse_baselines
from opsmith.benchmarking.cost import bytes_of
from opsmith.benchmarking.effort import BenchmarkEffort, TimeBudget, effort_named
from opsmith.benchmarking.measurement import Request, measure
from opsmith.benchmarking.result import DIRECTIONS, Benchmark, BenchmarkCase
from opsmith.benchmarking.sizes import Samples, SizedCall, Sizes, sizes_of
from opsmith.benchmarking.templates import elements
from opsmith.build.toolchain import processors
from opsmith.checking import Report, check
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.core.call_arguments import CallArguments, shown, tensors_in
from opsmith.core.effort_level import Level
from opsmith.core.kernels import check_device
from opsmith.core.operator import Operator
from opsmith.core.shape_samples import samples_for

Progress = Callable[[str, int, int], None]
BUSY = 0.5
"""Load average from which on a benchmark reports that the machine was busy."""


# Without this, a caller's inference mode would forbid gradients.
@torch.inference_mode(mode=False)
def benchmark(
    operator: Operator[..., Any],
    *,
    samples: Samples = None,
    sizes: Sizes = None,
    baselines: Mapping[str, Callable[..., Any]] | None = None,
    dtypes: Iterable[torch.dtype] | torch.dtype = torch.float32,
    device: str | None = None,
    directions: Iterable[str] = DIRECTIONS,
    threads: int | None = None,
    compiled: bool = True,
    memory: bool = True,
    flops: Callable[..., int] | None = None,
    effort: Level | BenchmarkEffort = "default",
    seed: int = 0,
    report: Report | None = None,
    progress: Progress | None = None,
) -> Benchmark:
    """Time an operator, its reference, the compiled reference and baselines; compare with the ceilings.

    Args:
        operator: The operator. It is checked first, and not benchmarked if the check fails.
        samples: Calls to measure, as a list of tuples or a function; by default enlarged samples of the
            operator.
        sizes: Letters of `shapes=`, numbers among the arguments, or parameters of `samples`, by name: `{"B":
            8, "H W": [14, 28]}`. Lists must have the same length: the first size takes the first number of
            each.
        baselines: Functions by name, with the arguments of the operator.
        dtypes: dtypes of floating inputs.
        device: Type of device; by default the CPU.
        directions: Directions to time, of `forward`, `backward` and `both`.
        threads: Number of threads of torch; by default the current one.
        compiled: Time the reference under `torch.compile`, too.
        memory: Measure saved bytes and peaks.
        flops: Function that returns the number of floating-point operations of a call; by default the
            operations of the reference are counted.
        effort: `quick`, `default` or `thorough`; or a `BenchmarkEffort`.
        seed: Seed of the numbers.
        report: Report of an earlier `check`; by default the operator is checked, at quick effort.
        progress: Function that is called with the current activity, the number of finished sizes, and the
            number of all sizes.

    Raises:
        NotPassedError: If the operator fails its check.
        MissingSamplesError, SampleError: If there are no samples, or one does not fit.
        UsageError: If any remaining argument is invalid.

    Example:
        >>> import opsmith.ops
        >>> found = opsmith.benchmark(opsmith.ops.exp, effort="quick", compiled=False, directions="forward")
        >>> [each.name for each in found.cases[-1].contenders]
        ['operator', 'reference']
    """
    begun = time.perf_counter()
    level = effort if isinstance(effort, BenchmarkEffort) else effort_named(effort)
    if not isinstance(operator, Operator):
        raise errors.UsageError(
            "only an operator of opsmith can be benchmarked",
            expected="an operator",
            got=shown(operator),
            hint='declare it with `@opsmith.operator("mylib::name")`, or adopt it with `opsmith.adopt`; '
            "give functions to compare with as `baselines=`",
        )
    with errors.about(operator.name):
        given = dict(baselines) if isinstance(baselines, Mapping) else baselines
        if operator.specification.schema.written:
            raise operator.specification.error(
                errors.UsageError,
                "an in-place operator cannot be benchmarked yet: each call would get different inputs",
                hint=f"benchmark `{operator.specification.variable}.functional`",
            )
        refuse_baselines({} if given is None else given)
        wanted = _directions(directions)
        types = _dtypes(dtypes)
        target = _device(device, operator.name)
        count = _threads(threads)
        calls, remarks = sizes_of(operator, samples, sizes, seed, level)
        before_check = time.perf_counter()
        checked = _passed(operator, report, calls[0], seed)
        spent = {"check": time.perf_counter() - before_check}
        if not _was_checked(checked, ("gradient", "surrogate")) and set(wanted) != {"forward"}:
            wanted = ("forward",)
            remarks.append("its gradients could not be checked: only forward is timed")
        request = Request(operator, given or {}, wanted, compiled, memory, flops, level, seed)
        budget = TimeBudget(level, len(calls) * len(types), len(wanted), begun)
        measured = _run(request, calls, types, target, count, remarks, progress, budget)
        compilation = sum(each.compile_s or 0.0 for case in measured.cases for each in case.contenders)
        spent |= {"compilation": compilation, "rounds": budget.rounds_s, "total": time.perf_counter() - begun}
        return replace(measured, spent={name: round(seconds, 2) for name, seconds in spent.items()})


def _run(
    request: Request,
    sizes: list[SizedCall],
    dtypes: list[torch.dtype],
    device: torch.device,
    count: int,
    remarks: list[str],
    progress: Progress | None,
    budget: TimeBudget,
) -> Benchmark:
    load = {"processors": float(processors())}
    _note_load(load, "before", remarks)
    cases: list[BenchmarkCase] = []
    with thread_count(count), torch.enable_grad(), torch.random.fork_rng(), _older_objects_frozen():
        largest = max(2 * bytes_of(tensors_in(list(each.sample.flat))) for each in sizes)
        before = tuple(machine.ceilings(device, dtypes, 4 * largest))
        total = len(sizes) * len(dtypes)
        for dtype in dtypes:
            done: list[tuple[int, float]] = []
            for at, grown in enumerate(sizes):
                size = _in_time(grown, done, request.effort, remarks)
                if progress is not None:
                    progress(f"{size.label}, {str(dtype).removeprefix('torch.')}", len(cases), total)
                case, slowest_s = measure(request, size, dtype, device, budget)
                cases.append(case)
                done.append((case.elements, slowest_s))
                if slowest_s > request.effort.slowest_s and at + 1 < len(sizes):
                    left = ", ".join(each.label for each in sizes[at + 1 :])
                    remarks.append(
                        f"left out, because a call took {slowest_s:.1f} s at {size.label}, and the limit at "
                        f"{request.effort.name} effort is {request.effort.slowest_s:g} s: {left}"
                    )
                    break
        if progress is not None:
            progress("", total, total)
        ceilings = machine.higher_ceilings(before, tuple(machine.ceilings(device, dtypes, 4 * largest)))
    _note_load(load, "after", remarks)
    return Benchmark(
        request.operator.name,
        request.effort.name,
        request.seed,
        count,
        machine.environment_of(device),
        load,
        ceilings,
        tuple(cases),
        tuple(remarks),
    )


def _in_time(
    size: SizedCall, done: Sequence[tuple[int, float]], effort: BenchmarkEffort, remarks: list[str]
) -> SizedCall:
    """Return a size, or a smaller size if it was grown from a sample and its calls may take too long.

    Args:
        size: The size.
        done: Elements and seconds of the slowest call of each earlier size. Time is extrapolated linearly
            from them, so the constant overhead of a call is not multiplied.
        effort: The effort, which limits the seconds of a call.
        remarks: List to which a remark is added if a smaller size is returned.
    """
    if size.smaller is None or len(done) < 2 or done[-1][0] <= done[-2][0]:
        return size
    (few, least), (more, most) = done[-2:]
    slope = max(most - least, 1e-9) / (more - few)
    expected = most + slope * (elements(size.sample.flat) - more)
    fitting = int(more + max(effort.grown_s - most, 0.0) / slope) if expected > effort.grown_s else 0
    smaller = size.smaller(1 << fitting.bit_length() - 1) if fitting > 2 * more else None
    if smaller is None:
        return size
    remarks.append(
        f"measured {smaller.label} instead of {size.label}: a call with {size.label} was expected to take "
        f"{expected:.1f} s; to measure {size.label}, give it with `sizes=` or `samples=`"
    )
    return smaller


@contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection, since they make each collection slow.

    If the process has frozen objects before, as the command does, all objects stay frozen afterwards.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


def _note_load(load: dict[str, float], when: str, remarks: list[str]) -> None:
    """Record the load of the machine, and add a remark if it was high before the benchmark."""
    found = machine.load()
    if found is None:
        return
    load[when] = found
    if when == "before" and found > BUSY:
        remarks.append(
            f"the machine was busy before the benchmark: a load of {found:g} on {load['processors']:g} "
            "processors"
        )


def _directions(given: Any) -> tuple[str, ...]:
    wanted = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else []
    if not wanted or any(each not in DIRECTIONS for each in wanted):
        raise errors.UsageError(
            "`directions` must be directions",
            argument="directions",
            expected=", ".join(f"`{each}`" for each in DIRECTIONS),
            got=shown(given),
            hint='write `directions=["forward", "both"]`',
        )
    return tuple(each for each in DIRECTIONS if each in wanted)


def _dtypes(given: Any) -> list[torch.dtype]:
    types = [given] if isinstance(given, torch.dtype) else list(given) if isinstance(given, Iterable) else []
    if not types or not all(isinstance(each, torch.dtype) and each.is_floating_point for each in types):
        raise errors.UsageError(
            "`dtypes` must be floating dtypes",
            argument="dtypes",
            expected="floating dtypes of torch; complex inputs get the complex dtype of the same precision",
            got=shown(given),
            hint="write `dtypes=[torch.float32, torch.bfloat16]`",
        )
    return list(dict.fromkeys(types))


def _device(given: Any, operator: str) -> torch.device:
    """Return the device, with its index.

    Raises:
        DeviceNameError: If torch has no such type.
        UsageError: If this machine has none, or it cannot be timed.
    """
    kind = "cpu" if given is None else given
    if not isinstance(kind, str):
        kind = getattr(kind, "type", kind)
    check_device(kind, operator, "device={device!r}")
    available = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    if not available:
        raise errors.UsageError(
            f"nothing can be timed on the device `{kind}` here",
            argument="device",
            expected="`cpu`, or `cuda` where there is a GPU",
            got=repr(given),
            hint="leave `device=` out, or run it on a machine with a CUDA GPU",
        )
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _threads(given: Any) -> int:
    if given is None:
        return torch.get_num_threads()
    if type(given) is not int or given < 1:
        raise errors.UsageError(
            "the number of threads must be positive",
            argument="threads",
            expected="a whole number of at least 1",
            got=shown(given),
            hint="write `threads=1`, or leave it out",
        )
    return given


def _passed(operator: Operator[..., Any], report: Any, smallest: SizedCall, seed: int) -> Report:
    """Return the report of a check that has no failures.

    Raises:
        NotPassedError: If there is an error, or the results could not be checked. UsageError: If the report
            is of a different operator.
    """
    if report is None:
        args, kwargs = smallest.sample.arguments(smallest.sample.flat)
        own = samples_for(operator.specification)
        given = None if own is not None else [CallArguments(tuple(args), kwargs)]
        report = check(operator, samples=given, seed=seed, effort="quick")
    elif not isinstance(report, Report) or report.operator != operator.name:
        raise errors.UsageError(
            "the report must be about the operator",
            argument="report",
            expected=f"the report of `check` for `{operator.name}`",
            got=f"a report on `{report.operator}`" if isinstance(report, Report) else shown(report),
            hint="leave `report=` out: the operator is then checked",
        )
    if report.errors or not _was_checked(report, ("forward",)):
        failed = "\n".join(f"    {failure.heading()}" for failure in report.errors)
        raise errors.NotPassedError(
            "it fails its check, so its speed means nothing",
            got=f"{report.verdict().removeprefix(f'{operator.name}: ')}\n{failed}".rstrip(),
            where=operator.specification.where,
            hint="run `opsmith check`, fix the operator, then measure",
        )
    passed: Report = report
    return passed


def _was_checked(report: Report, names: tuple[str, ...]) -> bool:
    return any(each.status == "passed" for each in report.outcomes if each.property in names)
