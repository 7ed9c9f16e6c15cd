"""Cache of decisions by call signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from opsmith.core.specification import Specification

MAX_SIGNATURES = 4096
"""Maximum number of cached signatures: a size that changes in each call must not fill the memory."""

T = TypeVar("T")


class CallCache(Generic[T]):
    """Values by call signature, valid for one specification of the operator."""

    def __init__(self) -> None:
        self._cached: tuple[Specification | None, dict[Any, T]] = None, {}

    def get(self, specification: Specification, signature: Any) -> T | None:
        """Return the cached value, or None."""
        valid_for, cached = self._cached
        return cached.get(signature) if valid_for is specification else None

    def obtain(self, specification: Specification, signature: Any, compute: Callable[[], T]) -> T:
        """Return the cached value, or compute and cache it."""
        known = self.get(specification, signature)
        if known is not None:
            return known
        found = compute()
        valid_for, cached = self._cached
        if valid_for is not specification or len(cached) >= MAX_SIGNATURES:
            cached = {}
            self._cached = specification, cached
        cached[signature] = found
        return found


def call_signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return all properties of argument values, except the data in tensors.

    Example:
        >>> call_signature([torch.ones(2), [1.0]]) == call_signature([torch.zeros(2), [1.0]])
        True
        >>> call_signature([1]) == call_signature([True])
        False
    """
    return tuple(map(_signature, values))


def is_symbolic(signature: Any) -> bool:
    """Return True if a signature contains a symbol of a compiler, whose value differs between runs.

    All other signatures can be hashed. Hashing is fast even if lists have hundreds of sizes.
    """
    try:
        hash(signature)
    except TypeError:
        return True
    return False


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.is_neg()
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return [value]  # a hash of the symbol would make torch replace it by a number
    return type(value), value
