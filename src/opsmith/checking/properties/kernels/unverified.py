"""Kernels that no property ran, which are therefore unverified, and calls that an operator refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.checking.property import Findings, Skipped, not_run, raised
from opsmith.checking.report import Outcome
from opsmith.checking.subject import Subject, missing_device
from opsmith.core.kernels import BuiltKernel, Kernel, Rejected
from opsmith.core.specification import Specification
from opsmith.kernels.languages import language_of
from opsmith.torch_library.writes import refuse_unwritable


def runs_in(kernel: Kernel) -> str:
    """Name of the property that runs a kernel: `forward`, or the property that runs it on the CPU instead."""
    language = language_of(kernel.given)
    if language is None or language.on_cpu is None or missing_device(kernel.device) is None:
        return "forward"
    return language.key


def unverified_too(subject: Subject, kernel: Kernel, findings: Findings) -> Findings:
    """Yield the findings of a GPU kernel; if it is skipped for lack of a GPU, it is unverified."""
    left = False
    for finding in findings:
        yield finding
        if isinstance(finding, Skipped):
            left = runs_in(kernel) == "forward"
            if not left:
                yield not_run(runs_in(kernel), kernel, finding.reason, finding.hint)
    if not left:
        subject.ran.kernels.add(kernel)


def unrun_kernels(found: Mapping[str, Outcome], subject: Subject) -> Findings:
    """Report each kernel that no property ran, with the reason, or with the error if it does not compile."""
    ran = {position for outcome in found.values() for position in outcome.kernels}
    for position, kernel in enumerate(subject.specification.kernels):
        if position in ran:
            continue
        outcome = found[runs_in(kernel)]
        try:
            reason, hint = _reason(outcome, subject, kernel)
        except errors.ToolchainError as error:
            reason, hint = f"{error.problem}: {error.got}", error.hint
        except errors.OpsmithError as error:
            yield raised("forward", subject, error, "compiled, though no sample needs it")
            continue
        yield not_run(outcome.property, kernel, reason, hint)


def _reason(outcome: Outcome, subject: Subject, kernel: Kernel) -> tuple[str, str | None]:
    """The reason why the property of this outcome did not run a kernel, and the hint for it."""
    way_out = f"check `{outcome.property}`, too" if outcome.left_out else ""
    if isinstance(kernel.given, BuiltKernel):
        kernel.given.load()
    if outcome.property == "forward":
        missing = missing_device(kernel.device)
        if missing is not None:
            return missing, None
        device = torch.device(kernel.device)
        calls = [sample.flattening.pack(sample.at(device=device)) for sample in subject.samples]
        none = [each.reason for each in map(kernel.consider, calls) if isinstance(each, Rejected)]
        if len(none) == len(calls):
            hint = " or ".join(filter(None, ["add a sample that it takes", way_out]))
            return f"it takes none of the samples ({'; '.join(sorted({*none}))})", hint
    return f"`{outcome.property}` runs it, but is skipped: {outcome.reason}", way_out


def unwritable(specification: Specification, values: Sequence[Any]) -> str | None:
    """Return the reason why an operator that writes in place refuses a call; None if it does not."""
    if specification.schema.written:
        try:
            refuse_unwritable(specification, values)
        except errors.MutationError as error:
            return error.problem
    return None
