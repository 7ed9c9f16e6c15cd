"""What the environment says to opsmith: read here alone, when it is first needed and not at import."""

from __future__ import annotations

import os
from pathlib import Path

from opsmith import errors

CONSERVATIVE = "OPSMITH_CONSERVATIVE"
"""The variable that turns off every use of torch's private names that has another way."""


def conservative() -> bool:
    """Whether `OPSMITH_CONSERVATIVE` is on.

    Raises:
        UsageError: If it is set to something that means neither on nor off.

    Example:
        >>> import os
        >>> _ = os.environ.pop("OPSMITH_CONSERVATIVE", None)
        >>> conservative()
        False
    """
    said = os.environ.get(CONSERVATIVE, "")
    if said not in ("", "0", "1"):
        raise errors.UsageError(
            f"the environment variable {CONSERVATIVE} has a value that means nothing",
            expected="1 for on, 0 for off",
            got=repr(said),
            hint=f"set {CONSERVATIVE}=1, or unset it",
        )
    return said == "1"


CACHE = "OPSMITH_CACHE"
"""The variable that names the directory in which built kernels are kept."""
COMPILER = "CXX"
"""The variable that names the C++ compiler, as build systems have it: a program, and options after it."""


def cache_directory() -> Path:
    """Where built kernels are kept: what `OPSMITH_CACHE` names, or `opsmith` in the user's own cache."""
    named = os.environ.get(CACHE, "")
    if named:
        return Path(named).absolute()
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "opsmith" / "cache"
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "opsmith"


def compiler() -> str:
    """What `CXX` names; empty where it names nothing."""
    return os.environ.get(COMPILER, "").strip()


CUDA = "CUDA_HOME"
"""The variable that names a CUDA toolkit, as build systems have it."""


def cuda_toolkit() -> str:
    """Where a CUDA toolkit is: what `CUDA_HOME` or `CUDA_PATH` names; empty where neither does."""
    return os.environ.get(CUDA, "") or os.environ.get("CUDA_PATH", "")
