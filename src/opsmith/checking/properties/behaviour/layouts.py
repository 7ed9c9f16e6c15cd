"""Layouts: results and gradients do not depend on the memory layout of inputs and grad_outputs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith.checking.effort import ALL
from opsmith.checking.exceptions import Raised, attempt, error_words, first_line, of_backward, within_backward
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.output.replay import layout_replay
from opsmith.checking.property import Findings, Note, Property
from opsmith.checking.report import RESULT, Failure, Given
from opsmith.checking.run import Coverage, Run, TensorName, covered_runs
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.cases import ALWAYS_CHECKED, dtype_name
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.memory_layouts import CHUNK, Layout, layouts_for, plain
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.checking.ways import Fault, Outputs, Twin, Way, compare
from opsmith.core.cached_property import cached_property
from opsmith.core.kernels import Kernel, choose
from opsmith.judging.compare import exact_difference
from opsmith.torch_library.torch_messages import LAYOUT_REFUSED, LAZY_BIT, SHARED, has_message

NAME = "layouts"

IN_FLOAT32 = 2
"""Number of samples that are also tried in float32 if no kernel distinguishes it from float64."""

FIRST = 3
"""Number of layouts of each grad_output that are tried before layouts of inputs, if not all are tried."""

Refused = dict[str, dict[str, str]]
"""The layouts that a call refuses, each with its error, by the description of the tensor."""


def run(subject: Subject) -> Findings:
    """Try every layout of every input and grad_output alone, and some layouts together."""
    refused: Refused = {}

    def check(run: Run, coverage: Coverage) -> Findings:
        for case in layout_cases(partial(LayoutCase, refused=refused), run):
            if isinstance(case, Note):
                yield case
            else:
                coverage.ran += 1
                yield from compare(case.ways())

    chosen = samples_of_each_form(subject)
    yield from covered_runs(
        NAME, check, "no sample has a tensor, or no sample runs on contiguous tensors", chosen
    )
    for label, texts in refused.items():
        words, text = ", ".join(texts), next(iter(texts.values()))
        yield Note(f"the operator refuses {label} ({words}): {text}")


def samples_of_each_form(subject: Subject) -> Subject:
    """The subject with few samples, of different forms first: the author's samples, then derived samples."""
    firsts: dict[Any, Sample] = {}
    for sample in subject.samples:
        firsts.setdefault((sample.ranks, sample.is_empty), sample)
    rest = [sample for sample in subject.samples if sample not in firsts.values()]
    chosen = [*sorted(firsts.values(), key=lambda sample: sample.is_empty), *rest]
    return replace(subject, samples=tuple(chosen[: subject.effort.layout_samples]))


Odd = tuple[int, Layout]
"""A tensor that is not contiguous: its position among all tensors, and its layout."""


