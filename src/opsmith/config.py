"""Environment variables of opsmith; no other module reads them, and none is read at import."""

from __future__ import annotations

import os
from pathlib import Path

from opsmith import errors

CONSERVATIVE = "OPSMITH_CONSERVATIVE"
"""Variable that turns off every use of torch's private names that has a public alternative."""


def conservative() -> bool:
    """Return True if `OPSMITH_CONSERVATIVE` is on.

    Raises:
        UsageError: If its value is neither 0 nor 1.

    Example:
        >>> import os
        >>> _ = os.environ.pop("OPSMITH_CONSERVATIVE", None)
        >>> conservative()
        False
    """
    return _is_on(CONSERVATIVE)


PYTHON_CALLS = "OPSMITH_PYTHON_CALLS"
"""Variable that turns off calls in C++, even if they are built."""


def calls_in_python() -> bool:
    """Return True if `OPSMITH_PYTHON_CALLS` is on.

    Raises:
        UsageError: If its value is neither 0 nor 1.
    """
    return _is_on(PYTHON_CALLS)


NO_CALLS_BUILD = "OPSMITH_NO_CALLS_BUILD"
"""Variable that stops opsmith from building calls in C++ without being asked."""


def no_calls_build() -> bool:
    """Return True if `OPSMITH_NO_CALLS_BUILD` is on.

    Raises:
        UsageError: If its value is neither 0 nor 1.
    """
    return _is_on(NO_CALLS_BUILD)


def local_rank() -> int:
    """Return the number of this process among this machine's processes, set by `torchrun`; 0 without it."""
    value = os.environ.get("LOCAL_RANK", "0")
    return int(value) if value.isdecimal() else 0


REQUIRE_KERNELS = "OPSMITH_REQUIRE_KERNELS"
"""Variable that makes opsmith raise an error if a kernel can neither be loaded nor built."""


def kernels_required() -> bool:
    """Return True if `OPSMITH_REQUIRE_KERNELS` is on.

    Raises:
        UsageError: If its value is neither 0 nor 1.
    """
    return _is_on(REQUIRE_KERNELS)


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise errors.UsageError(
            f"the environment variable {variable} has an invalid value",
            expected="1 for on, 0 for off",
            got=repr(value),
            hint=f"set {variable}=1, or unset it",
        )
    return value == "1"


CACHE = "OPSMITH_CACHE"
"""Variable with the directory of built kernels."""
COMPILER = "CXX"
"""Variable with the C++ compiler: a program, and options after it."""


def cache_directory() -> Path:
    """Return the directory of built kernels: `OPSMITH_CACHE`, or `opsmith` in the user's cache.

    Raises:
        CacheError: If neither exists.
    """
    named = os.environ.get(CACHE, "")
    if named:
        return Path(named).absolute()
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "opsmith" / "cache"
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "opsmith"
    except RuntimeError as error:  # neither HOME nor the system has a home directory
        raise errors.CacheError(
            "there is no home directory for the cache of built kernels",
            expected=f"a home directory, or a directory in {CACHE}",
            got=str(error),
            hint=f"set {CACHE} to a directory of your own",
        ) from None


def compiler() -> str:
    """Return `CXX`; empty if it is not set."""
    return os.environ.get(COMPILER, "").strip()


CUDA = "CUDA_HOME"
"""Variable with the directory of a CUDA toolkit."""


def cuda_toolkit() -> str:
    """Return the directory of a CUDA toolkit: `CUDA_HOME` or `CUDA_PATH`; empty if neither is set."""
    return os.environ.get(CUDA, "") or os.environ.get("CUDA_PATH", "")
