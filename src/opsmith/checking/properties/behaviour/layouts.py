"""Layouts: results and gradients are the same wherever inputs and grad_outputs lie in memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated
from opsmith.checking.effort import ALL
from opsmith.checking.exceptions import Overlooking, within_backward
from opsmith.checking.output.replay import layout_replay
from opsmith.checking.properties.behaviour.layout_runs import (
    NAME,
    ContiguousRun,
    LayoutFault,
    LayoutFindings,
    LayoutRun,
    LayoutRunner,
    OddTensor,
    failure_of,
)
from opsmith.checking.property import Coverage, Findings, Note, Property, covered_samples, first_line
from opsmith.checking.samples.cases import ALWAYS_CHECKED, case_name, dtype_name
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.memory_layouts import CHUNK, layouts_for, plain
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.core.kernels import choose
from opsmith.torch_library.torch_messages import LAYOUT_REFUSED, LAZY_BIT, has_message

IN_FLOAT32 = 2
"""Samples that are tried in float32 as well, where no kernel distinguishes it from float64."""

FIRST = 3
"""Layouts of each grad_output that come before any of an input, where not all are tried."""


def run(subject: Subject) -> Findings:
    """Try every layout of every input and of every grad_output alone, and some of them together."""
    seen = LayoutFindings()
    chosen = replace(subject, samples=samples_of_each_form(subject))

    def check_sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
        for case in layout_cases(subject, sample):
            if isinstance(case, Note):
                yield case
            else:
                coverage.ran += 1
                case.try_layouts(seen)

    yield from covered_samples(
        NAME, check_sample, "no sample has a tensor, or runs on contiguous ones", chosen
    )
    for key, group in seen.wrong.items():
        yield failure_of(subject, key, group, seen)
    for label, texts in seen.refused.items():
        words, text = ", ".join(texts), next(iter(texts.values()))
        yield Note(f"it does not take {label} {words}, and says so: {text}")


def samples_of_each_form(subject: Subject) -> tuple[Sample, ...]:
    """Samples of different forms first: the author's, then those that were derived."""
    forms: dict[Any, Sample] = {}
    rest: list[Sample] = []
    for sample in subject.samples:
        if forms.setdefault((sample.ranks, sample.is_empty), sample) is not sample:
            rest.append(sample)
    first = [sample for (_, empty), sample in forms.items() if not empty]
    last = [sample for (_, empty), sample in forms.items() if empty]
    return tuple([*first, *last, *rest][: subject.effort.layout_samples])


