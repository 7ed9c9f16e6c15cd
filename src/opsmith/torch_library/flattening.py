"""Calls with lists of tensors in flat form: autograd only sees tensors that are arguments of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from opsmith.core.schema import Schema


@dataclass(frozen=True)
class Flattening:
    """How the argument values of one call lie in a flat tuple.

    Args:
        schema: The operator's signature.
        lengths: For each argument the length of its list of tensors; None where it is a single value.
    """

    schema: Schema
    lengths: tuple[int | None, ...]

    @classmethod
    def of(cls, schema: Schema, values: Sequence[Any]) -> Flattening:
        """The flattening of these values."""
        lengths = tuple(
            len(value) if argument.kind.is_tensor and argument.kind.sequence and value is not None else None
            for argument, value in zip(schema.arguments, values, strict=True)
        )
        return cls(schema, lengths)

    @cached_property
    def spans(self) -> dict[str, slice]:
        """Where each argument lies."""
        spans: dict[str, slice] = {}
        start = 0
        for name, length in zip(self.schema.names, self.lengths, strict=True):
            stop = start + (1 if length is None else length)
            spans[name] = slice(start, stop)
            start = stop
        return spans

    def is_list(self, name: str) -> bool:
        """Whether this argument is a list of tensors."""
        return self.lengths[self.schema.names.index(name)] is not None

    def flatten(self, values: Iterable[Any]) -> list[Any]:
        """Argument values, lists of tensors spread out."""
        flat: list[Any] = []
        for value, length in zip(values, self.lengths, strict=True):
            if length is None:
                flat.append(value)
            else:
                flat.extend(value)
        return flat

    def pack(self, flat: Sequence[Any]) -> list[Any]:
        """The argument values again; inverse of `flatten`."""
        return [self.item(name, flat) for name in self.schema.names]

    def item(self, name: str, flat: Sequence[Any]) -> Any:
        """One argument's value, from the flat form."""
        part = flat[self.spans[name]]
        return list(part) if self.is_list(name) else part[0]

    def labels(self, name: str) -> list[str]:
        """How messages call each flat place of an argument: `x`, or `xs[0]`, `xs[1]`, ..."""
        if not self.is_list(name):
            return [name]
        span = self.spans[name]
        return [f"{name}[{i}]" for i in range(span.stop - span.start)]

    def needed(self, needs: Sequence[bool]) -> frozenset[str]:
        """Arguments of which at least one tensor needs a gradient."""
        return frozenset(name for name, span in self.spans.items() if any(needs[span]))
