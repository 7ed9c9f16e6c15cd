"""Operators that a library without Python computes, too: Python takes over operators of the same sources.

The counterpart is `kernels/runtime/torch_library.cpp`. A library that is loaded after the declaration of an
operator calls `share` at the first call. A library that is already loaded is found by the declaration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from opsmith.core.kernels import BuiltKernel
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities

REGISTRY = "opsmith_libraries"
"""Namespace with a describing operator for each operator that a library computes."""
DEVICES = ("cpu", "cuda")
"""Devices of the kernels in a library: only the first, or both."""

_owners: dict[str, Callable[[ServedLibrary], str]] = {}


@dataclass(frozen=True, slots=True)
class ServedLibrary:
    """Library that computes an operator.

    Attributes:
        digest: See `operator_digest`.
        file: Path of the library.
    """

    digest: str
    file: str


def is_same(specification: Specification, library: ServedLibrary) -> bool:
    """Return True if a library is made of the sources of an operator."""
    return library.digest in {operator_digest(specification, cuda=cuda) for cuda in (False, True)}


def operator_digest(specification: Specification, *, cuda: bool = False) -> str:
    """Return the digest of an author's schema, shapes and kernels for the CPU.

    It contains nothing that opsmith generates, so it is the same for all releases of opsmith.

    Args:
        specification: The operator.
        cuda: True to include kernels for NVIDIA's GPUs.
    """
    shapes = "" if specification.shapes is None else specification.shapes.text
    parts = [specification.schema.text(specification.name, with_hidden=True), shapes]
    for kernel in specification.kernels:
        if kernel.device in DEVICES[: 1 + cuda]:
            given = kernel.given
            parts.append(
                f"{given.digest()} {given.copies_back}" if isinstance(given, BuiltKernel) else kernel.where
            )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def library_of(name: str) -> ServedLibrary | None:
    """Return the library in this process that computes `namespace::name`; None if there is none."""
    described = name.replace("::", "__")
    if "." in name or not capabilities.operator_exists(f"{REGISTRY}::{described}"):
        return None
    describe: Any = getattr(getattr(torch.ops, REGISTRY), described)
    return ServedLibrary(*describe("", "").split("\n", 1))


def announce(name: str, owner: Callable[[ServedLibrary], str]) -> None:
    """Let libraries that are loaded from now on share an operator.

    Args:
        name: `namespace::name`.
        owner: Takes the operator over, and returns an empty string; or returns the place of its declaration,
            if the library is made of different sources.
    """
    _owners[name] = owner
    _asked()


def withdraw(name: str) -> None:
    """Let libraries share an operator no longer."""
    _owners.pop(name, None)


@cache
def _asked() -> torch.library.Library:
    """Register the operator `share`, which libraries call."""
    library = torch.library.Library(REGISTRY, "FRAGMENT")
    library.define("share(str name, str digest, str file) -> str")
    library.impl("share", _share, "CompositeExplicitAutograd")
    return library


def _share(name: str, digest: str, file: str) -> str:
    owner = _owners.get(name)
    return (
        "Python code that does not declare it by opsmith"
        if owner is None
        else owner(ServedLibrary(digest, file))
    )
