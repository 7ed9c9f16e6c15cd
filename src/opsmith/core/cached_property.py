"""Attributes that are computed when they are first read, without a lock.

The one of `functools` takes a lock of the class before Python 3.12: a child that is forked while another
thread holds it waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

import torch

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801  # its name in functools
    """Attribute that a method computes when it is first read.

    Two threads that read it first at once compute it twice, and keep one of the two values.

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
        if torch.compiler.is_dynamo_compiling():  # Dynamo of torch 2.11 cannot trace what keeps the value
            return self.func(holder)
        value: T = holder.__dict__.setdefault(self._name, self.func(holder))
        return value
