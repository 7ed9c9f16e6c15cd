"""Measurement of one size: contenders are called, compared, timed in turns, and their memory is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from opsmith import errors
from opsmith.benchmarking import machine
from opsmith.benchmarking.contenders import (
    Baselines,
    Candidate,
    ContenderArguments,
    ReferenceAnswer,
    candidates,
    first_call,
    gradients_of,
    reference_answer,
    results_of,
    run_contender,
    without_hidden_results,
)
from opsmith.benchmarking.cost import bytes_of, count_operations, peak_bytes, saved_bytes
from opsmith.benchmarking.effort import BenchmarkEffort, TimeBudget
from opsmith.benchmarking.result import BenchmarkCase, Contender, MemoryUse, Timing, Work
from opsmith.benchmarking.sizes import SizedCall, argument_texts, arguments_on
from opsmith.benchmarking.timing import Clock, TimedCall, clock_of, time_in_turns
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.core.collector import without_garbage_collection
from opsmith.core.operator import Operator

CONTROL_SIDES = {"cpu": 128, "cuda": 1024}
"""Rows and columns of the matrices that are multiplied beside the contenders."""
GRAPH_ROOM = 64 << 20
"""Bytes of the graphs that are prepared for a turn of backwards."""
DIGITS = 5
WRITES = "it writes into its arguments"


@dataclass(frozen=True)
class Request:
    """Options of a benchmark that hold for each size.

    Args:
        operator: The operator.
        baselines: As of `benchmark`.
        directions: Directions to time.
        compiled: Time the compiled reference, too.
        memory: Measure memory.
        flops: The author's formula of operations, if any.
        effort: Number of rounds.
        seed: Seed of all random numbers.
    """

    operator: Operator[..., Any]
    baselines: Baselines
    directions: tuple[str, ...]
    compiled: bool
    memory: bool
    flops: Callable[..., int] | None
    effort: BenchmarkEffort
    seed: int


def measure(
    request: Request, size: SizedCall, dtype: torch.dtype, device: torch.device, budget: TimeBudget
) -> tuple[BenchmarkCase, float]:
    """Measure one size, in one dtype, on one device.

    Args:
        request: Options of the benchmark.
        size: The size.
        dtype: dtype of floating inputs.
        device: The device.
        budget: What is left of the benchmark's time.

    Returns:
        The case, and the seconds of its slowest call.
    """
    budget.begin_case()
    gc.collect()  # the collector is off while calls are timed
    with torch.random.fork_rng():
        return _measure(request, size, dtype, device, budget)


def _measure(
    request: Request, size: SizedCall, dtype: torch.dtype, device: torch.device, budget: TimeBudget
) -> tuple[BenchmarkCase, float]:
    specification = request.operator.specification
    reference = without_hidden_results(specification.reference, specification.schema)
    exact = not (specification.opaque or specification.random)
    try:
        flat = arguments_on(size.sample, dtype, device)
        arguments = ContenderArguments.of(size.sample, flat, specification.gradients.differentiable)
        backward = any(each != "forward" for each in request.directions) and bool(arguments.sought)
        answer = reference_answer(reference, arguments, request.seed, backward=backward, exact=exact)
    except (Exception, SystemExit) as error:
        raise errors.SampleError(
            f"its reference raises {type(error).__name__} at {size.label} in {dtype}: {_line(error)}",
            operator=specification.name,
            where=specification.where,
            hint="give calls that it takes: `samples=[(x, weight)]`, or other `sizes=` or `dtypes=`",
        ) from error
    notes = []
    if backward and not answer.grad_outputs:
        notes.append("no result of the reference has a gradient: forward alone is timed")
    directions = tuple(each for each in request.directions if each == "forward" or answer.grad_outputs)
    every = candidates(request.operator, arguments, request.baselines, compiled=request.compiled)
    present, contenders = _admitted(every, arguments, answer, request.seed, random=specification.random)
    flops = _given_flops(request, arguments)
    controls = _control_calls(arguments, answer, device)
    calls = {
        direction: {each.about.name: _timed_call(each, arguments, answer, direction) for each in present}
        for direction in directions
    }
    timings, slowest = _timings(request, calls, controls, clock_of(device), budget)
    # The bytes that the operator saves belong to its backward, also if memory is not measured.
    operator_saved = next(
        (_saved(each, arguments, answer) for each in present if each.about.kind == "operator"), None
    )
    saved = {each.about.name: _saved(each, arguments, answer) for each in present} if request.memory else {}
    case = BenchmarkCase(
        label=size.label,
        sizes=dict(size.sizes),
        arguments=tuple(argument_texts(size.sample.labels, size.sample.flat)),
        elements=sum(each.numel() for each in arguments.tensors),
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        role=size.role,
        contenders=contenders,
        timings=timings,
        work=tuple(_work(request, arguments, answer, directions, operator_saved, flops)),
        memory=_memory(present, arguments, answer, saved, device) if request.memory else (),
        notes=tuple(notes),
    )
    return case, slowest


def _admitted(
    every: Sequence[Candidate],
    arguments: ContenderArguments,
    answer: ReferenceAnswer,
    seed: int,
    *,
    random: bool,
) -> tuple[list[Candidate], tuple[Contender, ...]]:
    """Return the candidates that agree with the reference, and the description of all."""
    present, descriptions = [], []
    before = [each.clone() for each in arguments.tensors]
    for each in every:
        about = each.about
        try:
            (results, gradients), seconds = first_call(
                partial(run_contender, each.function, arguments, answer, seed)
            )
        except (Exception, SystemExit) as error:
            reason = f"it raises {type(error).__name__}: {_line(error)}"
            descriptions.append(replace(about, left_out=WRITES if _restore(arguments, before) else reason))
            continue
        # Random implementations may draw different numbers; `check` covers that.
        may_differ = about.kind == "reference" or (random and about.kind != "baseline")
        fault = None if may_differ else answer.fault(results, gradients)
        if _restore(arguments, before):
            fault = WRITES
        if about.kind == "compiled":
            about = replace(about, compile_s=round(seconds, 3))
        descriptions.append(about if fault is None else replace(about, left_out=_exclusion(fault)))
        if fault is None:
            present.append(each)
    return present, tuple(descriptions)


def _exclusion(fault: str) -> str:
    return fault if fault == WRITES else f"it computes something else: {fault}"


def _restore(arguments: ContenderArguments, before: Sequence[torch.Tensor]) -> bool:
    """Restore the arguments, and return True if they had been changed."""
    written = False
    for current, original in zip(arguments.tensors, before, strict=True):
        same = (current == original) | ((current != current) & (original != original))
        if not bool(same.all()):
            written = True
            with torch.no_grad():
                current.copy_(original)
    return written


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "without a message"


def _control_calls(
    arguments: ContenderArguments, answer: ReferenceAnswer, device: torch.device
) -> dict[str, TimedCall]:
    """Return the controls: a copy of as many bytes as the forward moves, and a product of matrices."""
    moved = bytes_of([*arguments.tensors, *answer.results])
    side = CONTROL_SIDES.get(device.type, 128)
    return {
        "copy": TimedCall(machine.copy(device, moved)),
        "multiply": TimedCall(machine.multiply(device, torch.float32, side)),
    }


def _timings(
    request: Request,
    calls_by_direction: Mapping[str, Mapping[str, TimedCall]],
    controls: Mapping[str, TimedCall],
    clock: Clock,
    budget: TimeBudget,
) -> tuple[tuple[Timing, ...], float]:
    """Time each direction, and return the seconds of the slowest call, too."""
    found, slowest = [], 0.0
    for at, (direction, calls) in enumerate(calls_by_direction.items()):
        effort = replace(request.effort, budget_s=budget.share(len(calls_by_direction) - at))
        begun = time.perf_counter()
        with _mode(direction), without_warnings():
            times = time_in_turns({**calls, **controls}, clock, effort, request.seed + at)
        budget.spend(time.perf_counter() - begun)
        for name, taken in times.items():
            seconds = tuple(float(f"{one:.{DIGITS}g}") for one in taken.seconds)
            found.append(Timing(name, direction, taken.calls, seconds))
        slowest = max([slowest, *(min(times[name].seconds) for name in calls)])
    return tuple(found), slowest


def _mode(direction: str) -> Any:
    """Set the mode for all calls of a direction: setting it in each would cost more than a small call."""
    return torch.set_grad_enabled(direction != "forward")


def _timed_call(
    each: Candidate, arguments: ContenderArguments, answer: ReferenceAnswer, direction: str
) -> TimedCall:
    """Return the timed part of a contender; to be called in the direction's `_mode`."""
    if direction == "forward":
        return TimedCall(arguments.call(each.function))
    call = arguments.call(each.function, leaves=True)
    both = partial(gradients_of, call, arguments.sought, answer.grad_outputs)
    if direction == "both":
        return TimedCall(both)
    return TimedCall(both, partial(_prepared, call, arguments, answer), _graph_room(arguments, answer))


