"""Installation of the packages of an extra, for messages."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs an extra; opsmith is not on a package registry.

    Example:
        >>> install("cli")
        "pip install '.[cli]' in a checkout of opsmith"
    """
    return f"pip install '.[{extra}]' in a checkout of opsmith"