@dataclass(frozen=True)
class LayoutCase(Run):
    """A sample in a dtype on a device, run in every layout.

    Args:
        contiguous: Its arguments, then the grad_output of each visible result; None for a result without one.
        inputs_too: True if inputs get layouts as well as grad_outputs.
        refused: Dict to which the layouts are added that a call refuses.
    """

    contiguous: list[Any] = field(default_factory=list)
    inputs_too: bool = True
    refused: Refused = field(default_factory=dict)

    @property
    def given(self) -> list[Any]:
        """The contiguous arguments."""
        return self.contiguous[: len(self.sample.flat)]

    @property
    def grads(self) -> list[Tensor | None]:
        """The contiguous grad_outputs."""
        return self.contiguous[len(self.sample.flat) :]

    @cached_property
    def twin(self) -> Twin:
        """The outputs for contiguous tensors."""
        return self.right(self.contiguous)

    def right(self, values: list[Any]) -> Twin:
        """The outputs for contiguous arguments and grad_outputs."""
        return Twin(self.outputs, values, len(self.grads), self.subject)

    def outputs(self, values: Sequence[Any]) -> Outputs:
        """The results and gradients of a call, for arguments and grad_outputs in their own layouts."""
        count = len(self.sample.flat)
        call = self.call(values[:count])
        gradients = differentiate(call.results, call.inputs, values[count:])
        return [None if each is None else each.detach() for each in (*call.results, *gradients)]

    def kernel(self, values: Sequence[Any]) -> Kernel | None:
        """The kernel that serves some arguments; None for the reference."""
        flat = self.sample.flattening.pack(values[: len(self.sample.flat)])
        chosen, _ = choose(self.subject.specification.kernels, flat)
        return chosen.kernel if chosen else None

    @cached_property
    def _labels(self) -> list[str]:
        """Labels of the arguments, then names of the results."""
        return [*self.sample.labels, *(each.name for each in self.subject.results(self.sample))]

    def _backward(self, at: int) -> bool:
        """True for the position of a grad_output."""
        return at >= len(self.sample.flat)

    @property
    def _tensors(self) -> list[list[Odd]]:
        """The layouts of every tensor; grad_outputs come first, since callers do not choose their layout."""
        every = [at for at, value in enumerate(self.contiguous) if isinstance(value, Tensor)]
        inputs = [at for at in every if self.inputs_too and not self._backward(at)]
        return [
            [
                (at, layout)
                for layout in sorted(
                    layouts_for(self.contiguous[at]),
                    key=lambda layout: layout.repeats and not self._backward(at),
                )
            ]
            for at in [*filter(self._backward, every), *inputs]
        ]

    def ways(self) -> Iterator[Way]:
        """Yield each layout alone, then several at once."""
        effort, tensors = self.subject.effort, self._tensors
        draw, faulty = random.Random(self.subject.seed), set[Hashable]()
        kept = [[odd for odd in odds if self._backward(odd[0]) or not odd[1].repeats] for odds in tensors]
        several = [odds for odds in kept if odds]
        count = effort.layout_combinations if len(several) > 1 else 0
        drawn = ([draw.choice(odds) for odds in several] for _ in range(count))
        for odds in chain(([odd] for odd in self._selected(tensors, effort.layouts)), drawn):
            if len(odds) == 1 or not any(at in faulty for at, _ in odds):
                way = self._least(odds)
                yield way
                faulty |= {way.about} if way.faults else set()

    def _selected(self, tensors: Sequence[Sequence[Odd]], limit: int) -> list[Odd]:
        """All layouts; of too many, the first of each grad_output, then those of each tensor in turn."""
        if limit == ALL:
            return [odd for odds in tensors for odd in odds]
        turns = [odd for turn in zip_longest(*tensors) for odd in turn if odd is not None]
        # A chunk's rows are whole but far apart: code that uses only one stride fails only here.
        first = [
            (at, layout)
            for odds in tensors
            for turn, (at, layout) in enumerate(odds)
            if self._backward(at) and (turn < FIRST - 1 or layout.name == CHUNK)
        ][: limit // 2]
        return [*first, *(odd for odd in turns if odd not in first)][:limit]

    def _least(self, odds: list[Odd]) -> Way:
        """The way with the smallest subset of several layouts that still fails."""
        for odd in odds if len(odds) > 1 else ():
            fewer = [each for each in odds if each is not odd]
            if self._way(fewer).faults:
                return self._least(fewer)
        return self._way(odds)

    def _way(self, odds: Sequence[Odd]) -> Way:
        """The way with some tensors in odd layouts."""
        values, (first, layout) = replicas(self.contiguous), odds[0]
        for at, each in odds:
            values[at] = each.of(values[at])
        right = self.right([*map(plain, values)]) if any(each.repeats for _, each in odds) else self.twin
        others = [
            f"{'the grad_output of ' * self._backward(at)}`{self._labels[at]}` {each.name}"
            for at, each in odds[1:]
        ]
        return Way(
            layout.name + (f" (with {', '.join(others)})" if others else ""),
            self._names,
            # It may not take repeated numbers.
            partial(self.outputs, values) if right.error is None else lambda: None,
            right.fault,
            partial(self._failure, odds, values),
            about=first,
            # The call does not see grad_output: results that differ are a separate fault.
            since=len(self.grads) if all(self._backward(at) for at, _ in odds) else 0,
            excused=partial(self._refuses, odds[0], values),
            blamed=partial(self._blamed, values),
        )

    @cached_property
    def _names(self) -> list[TensorName]:
        return self.names()

    def _refuses(self, odd: Odd, values: Sequence[Any], error: Exception) -> bool:
        """Note a clear refusal of a layout by the call, or by torch in the backward; True if there is one."""
        subject, flat = self.subject, values[: len(self.sample.flat)]
        itself = not subject.kind.has_reference  # the reference raises as well
        if has_message(error, LAZY_BIT):
            refuses = True
        elif of_backward(error):
            # Without formulas, torch derives the gradients, and no code of the author's runs.
            own = itself or subject.specification.gradients.rules or within_backward(error)
            refuses = not own
        else:
            refuses = is_stated(error) or (not itself and _raises(subject.plain(self.sample), flat))
            # No code can write several values into one shared element.
            refuses |= odd[1].repeats and has_message(error, SHARED) and self._returns(odd[0])
        if refuses:
            what = "a grad_output" if self._backward(odd[0]) else f"`{self._labels[odd[0]]}`"
            self.refused.setdefault(what, {}).setdefault(odd[1].name, error_words(error))
        return refuses

    def _returns(self, at: int) -> bool:
        """True if a call returns an argument, like a class that marks it as dirty."""
        call = self.call(replicas(self.given))
        return any(each is call.given[at] for each in call.results)

    def _blamed(self, values: list[Any], error: Exception) -> int:
        """The first result, or the first input whose gradient raises even if it is computed alone."""
        if not of_backward(error):
            return 0
        alone = [replace(self, by=(argnum,)).outputs for argnum in self.argnums]
        return len(self.grads) + next((at for at, each in enumerate(alone) if _raises(each, values)), 0)

    def _failure(self, odds: Sequence[Odd], values: Sequence[Any], fault: Fault) -> Failure:
        named, difference, name = fault.named, fault.difference, fault.way.name
        at, layout = odds[0]
        backward, label = self._backward(at), self._labels[at]
        about, where = str(named), named.where
        if named.kind == "result":
            kernel = self.kernel(values)
            where = kernel.where if kernel else self.subject.specification.where
            about += f" by the kernel for {kernel.device}" if kernel else ""
        # A write fails if elements share memory.
        shares = layout.repeats or (difference is not None and not difference.aspect)
        cause = (self._written if shares else None) or "layout"
        if cause != "layout":
            written = "grad_output" if cause == "mutates-grad-output" else f"`{label}`"
            message = f"the operator writes into {written}: {fault}; work on a copy, `.clone()`"
        elif backward:
            message = (
                f"{about} is right for a contiguous grad_output and wrong for a grad_output that is "
                f"{name} (the backward of {layout.handed_back_by} returns this layout): {fault}; "
                f"read grad_output by its strides, or use `grad{layout.undone}`"
            )
        else:
            message = (
                f"{about} is right where `{label}` is contiguous, and wrong where `{label}` is "
                f"{name}: {fault}; read `{label}` by its strides, or use "
                f"`{label.partition('[')[0]}{layout.undone}`"
            )
        evidence = {"grad_output" if backward else f"`{label}`": name}
        # A result that is wrong for a layout of an input is reported under that input.
        evidence |= {RESULT: f"`{named.name}`"} if named.kind == "result" else {}
        evidence |= difference.evidence() if difference else {}
        input = named.name if named.kind == "gradient" or backward else label
        replay = layout_replay(self, self.contiguous, odds, fault.output or 0)
        state = cause == "mutates-input" and self.keeps_state(label)
        given: Given = "unpromised" if state else "usual"
        return self.failure(input, cause, message, where, evidence, replay=replay, given=given)

    @cached_property
    def _written(self) -> str | None:
        """The cause and a text, if a call or its backward writes into arguments or grad_outputs."""
        values = replicas(self.contiguous)
        self.outputs(values)
        pairs = zip(values, self.contiguous, strict=True)
        changed = [isinstance(old, Tensor) and exact_difference(new, old) is not None for new, old in pairs]
        if any(changed[: len(self.sample.flat)]):
            return "mutates-input"
        return "mutates-grad-output" if any(changed) else None


def _raises(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> bool:
    with torch.no_grad():  # its error is reported with the operator's own
        return isinstance(attempt(partial(function, [*values])), Raised)


Case = TypeVar("Case", bound=LayoutCase)


def layout_cases(
    kind: Callable[..., Case], run: Run, *, forward_alone: bool = False
) -> Iterator[Case | Note]:
    """Yield the contiguous sample on each device in each dtype, and a note for each that does not run.

    Args:
        kind: Makes a case.
        run: The run of the sample.
        forward_alone: True to yield a sample that raises with gradients again without gradients.
    """
    subject, sample = run.subject, run.sample
    if not any(isinstance(value, Tensor) for value in sample.flat):
        return
    draws = bool(subject.draws or drawing_operations(subject, sample))
    if draws:
        yield Note(
            "layouts of inputs were left out: the operator draws random numbers, and their order "
            "depends on the layout"
        )
    dtypes = (torch.float32,) if subject.single_precision else ALWAYS_CHECKED
    by_dtype = subject.specification.kernels or subject.kind.in_library
    if not (by_dtype or sample in subject.samples[:IN_FLOAT32]) or not sample.inexact:
        dtypes = dtypes[:1]
    places = ((each, device) for each in dtypes for device in subject.devices_with(each))
    for dtype, device in places:
        flat = [*map(plain, sample.at(dtype, device))]
        with torch.no_grad():
            results = subject.call(sample, sample.at(dtype, device))
        open_ = results_with_gradient(subject, sample, results) if run.argnums else [False] * len(results)
        grads = random_grad_outputs(results, open_, subject.generator())
        made = partial(kind, subject, sample, run.name, device, dtype, inputs_too=not draws)
        case = made(contiguous=[*flat, *grads])
        error = case.twin.error
        if error is None:
            yield case
            continue
        if forward_alone and run.argnums:
            alone = made(by=(), contiguous=[*flat, *([None] * len(results))])
            yield from [alone] if alone.twin.error is None else []
        what = f"gradients in {dtype_name(dtype)} were" if forward_alone else f"{dtype_name(dtype)} was"
        yield Note(f"{what} left out on {device.type}, because the call raises: {first_line(error)}")


OWN_WORDS = re.compile(r"contiguous|stride|layout|memory.format|channels.last|aligned", re.IGNORECASE)


def is_stated(error: Exception) -> bool:
    """True if the operator itself raises an error that names the layout, and not an operation in it."""
    return bool(OWN_WORDS.search(str(error))) and not has_message(error, LAYOUT_REFUSED)


LAYOUTS = Property(
    NAME,
    "results and gradients do not depend on the memory layout of inputs and grad_outputs",
    run,
    inputs="every",
    traits=("sends-gradients",),
)
