"""A torch operation that is about to run, as reported by a capability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Operation:
    """An operation that is about to run.

    Args:
        operator: The `OpOverload`.
        args: Its arguments.
        kwargs: Its keyword arguments.
        written: The tensors that it writes into, by its schema.
        viewed: The tensors of which its results are views, by its schema.
        run: Runs it, and returns its results.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Sequence[Tensor]
    viewed: Sequence[Tensor]
    run: Callable[[], Any]
