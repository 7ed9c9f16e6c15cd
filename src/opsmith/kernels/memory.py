"""What is remembered for calls of one form, so that it is found out once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from opsmith.core.specification import Specification

MOST = 4096
"""Forms that are kept: a size that changes with each call must not fill the memory."""

T = TypeVar("T")


class Memory(Generic[T]):
    """What was found out for each form of calls, as long as the operator's specification is the same."""

    def __init__(self) -> None:
        self._known: tuple[Specification | None, dict[Any, T]] = None, {}

    def of(self, specification: Specification, form: Any) -> T | None:
        """What is remembered for a form, as `form_of_call` gives it; None where nothing is."""
        remembered_for, found = self._known
        return found.get(form) if remembered_for is specification else None

    def obtain(self, specification: Specification, form: Any, find: Callable[[], T]) -> T:
        """What is remembered for a form, or else is found now."""
        known = self.of(specification, form)
        if known is not None:
            return known
        found = find()
        remembered_for, kept = self._known
        if remembered_for is not specification or len(kept) >= MOST:
            kept = {}
            self._known = specification, kept
        kept[form] = found
        return found


def form_of_call(values: Sequence[Any]) -> tuple[Any, ...]:
    """All that what is found out may depend on in argument values: everything but the data in tensors.

    Example:
        >>> form_of_call([torch.ones(2), [1.0]]) == form_of_call([torch.zeros(2), [1.0]])
        True
        >>> form_of_call([1]) == form_of_call([True])
        False
    """
    return tuple(map(_form, values))


def is_open(form: Any) -> bool:
    """Whether something in a form is a letter to a compiler, and another number at each run."""
    return any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in _leaves(form))


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.is_neg()
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return type(value), value


def _leaves(form: Any) -> Iterator[Any]:
    if isinstance(form, tuple):
        for item in form:
            yield from _leaves(item)
    else:
        yield form
