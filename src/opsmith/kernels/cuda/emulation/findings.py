"""Findings about an emulated kernel, from the runtime's reports; those first that explain others."""

from __future__ import annotations

from collections.abc import Iterable

from opsmith.kernels.cuda.emulation.launch import EmulatedLaunch, Kind, LaunchResult, Report
from opsmith.kernels.cuda.emulation.messages import MESSAGES, EmulationFinding, ended_process
from opsmith.kernels.cuda.emulation.places import ReportReader
from opsmith.kernels.cuda.source import CudaSource
from opsmith.kernels.on_cpu import NOTE, SKIPPED

_PRECEDENCE = (
    *("misaligned", "mutates-input", "out-of-bounds", "undefined", "raises", "divergent-barrier", "race"),
    *("endless", "uninitialized", SKIPPED, NOTE),
)
"""Causes, those first that explain others: what lies beyond a row is another thread's, and so a race."""

_ENDING = (Kind.CRASH, Kind.STACK_OVERFLOW, Kind.OUT_OF_MEMORY)
"""Kinds of reports after which the runtime ends its process."""


def findings_of(source: CudaSource, launch: EmulatedLaunch, result: LaunchResult) -> list[EmulationFinding]:
    """Return the findings of a launch, those first that explain others.

    Args:
        source: The kernel.
        launch: The launch.
        result: Its result.
    """
    reader = ReportReader(source, launch, result.reports)
    reports = _root_reports(result.reports)
    found = [MESSAGES[Kind(each.kind)](reader, each) for each in reports]
    if result.status is not None and not any(each.kind in _ENDING for each in result.reports):
        found.append(ended_process(source, result.status))
    return sorted(found, key=lambda each: _PRECEDENCE.index(each.cause))


def _root_reports(reports: Iterable[Report]) -> list[Report]:
    """Leave out the reports that others explain.

    What a race reads before it is written is not uninitialized for another reason. Elements of a result that
    a thread would have written which was ended, or that a launch which was given up had still to write, are
    not missing for another reason.
    """
    found = list(reports)
    kinds = {Kind(each.kind) for each in found}
    racing = {pc for each in found if each.kind == Kind.RACE for pc in (each.pc, each.other_pc)}
    ended = kinds - {Kind.NOT_WRITTEN, Kind.RACE, Kind.BARRIER_AFTER_EXIT, Kind.UNORDERED_SUM}
    return [
        each
        for each in found
        if not (
            (each.kind in (Kind.UNINITIALIZED_SHARED, Kind.UNINITIALIZED_RESULT) and each.pc in racing)
            or (each.kind == Kind.NOT_WRITTEN and ended)
        )
    ]