@dataclass
class LayoutCase:
    """A sample in a dtype on a device, run in every layout.

    Args:
        runner: Runs the sample.
        device: Its device.
        flat: Its arguments, contiguous.
        grads: The grad_output of each visible result, contiguous; None where there is none.
        inputs_too: True if inputs get layouts, and not grad_outputs alone.
    """

    runner: LayoutRunner
    device: torch.device
    flat: list[Any]
    grads: list[Tensor | None]
    inputs_too: bool

    def __post_init__(self) -> None:
        self.twin = ContiguousRun(self.runner, self.flat, self.grads)

    @property
    def name(self) -> str:
        """Sample, dtype and device in words."""
        return case_name(self.runner.sample, self.runner.dtype, self.device)

    def try_layouts(self, seen: LayoutFindings) -> None:
        """Try each layout alone, then several at once."""
        singles = list(self._singles())
        limit = self.runner.subject.effort.layouts
        for odd in singles if limit == ALL else _spread(singles, limit):
            self._try(seen, [odd])
        draw = random.Random(self.runner.subject.seed)
        by_position: dict[tuple[int, bool], list[OddTensor]] = {}
        for odd in singles:
            if not odd.layout.repeats or odd.backward:
                by_position.setdefault((odd.position, odd.backward), []).append(odd)
        for _ in range(self.runner.subject.effort.layout_combinations if len(by_position) > 1 else 0):
            several = [draw.choice(odds) for odds in by_position.values()]
            if not any(self._known(seen, odd) for odd in several):
                self._try(seen, self._least(several))

    def _singles(self) -> Iterator[OddTensor]:
        """Every layout of every tensor, grad_outputs first, since callers do not choose their layout."""
        for position, grad in enumerate(self.grads):
            if grad is not None:
                yield from (OddTensor(position, True, layout) for layout in layouts_for(grad))
        for position, value in enumerate(self.flat if self.inputs_too else ()):
            if isinstance(value, Tensor):
                known = sorted(layouts_for(value), key=lambda layout: layout.repeats)
                yield from (OddTensor(position, False, layout) for layout in known)

    def _known(self, seen: LayoutFindings, odd: OddTensor) -> bool:
        label = self._label(odd)
        return any(key[:2] == (label, odd.backward) for key in seen.wrong)

    def _label(self, odd: OddTensor) -> str:
        subject, sample = self.runner.subject, self.runner.sample
        return subject.results(sample)[odd.position].name if odd.backward else sample.labels[odd.position]

    def laid(self, odds: Sequence[OddTensor]) -> tuple[LayoutRun, ContiguousRun, list[Any]]:
        """A run with some tensors in odd layouts, the contiguous run to compare with, and the arguments."""
        flat, grads = [*map(replica, self.flat)], [*map(replica, self.grads)]
        for odd in odds:
            values: list[Any] = grads if odd.backward else flat
            values[odd.position] = odd.layout.of(values[odd.position])
        twin = self.twin
        if any(odd.layout.repeats for odd in odds):
            twin = ContiguousRun(self.runner, [*map(plain, flat)], [*map(plain, grads)])
        return self.runner.run(flat, grads), twin, flat

    def _least(self, several: list[OddTensor]) -> list[OddTensor]:
        """The smallest part of several layouts that still fails together."""
        for odd in several:
            fewer = [each for each in several if each is not odd]
            run, twin, _ = self.laid(fewer)
            wrong = run.error is not None or any(
                twin.fault(at, output) is not None for at, output in enumerate(run.outputs)
            )
            if wrong and fewer:
                return self._least(fewer)
        return several

    def _try(self, seen: LayoutFindings, odds: Sequence[OddTensor]) -> None:
        got, twin, flat = self.laid(odds)
        if twin.right.error is not None:
            return  # its numbers, repeated, are none that it takes
        if got.error is not None:
            self._raised(seen, odds, got, flat)
            return
        fine = True
        results = len(got.outputs) - len(self.runner.argnums)
        unseen = results if all(odd.backward for odd in odds) else 0
        for position, output in enumerate(got.outputs):
            # The call does not see grad_output: where its results differ, that is another fault.
            fault = twin.fault(position, output) if position >= unseen else None
            if fault is None:
                continue
            fine = False
            what, difference = fault
            first = odds[0]
            replay = self._replay(odds, position)
            what += self._together(odds)
            self._enter(seen, LayoutFault(first, position, what, self.name, difference, replay), flat)
            if position < results:
                return  # a gradient of a wrong result would report the same
        if fine and len(odds) == 1:
            seen.right.setdefault((self._label(odds[0]), odds[0].backward), set()).add(odds[0].layout.name)

    def _together(self, odds: Sequence[OddTensor]) -> str:
        others = [
            f"that of `{self._label(odd)}`" if odd.backward else f"`{self._label(odd)}`" for odd in odds[1:]
        ]
        words = [f"{other} {odd.layout.name}" for other, odd in zip(others, odds[1:], strict=True)]
        return f" (with {', '.join(words)})" if words else ""

    def _raised(
        self, seen: LayoutFindings, odds: Sequence[OddTensor], got: LayoutRun, flat: Sequence[Any]
    ) -> None:
        """Report an exception: in the call it may be a refusal, in the backward it is a failure."""
        assert got.error is not None
        first, error = odds[0], got.error
        text = f"{type(error).__name__}: {first_line(error)}"
        if self._is_answer(error, got, flat):
            what = "a grad_output" if first.backward else f"`{self._label(first)}`"
            seen.refused.setdefault(what, {}).setdefault(first.layout.name, text)
            return
        position = len(self.grads) + self._raising(odds) if got.in_backward else 0
        replay, what = self._replay(odds, position), text + self._together(odds)
        self._enter(seen, LayoutFault(first, position, what, self.name, replay=replay), flat)

    def _is_answer(self, error: Exception, got: LayoutRun, flat: Sequence[Any]) -> bool:
        """True if an error is a clear refusal of a layout by the call, or torch's own in the backward."""
        if has_message(error, LAZY_BIT):
            return True
        subject, sample = self.runner.subject, self.runner.sample
        itself = not subject.kind.has_reference  # then the reference raises whatever it raises
        if got.in_backward:  # of a reference without formulas torch derives what no code of the author's does
            return not (itself or subject.specification.gradients.rules or within_backward(error))
        return is_stated(error) or (not itself and _raises(lambda: subject.reference(sample, flat)))

    def _raising(self, odds: Sequence[OddTensor]) -> int:
        """The input, by its position among those that are differentiated by, whose gradient raises."""
        argnums = self.runner.argnums
        alone = [replace(self, runner=replace(self.runner, argnums=(argnum,))) for argnum in argnums]
        return next((at for at, each in enumerate(alone) if each.laid(odds)[0].error is not None), 0)

    def _replay(self, odds: Sequence[OddTensor], output: int) -> Callable[[], str | None]:
        runner = self.runner
        laid = [(odd.position, odd.backward, odd.layout) for odd in odds]
        return lambda: layout_replay(
            runner.subject, runner.sample, self.flat, self.grads, runner.argnums, laid, output, NAME
        )

    def _enter(self, seen: LayoutFindings, wrong: LayoutFault, flat: Sequence[Any]) -> None:
        subject, sample = self.runner.subject, self.runner.sample
        results = subject.results(sample)
        if wrong.output < len(results):
            about = results[wrong.output].name
            chosen, _ = choose(subject.specification.kernels, sample.flattening.pack(flat))
            wrong = replace(wrong, kernel=chosen.kernel if chosen else None)
        else:
            about = f"gradient of {sample.labels[self.runner.argnums[wrong.output - len(results)]]}"
        shares = wrong.odd.layout.repeats or wrong.difference is not None
        if self.twin.written is not None and shares:  # a write goes wrong where numbers share memory
            wrong = replace(wrong, cause=self.twin.written)
        seen.wrong.setdefault((self._label(wrong.odd), wrong.odd.backward, about), []).append(wrong)


