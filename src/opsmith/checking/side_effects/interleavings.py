"""Interleavings of calls: alone, one after another, interrupted, in different modes, and in threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith.checking.exceptions import Overlooking, Raised, attempt, refuse_own
from opsmith.checking.numerics.autodiff import record
from opsmith.checking.processes.watchdog import POLL_S, EndlessCallError
from opsmith.checking.run import CallValues, LiveCall, Run, copies
from opsmith.checking.samples.perturb import exchanged
from opsmith.checking.side_effects.outside_state import HiddenState
from opsmith.core.call_arguments import tensors_in
from opsmith.judging.attribution import AboutOperatorError
from opsmith.judging.tensors import dense
from opsmith.torch_library import capabilities

THIS_CALL, OTHER_CALL = "this call", "a call with other numbers of the same shapes"
INTERRUPTIONS = 6
"""Maximum number of operations that are interrupted, one at a time."""
EXCHANGES = 6
"""Maximum number of arguments in which two numbers are exchanged, one argument at a time."""


Mode = Callable[[], AbstractContextManager[Any]]


class InterruptedOperationError(AboutOperatorError, RuntimeError):
    """Error of an operation that is made to fail, as if memory ran out."""


@dataclass(frozen=True)
class InterleavedAnswer:
    """Result of a call in an interleaving.

    Args:
        call: Name of the call.
        when: Description of the calls before it or at the same time.
        given: Its results and gradients, or the exception that it raised.
        modes: True if it ran in a different mode or thread, in which a different kernel may round
            differently.
        alone: True if no other call came before, so that an exception is due to the mode alone.
        mode: The mode without gradients in which it ran, if nothing else differs.
        by_script: True if only the caller differs.
    """

    call: str
    when: str
    given: CallValues | Raised
    modes: bool = False
    alone: bool = False
    mode: Mode | None = None
    by_script: bool = False


@dataclass
class InterleavedCalls:
    """Calls on a sample, with the right results and gradients of each.

    Args:
        hidden_state: Hidden state of the operator; cleared before each interleaving.
        run: The tested call.
        runs: Run of each call: `THIS_CALL`, and calls that may disturb it.
        right: Results and gradients of each call alone.
        arguments: Arguments of the calls, kept so that no other tensor gets their addresses.
    """

    hidden_state: HiddenState
    run: Run
    runs: dict[str, Run] = field(default_factory=dict)
    right: dict[str, CallValues] = field(default_factory=dict)
    arguments: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add(THIS_CALL, self.run)

    def add(self, call: str, run: Run) -> bool:
        """Make a new call alone, and add it; return False if it raises and is not the tested call."""
        flat = run.flat()
        self.hidden_state.clear()
        right = attempt(partial(run.values, flat))
        if isinstance(right, Raised):
            if run is self.run:
                raise right.error
            return False
        self.runs[call], self.right[call] = run, right
        self.arguments.append(flat)
        return True

    def add_exchanged(self) -> list[str]:
        """Add calls that differ from the tested call by two numbers of one argument; return their names."""
        labels = {at: self.run.sample.labels[at] for at in self.run.sample.inexact[:EXCHANGES]}
        names = {at: f"a call with two numbers of `{label}` exchanged" for at, label in labels.items()}
        changed = {call: replace(self.run, changed=partial(exchanged, at)) for at, call in names.items()}
        return [call for call, run in changed.items() if self.add(call, run)]

    def known(self, *calls: str) -> list[str]:
        """The calls, out of some, that can be made."""
        return [call for call in calls if call in self.runs]

    def answer(
        self,
        call: str,
        when: str,
        run: Callable[[], CallValues] | None = None,
        *,
        first: Callable[[], Any] | None = None,
        **how: Any,
    ) -> InterleavedAnswer:
        """Make a call, or run a function, and record its results or exception.

        The function `first` begins without hidden state, and its exceptions are ignored.
        """
        if first is not None:
            self.hidden_state.clear()
            with Overlooking():
                first()
        return InterleavedAnswer(call, when, attempt(run or self.runs[call].values), **how)


def one_after_another(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Make each call after each of the other calls, and after itself."""
    for first, second in product([*calls.runs], repeat=2):
        if THIS_CALL in (first, second):
            when = "again" if first == second else f"after {first}"
            yield calls.answer(second, when, first=calls.runs[first].values)


