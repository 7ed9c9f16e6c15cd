"""What is kept for the backward: tensors that autograd saves, and what a Function keeps on its context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.surroundings import tensors_within

MOST_NODES = 1000


@contextmanager
def saving() -> Iterator[list[Tensor]]:
    """A region in which every tensor that autograd saves is listed, sharing its memory."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # Detached: a hook that returned a result itself would close a circle of references.
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield saved


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def nodes(results: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the graph behind results, down to the leaves."""
    left = [each.grad_fn for each in results if isinstance(each, Tensor) and each.grad_fn is not None]
    seen: set[Any] = set()
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        left += [after for after, _ in node.next_functions if after is not None]


def attributes(results: Sequence[Any]) -> dict[str, Any]:
    """What Functions keep on their contexts as attributes, by name."""
    return {name: value for node in nodes(results) for name, value in getattr(node, "__dict__", {}).items()}


def attribute_tensors(results: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The tensors among them, or in containers among them, each with the attribute's name."""
    return [(name, tensor) for name, value in attributes(results).items() for tensor in tensors_within(value)]
