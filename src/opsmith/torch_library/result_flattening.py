"""Results with lists of tensors in flat form: autograd only sees tensors that are results of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opsmith.core.results import Result
from opsmith.core.schema import Schema

Flat = tuple[Any, ...]
"""Tensors, one for each place; None for a result that is not there."""


class ResultFlattening:
    """How the results of one call lie in a flat tuple.

    Everything is made at once: a compiled backward cannot pass the lock of a cached property.

    Args:
        schema: The operator's signature.
        lengths: For each result the length of its list; None where it is a single tensor.

    Attributes:
        lengths: As given.
        spans: Where each result lies, by name.
        described: The result that each place belongs to.
        labels: How messages call each place: `y`, or `ys[0]`, `ys[1]`, ...
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
        """Whether this result is a list of tensors."""
        return self._lists[name]

    def flatten(self, results: Sequence[Any]) -> Flat:
        """The results, lists spread out."""
        flat: list[Any] = []
        for result, length in zip(results, self.lengths, strict=True):
            if length is None:
                flat.append(result)
            else:
                flat.extend(result)
        return tuple(flat)

    def pack(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """The results again; inverse of `flatten`."""
        return tuple(self.item(name, flat) for name in self.spans)

    def item(self, name: str, flat: Sequence[Any]) -> Any:
        """One result, or what stands at its places in another flat tuple."""
        part = flat[self.spans[name]]
        return list(part) if self._lists[name] else part[0]


def lengths_of(results: Sequence[Any]) -> tuple[int | None, ...]:
    """For each result the length of its list; None where it is a single tensor."""
    return tuple(len(result) if isinstance(result, list | tuple) else None for result in results)


def detached(result: Any) -> Any:
    """A result outside of the graph: a tensor, a list of them, or None."""
    if isinstance(result, list):
        return [tensor.detach() for tensor in result]
    return None if result is None else result.detach()