def _spread(singles: Sequence[OddTensor], limit: int) -> list[OddTensor]:
    """Select layouts: the first few of each grad_output, then those of every tensor in turn."""
    by_position: dict[tuple[int, bool], list[OddTensor]] = {}
    for odd in singles:
        by_position.setdefault((odd.position, odd.backward), []).append(odd)
    longest = max(map(len, by_position.values()), default=0)
    turns = [odds[at] for at in range(longest) for odds in by_position.values() if at < len(odds)]
    first: list[OddTensor] = []
    for odds in (odds for (_, backward), odds in by_position.items() if backward):
        # A chunk's rows are whole and far from each other: what reads by one stride is wrong there alone.
        first += [*odds[: FIRST - 1], *(odd for odd in odds[FIRST - 1 :] if odd.layout.name == CHUNK)]
    first = first[: limit // 2]
    return [*first, *(odd for odd in turns if odd not in first)][:limit]


def layout_cases(
    subject: Subject, sample: Sample, *, forward_alone: bool = False
) -> Iterator[LayoutCase | Note]:
    """Yield the sample on each device in each dtype, contiguous, and a note for each that does not run.

    Args:
        subject: The subject of the check.
        sample: The sample.
        forward_alone: Yield a sample that raises with gradients once more, without them.
    """
    if not any(isinstance(value, Tensor) for value in sample.flat):
        return
    argnums = differentiated(subject, sample).argnums
    draws = bool(subject.draws or drawing_operations(subject, sample))
    if draws:
        yield Note(
            "layouts of inputs were left out: it draws, and what is drawn for a tensor follows its layout"
        )
    dtypes = (torch.float32,) if subject.single_precision else ALWAYS_CHECKED
    if not (
        subject.specification.kernels or subject.kind.in_library or sample in subject.samples[:IN_FLOAT32]
    ):
        dtypes = dtypes[:1]
    for dtype in dtypes if sample.inexact else dtypes[:1]:
        for device in subject.devices_with(dtype):
            flat = [*map(plain, sample.at(dtype, device))]
            with torch.no_grad():
                results = subject.call(sample, sample.at(dtype, device))
            open_ = results_with_gradient(subject, sample, results) if argnums else [False] * len(results)
            generator = subject.generator()
            grads = random_grad_outputs(results, open_, generator)
            case = LayoutCase(LayoutRunner(subject, sample, argnums, dtype), device, flat, grads, not draws)
            error = case.twin.right.error
            if error is None:
                yield case
                continue
            if forward_alone and argnums:
                runner = replace(case.runner, argnums=())
                alone = replace(case, runner=runner, grads=[None] * len(results))
                yield from [alone] if alone.twin.right.error is None else []
            what = f"gradients in {dtype_name(dtype)} were" if forward_alone else f"{dtype_name(dtype)} was"
            yield Note(f"{what} left out on {device.type}: it raises: {first_line(error)}")


def _raises(call: Callable[[], Any]) -> bool:
    with torch.no_grad(), Overlooking():  # its error is reported with the operator's own
        call()
        return False
    return True


OWN_WORDS = re.compile(r"contiguous|stride|layout|memory.format|channels.last|aligned", re.IGNORECASE)


def is_stated(error: Exception) -> bool:
    """True if an error of the operator names the layout, and not an error of some operation."""
    return bool(OWN_WORDS.search(str(error))) and not has_message(error, LAYOUT_REFUSED)


LAYOUTS = Property(
    NAME,
    "results and gradients are the same, wherever inputs and gradients lie in memory",
    run,
    varied=True,
    sends_gradients=True,
)
