"""Base class of kernels from source."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from opsmith import errors
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator


class KernelSource(Protocol):
    """Source of a kernel, as its author wrote it."""

    @property
    def where(self) -> str:
        """`file:line` of the function."""

    @property
    def text(self) -> str:
        """Text of the source."""

    @property
    def entry(self) -> str:
        """Name of the function."""


S = TypeVar("S", bound=KernelSource)
E = TypeVar("E", bound=errors.OpsmithError)


class KernelFromSource(BuiltKernel, Generic[S]):
    """Function that computes an operator by a kernel from source, in any language.

    Args:
        operator: The operator that the kernel computes.
        read: Reads the source: now, and again at each `reload`.
        strict: Whether a missing compiler, or a call that the kernel does not take, is an error. Otherwise
            the reference runs.

    Attributes:
        operator: The operator that the kernel computes.
        source: The source, as it was last read.
        language: Name of the language, for messages.
    """

    language: ClassVar[str]

    def __init__(self, operator: Operator[..., Any], read: Callable[[], S], *, strict: bool) -> None:
        self.operator = operator
        self.source = read()
        self.strict = strict
        self.__name__ = operator.specification.short_name
        self._read = read
        self._lock = threading.RLock()
        self._forget()

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return self.source.where

    @property
    def text(self) -> str:
        """Text of the source."""
        return self.source.text

    @property
    def entry(self) -> str:
        """Name of the function."""
        return self.source.entry

    def error(self, kind: type[E], problem: str, **details: str) -> E:
        """Return an error about the kernel, with its operator and location."""
        return kind(problem, operator=self.operator.name, where=self.where, **details)

    def reload(self) -> None:
        """Read the source again. If it has changed, it is compiled at the next call."""
        source = self._read()
        with self._lock:
            self._forget()
            self.source = source

    @abstractmethod
    def _forget(self) -> None:
        """Drop the built kernel, and all caches of calls."""
