"""For test suites: an assertion that an operator is right."""

from __future__ import annotations

from typing import Any

from opsmith.checking import Report, check
from opsmith.core.operator import Operator

__all__ = ["assert_correct"]


def assert_correct(operator: Operator[..., Any], **options: Any) -> Report:
    """Assert that an operator passes `opsmith.check`.

    Args:
        operator: The operator.
        **options: As for `opsmith.check`; what `only` or `skip` leaves out is not missed.

    Returns:
        The report, if the operator passed.

    Raises:
        AssertionError: With the whole report.

    Example:
        >>> import opsmith.ops
        >>> assert_correct(opsmith.ops.mul, skip=["integration"]).verdict()
        'opsmith::mul: passed'
    """
    # pytest then shows the line of the test that called, and not this function.
    __tracebackhide__ = True
    report = check(operator, **options)
    if not report.passed_as_asked:
        raise AssertionError(str(report))
    return report
