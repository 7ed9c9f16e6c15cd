"""One size measured: contenders are called, compared, timed in turns, and their memory is looked at."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from opsmith import errors
from opsmith.benchmarking import machine
from opsmith.benchmarking.agreeing import Right, computed, right
from opsmith.benchmarking.clock import Clock, clock_of
from opsmith.benchmarking.contenders import (
    Arguments,
    Entrant,
    Rivals,
    differentiated,
    entrants,
    first_call,
    results_of,
    visible,
)
from opsmith.benchmarking.effort import Effort
from opsmith.benchmarking.memory import peak, saved
from opsmith.benchmarking.result import Case, Contender, Memory, Timing, Work
from opsmith.benchmarking.subject import Size, described, placed
from opsmith.benchmarking.turns import Contestant, in_turns
from opsmith.benchmarking.work import bytes_of, counted
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.core.operator import Operator

CONTROL_SIDES = {"cpu": 128, "cuda": 1024}
"""Rows and columns of the matrices that are multiplied beside the contenders."""
GRAPH_ROOM = 64 << 20
"""Bytes that graphs may hold which are made ahead of a turn of backwards."""
DIGITS = 5
WRITES = "it writes into its arguments"


@dataclass(frozen=True)
class Asked:
    """What is asked of each size.

    Args:
        operator: The operator.
        rivals: As of `benchmark`.
        directions: Those to time.
        compiled: Whether the reference is compiled.
        memory: Whether memory is looked at.
        flops: The author's count, if one was given.
        effort: How often to measure.
        seed: Seed of everything random.
    """

    operator: Operator[..., Any]
    rivals: Rivals
    directions: tuple[str, ...]
    compiled: bool
    memory: bool
    flops: Callable[..., int] | None
    effort: Effort
    seed: int


@dataclass(frozen=True)
class Measured:
    """A size that was measured.

    Args:
        case: What came of it.
        slowest_s: How long the slowest call took.
    """

    case: Case
    slowest_s: float


def measured(asked: Asked, size: Size, dtype: torch.dtype, device: torch.device) -> Measured:
    """Measure one size, in one dtype, on one device."""
    gc.collect()  # for none is collected while calls are timed
    with torch.random.fork_rng():
        return _measured(asked, size, dtype, device)


def _measured(asked: Asked, size: Size, dtype: torch.dtype, device: torch.device) -> Measured:
    specification = asked.operator.specification
    reference = visible(specification.reference, specification.schema)
    exact = not (specification.opaque or specification.random)
    try:
        flat = placed(size.sample, dtype, device)
        arguments = Arguments.of(size.sample, flat, specification.gradients.differentiable)
        backward = any(each != "forward" for each in asked.directions) and bool(arguments.sought)
        held = right(reference, arguments, asked.seed, backward=backward, exact=exact)
    except Exception as error:
        raise errors.SampleError(
            f"its reference raises {type(error).__name__} at {size.label} in {dtype}: {_line(error)}",
            operator=specification.name,
            where=specification.where,
            hint="give calls that it takes: `samples=[(x, weight)]`, or other `sizes=` or `dtypes=`",
        ) from error
    notes = []
    if backward and not held.came:
        notes.append("no result of the reference has a gradient: forward alone is timed")
    directions = tuple(each for each in asked.directions if each == "forward" or held.came)
    every = entrants(asked.operator, arguments, asked.rivals, compiled=asked.compiled)
    present, contenders = _admitted(every, arguments, held, asked.seed, random=specification.random)
    flops = _given_flops(asked, arguments)
    beside = _control_calls(asked, arguments, held, device)
    timings, slowest = _timings(asked, present, beside, arguments, held, directions, clock_of(device))
    # What the operator saves is work of its backward, whether memory is looked at or not.
    own = next((_saved(each, arguments, held) for each in present if each.about.kind == "operator"), None)
    kept = {each.about.name: _saved(each, arguments, held) for each in present} if asked.memory else {}
    case = Case(
        label=size.label,
        sizes=dict(size.sizes),
        arguments=tuple(described(size.sample.labels, size.sample.flat)),
        elements=sum(each.numel() for each in arguments.tensors),
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        role=size.role,
        contenders=contenders,
        timings=timings,
        work=tuple(_work(asked, arguments, held, directions, own, flops)),
        memory=tuple(
            _memory(each, arguments, held, kept[each.about.name], device)
            for each in (present if asked.memory else ())
        ),
        notes=tuple(notes),
    )
    return Measured(case, slowest)


def _admitted(
    every: Sequence[Entrant], arguments: Arguments, held: Right, seed: int, *, random: bool
) -> tuple[list[Entrant], tuple[Contender, ...]]:
    """Who computes the same as the reference, and what is to be told of each."""
    present, told = [], []
    before = [each.clone() for each in arguments.tensors]
    for each in every:
        about = each.about
        try:
            (results, gradients), seconds = first_call(
                partial(computed, each.function, arguments, held, seed)
            )
        except Exception as error:
            left = f"it raises {type(error).__name__}: {_line(error)}"
            told.append(replace(about, left_out=WRITES if _restore(arguments, before) else left))
            continue
        # One draws other numbers than another, which a check looks into.
        unlike = about.kind == "reference" or (random and about.kind != "rival")
        fault = None if unlike else held.fault(results, gradients)
        if _restore(arguments, before):
            fault = WRITES
        if about.kind == "compiled":
            about = replace(about, compile_s=round(seconds, 3))
        told.append(about if fault is None else replace(about, left_out=_other(fault)))
        if fault is None:
            present.append(each)
    return present, tuple(told)


def _other(fault: str) -> str:
    return fault if fault == WRITES else f"it computes something else: {fault}"


def _restore(arguments: Arguments, before: Sequence[torch.Tensor]) -> bool:
    """Whether the arguments are others than before; then they are made what they were."""
    written = False
    for now, kept in zip(arguments.tensors, before, strict=True):
        same = (now == kept) | ((now != now) & (kept != kept))
        if not bool(same.all()):
            written = True
            with torch.no_grad():
                now.copy_(kept)
    return written


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "without a message"


def _control_calls(
    asked: Asked, arguments: Arguments, held: Right, device: torch.device
) -> dict[str, Contestant]:
    """What never changes: a copy of as many bytes as the forward moves, and a product of matrices."""
    moved = bytes_of([*arguments.tensors, *held.results])
    side = CONTROL_SIDES.get(device.type, 128)
    return {
        "copy": Contestant(machine.copy(device, moved)),
        "multiply": Contestant(machine.multiply(device, torch.float32, side)),
    }


def _timings(
    asked: Asked,
    present: Sequence[Entrant],
    beside: Mapping[str, Contestant],
    arguments: Arguments,
    held: Right,
    directions: Sequence[str],
    clock: Clock,
) -> tuple[tuple[Timing, ...], float]:
    """Times in each direction, and how long the slowest call took."""
    found, slowest = [], 0.0
    for at, direction in enumerate(directions):
        racing = {each.about.name: _contestant(each, arguments, held, direction) for each in present}
        with _mode(direction), quiet():
            for each in racing.values():
                clock.seconds(each.calls(1))
            times = in_turns({**racing, **beside}, clock, asked.effort, asked.seed + at)
        for name, taken in times.items():
            seconds = tuple(float(f"{one:.{DIGITS}g}") for one in taken.seconds)
            found.append(Timing(name, direction, taken.calls, seconds))
        slowest = max([slowest, *(min(times[name].seconds) for name in racing)])
    return tuple(found), slowest


def _mode(direction: str) -> Any:
    """A region around all calls of a direction: around each, it would cost more than a small call takes."""
    return torch.set_grad_enabled(direction != "forward")


def _contestant(each: Entrant, arguments: Arguments, held: Right, direction: str) -> Contestant:
    """What is timed of a contender; to be called in the direction's `_mode`."""
    if direction == "forward":
        return Contestant(arguments.call(each.function))
    call = arguments.call(each.function, leaves=True)
    both = partial(differentiated, call, arguments.sought, held.came)
    if direction == "both":
        return Contestant(both)
    return Contestant(both, partial(_prepared, call, arguments, held), _room(arguments, held))