def two_graphs(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Keep two graphs at once, and run their backwards in both orders."""
    for other, early in product([*calls.runs][1:], (True, False)):
        calls.hidden_state.clear()
        pairs = [(THIS_CALL, calls.run.call()), (other, calls.runs[other].call())]
        for call, graph in pairs if early else reversed(pairs):
            beside = other if call == THIS_CALL else THIS_CALL
            when = f"when {beside} comes between its forward and its backward"
            yield calls.answer(call, when, graph.values)


def in_rewritten_tensors(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Write new numbers into the same tensors, also without raising versions; then reuse freed memory."""
    if OTHER_CALL not in calls.runs or any(0 in each.stride() for each in tensors_in(calls.run.flat())):
        return
    exchanges = calls.add_exchanged()
    calls.hidden_state.clear()
    first = calls.run.call()
    first.values()

    def again(call: str) -> CallValues:
        new = zip(first.leaves, calls.runs[call].flat(), strict=True)
        leaves = [_rewritten(*pair, open_write=call == OTHER_CALL) for pair in new]
        return first.again(leaves).values()

    for call in (OTHER_CALL, THIS_CALL, *exchanges):
        what = "other numbers were in them" if call == OTHER_CALL else UNCOUNTED_WRITE
        yield calls.answer(call, f"in the same tensors, after {what}", partial(again, call))
    calls.hidden_state.clear()
    for call in (THIS_CALL, OTHER_CALL) * 2:
        yield calls.answer(call, "in memory that another call has freed")


UNCOUNTED_WRITE = "a write that their version counters do not count (`.data`, NumPy, DLPack)"


def _rewritten(leaf: Any, value: Any, *, open_write: bool) -> Any:
    """The same tensor with new numbers; its version rises only if the write is visible to autograd."""
    if not isinstance(leaf, Tensor):
        return value
    with torch.no_grad():
        (leaf if open_write else leaf.data).copy_(value)
    return leaf


def after_freed_graph(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Keep the results of a call after its graph is freed, and make another call."""
    calls.hidden_state.clear()
    results = calls.run.call().results
    with Overlooking():
        calls.runs.get(OTHER_CALL, calls.run).values()
    answer = CallValues(copies(results), calls.right[THIS_CALL].gradients)
    yield InterleavedAnswer(THIS_CALL, "after its graph was freed and another call was made", answer)


def interrupted(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Make a call after a call in which torch's first operation failed, then the second, and so on."""
    for last in range(1, INTERRUPTIONS + 1):
        calls.hidden_state.clear()
        if not _stops(calls, last):
            return
        for call in calls.known(OTHER_CALL, THIS_CALL):
            yield calls.answer(call, "after a call in which an operation of torch failed")


def _stops(calls: InterleavedCalls, last: int) -> bool:
    """Make a call in which an operation fails; return True if it has at least `last` operations."""
    seen = 0

    def see(operator: Any, kwargs: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            raise InterruptedOperationError(str(operator))

    graph = calls.run.call(leaf=False)
    grads = graph.grads()
    with Overlooking():  # the operator may raise a different exception instead
        with capabilities.observe_operators(see), torch.enable_grad():
            graph.results = calls.run.subject.call(graph.sample, graph.given)
        with capabilities.observe_operators(see):
            graph.backward(grads)
    return seen >= last


def in_modes(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Make the call without gradients, and with gradients after a call without gradients."""
    right, anew = calls.right[THIS_CALL], calls.hidden_state.clear
    modes: list[tuple[str, Mode]] = [
        ("`torch.no_grad()`", torch.no_grad),
        ("`torch.inference_mode()`", torch.inference_mode),
    ]
    for name, mode in modes:
        under = f"under {name}"

        def inside(mode: Mode = mode) -> CallValues:
            with mode():
                results = copies(calls.run.subject.call(calls.run.sample, calls.run.flat()))
            return CallValues(copies(results), right.gradients)  # these are no inference tensors

        yield calls.answer(THIS_CALL, under, inside, first=anew, modes=True, alone=True, mode=mode)
        for call in calls.known(THIS_CALL, OTHER_CALL):
            yield calls.answer(call, f"after {THIS_CALL} was made {under}", first=inside)
        yield calls.answer(THIS_CALL, f"{under}, after the same call with gradients", inside, modes=True)

    def single() -> CallValues:
        with torch.autograd.set_multithreading_enabled(False):
            return calls.run.values()

    when = "under `torch.autograd.set_multithreading_enabled(False)`"
    yield calls.answer(THIS_CALL, when, single, first=anew, modes=True, alone=True)


def in_threads(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Make calls in four threads at once, each with its own tensors: all forwards, then all backwards."""
    names = (calls.known(THIS_CALL, OTHER_CALL) * 4)[:4]
    runs = [calls.runs[call] for call in names]
    jobs = [(lambda _, run=run: run.flat(), run.call, _grads, _back) for run in runs]
    for in_step in (True, False):
        calls.hidden_state.clear()
        answers = at_once(jobs, in_step=in_step)
        for call, given in zip(names, answers, strict=True):
            if isinstance(given, BaseException):
                refuse_own(given)
            if given is not None:
                answer = given if isinstance(given, CallValues) else Raised(given)
                yield InterleavedAnswer(call, "in four threads at once", answer, modes=True)


def _grads(graph: LiveCall) -> tuple[LiveCall, tuple[Tensor | None, ...], list[Tensor]]:
    return graph, copies(graph.results), graph.grads()


def _back(begun: tuple[LiveCall, tuple[Tensor | None, ...], list[Tensor]]) -> CallValues:
    graph, results, grads = begun
    return CallValues(results, tuple(graph.backward(grads)))


def from_a_script(calls: InterleavedCalls) -> Iterator[InterleavedAnswer]:
    """Make the call, forward and backward, as in a script that shows no trace of a check."""
    when = "by a script in a separate thread, where nothing shows that a check runs"
    anew = calls.hidden_state.clear
    yield calls.answer(THIS_CALL, when, partial(_plainly, calls.run), first=anew, by_script=True)


def _plainly(run: Run) -> CallValues:
    subject, sample = run.subject, run.sample
    function = subject.apply or subject.operator
    assert function is not None
    forward = partial(subject.call, sample, by=partial(call_plainly, function))
    with as_a_script():
        graph = LiveCall(subject, sample, run.argnums, *record(forward, run.flat(), run.argnums))
        results = copies(graph.results)
        if not (graph.open and graph.inputs):
            return CallValues(results, (None,) * len(graph.inputs))
        given = graph.outputs, graph.inputs, graph.grads()
        gradients = call_plainly(torch.autograd.grad, given, {"allow_unused": True})
    return CallValues(results, copies(dense(gradients)))


Interleaving = Callable[[InterleavedCalls], Iterator[InterleavedAnswer]]

INTERLEAVINGS: tuple[Interleaving, ...] = (
    one_after_another,
    two_graphs,
    in_rewritten_tensors,
    after_freed_graph,
    interrupted,
    in_modes,
    in_threads,
    from_a_script,
)

FEW_INTERLEAVINGS = (one_after_another, two_graphs, from_a_script)
"""Interleavings for samples after the first, since their findings may depend on the sample."""


LONGEST = 60.0
"""Seconds after which a thread stops waiting for the other threads to begin a stage."""

STEP = 0.2
"""Seconds after which a thread continues alone, if another has fewer operations or waits for its lock."""

STEPS = 200
"""Number of operations of a stage that run at the same time in all threads."""


def at_once(stages: Sequence[Sequence[Callable[[Any], Any]]], *, in_step: bool) -> list[Any]:
    """Run several jobs, each in a thread; all threads begin each stage together.

    Args:
        stages: Stages of each thread; each stage takes the result of the previous stage.
        in_step: True to run each operation of torch in all threads together, so that shared state is mixed
            up.

    Returns:
        Result of each thread's last stage, or its exception; None if another thread's exception stopped it.

    Example:
        >>> stages = [lambda _: 1, lambda one: one + 1], [lambda _: 5, lambda five: -five]
        >>> at_once(stages, in_step=False)
        [2, -5]
    """
    answers: list[Any] = [None] * len(stages)
    begin = threading.Barrier(len(stages))
    steps = [threading.Barrier(len(stages)) for _ in stages[0]]

    def work(at: int) -> None:
        value: Any = None
        try:
            for stage, step in zip(stages[at], steps, strict=True):
                begin.wait(LONGEST)
                with capabilities.observe_operators(_waiting(step)) if in_step else nullcontext():
                    value = stage(value)
                step.abort()  # further operations of other threads run alone
            answers[at] = value
        except threading.BrokenBarrierError:
            return
        except (Exception, SystemExit, EndlessCallError) as error:  # otherwise the other threads would wait
            answers[at] = error
            begin.abort()
            for step in steps:
                step.abort()

    _finish([threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(stages))])
    return answers


def _finish(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # a call can only be stopped at its next line of Python
            thread.join(POLL_S)


def _waiting(step: threading.Barrier) -> Callable[[Any, dict[str, Any]], None]:
    done = 0

    def wait(operator: Any, kwargs: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if done > STEPS or step.broken:
            return
        try:
            step.wait(STEP)
        except threading.BrokenBarrierError:
            return

    return wait


SCRIPT = "script.py"
"""File of the caller's frames, and `sys.argv`."""

MODULES = ("opsmith.checking", "opsmith.cli", "opsmith.testing", "pytest", "_pytest")
"""Prefixes of the names of modules that a script does not import."""

VARIABLES = "PYTEST_"
"""Prefix of the names of environment variables that a script does not have."""

_OPSMITH = Path(opsmith.__file__).parent


@contextmanager
def as_a_script() -> Iterator[None]:
    """A region in which modules, arguments and variables look like a script's.

    Example:
        >>> with as_a_script():
        ...     sys.argv, "opsmith.checking" in sys.modules
        (['script.py'], False)
    """
    modules = {name: sys.modules[name] for name in [*sys.modules] if name.startswith(MODULES)}
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    arguments = sys.argv
    try:
        for name in modules:
            del sys.modules[name]
        for name in variables:
            del os.environ[name]
        sys.argv = [SCRIPT]
        yield
    finally:
        sys.argv = arguments
        os.environ.update(variables)
        sys.modules.update(modules)


def call_plainly(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function in a new thread, whose frames look like a script's.

    Args:
        function: The function; opsmith's code that wraps it gets the name of the script, too.
        args: Its arguments.
        kwargs: Its arguments by name.

    Example:
        >>> call_plainly(lambda: sys._getframe(1).f_code.co_filename, (), {})
        'script.py'
    """
    answer: list[Any] = []
    work = _moved(_work), _moved(function), args, kwargs, answer
    _finish([threading.Thread(target=copy_context().run, args=work, daemon=True)])
    returned, error = answer
    if error is not None:
        raise error
    return returned


def _work(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], answer: list[Any]
) -> None:
    try:
        answer += function(*args, **kwargs), None
    except BaseException as error:
        answer += None, error


def _moved(function: Any) -> Any:
    """The same code under a script's name, with the functions that it wraps."""
    if not isinstance(function, FunctionType) or not _is_opsmiths(function):
        return function
    code = function.__code__.replace(co_filename=SCRIPT)
    cells = tuple(CellType(_moved(each.cell_contents)) for each in function.__closure__ or ())
    names = {**function.__globals__, "__name__": "__main__", "__file__": SCRIPT}
    return FunctionType(code, names, function.__name__, function.__defaults__, cells)


def _is_opsmiths(function: FunctionType) -> bool:
    return Path(function.__code__.co_filename).is_relative_to(_OPSMITH)
