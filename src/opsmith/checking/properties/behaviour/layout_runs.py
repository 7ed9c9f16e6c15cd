"""One call and its backward in some layout, and whether it gave what it gives for contiguous memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import dense, with_gradient
from opsmith.checking.numerics.compare import Difference, alike, form_fault, unequal
from opsmith.checking.numerics.rounding import LIBRARY, unit_roundoff
from opsmith.checking.numerics.truth import Measure, Truth
from opsmith.checking.properties.numeric.differentiable import rule_place
from opsmith.checking.report import Failure
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.layouts import Layout
from opsmith.checking.samples.perturb import nudged
from opsmith.checking.samples.sample import Sample, is_inexact, replica
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.checking.subject import NUDGES, Subject
from opsmith.core.kernels import Kernel

NUDGE = 2.0**-30
"""By how much inputs are moved to see whether the answer stays: more than rounding does."""

AGAIN = 2
"""How often what is held to be right is run again, before anything is held to it."""


@dataclass(frozen=True)
class Run:
    """What came of a call and its backward.

    Args:
        outputs: The visible results, then the gradient of each differentiated input; None for none.
        error: What was raised.
        in_backward: Whether the call itself went well.
    """

    outputs: tuple[Tensor | None, ...] = ()
    error: Exception | None = None
    in_backward: bool = False


@dataclass(frozen=True)
class Runner:
    """Runs a sample with arguments and incoming gradients as they are, whatever their layout.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The inputs that are differentiated by.
        dtype: dtype of floating tensors.
    """

    subject: Subject
    sample: Sample
    places: tuple[int, ...]
    dtype: torch.dtype

    def run(self, flat: Sequence[Any], grads: Sequence[Tensor | None]) -> Run:
        """One call and one backward; what is raised is told, not raised."""
        call = False
        try:
            with quiet(), torch.enable_grad():
                leaves = [
                    value.detach().requires_grad_(place in self.places) if is_inexact(value) else value
                    for place, value in enumerate(flat)
                ]
                results = self.subject.call(self.sample, leaves)
            call = True
            with quiet():
                return Run(
                    tuple(_bare(each) for each in [*results, *self._gradients(leaves, results, grads)])
                )
        except Exception as error:
            refuse_own(error)
            return Run(error=error, in_backward=call)

    def _gradients(
        self, leaves: Sequence[Any], results: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result is not None and with_gradient(result)
        ]
        if not pairs or not self.places:
            return [None] * len(self.places)
        outputs, incoming = zip(*pairs, strict=True)
        return dense(
            torch.autograd.grad(
                outputs, [leaves[place] for place in self.places], incoming, allow_unused=True
            )
        )


def _bare(output: Tensor | None) -> Tensor | None:
    return None if output is None else output.detach()


@dataclass
class Twin:
    """What a call and its backward give for contiguous memory: all that a layout is held to.

    Args:
        runner: What runs them.
        flat: The arguments, contiguous.
        grads: The incoming gradients, contiguous.
    """

    runner: Runner
    flat: list[Any]
    grads: list[Tensor | None]
    _truth: list[Truth | None] = field(default_factory=list)

    @cached_property
    def right(self) -> Run:
        """The run on contiguous memory."""
        return self.runner.run(replicas(self.flat), replicas(self.grads))

    def fault(self, position: int, got: Tensor | None) -> tuple[str, Difference | None] | None:
        """What is wrong with an output: in words, and its worst element; None where it is right."""
        expected = self.right.outputs[position]
        if got is None or expected is None:
            return self._beside_none(position, got, expected)
        form = form_fault(got, expected, strides=False)
        if form is not None:
            aspect, mine, theirs = form
            return f"its {aspect} is {mine} and not {theirs}", None
        difference = unequal(got, expected)
        if difference is None or (is_inexact(expected) and _last_places(got, expected)):
            return None
        if is_inexact(expected):
            difference = self._judged(position, got, expected)
        if difference is None or not self._settled(position, expected) or not self._steady(position):
            return None
        return str(difference), difference

    def _beside_none(
        self, position: int, got: Tensor | None, expected: Tensor | None
    ) -> tuple[str, Difference | None] | None:
        """No gradient is as good as zeros; no result is none."""
        there = got if got is not None else expected
        if there is None:
            return None
        is_gradient = position >= len(self.right.outputs) - len(self.runner.places)
        if is_gradient and not there.any():
            return None
        return ("there is none (None)" if got is None else "there is one, and should be none (None)"), None

    def _judged(self, position: int, got: Tensor, expected: Tensor) -> Difference | None:
        """The worst element, if rounding in another order does not explain it."""
        truth = self._measured()
        bound = truth.bounds[position] if truth is not None else None
        if bound is None or bound.truth.shape != got.shape:
            eps = torch.finfo(expected.dtype).eps
            return None if alike(got, expected, eps**0.75) else unequal(got, expected)
        # The twin stands for the truth: whether that is right is for other properties to say.
        mine = bound.truth + (got.to(bound.truth) - expected.to(bound.truth))
        same = (got == expected) | (got.isnan() & expected.isnan())
        mine = torch.where(same.to(mine.device), bound.truth, mine)
        if bound.judge(mine) is None:
            return None
        return unequal(torch.where(same, expected, got), expected)

    def _measured(self) -> Truth | None:
        """How far rounding may lead, from the operator's own run in float64; None where it has none."""
        if not self._truth:
            self._truth.append(self._measure())
        return self._truth[0]

    def _measure(self) -> Truth | None:
        wide = [replica(value, torch.float64, torch.device("cpu")) for value in self.flat]
        grads = [replica(grad, torch.float64, torch.device("cpu")) for grad in self.grads]
        count = len(wide)

        def function(values: list[Any]) -> Sequence[Tensor | None]:
            run = self.runner.run(values[:count], values[count:])
            if run.error is not None:
                raise run.error
            return run.outputs

        subject = self.runner.subject
        try:
            measure = Measure.of(function, [*wide, *grads], subject.generator(), has_truth=subject.has_truth)
            return measure.truth([*self.flat, *self.grads], self.runner.dtype)
        except (RuntimeError, TypeError) as error:  # as of a class that takes one dtype alone
            refuse_own(error)
            return None

    def _settled(self, position: int, expected: Tensor) -> bool:
        """Whether the answer stays where the inputs move a little: at a tie, each of several is right."""
        generator = self.runner.subject.generator(NUDGES)
        nudge = NUDGE if self.runner.dtype == torch.float64 else 2.0**-14
        moved = [nudged(value, nudge, generator) for value in replicas(self.flat)]
        run = self.runner.run(moved, replicas(self.grads))
        other = run.outputs[position] if run.error is None else None
        if other is None or other.shape != expected.shape:
            return False
        if not is_inexact(expected):
            return torch.equal(other, expected)
        finite = expected.isfinite() & other.isfinite()
        return alike(
            torch.where(finite, other, 0), torch.where(finite, expected, 0), nudge**0.5
        ) and torch.equal(expected.isfinite(), other.isfinite())

    def _steady(self, position: int) -> bool:
        """Whether it gives the same again: where it does not, the layout is not the reason."""
        expected = self.right.outputs[position]
        for _ in range(AGAIN):
            run = self.runner.run(replicas(self.flat), replicas(self.grads))
            other = run.outputs[position] if run.error is None else None
            if other is None or expected is None or other.shape != expected.shape:
                return False
            if unequal(other, expected) is not None and not (
                is_inexact(expected) and _last_places(other, expected)
            ):
                return False
        return True

    @cached_property
    def written(self) -> str | None:
        """The word for it, if a call or its backward writes into the arguments, or into what comes in."""
        flat, grads = replicas(self.flat), replicas(self.grads)
        self.runner.run(flat, grads)
        if _differ(flat, self.flat):
            return "mutates-input"
        return "mutates-grad-output" if _differ(grads, self.grads) else None


