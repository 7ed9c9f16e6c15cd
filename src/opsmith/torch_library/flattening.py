"""Flat form of the arguments and results of a call, and values saved by name for a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from opsmith.core.results import Result
from opsmith.core.schema import Schema


@dataclass(frozen=True)
class Flattening:
    """Layout of the argument values of one call in a flat tuple.

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
        """Slice of each argument in the flat tuple."""
        spans: dict[str, slice] = {}
        start = 0
        for name, length in zip(self.schema.names, self.lengths, strict=True):
            stop = start + (1 if length is None else length)
            spans[name] = slice(start, stop)
            start = stop
        return spans

    def is_list(self, name: str) -> bool:
        """Return True if this argument is a list of tensors."""
        return self.lengths[self.schema.names.index(name)] is not None

    def flatten(self, values: Iterable[Any]) -> list[Any]:
        """Flatten argument values, with lists of tensors spread out."""
        flat: list[Any] = []
        for value, length in zip(values, self.lengths, strict=True):
            if length is None:
                flat.append(value)
            else:
                flat.extend(value)
        return flat

    def pack(self, flat: Sequence[Any]) -> list[Any]:
        """Restore the argument values; inverse of `flatten`."""
        return [self.item(name, flat) for name in self.schema.names]

    def item(self, name: str, flat: Sequence[Any]) -> Any:
        """One argument's value, from the flat form."""
        part = flat[self.spans[name]]
        return list(part) if self.is_list(name) else part[0]

    def labels(self, name: str) -> list[str]:
        """Label of each flat position of an argument: `x`, or `xs[0]`, `xs[1]`, ..."""
        if not self.is_list(name):
            return [name]
        span = self.spans[name]
        return [f"{name}[{i}]" for i in range(span.stop - span.start)]

    def needed(self, needs: Sequence[bool]) -> frozenset[str]:
        """Arguments with at least one tensor that needs a gradient."""
        return frozenset(name for name, span in self.spans.items() if any(needs[span]))


Flat = tuple[Any, ...]
"""Tensors, one for each position; None for a missing result."""


class ResultFlattening:
    """Layout of the results of one call in a flat tuple.

    Everything is made at once: a compiled backward cannot pass the lock of a cached property.

    Args:
        schema: The operator's signature.
        lengths: For each result the length of its list; None where it is a single tensor.

    Attributes:
        lengths: As given.
        spans: Slice of each result, by name.
        described: The declared result of each position.
        labels: Label of each position: `y`, or `ys[0]`, `ys[1]`, ...
    """

    def __init__(self, schema: Schema, lengths: Sequence[int | None]) -> None:
        self.lengths = tuple(lengths)
        self.spans: dict[str, slice] = {}
        described: list[Result] = []
        labels: list[str] = []
        for result, length in zip(schema.results, lengths, strict=True):
            count = 1 if length is None else length
            self.spans[result.name] = slice(len(described), len(described) + count)
            described += [result] * count
            labels += (
                [result.name] if length is None else [f"{result.name}[{item}]" for item in range(length)]
            )
        self.described, self.labels = tuple(described), tuple(labels)
        self._lists = {result.name: result.sequence for result in schema.results}

    @classmethod
    def of(cls, schema: Schema, results: Sequence[Any]) -> ResultFlattening:
        """The flattening of these results, hidden ones among them."""
        return cls(schema, lengths_of(results))

    def is_list(self, name: str) -> bool:
        """Return True if this result is a list of tensors."""
        return self._lists[name]

    def flatten(self, results: Sequence[Any]) -> Flat:
        """Flatten results, with lists spread out."""
        flat: list[Any] = []
        for result, length in zip(results, self.lengths, strict=True):
            if length is None:
                flat.append(result)
            else:
                flat.extend(result)
        return tuple(flat)

    def pack(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Restore the results; inverse of `flatten`."""
        return tuple(self.item(name, flat) for name in self.spans)

    def item(self, name: str, flat: Sequence[Any]) -> Any:
        """One result, or the items at its positions in another flat tuple."""
        part = flat[self.spans[name]]
        return list(part) if self._lists[name] else part[0]


def lengths_of(results: Sequence[Any]) -> tuple[int | None, ...]:
    """Length of the list of each result; None for a single tensor."""
    return tuple(len(result) if isinstance(result, list | tuple) else None for result in results)


def detached(result: Any) -> Any:
    """A result outside of the graph: a tensor, a list of them, or None."""
    if isinstance(result, list):
        return [tensor.detach() for tensor in result]
    return None if result is None else result.detach()


@dataclass(frozen=True)
class SavedValues:
    """Description of values saved by name.

    Args:
        items: For each name whether it is a list, and its items: the index of a saved tensor, or a value in
            a tuple of one.
    """

    items: tuple[tuple[str, bool, tuple[int | tuple[Any], ...]], ...]

    def load(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Restore the values by name from the saved tensors."""
        loaded: dict[str, Any] = {}
        for name, is_list, items in self.items:
            values = [item[0] if isinstance(item, tuple) else tensors[item] for item in items]
            loaded[name] = values if is_list else values[0]
        return loaded


def save_values(
    save: Callable[..., None],
    names: Sequence[str],
    flattening: Flattening,
    flat: Sequence[Any],
    results: Sequence[Any],
    result_flattening: ResultFlattening,
) -> SavedValues:
    """Save arguments and results by name; tensors are passed to `save`, a method of an autograd context.

    Args:
        save: Takes the tensors.
        names: Names of the values to save.
        flattening: Flat form of the arguments.
        flat: The flat arguments.
        results: The flat results.
        result_flattening: Flat form of the results.
    """
    tensors: list[Tensor] = []
    items: list[tuple[str, bool, tuple[int | tuple[Any], ...]]] = []
    for name in names:
        is_result = name in result_flattening.spans
        values = results[result_flattening.spans[name]] if is_result else flat[flattening.spans[name]]
        kept: list[int | tuple[Any]] = []
        for value in values:
            if isinstance(value, Tensor):
                kept.append(len(tensors))
                tensors.append(value)
            else:
                kept.append((value,))
        is_list = result_flattening.is_list(name) if is_result else flattening.is_list(name)
        items.append((name, is_list, tuple(kept)))
    save(*tensors)
    return SavedValues(tuple(items))
