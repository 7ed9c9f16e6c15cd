"""What kernels from source have in common, in whichever language: a source that is read again, and counts."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator


class Source(Protocol):
    """The source of a kernel."""

    @property
    def where(self) -> str:
        """`file:line` of the function."""

    @property
    def text(self) -> str:
        """The source."""

    @property
    def entry(self) -> str:
        """Name of the function."""


S = TypeVar("S", bound=Source)


class KernelFromSource(BuiltKernel, Generic[S]):
    """A function that computes an operator by a kernel from source.

    Args:
        operator: Whose kernel it is.
        source: The source.
        strict: Whether what the kernel is built with being missing, or a call that it does not take, is an
            error, and not only a reason to run the reference.

    Attributes:
        operator: Whose kernel it is.
        source: The source, as it was read last.
    """

    def __init__(self, operator: Operator[..., Any], source: S, *, strict: bool) -> None:
        self.operator = operator
        self.source = source
        self.strict = strict
        self.__name__ = operator.specification.short_name
        self._lock = threading.RLock()
        self._forget()

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return self.source.where

    @property
    def text(self) -> str:
        """The source."""
        return self.source.text

    @property
    def entry(self) -> str:
        """Name of the function."""
        return self.source.entry

    def reload(self) -> None:
        """Read the source again; it is compiled at the next call, if it has changed."""
        source = self._read()
        with self._lock:
            self._forget()
            self.source = source

    @abstractmethod
    def _read(self) -> S:
        """Read the source again."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget what was made of the source, and what is known of calls."""
