"""Content of a page: every section, collected from one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.benchmarking import benchmark as measure
from opsmith.benchmarking.machine import environment_of
from opsmith.benchmarking.page import BenchmarkResult, pictured
from opsmith.build.toolchain import find_toolchain
from opsmith.checking import Report, check
from opsmith.core.operator import Operator
from opsmith.core.samples import first_call
from opsmith.drawing import Figure
from opsmith.kernels.common.memory_access import KernelAccess
from opsmith.pages.aspects import Aspect, aspects_of
from opsmith.pages.declaration import CallSignature, SourceCode, codes_of, signature_of
from opsmith.pages.kernels import KernelList, accesses_of, kernels_of
from opsmith.pages.sections import (
    ExportResult,
    SavedTensors,
    exports_of,
    graph_of,
    saved_tensors,
)

T = TypeVar("T")


@dataclass(frozen=True)
class AbsentSection:
    """A section that cannot be made.

    Args:
        reason: The reason, and a remedy.
    """

    reason: str


@dataclass(frozen=True)
class PageContent:
    """The content of an operator's page.

    Args:
        name: `namespace::name`.
        where: `file:line` of the reference.
        signature: The signature.
        codes: The source of the reference, formulas and samples.
        aspects: The origin of each aspect: handwritten, declared or derived.
        report: The report of a check.
        graph: The graph of the reference and the formulas.
        saved: The tensors that a call saves for the backward.
        kernels: The kernels with their resources.
        accesses: The access model of the kernels in CUDA C++.
        exports: The ONNX export with each kind of body.
        measured: The benchmark.
        environment: Versions, machine and compiler.
    """

    name: str
    where: str
    signature: CallSignature
    codes: tuple[SourceCode, ...]
    aspects: tuple[Aspect, ...]
    report: Report | AbsentSection
    graph: Figure | AbsentSection
    saved: SavedTensors | AbsentSection
    kernels: KernelList | AbsentSection
    accesses: tuple[KernelAccess, ...] | AbsentSection
    exports: tuple[ExportResult, ...] | AbsentSection
    measured: BenchmarkResult | AbsentSection
    environment: Mapping[str, str]


def attempted(make: Callable[[], T]) -> T | AbsentSection:
    """The content of a section, or the reason for its absence: an exception does not end the page.

    Example:
        >>> attempted(lambda: [1.0][0]), attempted(lambda: [][0])
        (1.0, AbsentSection(reason='IndexError: list index out of range'))
    """
    try:
        return make()
    except errors.OpsmithError as error:
        return AbsentSection(str(error))
    except Exception as error:
        return AbsentSection(f"{type(error).__name__}: {errors.message_of(error)}".rstrip(": "))


Step = Callable[[str], None]
"""A function of the current step."""

UNMEASURED = AbsentSection(
    "not benchmarked: `opsmith page ... --benchmark` measures it, and `--benchmarked FILE` reads the output "
    "of `opsmith benchmark ... -o FILE`; in Python use `benchmarks=`"
)
NO_KERNEL = AbsentSection("it has no kernel: the reference computes every call")


def collect_content(
    operator: Operator[..., Any],
    step: Step,
    *,
    report: Report | None,
    benchmark: Benchmark | bool | None,
    effort: Any,
    seed: int,
    architectures: Sequence[str],
) -> PageContent:
    """Make every section of an operator's page.

    Args:
        operator: The operator.
        step: Function that is called with the name of each step.
        report: An existing report; None to run a check. benchmark: An existing benchmark; True to measure;
            None or False to omit it.
        effort: Effort of the check.
        seed: Seed of the check.
        architectures: Architectures for which CUDA kernels are compiled.
    """
    specification = operator.specification

    def checked() -> Report:
        if report is not None:
            return report
        step("check")
        return check(operator, effort=effort, seed=seed)

    def sampled() -> list[Any]:
        call = first_call(specification, "shown")
        return specification.schema.call_values(call.args, call.kwargs)

    values = attempted(sampled)
    section = attempted(checked)
    step("graph")
    graph = attempted(lambda: graph_of(operator))
    saved = attempted(lambda: saved_tensors(operator))
    step("kernels")
    kernels = attempted(lambda: kernels_of(operator, architectures))
    step("memory accesses")
    accesses = attempted(lambda: accesses_of(operator))
    step("ONNX")
    exports = attempted(lambda: exports_of(operator))
    step("benchmark")
    return PageContent(
        name=specification.name,
        where=specification.where,
        signature=signature_of(specification),
        codes=codes_of(specification),
        aspects=aspects_of(specification, None if isinstance(values, AbsentSection) else values),
        report=section,
        graph=graph,
        saved=saved,
        kernels=kernels if specification.kernels else NO_KERNEL,
        accesses=accesses,
        exports=exports,
        measured=_measured(operator, benchmark, None if isinstance(section, AbsentSection) else section),
        environment=environment(),
    )


def _measured(operator: Operator[..., Any], given: Benchmark | bool | None, report: Report | None) -> Any:
    if given is None or given is False:
        return UNMEASURED
    made = attempted(lambda: measure(operator, effort="quick", report=report)) if given is True else given
    return made if isinstance(made, AbsentSection) else attempted(lambda: pictured(made))


def environment() -> dict[str, str]:
    """Versions, machine and compiler."""
    found = environment_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    compiler = attempted(lambda: find_toolchain().command[0])
    found["compiler"] = "none" if isinstance(compiler, AbsentSection) else compiler
    return found
