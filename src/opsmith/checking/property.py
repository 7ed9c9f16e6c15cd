"""Property of an operator: its name, its promise, and the driver over the samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from opsmith import errors
from opsmith.checking.exceptions import (
    WrongFormError,
    by_statement,
    named_by,
    of_backward,
    raised_within,
)
from opsmith.checking.processes.fork import announced
from opsmith.checking.processes.watchdog import EndlessCallError, Watchdog
from opsmith.checking.report import UNVERIFIED, Failure, Given
from opsmith.checking.subject import Subject
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.location import innermost
from opsmith.kernels.launches_on_cpu import launched_kernels
from opsmith.torch_library.torch_messages import NO_GPU, has_message


@dataclass(frozen=True, slots=True)
class Skipped:
    """Reason why the property was not checked, with a hint if there is one."""

    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, [self.reason, self.hint]))


@dataclass(frozen=True, slots=True)
class Note:
    """Note that a part of the property was not checked, while the rest was."""

    text: str


Finding = Failure | Note | Skipped
Findings = Iterator[Finding]


Trait = Literal["first", "compares-no-runs", "differences", "compiles", "on-request", "integration"]
"""Trait of a property that decides how it runs.

`first`: it runs before the others, since its failures can make every comparison meaningless.
`compares-no-runs`: it also runs if two runs give different numbers. `differences`: it compares derivatives
with finite differences, so that inputs of which only one triangle is read must be made symmetric. `compiles`:
its time is reported separately. `on-request`: it only runs if it is named, since it takes long or needs more
than torch. `integration`: `only` and `skip` also select it by the name `integration`.
"""

Relation = Literal["about-results", "explains-gradients", "sends-gradients", "transforms", "reruns"]
"""Trait that decides which failures of other properties explain a property's failures.

