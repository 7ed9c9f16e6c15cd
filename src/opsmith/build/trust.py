"""Whether a directory may hold code that is loaded: nobody else can write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from opsmith import errors

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def refuse_foreign(directory: Path, variable: str) -> None:
    """Refuse a directory that another user of this machine owns or may write into, itself or above.

    A library from there would run that user's code as this one's. Windows has no such bits, and keeps
    profiles apart; there nothing is looked at.

    Args:
        directory: An existing directory.
        variable: The environment variable that names another one, for the message.

    Raises:
        CacheError: If somebody else can put files there.
    """
    if os.name == "nt":
        return
    resolved = directory.resolve()
    fault = _fault(resolved, shared=False)
    at = resolved
    for parent in resolved.parents:
        if fault is not None:
            break
        at, fault = parent, _fault(parent, shared=True)
    if fault is not None:
        raise errors.CacheError(
            "the cache of built kernels is in a directory that is not this user's alone",
            expected="a directory that this user owns, and that nobody else can write into",
            got=f"{at}: {fault}",
            hint=f"run `chmod go-w {at}` if it is yours, or set {variable} to a directory of your own",
        )


def _fault(directory: Path, *, shared: bool) -> str | None:
    """What is wrong with a directory; one above may be root's, or shared where only owners can rename."""
    state = directory.stat()
    if state.st_uid != os.geteuid() and not (shared and state.st_uid == 0):
        return f"it belongs to user {state.st_uid}, and this is user {os.geteuid()}"
    if state.st_mode & OTHERS and not (shared and state.st_mode & stat.S_ISVTX):
        return f"its mode is {stat.S_IMODE(state.st_mode):o}, so others can write into it"
    return None
