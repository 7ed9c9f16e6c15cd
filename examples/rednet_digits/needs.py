"""The packages that this example needs beside torch, looked for before anything else takes time."""

from __future__ import annotations

import importlib.util

NEEDS = {"rich": "cli", "sklearn": "tour", "matplotlib": "plot"}
"""Packages, and the extras of opsmith that bring them."""


class MissingError(Exception):
    """A package is not installed."""


def refuse_missing() -> None:
    """Refuse to begin without the packages that a later part needs.

    Raises:
        MissingError: Naming all of them, and what to install.
    """
    missing = [package for package in NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        extras = ",".join(NEEDS[package] for package in missing)
        raise MissingError(
            f"{', '.join(missing)} must be installed: pip install '.[{extras}]' in a checkout of opsmith"
        )