def _prepared(call: Callable[[], Any], arguments: Arguments, held: Right) -> Callable[[], Any]:
    """A backward whose graph is there: it is used up by it, as in training."""
    results = [each for each in results_of(call()) if each.requires_grad]
    return partial(torch.autograd.grad, results, arguments.sought, held.came, allow_unused=True)


def _room(arguments: Arguments, held: Right) -> int:
    """How many graphs may be made ahead: as if each kept all arguments and results twice."""
    each = 2 * bytes_of([*arguments.tensors, *held.results])
    return max(1, GRAPH_ROOM // max(each, 1 << 12))


def _saved(each: Entrant, arguments: Arguments, held: Right) -> tuple[int, int] | None:
    if not held.came:
        return None
    call = arguments.call(each.function, leaves=True)
    with quiet():
        return saved(lambda: results_of(call()), arguments.tensors)


def _memory(
    each: Entrant, arguments: Arguments, held: Right, kept: tuple[int, int] | None, device: torch.device
) -> Memory:
    direction = "both" if held.came else "forward"
    contestant = _contestant(each, arguments, held, direction)
    with _mode(direction), quiet():
        most, remark = peak(contestant.call, device)
    saved, beyond = kept if kept is not None else (None, None)
    return Memory(each.about.name, saved, beyond, most, remark)


def _work(
    asked: Asked,
    arguments: Arguments,
    held: Right,
    directions: Sequence[str],
    kept: tuple[int, int] | None,
    flops: int | None,
) -> Iterator[Work]:
    """What each direction has to do."""
    forward = bytes_of([*arguments.tensors, *held.results])
    backward = bytes_of([*held.came, *held.gradients]) + (kept[0] if kept else 0)
    moved = {"forward": forward, "backward": backward, "both": forward + backward}
    operations = dict(_operations(asked, arguments, held, flops))
    for direction in directions:
        count, words = operations.get(direction, (None, "not counted: there is no backward"))
        yield Work(direction, moved[direction], count, words)


def _given_flops(asked: Asked, arguments: Arguments) -> int | None:
    """What the author's formula counts of a forward; None where there is none.

    Raises:
        UsageError: If it raises, or counts nothing.
    """
    given = asked.flops or asked.operator.specification.flops
    if given is None:
        return None
    args, kwargs = arguments.sample.arguments(arguments.flat)
    try:
        return int(given(*args, **kwargs))
    except Exception as error:
        raise errors.UsageError(
            "the formula that is given counts no operations of a call",
            operator=asked.operator.name,
            argument="flops",
            expected="a function of what the operator takes, which returns a whole number",
            got=f"{type(error).__name__}: {_line(error)}",
            hint="write `flops=lambda x, weight: 2 * x.shape[0] * weight.numel()`, or leave it out",
        ) from error


def _operations(
    asked: Asked, arguments: Arguments, held: Right, given: int | None
) -> Iterator[tuple[str, tuple[int | None, str]]]:
    """Floating-point operations by direction, and how they were counted."""
    specification = asked.operator.specification
    reference = visible(specification.reference, specification.schema)
    forward: int | None
    backward: int | None = None
    try:
        results, forward, words = _counted(arguments.call(reference, leaves=bool(held.came)))
        if held.came:
            kept = [each for each in results if each.requires_grad]
            run = partial(torch.autograd.grad, kept, arguments.sought, held.came, allow_unused=True)
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
    with torch.enable_grad(), quiet():
        returned, count, words = counted(run)
    return results_of(returned), count, words


@contextmanager
def threaded(count: int) -> Iterator[None]:
    """A region in which torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
