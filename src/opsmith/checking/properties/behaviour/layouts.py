"""Layouts: results and gradients are the same wherever inputs and grad_outputs lie in memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated
from opsmith.checking.effort import ALL
from opsmith.checking.exceptions import Overlooking, of_backward, within_backward
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.output.replay import layout_replay
from opsmith.checking.property import Coverage, Findings, Note, Property, covered_samples, first_line
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, TensorName
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.cases import ALWAYS_CHECKED, case_name, dtype_name
from opsmith.checking.samples.grad_outputs import random_grad_outputs, results_with_gradient
from opsmith.checking.samples.memory_layouts import CHUNK, Layout, layouts_for, plain
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.checking.ways import Fault, Outputs, RightOutputs, Way, compare, error_words
from opsmith.core.cached_property import cached_property
from opsmith.core.kernels import choose
from opsmith.judging.compare import exact_difference
from opsmith.torch_library.torch_messages import LAYOUT_REFUSED, LAZY_BIT, has_message

NAME = "layouts"

IN_FLOAT32 = 2
"""Samples that are tried in float32 as well, where no kernel distinguishes it from float64."""

FIRST = 3
"""Layouts of each grad_output that come before any of an input, where not all are tried."""

Refused = dict[str, dict[str, str]]
"""The layouts that a call refuses, each with its error, by the tensor in words."""


def run(subject: Subject) -> Findings:
    """Try every layout of every input and of every grad_output alone, and some of them together."""
    refused: Refused = {}
    chosen = replace(subject, samples=samples_of_each_form(subject))

    def check_sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
        for case in layout_cases(subject, sample):
            if isinstance(case, Note):
                yield case
            else:
                coverage.ran += 1
                case.refused = refused
                yield from compare(case.ways())

    yield from covered_samples(
        NAME, check_sample, "no sample has a tensor, or runs on contiguous ones", chosen
    )
    for label, texts in refused.items():
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


class OddTensor(NamedTuple):
    """A tensor that is not contiguous.

    Args:
        position: Position among the flat arguments, or among the visible results for a grad_output.
        backward: True if it is a grad_output.
        layout: Its layout.
        label: Label of the argument, or name of the result.
    """

    position: int
    backward: bool
    layout: Layout
    label: str


@dataclass
class LayoutCase:
    """A sample in a dtype on a device, run in every layout.

    Args:
        runner: Runs the sample.
        flat: Its arguments, contiguous.
        grads: The grad_output of each visible result, contiguous; None where there is none.
        inputs_too: True if inputs get layouts, and not grad_outputs alone.
        refused: What a call refuses is entered here.
    """

    runner: Run
    flat: list[Any]
    grads: list[Tensor | None]
    inputs_too: bool
    refused: Refused = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.twin = self.right([*self.flat, *self.grads])

    @property
    def name(self) -> str:
        """Sample, dtype and device in words."""
        return case_name(self.runner.sample, self.runner.dtype or torch.float64, self.runner.device)

    def right(self, values: list[Any]) -> RightOutputs:
        """The outputs for contiguous arguments and grad_outputs."""
        return RightOutputs(partial(_outputs, self.runner), values, len(self.grads), self.runner.subject)

    @property
    def _tensors(self) -> list[list[OddTensor]]:
        """The layouts of every tensor, grad_outputs first, since callers do not choose their layout."""
        named = zip(self.runner.subject.results(self.runner.sample), self.grads, strict=True)
        labelled = zip(self.runner.sample.labels, self.flat if self.inputs_too else (), strict=False)
        grads = [(at, True, result.name, grad) for at, (result, grad) in enumerate(named)]
        inputs = [(at, False, label, value) for at, (label, value) in enumerate(labelled)]
        return [
            [
                OddTensor(at, backward, layout, label)
                for layout in sorted(layouts_for(x), key=lambda layout: layout.repeats and not backward)
            ]
            for at, backward, label, x in (*grads, *inputs)
            if isinstance(x, Tensor)
        ]

    def ways(self) -> Iterator[Way]:
        """Yield each layout alone, then several at once."""
        effort, tensors = self.runner.subject.effort, self._tensors
        draw, faulty = random.Random(self.runner.subject.seed), set[Hashable]()
        kept = [[odd for odd in odds if odd.backward or not odd.layout.repeats] for odds in tensors]
        several = [odds for odds in kept if odds]
        count = effort.layout_combinations if len(several) > 1 else 0
        drawn = ([draw.choice(odds) for odds in several] for _ in range(count))
        for odds in chain(([odd] for odd in _selected(tensors, effort.layouts)), drawn):
            if len(odds) == 1 or not any(odd[:2] in faulty for odd in odds):
                way = self._least(odds)
                yield way
                faulty |= {way.about} if way.faults else set()

    def _least(self, odds: list[OddTensor]) -> Way:
        """The way with the smallest part of several layouts that still fails together."""
        for odd in odds if len(odds) > 1 else ():
            fewer = [each for each in odds if each is not odd]
            if self._way(fewer).faults:
                return self._least(fewer)
        return self._way(odds)

    def _way(self, odds: Sequence[OddTensor]) -> Way:
        """The way with some tensors in odd layouts."""
        values, first = replicas(self.twin.values), odds[0]
        for odd in odds:
            at = odd.position + odd.backward * len(self.flat)
            values[at] = odd.layout.of(values[at])
        repeats = any(odd.layout.repeats for odd in odds)
        right = self.right([*map(plain, values)]) if repeats else self.twin
        others = [f"{'that of ' * odd.backward}`{odd.label}` {odd.layout.name}" for odd in odds[1:]]
        return Way(
            first.layout.name + (f" (with {', '.join(others)})" if others else ""),
            self._names,
            # Numbers that are repeated may be none that it takes.
            partial(_outputs, self.runner, values) if right.error is None else lambda: None,
            right.fault,
            partial(self._failure, odds, values),
            about=first[:2],
            # The call does not see grad_output: where its results differ, that is another fault.
            since=len(self.grads) if all(odd.backward for odd in odds) else 0,
            excused=partial(self._refuses, first, values),
            blamed=partial(self._blamed, values),
        )

    @cached_property
    def _names(self) -> list[TensorName]:
        return self.runner.names()

    def _refuses(self, first: OddTensor, values: Sequence[Any], error: Exception) -> bool:
        """Enter a clear refusal of a layout by the call, or torch's own in the backward; True for one."""
        subject, flat = self.runner.subject, values[: len(self.flat)]
        itself = not subject.kind.has_reference  # then the reference raises whatever it raises
        if has_message(error, LAZY_BIT):
            refuses = True
        elif of_backward(error):
            # Of a reference without formulas torch derives what no code of the author's does.
            own = itself or subject.specification.gradients.rules or within_backward(error)
            refuses = not own
        else:
            refuses = is_stated(error) or (not itself and _raises(subject.plain(self.runner.sample), flat))
        if refuses:
            what = "a grad_output" if first.backward else f"`{first.label}`"
            self.refused.setdefault(what, {}).setdefault(first.layout.name, error_words(error))
        return refuses

    def _blamed(self, values: list[Any], error: Exception) -> int:
        """The first result, or the first input whose gradient alone raises."""
        if not of_backward(error):
            return 0
        alone = [partial(_outputs, replace(self.runner, by=(argnum,))) for argnum in self.runner.argnums]
        return len(self.grads) + next((at for at, each in enumerate(alone) if _raises(each, values)), 0)

    def _failure(self, odds: Sequence[OddTensor], values: Sequence[Any], fault: Fault) -> Failure:
        runner, named, difference, name = self.runner, fault.named, fault.difference, fault.way.name
        _, backward, layout, label = odds[0]
        about, where = str(named), named.where
        if named.kind == "result":
            flat = runner.sample.flattening.pack(values[: len(self.flat)])
            chosen, _ = choose(runner.subject.specification.kernels, flat)
            where = chosen.kernel.where if chosen else runner.subject.specification.where
            about += f" by the kernel for {chosen.kernel.device}" if chosen else ""
        # A write goes wrong where numbers share memory.
        shares = layout.repeats or (difference is not None and not difference.form)
        cause = (self._written if shares else None) or "layout"
        if cause != "layout":
            written = "grad_output" if cause == "mutates-grad-output" else f"`{label}`"
            message = f"it writes into {written}: {fault}; work on a copy, `.clone()`"
        elif backward:
            message = (
                f"{about} is right for a contiguous grad_output and wrong for one that is {name}, as "
                f"{layout.handed_back_by} hands it back: {fault}; read it by its strides, or take "
                f"`grad{layout.undone}`"
            )
        else:
            message = (
                f"{about} is right where `{label}` is contiguous and wrong where it is {name}: {fault}; read "
                f"it by its strides, or take `{label.partition('[')[0]}{layout.undone}`"
            )
        evidence = {"sample": self.name, "grad_output" if backward else f"`{label}`": name}
        evidence |= difference.evidence() if difference else {}
        # A result that is wrong for a layout of an input is reported under that input.
        input = named.name if named.kind == "gradient" or backward else label
        laid, grads = [odd[:3] for odd in odds], self.grads
        replay = layout_replay(
            runner.subject, runner.sample, self.flat, grads, runner.argnums, laid, fault.output or 0, NAME
        )
        return Failure(NAME, input, cause, message, where, evidence, replay)

    @cached_property
    def _written(self) -> str | None:
        """The cause, if a call or its backward writes into the arguments or the grad_outputs."""
        values = replicas(self.twin.values)
        _outputs(self.runner, values)
        pairs = zip(values, self.twin.values, strict=True)
        changed = [isinstance(old, Tensor) and exact_difference(new, old) is not None for new, old in pairs]
        if any(changed[: len(self.flat)]):
            return "mutates-input"
        return "mutates-grad-output" if any(changed) else None