`about-results`: a wrong gradient explains none of its failures. `explains-gradients`: its failure for an
input explains other properties' failures about the gradient by that input. `sends-gradients`: it passes a
gradient of the right shape to every result. `transforms`: it traces, maps, copies or compiles the operator,
so that any earlier failure may explain its failures. `reruns`: it runs the forward several times for one
comparison, so that undeclared random numbers differ.
"""


@dataclass(frozen=True)
class Property:
    """A property that every correct operator has.

    Args:
        name: One word, as in `only=["forward"]`.
        title: The promise of the property, in one sentence.
        run: Yields failures, notes on parts that were left out, or the reason for skipping. If it yields
            nothing, the property passes.
        inputs: The inputs that it runs on. `authors`: the author's samples. `few`: a few of these if the
            effort limits them, for a property that runs each sample many times, since a fault seldom shows on
            one sample only. `every`: the samples and all inputs derived from them.
        traits: Its further traits.
        given: Circumstance of all its failures, or a function that returns it for a subject.
    """

    name: str
    title: str
    run: Callable[[Subject], Findings]
    _: KW_ONLY
    inputs: Literal["authors", "few", "every"] = "authors"
    traits: tuple[Trait | Relation, ...] = ()
    given: Given | Callable[[Subject], Given] = "usual"


def not_run(property: str, kernel: Kernel, reason: str, hint: str | None = None) -> Failure:
    """The failure for a kernel that ran on no sample, so that it was not checked.

    Args:
        property: Name of the property that would run it.
        reason: The reason; its first line follows the kernel's name.
        hint: A hint on the repair, if there is one.
    """
    given = kernel.given
    what = f"{given.language} kernel" if isinstance(given, BuiltKernel) else f"kernel for `{kernel.device}`"
    named = f"{what} at {Path(kernel.where).name} ({reason.splitlines()[0]})"
    message = "; ".join(filter(None, [f"the {what} is not verified: {reason}", hint]))
    return Failure(property, None, "not-exercised", message, kernel.where, {UNVERIFIED: named})


def endless(property: str, location: str, error: EndlessCallError, watchdog: Watchdog) -> Failure:
    """The failure for a call that did not return.

    Args:
        location: `file:line` of the operator.
        error: The exception that stopped the call.
        watchdog: The region in which it was raised.
    """
    sample = announced()
    evidence = {"sample": sample, "limit": f"{watchdog.seconds:.0f} s"}
    dtypes = tuple(re.findall(r" in ((?:b?float|complex)\d+)(?: on \w+)?$", sample))
    given: Given = "strained" if error.strained else "usual"
    where = innermost(error, location)
    message = watchdog.words() + error.when
    return Failure(property, None, "raises", message, where, evidence, dtypes=dtypes, given=given)


def raised(
    property: str, subject: Subject, error: BaseException, when: str, input: str | None = None
) -> Failure:
    """The failure for an exception inside the operator.

    Args:
        when: Action in which it was raised, for the message.
        input: The tested argument.
    """
    found = raised_at(property, subject.specification.where, error, when, input)
    # A class has a temporary name during a check, which users do not know.
    return replace(found, message=found.message.replace(subject.specification.name, subject.name))


def raised_at(
    property: str, location: str, error: BaseException, when: str, input: str | None = None
) -> Failure:
    """The failure for an exception of an operator of which only the location is known.

    Args:
        location: `file:line` of the operator.
        when: Action in which it was raised, for the message.
        input: The tested argument.
    """
    if isinstance(error, WrongFormError):
        return Failure(property, error.result, "shape", str(error), error.where, {"sample": when})
    where = innermost(error, location)
    if isinstance(error, errors.OpsmithError):
        where, input = error.where or where, error.argument or input
    named = named_by(error)
    notes = [note for note in getattr(error, "__notes__", ()) if note not in str(error)]
    evidence = of_exception(error, when)
    if notes:
        evidence["notes"] = " ".join(notes)
    if isinstance(error, Exception) and raised_within(error) and by_statement(error):
        evidence[BY_ITSELF] = where
    if of_backward(error):
        evidence[IN_BACKWARD] = "the backward"
    lacks = _lacks(error, named.cause)
    if lacks:
        evidence[MISSING_HERE] = lacks
    lines = [line for line in errors.message_of(error).splitlines() if not line.startswith("  where: ")]
    text = "\n".join(lines) or "without a message"
    end = "" if isinstance(error, Exception) else END
    if isinstance(error, torch.AcceleratorError):
        end = (
            "a GPU reports the error only after the call: `CUDA_LAUNCH_BLOCKING=1` shows the call that "
            "caused it"
        )
    message = "; ".join(filter(None, [f"{type(error).__name__}: {text}", named.reason, end]))
    return Failure(property, input, named.cause, message, where, evidence)


END = "the operator ends the process instead of returning or raising an error"


def of_exception(error: BaseException, when: str) -> dict[str, Any]:
    """Evidence of an exception."""
    evidence = {"sample": when, "exception": type(error).__name__}
    if isinstance(error, errors.CompileError | errors.KernelSignatureError):
        evidence[UNCOMPILED] = str(error.where)
    return evidence


UNCOMPILED = "kernel that cannot be compiled"
"""Evidence of a kernel that does not compile, or whose parameters differ from its operator's."""

BY_ITSELF = "raised by"
"""Evidence of a `raise` or an `assert` in the operator's own code, by which its author refuses a call."""

IN_BACKWARD = "raised in"
"""Evidence of an exception in a backward, whose forward has returned."""

REFUSED = "refused"
"""Evidence of a limit: the text with which an author refuses a dtype, or a gradient in some samples."""

IMPORTED = "imported"
"""Evidence of a change that the import of the operator's file makes; it explains no other failure."""

MISSING_HERE = "missing here"
"""Evidence of a part that this machine lacks: not a fault of the operator, but nothing was checked."""


def missing_here(failures: Sequence[Failure]) -> str:
    """Return the parts that this machine lacks, by evidence of failures, as a reason for skipping."""
    found = {str(each.evidence[MISSING_HERE]): None for each in failures if MISSING_HERE in each.evidence}
    return f"missing here: {'; '.join(found)}" if found else ""


def _lacks(error: BaseException, cause: str) -> str:
    """Return the missing part of this machine that may explain an exception; else an empty string.

    Triton takes no CPU tensors, so code that launches its kernels may raise on these where a GPU is needed.
    """
    if isinstance(error, errors.ToolchainError | errors.LanguageError):
        return f"{error.problem}: {error.got}" if error.got else error.problem
    raises = cause == "raises" and not isinstance(error, errors.OpsmithError)
    if raises and launched_kernels() and not torch.cuda.is_available():
        return "a GPU, which the code that launches the kernels may need"
    return "a GPU" if has_message(error, NO_GPU) else ""
