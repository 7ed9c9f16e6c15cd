"""Runs in a layout: a call and its backward, compared with those on contiguous memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import rule_location
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.answer import Answer, Computation
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.numerics.compare import (
    Difference,
    agree_to_share,
    exact_difference,
    metadata_difference,
)
from opsmith.checking.numerics.judge import judge
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.memory_layouts import Layout
from opsmith.checking.samples.perturb import perturbed
from opsmith.checking.samples.sample import CPU, Sample, is_inexact, replica
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import PERTURBATIONS, Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.kernels import Kernel

NAME = "layouts"

PERTURBATION = 2.0**-30
"""Relative perturbation of inputs: more than rounding."""

REPEATS = 2
"""Repeated runs of the contiguous call, before anything is compared with it."""


@dataclass(frozen=True)
class LayoutRun:
    """Outputs of a call and its backward, or the exception.

    Args:
        outputs: The visible results, then the gradient of each differentiated input; None for none.
        error: The exception.
        in_backward: True if the call succeeded and its backward raised.
    """

    outputs: tuple[Tensor | None, ...] = ()
    error: Exception | None = None
    in_backward: bool = False


@dataclass(frozen=True)
class LayoutRunner:
    """Runs a sample with arguments and grad_outputs in the layout that they have.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: The inputs that are differentiated by.
        dtype: dtype of floating tensors.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    dtype: torch.dtype

    def run(self, flat: Sequence[Any], grads: Sequence[Tensor | None]) -> LayoutRun:
        """One call and one backward; an exception is returned, not raised."""
        call = False
        try:
            with without_warnings(), torch.enable_grad():
                leaves = [
                    value.detach().requires_grad_(argnum in self.argnums) if is_inexact(value) else value
                    for argnum, value in enumerate(flat)
                ]
                results = self.subject.call(self.sample, leaves)
            call = True
            inputs = [leaves[argnum] for argnum in self.argnums]
            with without_warnings():
                outputs = [*results, *differentiate(results, inputs, grads)]
                return LayoutRun(tuple(None if each is None else each.detach() for each in outputs))
        except Exception as error:
            refuse_own(error)
            return LayoutRun(error=error, in_backward=call)


@dataclass
class ContiguousRun:
    """A call and its backward on contiguous memory, with which other layouts are compared.

    Args:
        runner: Runner of the calls.
        flat: The arguments, contiguous.
        grads: The grad_outputs, contiguous.
    """

    runner: LayoutRunner
    flat: list[Any]
    grads: list[Tensor | None]

    @cached_property
    def right(self) -> LayoutRun:
        """The run on contiguous memory."""
        return self.runner.run(replicas(self.flat), replicas(self.grads))

    def fault(self, position: int, got: Tensor | None) -> tuple[str, Difference | None] | None:
        """Describe what is wrong with an output, with its worst element; None where it is right."""
        expected = self.right.outputs[position]
        if got is None or expected is None:
            return self._beside_none(position, got, expected)
        form = metadata_difference(got, expected, strides=False)
        if form is not None:
            aspect, actual, theirs = form
            return f"its {aspect} is {actual} and not {theirs}", None
        if exact_difference(got, expected) is None:
            return None
        difference = judge(got, self._answer(position)).difference
        if difference is None or not self._settled(position, expected) or not self._steady(position):
            return None
        return str(difference), difference

    def _beside_none(
        self, position: int, got: Tensor | None, expected: Tensor | None
    ) -> tuple[str, Difference | None] | None:
        """Compare outputs if one is None: a missing gradient equals zeros, a missing result only None."""
        present = got if got is not None else expected
        if present is None:
            return None
        is_gradient = position >= len(self.right.outputs) - len(self.runner.argnums)
        if is_gradient and not present.any():
            return None
        return ("there is none (None)" if got is None else "there is one, and should be none (None)"), None

    def _answer(self, position: int) -> Answer:
        """The output on contiguous memory as the right one; other properties judge it."""
        expected, dtype = self.right.outputs[position], self.runner.dtype
        if self._computation is not None:
            return self._computation.twin(position, expected, dtype)
        wide = replica(expected, torch.float64, CPU)
        summands = max(value.numel() for value in self.flat if isinstance(value, Tensor))
        return Answer(wide, expected, dtype, None, summands=summands)

    @cached_property
    def _computation(self) -> Computation | None:
        """The operator's own run in float64, which measures rounding; None where it does not run there."""
        count = len(self.flat)

        def function(values: list[Any]) -> Sequence[Tensor | None]:
            run = self.runner.run(values[:count], values[count:])
            if run.error is not None:
                raise run.error
            return run.outputs

        subject, flat = self.runner.subject, [*self.flat, *self.grads]
        try:
            return Computation.of(function, flat, subject.generator(), has_truth=subject.has_truth)
        except (RuntimeError, TypeError) as error:  # as of a class that takes one dtype alone
            refuse_own(error)
            return None

    def _settled(self, position: int, expected: Tensor) -> bool:
        """True if the output stays under perturbed inputs: at a tie, each of several outputs is right."""
        generator = self.runner.subject.generator(PERTURBATIONS)
        step = PERTURBATION if self.runner.dtype == torch.float64 else 2.0**-14
        moved = [perturbed(value, step, generator) for value in replicas(self.flat)]
        run = self.runner.run(moved, replicas(self.grads))
        other = run.outputs[position] if run.error is None else None
        if other is None or other.shape != expected.shape:
            return False
        if not is_inexact(expected):
            return torch.equal(other, expected)
        finite = expected.isfinite() & other.isfinite()
        return agree_to_share(
            torch.where(finite, other, 0), torch.where(finite, expected, 0), step**0.5
        ) and torch.equal(expected.isfinite(), other.isfinite())

    def _steady(self, position: int) -> bool:
        """True if repeated runs agree; otherwise the layout is not the reason."""
        expected = self.right.outputs[position]
        for _ in range(REPEATS):
            run = self.runner.run(replicas(self.flat), replicas(self.grads))
            other = run.outputs[position] if run.error is None else None
            if other is None or expected is None or other.shape != expected.shape:
                return False
            if exact_difference(other, expected) is not None and judge(other, self._answer(position)).wrong:
                return False
        return True

    @cached_property
    def written(self) -> str | None:
        """The cause, if a call or its backward writes into the arguments or the grad_outputs."""
        flat, grads = replicas(self.flat), replicas(self.grads)
        self.runner.run(flat, grads)
        if _differ(flat, self.flat):
            return "mutates-input"
        return "mutates-grad-output" if _differ(grads, self.grads) else None


