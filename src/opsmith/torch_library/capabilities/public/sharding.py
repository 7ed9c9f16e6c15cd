"""DTensor by its public names: an operator on DTensors is always its reference on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def replicates_implicitly() -> bool:
    """Whether DTensor takes plain tensors for replicated ones: not known, so taken for not asked for."""
    return False


def implicit_replication() -> AbstractContextManager[None]:
    """A region in which DTensor takes plain tensors for replicated ones; it ends an outer one."""
    from torch.distributed.tensor.experimental import implicit_replication

    region: AbstractContextManager[None] = implicit_replication()
    return region


def watching_shards(see: Callable[[Any, Any, Any, Callable[[], Any]], Any]) -> AbstractContextManager[Any]:
    """No region: without seeing what DTensor does, nothing is proved about shards.

    Raises:
        NotImplementedError: Always, which ends the trial.
    """
    raise NotImplementedError("torch has no public means to see operations on shards")
