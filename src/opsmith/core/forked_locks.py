"""Locks that are free in a forked process, even if another thread of its parent held them."""

from __future__ import annotations

import itertools
import os
import threading
import weakref

_locks: dict[int, tuple[weakref.ref[object], str]] = {}
"""Owner and attribute of each lock, as long as the owner lives."""
_numbers = itertools.count()
_registered = False


def lock_of(holder: object, name: str) -> threading.RLock:
    """Return a new reentrant lock, which is replaced in a forked child if another thread held it.

    The protected data must be consistent at any time: the child sees it as the other thread left it.

    Args:
        holder: Object or module that has the lock as an attribute.
        name: Name of the attribute.

    Example:
        >>> class Cache:
        ...     def __init__(self):
        ...         self.lock = lock_of(self, "lock")
        >>> with Cache().lock:
        ...     pass
    """
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew)
        _registered = True
    number = next(_numbers)
    _locks[number] = (weakref.ref(holder, lambda _: _locks.pop(number, None)), name)
    return threading.RLock()


def _renew() -> None:
    """Replace the locks held by threads that this process does not have."""
    for reference, name in list(_locks.values()):
        holder = reference()
        if holder is None:
            continue
        lock = getattr(holder, name)
        if lock.acquire(blocking=False):  # it is free, or this thread's own
            lock.release()
        else:
            setattr(holder, name, threading.RLock())
