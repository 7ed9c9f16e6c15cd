"""Measure one size: call and compare the contenders, time them in turns, and measure their memory."""

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
from opsmith.benchmarking.timing import TimedCall, clock_of, time_in_turns
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.core.collector import without_garbage_collection
from opsmith.core.operator import Operator

CONTROL_SIDES = {"cpu": 128, "cuda": 1024}
"""Number of rows and columns of the matrices of the control."""
GRAPH_ROOM = 64 << 20
"""Maximum bytes of the graphs that are prepared for one turn of backwards."""
DIGITS = 5
WRITES = "it writes into its arguments"


@dataclass(frozen=True)
class Request:
    """Options of a benchmark that are the same for each size.

    Args:
        operator: The operator.
        baselines: See `benchmark`.
        directions: Directions to time.
        compiled: Time the compiled reference, too.
        memory: Measure memory.
        flops: The author's function that returns the number of operations, if any.
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
        budget: The remaining time of the benchmark.

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
            where=specification.where,
            hint="give valid calls with `samples=[(x, weight)]`, or different `sizes=` or `dtypes=`",
        ) from error
    notes = []
    if backward and not answer.grad_outputs:
        notes.append("no result of the reference has a gradient: only forward is timed")
    directions = tuple(each for each in request.directions if each == "forward" or answer.grad_outputs)
    measured = _MeasuredCase(request, reference, arguments, answer, device, directions)
    every = candidates(request.operator, arguments, request.baselines, compiled=request.compiled)
    present, contenders = measured.admitted(every)
    flops = measured.given_flops()
    timings, slowest = measured.timings(present, budget)
    # The work of a backward includes the bytes that the operator saves, so measure them in any case.
    saved = {
        each.about.name: measured.saved(each)
        for each in present
        if request.memory or each.about.kind == "operator"
    }
    operator_saved = next((saved[each.about.name] for each in present if each.about.kind == "operator"), None)
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
        work=tuple(measured.work(operator_saved, flops)),
        memory=measured.memory(present, saved) if request.memory else (),
        notes=tuple(notes),
    )
    return case, slowest


@dataclass(frozen=True)
class _MeasuredCase:
    """Measurements of the contenders in one size.

    Args:
        request: Options of the benchmark.
        reference: The reference, without hidden results.
        arguments: The arguments of all contenders.
        answer: Results and gradients of the reference.
        device: The device.
        directions: Directions to time.
    """

    request: Request
    reference: Callable[..., Any]
    arguments: ContenderArguments
    answer: ReferenceAnswer
    device: torch.device
    directions: tuple[str, ...]

    @property
    def moved(self) -> int:
        """Bytes of the arguments and results."""
        return bytes_of([*self.arguments.tensors, *self.answer.results])

    def admitted(self, every: Sequence[Candidate]) -> tuple[list[Candidate], tuple[Contender, ...]]:
        """Return the candidates that agree with the reference, and a description of all candidates."""
        arguments, answer, seed = self.arguments, self.answer, self.request.seed
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
                descriptions.append(
                    replace(about, left_out=WRITES if _restore(arguments, before) else reason)
                )
                continue
            # Random implementations may draw different numbers; `check` covers that.
            random = self.request.operator.specification.random
            may_differ = about.kind == "reference" or (random and about.kind != "baseline")
            fault = None if may_differ else answer.fault(results, gradients)
            if fault is not None:
                fault = f"it computes something else: {fault}"
            if _restore(arguments, before):
                fault = WRITES
            if about.kind == "compiled":
                about = replace(about, compile_s=round(seconds, 3))
            descriptions.append(replace(about, left_out=fault or ""))
            if fault is None:
                present.append(each)
        return present, tuple(descriptions)

    def timings(self, present: Sequence[Candidate], budget: TimeBudget) -> tuple[tuple[Timing, ...], float]:
        """Time each direction; return the timings and the seconds of the slowest call.

        The controls are a copy of as many bytes as the forward moves, and a matrix product.
        """
        side = CONTROL_SIDES.get(self.device.type, 128)
        controls = {
            "copy": TimedCall(machine.copy(self.device, self.moved)),
            "multiply": TimedCall(machine.multiply(self.device, torch.float32, side)),
        }
        clock, found, slowest = clock_of(self.device), [], 0.0
        for at, direction in enumerate(self.directions):
            calls = {each.about.name: self.timed_call(each, direction) for each in present}
            effort = replace(self.request.effort, budget_s=budget.share(len(self.directions) - at))
            begun = time.perf_counter()
            with _mode(direction), without_warnings():
                times = time_in_turns({**calls, **controls}, clock, effort, self.request.seed + at)
            budget.spend(time.perf_counter() - begun)
            for name, taken in times.items():
                seconds = tuple(float(f"{one:.{DIGITS}g}") for one in taken.seconds)
                found.append(Timing(name, direction, taken.calls, seconds))
            slowest = max([slowest, *(min(times[name].seconds) for name in calls)])
        return tuple(found), slowest

    def timed_call(self, each: Candidate, direction: str) -> TimedCall:
        """Return the timed part of a contender; the caller enters the direction's `_mode` first."""
        if direction == "forward":
            return TimedCall(self.arguments.call(each.function))
        call = self.arguments.call(each.function, leaves=True)
        both = partial(gradients_of, call, self.arguments.sought, self.answer.grad_outputs)
        if direction == "both":
            return TimedCall(both)
        # Prepare as many graphs as fit if each keeps all arguments and results twice.
        room = max(1, GRAPH_ROOM // max(2 * self.moved, 1 << 12))
        return TimedCall(both, lambda: self.backward_of(results_of(call())), room)

    def backward_of(self, results: Sequence[torch.Tensor]) -> Callable[[], Any]:
        """Return a function that runs the backward of results and frees their graph, as in training."""
        roots = [each for each in results if each.requires_grad]
        sought, given = self.arguments.sought, self.answer.grad_outputs
        return partial(torch.autograd.grad, roots, sought, given, allow_unused=True)

    def saved(self, each: Candidate) -> tuple[int, int] | None:
        """Return the bytes that a contender saves, in total and without arguments; None if it saves none."""
        if not self.answer.grad_outputs:
            return None
        call = self.arguments.call(each.function, leaves=True)
        with without_warnings():
            return saved_bytes(lambda: results_of(call()), self.arguments.tensors)

    def memory(
        self, present: Sequence[Candidate], saved: Mapping[str, tuple[int, int] | None]
    ) -> tuple[MemoryUse, ...]:
        """Measure the peak of each contender, forward and backward if there is one."""
        direction, found = "both" if self.answer.grad_outputs else "forward", []
        gc.collect()  # garbage that a call frees would hide what it allocates
        with _mode(direction), without_warnings(), without_garbage_collection():
            for each in present:
                most, remark = peak_bytes(self.timed_call(each, direction).call, self.device)
                whole, beyond = saved[each.about.name] or (None, None)
                found.append(MemoryUse(each.about.name, whole, beyond, most, remark))
        return tuple(found)

    def work(self, saved: tuple[int, int] | None, given: int | None) -> Iterator[Work]:
        """Yield the work of each direction; `given` is the number of operations by the author's function."""
        backward = bytes_of([*self.answer.grad_outputs, *self.answer.gradients])
        backward += saved[0] if saved else 0
        moved = {"forward": self.moved, "backward": backward, "both": self.moved + backward}
        operations = self.operations(given)
        for direction in self.directions:
            yield Work(direction, moved[direction], *operations[direction])

    def given_flops(self) -> int | None:
        """Return the number of operations of a forward from the author's function; None without one.

        Raises:
            UsageError: If the function raises, or does not return a number.
        """
        given = self.request.flops or self.request.operator.specification.flops
        if given is None:
            return None
        args, kwargs = self.arguments.sample.arguments(self.arguments.flat)
        try:
            return int(given(*args, **kwargs))
        except Exception as error:
            raise errors.UsageError(
                "`flops` must count the operations of a call",
                argument="flops",
                expected="a function with the operator's arguments that returns a whole number",
                got=f"{type(error).__name__}: {_line(error)}",
                hint="write `flops=lambda x, weight: 2 * x.shape[0] * weight.numel()`, or leave it out",
            ) from error

    def operations(self, given: int | None) -> dict[str, tuple[int | None, str]]:
        """Return the floating-point operations by direction, and the method of counting."""
        forward: int | None
        backward: int | None = None
        call = self.arguments.call(self.reference, leaves=bool(self.answer.grad_outputs))
        try:
            results, forward, words = _counted(call)
            if self.answer.grad_outputs:
                _, backward, more = _counted(self.backward_of(results))
                words = more if len(more) > len(words) else words
        except Exception as error:
            forward = backward = None
            words = f"not counted: the reference does not run under torch's counter: {_line(error)}"
        of_forward = words
        if given is not None:
            forward, of_forward = given, "by the author's formula"
            words = f"{of_forward}; the backward {words}"
        both = None if forward is None or backward is None else forward + backward
        return {"forward": (forward, of_forward), "backward": (backward, words), "both": (both, words)}


def _restore(arguments: ContenderArguments, before: Sequence[torch.Tensor]) -> bool:
    """Restore the arguments; return True if a call had changed them."""
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


def _mode(direction: str) -> Any:
    """Set the gradient mode for all calls of a direction: setting it each time costs more than a call."""
    return torch.set_grad_enabled(direction != "forward")


def _counted(run: Callable[[], Any]) -> tuple[list[Any], int, str]:
    with torch.enable_grad(), without_warnings():
        returned, count, words = count_operations(run)
    return results_of(returned), count, words
