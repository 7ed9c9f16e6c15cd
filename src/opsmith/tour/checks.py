"""Stage: every operator that the tour uses passes the check."""

from __future__ import annotations

from time import perf_counter

from rich.table import Table

from opsmith import ops
from opsmith.checking import Report, check
from opsmith.ops.involution import involution_input_gradient, involution_weight_gradient
from opsmith.tour.files import write_json
from opsmith.tour.progress import progress
from opsmith.tour.stage import Context, StageResult
from opsmith.tour.swish import swish
from opsmith.tour.threads import single_thread

OPERATORS = (
    ops.exp,
    ops.mul,
    ops.add,
    ops.linear,
    ops.involution,
    involution_input_gradient,
    involution_weight_gradient,
    swish,
)


@single_thread()
def run(context: Context) -> StageResult:
    """Check the operators, print a table, and write the reports to `checks.json`."""
    reports: dict[str, Report] = {}
    seconds: dict[str, float] = {}
    with progress(context.console, "checking", len(OPERATORS)) as advance:
        for operator in OPERATORS:
            start = perf_counter()
            reports[operator.name] = check(operator, seed=context.seed)
            seconds[operator.name] = perf_counter() - start
            advance(operator.name)
    context.console.print(_table(reports, seconds))
    for report in reports.values():
        for failure in report.failures:
            context.console.print(f"{report.operator}: {failure.message}", markup=False)
    path = write_json(context.out / "checks.json", [report.to_dict() for report in reports.values()])
    passed = [name for name, report in reports.items() if report.passed]
    return StageResult(
        len(passed) == len(reports),
        f"{len(passed)} of {len(reports)} operators passed",
        {"passed": passed, "failed": [name for name in reports if name not in passed]},
        (path,),
    )


STATUSES = ("passed", "skipped")


def _table(reports: dict[str, Report], seconds: dict[str, float]) -> Table:
    table = Table("operator", "check", "passed", "skipped", "seconds")
    for name, report in reports.items():
        counts = [str(sum(outcome.status == status for outcome in report.outcomes)) for status in STATUSES]
        verdict = "[green]passed" if report.passed else "[red]failed"
        table.add_row(name, verdict, *counts, f"{seconds[name]:.1f}")
    return table
