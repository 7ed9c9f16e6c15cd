"""Flat form of the arguments and results of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opsmith.core.schema import Schema

Flat = tuple[Any, ...]
"""Values, one for each position; None for a missing tensor."""


class Flattening:
    """Layout of named values in a flat tuple, in which a list of tensors has a position for each item.

    Everything is made at once: a compiled backward cannot pass the lock of a cached property.

    Args:
        lists: Names of the values, in order, each with True if it is a list.
        lengths: Length of the list of each value; None for a single value.

    Attributes:
        lengths: As given.
        is_flat: True if no value is a list.
        spans: Slice of each value, by name.
        names: Name of the value at each position.
        labels: Label of each position: `x`, or `xs[0]`, `xs[1]`, ...
    """

    def __init__(self, lists: Mapping[str, bool], lengths: Sequence[int | None]) -> None:
        self._lists, self.lengths = lists, tuple(lengths)
        self.is_flat = not any(lists.values())
        self.spans: dict[str, slice] = {}
        labels: list[str] = []
        for name, length in zip(lists, lengths, strict=True):
            start = len(labels)
            labels += [name] if length is None else [f"{name}[{item}]" for item in range(length)]
            self.spans[name] = slice(start, len(labels))
        self.labels = tuple(labels)
        self.names = tuple(name for name, span in self.spans.items() for _ in labels[span])

    def is_list(self, name: str) -> bool:
        """Return True if this value is a list of tensors."""
        return self._lists[name]

    def flatten(self, values: Iterable[Any]) -> Flat:
        """Flatten values, with lists of tensors spread out."""
        flat: list[Any] = []
        for value, length in zip(values, self.lengths, strict=True):
            if length is None:
                flat.append(value)
            else:
                flat.extend(value)
        return tuple(flat)

    def pack(self, flat: Sequence[Any]) -> list[Any]:
        """Restore the values; inverse of `flatten`."""
        if self.is_flat and len(flat) == len(self.spans):
            return list(flat)
        return [self.item(name, flat) for name in self.spans]

    def item(self, name: str, flat: Sequence[Any]) -> Any:
        """One value, or the items at its positions, from a flat tuple."""
        part = flat[self.spans[name]]
        return list(part) if self._lists[name] else part[0]

    def positions(self, names: Iterable[str]) -> list[int]:
        """Flat positions of some values."""
        spans = [self.spans[name] for name in names]
        return [position for span in spans for position in range(span.start, span.stop)]

    def needed(self, needs: Sequence[bool]) -> frozenset[str]:
        """Names of the values that need a gradient at one or more positions."""
        return frozenset(name for name, need in zip(self.names, needs, strict=True) if need)


class ArgumentFlattening(Flattening):
    """Layout of the argument values of one call.

    Args:
        schema: The operator's signature.
        lengths: Length of each argument's list of tensors; None for a single value.
    """

    def __init__(self, schema: Schema, lengths: Sequence[int | None]) -> None:
        pairs = zip(schema.names, lengths, strict=True)
        super().__init__({name: length is not None for name, length in pairs}, lengths)
        self.schema = schema

    @classmethod
    def of(cls, schema: Schema, values: Sequence[Any]) -> ArgumentFlattening:
        """The flattening of these values."""
        lengths = tuple(
            len(value) if argument.kind.is_tensor and argument.kind.sequence and value is not None else None
            for argument, value in zip(schema.arguments, values, strict=True)
        )
        return cls(schema, lengths)


class ResultFlattening(Flattening):
    """Layout of the results of one call, including hidden results.

    Args:
        schema: The operator's signature.
        lengths: Length of each result's list; None for a single tensor.

    Attributes:
        described: The declared result of each position.
    """

    def __init__(self, schema: Schema, lengths: Sequence[int | None]) -> None:
        super().__init__({result.name: result.sequence for result in schema.results}, lengths)
        by_name = {result.name: result for result in schema.results}
        self.described = tuple(by_name[name] for name in self.names)

    @classmethod
    def of(cls, schema: Schema, results: Sequence[Any]) -> ResultFlattening:
        """The flattening of these results."""
        return cls(schema, lengths_of(results))


def lengths_of(results: Sequence[Any]) -> tuple[int | None, ...]:
    """Length of the list of each result; None for a single tensor."""
    return tuple(len(result) if isinstance(result, list | tuple) else None for result in results)


def detached(result: Any) -> Any:
    """A result outside the graph: a tensor, a list of tensors, or None."""
    if isinstance(result, list):
        return [tensor.detach() for tensor in result]
    return None if result is None else result.detach()