def _prepared(
    call: Callable[[], Any], arguments: ContenderArguments, answer: ReferenceAnswer
) -> Callable[[], Any]:
    """Return a backward with its graph, which it frees, as in training."""
    results = [each for each in results_of(call()) if each.requires_grad]
    return partial(torch.autograd.grad, results, arguments.sought, answer.grad_outputs, allow_unused=True)


def _graph_room(arguments: ContenderArguments, answer: ReferenceAnswer) -> int:
    """Return the number of graphs to prepare, if each keeps all arguments and results twice."""
    graph = 2 * bytes_of([*arguments.tensors, *answer.results])
    return max(1, GRAPH_ROOM // max(graph, 1 << 12))


def _saved(each: Candidate, arguments: ContenderArguments, answer: ReferenceAnswer) -> tuple[int, int] | None:
    if not answer.grad_outputs:
        return None
    call = arguments.call(each.function, leaves=True)
    with without_warnings():
        return saved_bytes(lambda: results_of(call()), arguments.tensors)


def _memory(
    present: Sequence[Candidate],
    arguments: ContenderArguments,
    answer: ReferenceAnswer,
    saved: Mapping[str, tuple[int, int] | None],
    device: torch.device,
) -> tuple[MemoryUse, ...]:
    """Measure the peak of each contender, forward and backward if there is one."""
    direction, found = "both" if answer.grad_outputs else "forward", []
    gc.collect()  # garbage that a call frees would hide what it allocates
    with _mode(direction), without_warnings(), without_garbage_collection():
        for each in present:
            most, remark = peak_bytes(_timed_call(each, arguments, answer, direction).call, device)
            whole, beyond = saved[each.about.name] or (None, None)
            found.append(MemoryUse(each.about.name, whole, beyond, most, remark))
    return tuple(found)


def _work(
    request: Request,
    arguments: ContenderArguments,
    answer: ReferenceAnswer,
    directions: Sequence[str],
    saved_sizes: tuple[int, int] | None,
    flops: int | None,
) -> Iterator[Work]:
    """Yield the work of each direction."""
    forward = bytes_of([*arguments.tensors, *answer.results])
    backward = bytes_of([*answer.grad_outputs, *answer.gradients]) + (saved_sizes[0] if saved_sizes else 0)
    moved = {"forward": forward, "backward": backward, "both": forward + backward}
    operations = dict(_operations(request, arguments, answer, flops))
    for direction in directions:
        count, words = operations.get(direction, (None, "not counted: there is no backward"))
        yield Work(direction, moved[direction], count, words)


def _given_flops(request: Request, arguments: ContenderArguments) -> int | None:
    """Return the operations of a forward by the author's formula; None if there is none.

    Raises:
        UsageError: If it raises, or does not return a number.
    """
    given = request.flops or request.operator.specification.flops
    if given is None:
        return None
    args, kwargs = arguments.sample.arguments(arguments.flat)
    try:
        return int(given(*args, **kwargs))
    except Exception as error:
        raise errors.UsageError(
            "`flops` must count the operations of a call",
            operator=request.operator.name,
            argument="flops",
            expected="a function with the operator's arguments that returns a whole number",
            got=f"{type(error).__name__}: {_line(error)}",
            hint="write `flops=lambda x, weight: 2 * x.shape[0] * weight.numel()`, or leave it out",
        ) from error


def _operations(
    request: Request, arguments: ContenderArguments, answer: ReferenceAnswer, given: int | None
) -> Iterator[tuple[str, tuple[int | None, str]]]:
    """Yield the floating-point operations by direction, and the method of counting."""
    specification = request.operator.specification
    reference = without_hidden_results(specification.reference, specification.schema)
    forward: int | None
    backward: int | None = None
    try:
        results, forward, words = _counted(arguments.call(reference, leaves=bool(answer.grad_outputs)))
        if answer.grad_outputs:
            differentiable = [each for each in results if each.requires_grad]
            run = partial(
                torch.autograd.grad, differentiable, arguments.sought, answer.grad_outputs, allow_unused=True
            )
            _, backward, more = _counted(run)
            words = more if len(more) > len(words) else words
    except Exception as error:
        forward = backward = None
        words = f"not counted: the reference does not run under torch's counter: {_line(error)}"
    if given is not None:
        forward, counted_by = given, "by the author's formula"
        yield "forward", (forward, counted_by)
        words = f"{counted_by}; the backward {words}"
    else:
        yield "forward", (forward, words)
    yield "backward", (backward, words)
    yield "both", (None if forward is None or backward is None else forward + backward, words)


def _counted(run: Callable[[], Any]) -> tuple[list[Any], int, str]:
    with torch.enable_grad(), without_warnings():
        returned, count, words = count_operations(run)
    return results_of(returned), count, words