def _differ(after: Sequence[Any], before: Sequence[Any]) -> bool:
    pairs = zip(after, before, strict=True)
    return any(unequal(new, old) is not None for new, old in pairs if isinstance(old, Tensor))


def _last_places(got: Tensor, expected: Tensor) -> bool:
    """Whether every element is right but for the last places, which every library function may get wrong."""
    allowed = LIBRARY * unit_roundoff(expected.dtype) * expected.abs()
    near = ((got - expected).abs() <= allowed) | (got == expected) | (got.isnan() & expected.isnan())
    return bool(near.all())


@dataclass(frozen=True)
class Odd:
    """A tensor that is not contiguous.

    Args:
        place: Which of the flat arguments, or of the visible results whose gradient comes in.
        backward: Whether it is an incoming gradient.
        layout: Its layout.
    """

    place: int
    backward: bool
    layout: Layout


@dataclass(frozen=True)
class Wrong:
    """One output that is wrong for a layout.

    Args:
        odd: What was not contiguous.
        output: Which of the results and gradients.
        what: What is wrong.
        difference: Its worst element.
        case: Sample, dtype and device, in words.
        replay: Gives lines that show it.
        cause: The word for it.
        kernel: What computed it, if it is a result and a kernel did.
    """

    odd: Odd
    output: int
    what: str
    case: str
    difference: Difference | None = None
    replay: Callable[[], str | None] = lambda: None
    cause: str = "layout"
    kernel: Kernel | None = None


