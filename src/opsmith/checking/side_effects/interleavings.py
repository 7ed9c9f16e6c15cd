"""The same calls alone, after and between one another, interrupted, in other modes, and in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import Alive, Answer, alive, answer, copies
from opsmith.checking.exceptions import AboutOperatorError, Overlooking, refuse_own
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.hidden_state import Memory
from opsmith.checking.subject import Subject
from opsmith.torch_library import capabilities

MINE, OTHER = "this call", "a call of other numbers of the same shapes"
INTERRUPTIONS = 6


Mode = Callable[[], AbstractContextManager[Any]]


class InterruptedOperationError(AboutOperatorError, RuntimeError):
    """What an operation raises that is made to fail, as it would for want of memory."""


@dataclass(frozen=True)
class Heard:
    """What a call gave in a scene.

    Args:
        call: Which call it was.
        when: What came before or beside it.
        given: Its results and gradients, or what it raised.
        modes: Whether it ran in another mode or thread, in which another kernel may round otherwise.
        alone: Whether no other call came before, so that what it raises is a matter of the mode alone.
        mode: The mode without gradients that it ran in, if that is all that differs.
    """

    call: str
    when: str
    given: Answer | BaseException
    modes: bool = False
    alone: bool = False
    mode: Mode | None = None


@dataclass(frozen=True)
class Made:
    """How to make a call.

    Args:
        sample: The sample that its arguments are of.
        places: Arguments that require a gradient.
        make: Makes its flat arguments.
    """

    sample: Sample
    places: tuple[int, ...]
    make: Callable[[], list[Any]]


@dataclass
class Stage:
    """A sample's calls, and what each gives alone.

    Args:
        subject: What is under check.
        memory: What the operator may remember; it is emptied before each scene.
        calls: How to make each call: `MINE`, and others that may disturb it.
        right: What each call gives alone.
        kept: Arguments that stay alive, so that no other tensor gets their addresses.
    """

    subject: Subject
    memory: Memory
    calls: dict[str, Made]
    right: dict[str, Answer] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def prepare(self) -> None:
        """Run each call alone; one that raises is left out."""
        for call, made in list(self.calls.items()):
            flat = made.make()
            self.memory.forget()
            try:
                self.right[call] = answer(self.subject, made.sample, flat, made.places)
            except Exception as error:
                refuse_own(error)
                if call == MINE:
                    raise
                del self.calls[call]
            else:
                self.kept.append(flat)

    @property
    def mine(self) -> Made:
        """The call that is looked at."""
        return self.calls[MINE]

    def alive(self, call: str, flat: list[Any] | None = None, *, leaf: bool = True) -> Alive:
        """A call with its graph."""
        made = self.calls[call]
        return alive(self.subject, made.sample, flat or made.make(), made.places, leaf=leaf)

    def heard(self, call: str, when: str, run: Callable[[], Answer], **how: Any) -> Heard:
        """What a run gives."""
        try:
            return Heard(call, when, run(), **how)
        except Exception as error:
            refuse_own(error)
            return Heard(call, when, error, **how)

    def answer(self, call: str) -> Answer:
        """A call, forward and backward."""
        return self.alive(call).answered(self.subject)


def one_after_another(stage: Stage) -> Iterator[Heard]:
    """Each call after each other call, and after itself."""
    for first in stage.calls:
        for second in stage.calls:
            if MINE not in (first, second):
                continue
            stage.memory.forget()
            with Overlooking():
                stage.answer(first)
            when = "again" if first == second else f"after {first}"
            yield stage.heard(second, when, partial(stage.answer, second))


def two_graphs(stage: Stage) -> Iterator[Heard]:
    """Two graphs alive at once, and their backwards in both orders."""
    for other in stage.calls:
        for early in (True, False):
            if other == MINE:
                continue
            stage.memory.forget()
            mine, theirs = stage.alive(MINE), stage.alive(other)
            pairs = [(MINE, mine), (other, theirs)]
            for call, graph in pairs if early else reversed(pairs):
                beside = other if call == MINE else MINE
                when = f"when {beside} comes between its forward and its backward"
                yield stage.heard(call, when, partial(graph.answered, stage.subject))


def renewed(stage: Stage) -> Iterator[Heard]:
    """Other numbers in the same tensors, as an optimizer writes them; and in memory that was freed."""
    if OTHER not in stage.calls or any(
        isinstance(each, Tensor) and 0 in each.stride() for each in stage.mine.make()
    ):
        return
    stage.memory.forget()
    first = stage.alive(MINE)
    first.answered(stage.subject)
    leaves = stage.calls[OTHER].make()
    with torch.no_grad():
        for at, mine in enumerate(first.leaves):
            if isinstance(mine, Tensor):
                leaves[at] = mine.copy_(leaves[at])

    def again() -> Answer:
        with torch.enable_grad():
            given = leaves if first.given is first.leaves else [_copy(each) for each in leaves]
            results = stage.subject.call(first.sample, given)
        return Alive(first.sample, first.places, leaves, given, results).answered(stage.subject)

    yield stage.heard(OTHER, "in the same tensors, after other numbers were in them", again)
    stage.memory.forget()
    for call in (MINE, OTHER) * 2:
        yield stage.heard(call, "in memory that another call has freed", partial(stage.answer, call))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def gone(stage: Stage) -> Iterator[Heard]:
    """Results that outlive their graph."""
    stage.memory.forget()
    results = stage.alive(MINE).results
    with Overlooking():
        stage.answer(OTHER if OTHER in stage.calls else MINE)
    kept = Answer(copies(results), stage.right[MINE].gradients)
    yield Heard(MINE, "when its graph is gone and another call has been made", kept)


def interrupted(stage: Stage) -> Iterator[Heard]:
    """A call after one in which an operation of torch has failed, the first, the second, and so on."""
    for last in range(1, INTERRUPTIONS + 1):
        stage.memory.forget()
        if not _stops(stage, last):
            return
        for call in (OTHER, MINE):
            if call in stage.calls:
                when = "after a call in which an operation of torch failed"
                yield stage.heard(call, when, partial(stage.answer, call))


def _stops(stage: Stage, last: int) -> bool:
    """Make a call in which an operation fails, and say whether there are as many."""
    seen = 0

    def see(operator: Any, kwargs: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            raise InterruptedOperationError(str(operator))

    graph = stage.alive(MINE, leaf=False)
    grads = graph.grads(stage.subject)
    with Overlooking():  # the operator may have made another exception of it
        with capabilities.watching(see), torch.enable_grad():
            graph.results = stage.subject.call(graph.sample, graph.given)
        with capabilities.watching(see):
            graph.backward(grads)
    return seen >= last


def in_modes(stage: Stage) -> Iterator[Heard]:
    """Without gradients, and with them after a call without."""
    right = stage.right[MINE]
    modes: list[tuple[str, Mode]] = [
        ("`torch.no_grad()`", torch.no_grad),
        ("`torch.inference_mode()`", torch.inference_mode),
    ]
    for name, mode in modes:

        def inside(mode: Mode = mode) -> Answer:
            with mode():
                results = copies(stage.subject.call(stage.mine.sample, stage.mine.make()))
            return Answer(tuple(_plain(each) for each in results), right.gradients)

        stage.memory.forget()
        yield stage.heard(MINE, f"under {name}", inside, modes=True, alone=True, mode=mode)
        for call in (MINE, OTHER):
            if call in stage.calls:
                stage.memory.forget()
                with Overlooking():
                    inside()
                when = f"after {MINE} was made under {name}"
                yield stage.heard(call, when, partial(stage.answer, call))
        yield stage.heard(MINE, f"under {name}, after the same with gradients", inside, modes=True)

    def single() -> Answer:
        with torch.autograd.set_multithreading_enabled(False):
            return stage.answer(MINE)

    stage.memory.forget()
    when = "under `torch.autograd.set_multithreading_enabled(False)`"
    yield stage.heard(MINE, when, single, modes=True, alone=True)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def in_threads(stage: Stage) -> Iterator[Heard]:
    """In four threads at once, each with tensors of its own, forwards first and then backwards."""
    calls = [call for call in (MINE, OTHER) if call in stage.calls] * 2
    calls = (calls * 2)[:4]
    jobs = [
        (partial(_made, stage, call), partial(_begun, stage), partial(_grads, stage), _back) for call in calls
    ]
    for in_step in (True, False):
        stage.memory.forget()
        answers = at_once(jobs, in_step=in_step)
        for call, given in zip(calls, answers, strict=True):
            if isinstance(given, BaseException):
                refuse_own(given)
            if given is not None:
                yield Heard(call, "in four threads at once", given, modes=True)


def _made(stage: Stage, call: str, _: None) -> tuple[str, list[Any]]:
    return call, stage.calls[call].make()


def _begun(stage: Stage, made: tuple[str, list[Any]]) -> Alive:
    return stage.alive(*made)


def _grads(stage: Stage, graph: Alive) -> tuple[Alive, tuple[Tensor | None, ...], list[Tensor]]:
    return graph, copies(graph.results), graph.grads(stage.subject) if graph.open else []


def _back(begun: tuple[Alive, tuple[Tensor | None, ...], list[Tensor]]) -> Answer:
    graph, results, grads = begun
    return Answer(results, tuple(graph.backward(grads)) if graph.open else (None,) * len(graph.places))


Scene = Callable[[Stage], Iterator[Heard]]

SCENES: tuple[Scene, ...] = (one_after_another, two_graphs, renewed, gone, interrupted, in_modes, in_threads)


LONGEST = 60.0
"""Seconds after which a thread that waits for the others to begin a stage gives up."""

STEP = 0.2
"""Seconds after which a thread goes on alone: another one has fewer operations, or waits for its lock."""

STEPS = 200
"""Operations of a stage that are done in step."""


def at_once(stages: Sequence[Sequence[Callable[[Any], Any]]], *, in_step: bool) -> list[Any]:
    """Run several jobs, each in a thread of its own; all threads begin each stage together.

    Args:
        stages: For each thread what it does, one stage after the other; each takes what the one before gave.
        in_step: Whether all threads do each operation of torch together, so that what they share gets mixed.

    Returns:
        What each thread's last stage gave, or what it raised; None where another's exception stopped it.

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
                with capabilities.watching(_waiting(step)) if in_step else nullcontext():
                    value = stage(value)
                step.abort()  # whoever has more operations does them alone
            answers[at] = value
        except threading.BrokenBarrierError:
            return
        except (Exception, SystemExit) as error:  # a thread that exits would let the others wait
            answers[at] = error
            begin.abort()
            for step in steps:
                step.abort()

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


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
