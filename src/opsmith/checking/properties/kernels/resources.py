"""Resources of CUDA kernels: they compile, and use no more of a GPU than their author allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.checking.properties.kernels.sizes import narrow_index
from opsmith.checking.property import Findings, Note, Property, Skipped, raised
from opsmith.checking.report import Failure
from opsmith.checking.subject import Subject
from opsmith.kernels.languages import with_gpu_usage

if TYPE_CHECKING:
    from opsmith.kernels.common.gpu_resources import KernelUsage

NAME = "resources"
SHOWN = 4
"""Maximum number of instances in a message."""


def run(subject: Subject) -> Findings:
    """Compile every instance that the samples need, and compare each with its limits."""
    kernels = [each for each in with_gpu_usage(subject.specification.kernels) if each[1].has_limits]
    if subject.operator is None or not kernels:
        yield Skipped("the operator has no kernel in CUDA C++")
        return
    from opsmith.kernels.common.gpu_resources import ARCHITECTURES  # few operators need it

    architectures = ARCHITECTURES if subject.effort.full else ARCHITECTURES[-1:]

    def calls(dtype: torch.dtype) -> Iterator[list[Any]]:
        for sample in subject.samples:
            yield sample.flattening.pack(sample.at(dtype if dtype.is_floating_point else None))

    for kernel, usage in kernels:
        try:
            beyond = [each for each in usage.usage(kernel, architectures, calls) if each.faults]
            if beyond:
                yield _failure(beyond, kernel.language)
            yield from narrow_index(NAME, subject, kernel)
        except (errors.ToolchainError, errors.LanguageError) as error:
            yield Skipped(f"{error.problem}: {error.hint}")
        except errors.MissingSamplesError as error:
            yield Note(error.problem)
        except errors.OpsmithError as error:
            yield raised(NAME, subject, error, f"compiled for {' and '.join(architectures)}")


def _failure(beyond: Sequence[KernelUsage], language: str) -> Failure:
    """One failure for a kernel, with the instances that exceed its limits."""
    exceeded = [
        f"for {', '.join(filter(None, [each.instance, each.architecture]))} {' and '.join(each.faults)}"
        for each in beyond
    ]
    more = f"; and {len(exceeded) - SHOWN} more" if len(exceeded) > SHOWN else ""
    message = f"the {language} kernel exceeds its limits: {'; '.join(exceeded[:SHOWN])}{more}"
    registers = max(each.registers for each in beyond)
    spills = max(each.spills for each in beyond)
    evidence = {"most registers": registers, "most bytes spilled": spills}
    return Failure(NAME, None, "resources", message, beyond[0].where, evidence)


RESOURCES = Property(NAME, "CUDA kernels compile, and use no more registers and memory than allowed", run)
