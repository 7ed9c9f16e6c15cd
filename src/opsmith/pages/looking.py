"""From an operator to all that its page says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.machine import surroundings
from opsmith.build.toolchain import find_toolchain
from opsmith.checking import Report, check
from opsmith.core.operator import Operator
from opsmith.pages.aspects import aspects_of
from opsmith.pages.benchmarks import measured, pictured
from opsmith.pages.content import Absent, Content, attempted
from opsmith.pages.exports import exports_of
from opsmith.pages.graph import graph_of
from opsmith.pages.kernels import kernels_of
from opsmith.pages.memory import kept_by
from opsmith.pages.signature import signature_of
from opsmith.pages.sources import codes_of

Say = Callable[[str], None]
"""Told what is looked at next."""

UNMEASURED = Absent(
    "not benchmarked: `opsmith page ... --benchmark` measures it, and `--benchmarked FILE` takes what "
    "`opsmith benchmark ... -o FILE` wrote; in Python `benchmarks=`"
)
NO_KERNEL = Absent("it has no kernel: the reference computes every call")


@dataclass(frozen=True)
class Wanted:
    """What is to be looked at, and what was looked at before.

    Args:
        report: What a check has found already; None: it is checked now.
        benchmark: What was measured already; True: it is measured now; None: not at all.
        effort: Of the check.
        seed: Of the check.
        architectures: What kernels for CUDA are compiled for.
    """

    report: Report | None
    benchmark: Benchmark | bool | None
    effort: str
    seed: int
    architectures: Sequence[str]


def look_at(operator: Operator[..., Any], wanted: Wanted, say: Say) -> Content:
    """Look at everything; what cannot be looked at is said to be absent, with the reason."""
    specification = operator.specification

    def checked() -> Report:
        if wanted.report is not None:
            return wanted.report
        say("check")
        effort: Any = wanted.effort
        return check(operator, effort=effort, seed=wanted.seed)

    report = attempted(checked)
    say("graph")
    graph = attempted(lambda: graph_of(operator))
    kept = attempted(lambda: kept_by(operator))
    say("kernels")
    kernels = attempted(lambda: kernels_of(operator, wanted.architectures))
    say("ONNX")
    exports = attempted(lambda: exports_of(operator))
    say("benchmark")
    return Content(
        name=specification.name,
        where=specification.where,
        signature=signature_of(specification),
        codes=codes_of(specification),
        aspects=aspects_of(specification),
        report=report,
        graph=graph,
        kept=kept,
        kernels=kernels if specification.kernels else NO_KERNEL,
        exports=exports,
        measured=_measured(operator, wanted, None if isinstance(report, Absent) else report),
        environment=environment(),
    )


def _measured(operator: Operator[..., Any], wanted: Wanted, report: Report | None) -> Any:
    given = wanted.benchmark
    if given is None or given is False:
        return UNMEASURED
    made = attempted(lambda: measured(operator, report)) if given is True else given
    return made if isinstance(made, Absent) else attempted(lambda: pictured(made))


def environment() -> dict[str, str]:
    """Versions, machine and compiler."""
    found = surroundings(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    compiler = attempted(lambda: find_toolchain().command[0])
    found["compiler"] = "none" if isinstance(compiler, Absent) else compiler
    return found