def _outputs(runner: Run, values: Sequence[Any]) -> Outputs:
    """The results and gradients of a call, for arguments and grad_outputs in the layout that they have."""
    count = len(runner.sample.flat)
    call = runner.call(values[:count])
    gradients = differentiate(call.results, call.inputs, values[count:])
    return [None if each is None else each.detach() for each in (*call.results, *gradients)]


def _raises(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> bool:
    with torch.no_grad(), Overlooking():  # its error is reported with the operator's own
        function([*values])
        return False
    return True


def _selected(tensors: Sequence[Sequence[OddTensor]], limit: int) -> list[OddTensor]:
    """All layouts; if they are too many, the first few of each grad_output, then those of each in turn."""
    if limit == ALL:
        return [odd for odds in tensors for odd in odds]
    turns = [odd for turn in zip_longest(*tensors) for odd in turn if odd is not None]
    # A chunk's rows are whole and far from each other: what reads by one stride is wrong there alone.
    first = [
        odd
        for odds in tensors
        for at, odd in enumerate(odds)
        if odd.backward and (at < FIRST - 1 or odd.layout.name == CHUNK)
    ][: limit // 2]
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
    by_dtype = subject.specification.kernels or subject.kind.in_library
    if not (by_dtype or sample in subject.samples[:IN_FLOAT32]) or not sample.inexact:
        dtypes = dtypes[:1]
    for runner in (
        Run(subject, sample, NAME, device, dtype)
        for dtype in dtypes
        for device in subject.devices_with(dtype)
    ):
        with torch.no_grad():
            results = subject.call(sample, runner.flat())
        open_ = results_with_gradient(subject, sample, results) if argnums else [False] * len(results)
        grads = random_grad_outputs(results, open_, subject.generator())
        case = LayoutCase(runner, [*map(plain, runner.flat())], grads, not draws)
        error = case.twin.error
        if error is None:
            yield case
            continue
        if forward_alone and argnums:
            alone = replace(case, runner=replace(runner, by=()), grads=[None] * len(results))
            yield from [alone] if alone.twin.error is None else []
        dtype = dtype_name(runner.dtype or torch.float64)
        what = f"gradients in {dtype} were" if forward_alone else f"{dtype} was"
        yield Note(f"{what} left out on {runner.device.type}: it raises: {first_line(error)}")


OWN_WORDS = re.compile(r"contiguous|stride|layout|memory.format|channels.last|aligned", re.IGNORECASE)


def is_stated(error: Exception) -> bool:
    """True if an error of the operator names the layout, and not an error of some operation."""
    return bool(OWN_WORDS.search(str(error))) and not has_message(error, LAYOUT_REFUSED)


LAYOUTS = Property(
    NAME,
    "results and gradients are the same, wherever inputs and gradients lie in memory",
    run,
    inputs="every",
    traits=("sends-gradients",),
)
