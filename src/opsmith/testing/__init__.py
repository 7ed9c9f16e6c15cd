"""Tools for test suites: assert that an operator passes, run CUDA kernels on the CPU, `pytest --opsmith`."""

from __future__ import annotations

from typing import Any

from opsmith.checking import Report, check
from opsmith.testing.emulation import emulated_cuda

__all__ = ["assert_correct", "emulated_cuda"]


def assert_correct(operator: Any, /, **options: Any) -> Report:
    """Assert that an operator passes `opsmith.check`.

    Args:
        operator: The operator, the `autograd.Function` class, or the operator of torch.library.
        **options: All options of `opsmith.check`; properties that they leave out are not required.

    Returns:
        The report, if the operator passed.

    Raises:
        AssertionError: If it does not pass; the text is the report.
        MissingSamplesError, SampleError, UsageError: As `opsmith.check`, if nothing was checked.

    Example:
        >>> import opsmith.ops
        >>> assert_correct(opsmith.ops.mul, skip=["opcheck"]).verdict()
        'opsmith::mul: passed'
    """
    # pytest then shows the line of the calling test instead of this function.
    __tracebackhide__ = True
    report = check(operator, **options)
    if not report.passed_as_asked:
        raise AssertionError(str(report))
    return report
