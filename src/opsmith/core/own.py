"""What an operator that others registered has of its own, and keeps when it is adopted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Own:
    """An operator that opsmith did not register, and what it brings.

    Args:
        overload: The operator as torch knows it.
        devices: Device types that it has kernels for; empty where one kernel serves all.
        autograd: Device types on which it differentiates itself.
        autocast: Device types on which it has a rule for autocast.
        fake: Whether it has a fake kernel.
        vmap: Whether it has a rule for `vmap`.
        sources: What its behaviour in compiled code is written in; what has no source is no two times alike.
    """

    overload: Any
    devices: tuple[str, ...] = ()
    autograd: frozenset[str] = frozenset()
    autocast: frozenset[str] = frozenset()
    fake: bool = False
    vmap: bool = False
    sources: tuple[Any, ...] = ()