def _differ(after: Sequence[Any], before: Sequence[Any]) -> bool:
    pairs = zip(after, before, strict=True)
    return any(exact_difference(new, old) is not None for new, old in pairs if isinstance(old, Tensor))


@dataclass(frozen=True)
class OddTensor:
    """A tensor that is not contiguous.

    Args:
        position: Position among the flat arguments, or among the visible results for a grad_output.
        backward: True if it is a grad_output.
        layout: Its layout.
    """

    position: int
    backward: bool
    layout: Layout


@dataclass(frozen=True)
class LayoutFault:
    """One output that is wrong for a layout.

    Args:
        odd: The tensors that are not contiguous.
        output: Position among results and gradients.
        what: Description of the fault.
        difference: Its worst element.
        case: Sample, dtype and device, in words.
        replay: Gives lines that show it.
        cause: The word for it.
        kernel: Kernel that computed it, for a result of a kernel.
    """

    odd: OddTensor
    output: int
    what: str
    case: str
    difference: Difference | None = None
    replay: Callable[[], str | None] = lambda: None
    cause: str = "layout"
    kernel: Kernel | None = None


@dataclass
class LayoutFindings:
    """Findings of one run of the property so far.

    Args:
        wrong: Faults, by the tensor that was not contiguous and by the wrong output.
        right: The layouts in which nothing was wrong, by that tensor.
        refused: The layouts that a call refuses, each with its error, by the input.
    """

    wrong: dict[tuple[str, bool, str], list[LayoutFault]] = field(default_factory=dict)
    right: dict[tuple[str, bool], set[str]] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)


Key = tuple[str, bool, str]
"""Label of the tensor that is not contiguous, whether it is a grad_output, and the output that is wrong."""


def failure_of(subject: Subject, key: Key, group: Sequence[LayoutFault], seen: LayoutFindings) -> Failure:
    """One failure for all layouts of a tensor in which the same output is wrong.

    Args:
        subject: The subject of the check.
        key: Key of the group.
        group: Faults in each of the layouts.
        seen: All that was found.
    """
    (odd_label, backward, about), shown = key, group[0]
    layout = shown.odd.layout
    names = dict.fromkeys(each.odd.layout.name for each in group)
    right = sorted(seen.right.get((odd_label, backward), set()) - set(names))
    label = about.removeprefix("gradient of ")
    subject_words = f"the gradient of `{label}`" if about.startswith("gradient of ") else f"`{label}`"
    if shown.kernel is not None:
        subject_words += f" by the kernel for {shown.kernel.device}"
    if shown.cause != "layout":
        written = "grad_output" if shown.cause == "mutates-grad-output" else f"`{odd_label}`"
        message = f"it writes into {written}: {shown.what}; work on a copy, `.clone()`"
    elif backward:
        message = (
            f"{subject_words} is right for a contiguous grad_output and wrong for one that is "
            f"{layout.name}, as {layout.handed_back_by} hands it back: {shown.what}; read it by its strides, "
            f"or take `grad{layout.undone}`"
        )
    else:
        message = (
            f"{subject_words} is right where `{odd_label}` is contiguous and wrong where it is "
            f"{layout.name}: {shown.what}; read it by its strides, or take "
            f"`{_bare_layout(odd_label)}{layout.undone}`"
        )
    evidence: dict[str, Any] = {
        "sample": shown.case,
        "grad_output" if backward else f"`{odd_label}`": layout.name,
        **(shown.difference.evidence() if shown.difference else {}),
        "wrong for": ", ".join(names),
    }
    if right:
        evidence["right for"] = ", ".join(right)
    gradient = about.startswith("gradient of ")
    where = rule_location(subject, _bare_layout(label)) if gradient else subject.specification.where
    if shown.kernel is not None:
        where = shown.kernel.where
    # A result that is wrong for a layout of an input is reported under that input.
    input = label if gradient or backward else odd_label
    return Failure(NAME, input, shown.cause, message, where, evidence, shown.replay())


def _bare_layout(label: str) -> str:
    """The argument that a label belongs to: `xs` of `xs[0]`."""
    return label.partition("[")[0]