@dataclass
class Seen:
    """What a run has found so far.

    Args:
        wrong: What is wrong, by the tensor that was not contiguous and by what was wrong then.
        right: The layouts in which nothing was wrong, by that tensor.
        refused: The layouts of an input that a call refuses, each with what it says, by that input.
    """

    wrong: dict[tuple[str, bool, str], list[Wrong]] = field(default_factory=dict)
    right: dict[tuple[str, bool], set[str]] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)


Key = tuple[str, bool, str]
"""Of a tensor that was not contiguous its label and whether it came in backward; and what was wrong then."""


def failure_of(check: str, subject: Subject, key: Key, group: Sequence[Wrong], seen: Seen) -> Failure:
    """One failure for all layouts of a tensor in which the same output is wrong.

    Args:
        check: Name of the property.
        subject: What is under check.
        key: What the group is about.
        group: What is wrong, in each of the layouts.
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
        written = "what comes in" if shown.cause == "mutates-grad-output" else f"`{odd_label}`"
        message = f"it writes into {written}: {shown.what}; work on a copy, `.clone()`"
    elif backward:
        message = (
            f"{subject_words} is right for a contiguous incoming gradient and wrong for one that is "
            f"{layout.name}, as {layout.handed_back_by} hands it back: {shown.what}; read it by its strides, "
            "or take `grad.contiguous()`"
        )
    else:
        message = (
            f"{subject_words} is right where `{odd_label}` is contiguous and wrong where it is "
            f"{layout.name}: {shown.what}; read it by its strides, or take "
            f"`{_bare_layout(odd_label)}.contiguous()`"
        )
    evidence: dict[str, Any] = {
        "sample": shown.case,
        "incoming gradient" if backward else f"`{odd_label}`": layout.name,
        **(shown.difference.evidence() if shown.difference else {}),
        "wrong for": ", ".join(names),
    }
    if right:
        evidence["right for"] = ", ".join(right)
    gradient = about.startswith("gradient of ")
    where = rule_place(subject, _bare_layout(label)) if gradient else subject.specification.where
    if shown.kernel is not None:
        where = shown.kernel.where
    # A result that is wrong for a layout of an input is told under that input, which is what to fix.
    input = label if gradient or backward else odd_label
    return Failure(check, input, shown.cause, message, where, evidence, shown.replay())


def _bare_layout(label: str) -> str:
    """The argument that a label belongs to: `xs` of `xs[0]`."""
    return label.partition("[")[0]
