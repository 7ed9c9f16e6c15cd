"""Attributes that are computed when they are first read, without a lock.

Before Python 3.12 `functools.cached_property` takes a lock of the class. A child that is forked while another
thread holds the lock waits forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

import torch

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801  # its name in functools
    """Attribute that a method computes when it is first read.

    If two threads read it for the first time at once, both compute it, and one of the two values is kept.

    Args:
        compute: The method.

    Example:
        >>> class Square:
        ...     def __init__(self, side):
        ...         self.side = side
        ...     @cached_property
        ...     def area(self):
        ...         print("computing")
        ...         return self.side**2
        >>> square = Square(3)
        >>> square.area, square.area
        computing
        (9, 9)
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.func = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, holder: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, holder: object, owner: type | None = None) -> T: ...
    def __get__(self, holder: object | None, owner: type | None = None) -> Self | T:
        if holder is None:
            return self
        if torch.compiler.is_dynamo_compiling():  # Dynamo of torch 2.11 cannot trace the caching
            return self.func(holder)
        value: T = holder.__dict__.setdefault(self._name, self.func(holder))
        return value
