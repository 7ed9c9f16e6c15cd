"""Kernels that can neither be loaded nor built: the reference runs after a warning, or an error is raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from opsmith import config, errors
from opsmith.core.caller_warning import warn_caller

if TYPE_CHECKING:
    from opsmith.core.kernels import BuiltKernel

_warned = False
_in_silence: ContextVar[bool] = ContextVar("missing_kernels_in_silence", default=False)


@contextmanager
def in_silence() -> Iterator[None]:
    """Context manager without warnings, for use where a report shows the reason."""
    token = _in_silence.set(True)
    try:
        yield
    finally:
        _in_silence.reset(token)


def missing_reason(kernel: BuiltKernel[Any], error: errors.ToolchainError) -> str:
    """Return the reason why a kernel does not take calls here; warn of the first one in a process.

    Args:
        kernel: A kernel that is in no built library, and that cannot be built.
        error: Reason why it cannot be built.

    Raises:
        ToolchainError: If the kernel is declared with `strict=True`.
        KernelRefusedError: If `require_kernel` or `OPSMITH_REQUIRE_KERNELS` requires it.
    """
    global _warned
    error = error.with_traceback(None)  # the kernel keeps it, and its frames would keep the arguments
    if kernel.strict:
        raise error
    reason = f"{error.problem}: {error.got}; {error.hint}"
    by_environment = config.kernels_required()
    if kernel.required or by_environment:
        requiring = f"{config.REQUIRE_KERNELS}=1" if by_environment else "`require_kernel`"
        raise kernel.error(
            errors.KernelRefusedError,
            f"its kernel in {kernel.language} is required by {requiring}, but cannot be loaded or built here",
            expected="a built kernel in its package that fits this machine, or a compiler",
            got=f"{error.problem}: {error.got}",
            hint="install a package with built kernels for this machine, or a compiler; "
            "`opsmith doctor` shows the missing tools",
        ) from error
    if not _warned and not _in_silence.get():
        warn_caller(
            f"{kernel.operator.name}: the reference runs in place of its kernel in {kernel.language}, "
            f"{kernel.where}: {reason}. `opsmith doctor` shows the missing tools, and "
            f"{config.REQUIRE_KERNELS}=1 turns this warning into an error. Other kernels may be missing, "
            "too: this warning appears only once in a process"
        )
        _warned = True  # last: if a filter makes the warning an error, each call raises it
    return reason


def with_reason(error: errors.ToolchainError, reason: str) -> errors.ToolchainError:
    """Return an error with the reason why no built kernel of the package is used, if there is one."""
    if not reason:
        return error
    got = f"{error.got}; {reason}"
    return errors.ToolchainError(error.problem, expected=error.expected, got=got, hint=error.hint)
