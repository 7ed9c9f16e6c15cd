"""How the packages of an extra are installed, as messages say it."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that brings an extra; opsmith is on no package registry, so it names a checkout.

    Example:
        >>> install("cli")
        "pip install '.[cli]' in a checkout of opsmith"
    """
    return f"pip install '.[{extra}]' in a checkout of opsmith"
