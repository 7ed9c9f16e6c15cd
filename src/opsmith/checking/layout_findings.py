"""What is found wrong in some layout: which tensor was not contiguous, what came of it, and that in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opsmith.checking.difference import Difference
from opsmith.checking.differentiated import rule_place
from opsmith.checking.layouts import Layout
from opsmith.checking.report import Failure
from opsmith.checking.subject import Subject
from opsmith.core.kernels import Kernel


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
            f"{layout.name}: {shown.what}; read it by its strides, or take `{_bare(odd_label)}.contiguous()`"
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
    where = rule_place(subject, _bare(label)) if gradient else subject.specification.where
    if shown.kernel is not None:
        where = shown.kernel.where
    # A result that is wrong for a layout of an input is told under that input, which is what to mend.
    input = label if gradient or backward else odd_label
    return Failure(check, input, shown.cause, message, where, evidence, shown.replay())


def _bare(label: str) -> str:
    """The argument that a label belongs to: `xs` of `xs[0]`."""
    return label.partition("[")[0]
