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
    """The property was not checked, with the way out if there is one."""

    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, [self.reason, self.hint]))


@dataclass(frozen=True, slots=True)
class Note:
    """A part of the property was not checked; the rest was."""

    text: str


Finding = Failure | Note | Skipped
Findings = Iterator[Finding]


Trait = Literal["first", "compares-no-runs", "differences", "compiles", "on-request", "integration"]
"""Trait of the way in which a property runs.

`first`: before the others, as its failures can make every comparison meaningless. `compares-no-runs`: also
where two runs give different numbers. `differences`: derivatives are compared with finite differences, so
that inputs that are read in one triangle alone must be made symmetric. `compiles`: its time is told apart.
`on-request`: only where it is named, as it takes long, or needs more than torch. `integration`: `only` and
`skip` name it so, too.
"""

Relation = Literal["about-results", "explains-gradients", "sends-gradients", "transforms", "reruns"]
"""Trait by which failures of properties follow from each other.

`about-results`: a wrong gradient explains none of its failures. `explains-gradients`: its failure for an
input explains what others find of the gradient by that input. `sends-gradients`: it passes a gradient of the
right shape to every result. `transforms`: it traces, maps, copies or compiles the operator, so that any
earlier failure may explain one of its own. `reruns`: it runs the forward several times for one answer, so
that undeclared random numbers differ.
"""


@dataclass(frozen=True)
class Property:
    """A property of a right operator.

    Args:
        name: One word, as in `only=["forward"]`.
        title: Promise, in one sentence.
        run: Yields failures, notes on parts left out, or the reason for skipping; yielding nothing is a pass.
        inputs: The inputs that it runs on: the samples of the `authors`; a `few` of these where the effort
            limits them, for what makes many runs of each, as a fault seldom shows on one alone; or `every`
            input, those that were derived from the samples as well.
        traits: What else holds of it.
        given: Circumstance of all its failures, or a function that gives it for a subject.
    """

    name: str
    title: str
    run: Callable[[Subject], Findings]
    _: KW_ONLY
    inputs: Literal["authors", "few", "every"] = "authors"
    traits: tuple[Trait | Relation, ...] = ()
    given: Given | Callable[[Subject], Given] = "usual"


def not_run(property: str, kernel: Kernel, reason: str, hint: str | None = None) -> Failure:
    """The failure for a kernel that ran on no sample, so that nothing is known of it.

    Args:
        property: Name of the property that would run it.
        reason: The reason; its first line stands beside the kernel's name.
        hint: The way out, if there is one.
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
        watchdog: The region that it was raised in.
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
    # The check gives a class a temporary name, which users do not know.
    return replace(found, message=found.message.replace(subject.specification.name, subject.name))


def raised_at(
    property: str, location: str, error: BaseException, when: str, input: str | None = None
) -> Failure:
    """The failure for an exception, where only the location of the operator is known.

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
        end = "a GPU tells of it after the call: `CUDA_LAUNCH_BLOCKING=1` shows which one"
    message = "; ".join(filter(None, [f"{type(error).__name__}: {text}", named.reason, end]))
    return Failure(property, input, named.cause, message, where, evidence)


END = "it ends the process instead of returning or raising an error"


def of_exception(error: BaseException, when: str) -> dict[str, Any]:
    """Evidence of an exception."""
    evidence = {"sample": when, "exception": type(error).__name__}
    if isinstance(error, errors.CompileError | errors.KernelSignatureError):
        evidence[UNCOMPILED] = str(error.where)
    return evidence


UNCOMPILED = "kernel that cannot be compiled"
"""Evidence of a kernel that does not compile, or that takes other parameters than its operator."""

BY_ITSELF = "raised by"
"""Evidence of a `raise` or an `assert` in the operator's own code: its author refuses something."""

IN_BACKWARD = "raised in"
"""Evidence of an exception in a backward, whose forward has returned."""

REFUSED = "refused"
"""Evidence of a limit: a gradient in some samples, or a dtype, that its author refuses like this."""

IMPORTED = "imported"
"""Evidence of what the import of the operator's file changes, which explains nothing of the operator."""

MISSING_HERE = "missing here"
"""Evidence of what the machine lacks: it is no fault of the operator, but nothing was checked either."""


def missing_here(failures: Sequence[Failure]) -> str:
    """Return what the machine lacks by the evidence of failures, as a reason for skipping; else nothing."""
    found = {str(each.evidence[MISSING_HERE]): None for each in failures if MISSING_HERE in each.evidence}
    return f"missing here: {'; '.join(found)}" if found else ""


def _lacks(error: BaseException, cause: str) -> str:
    """Return what the machine lacks, if it may be the reason of an exception; else an empty string.

    Triton takes no tensors of the CPU: what launches its kernels may raise for these where a GPU runs it.
    """
    if isinstance(error, errors.ToolchainError | errors.LanguageError):
        return f"{error.problem}: {error.got}" if error.got else error.problem
    raises = cause == "raises" and not isinstance(error, errors.OpsmithError)
    if raises and launched_kernels() and not torch.cuda.is_available():
        return "a GPU, which the code that launches its kernels may need"
    return "a GPU" if has_message(error, NO_GPU) else ""
