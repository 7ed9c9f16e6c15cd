"""In which dtypes an operator was run while a property was looked at, and in which something was wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opsmith.checking.report import Failure
from opsmith.core.calls import tensors_in

ORDER = ("float64", "float32", "bfloat16", "float16", "complex128", "complex64")
"""The order in which reports name dtypes; others follow."""

_NAMED = re.compile(r" in (\w+) on \w+$")
"""How evidence names a sample with its dtype: see `case.named`."""


@dataclass
class Ran:
    """The floating and complex dtypes of the tensors that an operator, or a kernel of it, was called with."""

    seen: set[torch.dtype] = field(default_factory=set)

    def note(self, values: Iterable[Any]) -> None:
        """Take down the dtypes of a call; what is compiled must not see this."""
        if not torch.compiler.is_compiling():
            self.seen.update(each.dtype for each in tensors_in(list(values)))

    def names(self) -> tuple[str, ...]:
        """The names of those that were taken down, in order."""
        inexact = (each for each in self.seen if each.is_floating_point or each.is_complex)
        return ordered(str(each).removeprefix("torch.") for each in inexact)


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Names of dtypes, each once, in the order of reports.

    Example:
        >>> ordered(["float16", "float64", "float16"])
        ('float64', 'float16')
    """
    found = set(names)
    return (*(name for name in ORDER if name in found), *sorted(found.difference(ORDER)))


def with_dtypes(failure: Failure) -> Failure:
    """The failure with the dtype that its evidence names, if it does not say itself in which it was seen."""
    named = _NAMED.search(str(failure.evidence.get("sample", "")))
    return failure if failure.dtypes or named is None else replace(failure, dtypes=(named[1],))


def all_dtypes(failures: Sequence[Failure]) -> tuple[str, ...]:
    """The dtypes in which any of several failures was seen; none where one of them does not say."""
    if not all(failure.dtypes for failure in failures):
        return ()
    return ordered(name for failure in failures for name in failure.dtypes)
