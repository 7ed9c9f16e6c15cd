"""What is still alive when a call's graph is gone, and who holds it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from opsmith.checking.side_effects.reachable import reached, tensors_within
from opsmith.checking.subject import Subject


@dataclass(frozen=True)
class Watched:
    """The memory of a tensor, watched without keeping it alive.

    Args:
        label: Whose it is, in words.
        reference: Tells whether it was freed.
        address: Where it lies.
        nbytes: How many bytes it has.
    """

    label: str
    reference: StorageWeakRef
    address: int
    nbytes: int

    @classmethod
    def of(cls, label: str, tensor: Tensor) -> Watched:
        """Watch the memory of a tensor."""
        storage = tensor.untyped_storage()
        return cls(label, StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())

    @property
    def freed(self) -> bool:
        """Whether nobody holds the memory any more."""
        return bool(self.reference.expired())


@contextmanager
def uncollected() -> Iterator[None]:
    """A region in which Python does not look for circles of references by itself."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def still_there(watched: Sequence[Watched]) -> list[Watched]:
    """Those that were not freed; what has no memory cannot be told."""
    return [each for each in watched if each.nbytes and not each.freed]


def collected(watched: Sequence[Watched]) -> list[Watched]:
    """Those that are there even after Python has looked for circles."""
    gc.collect()
    return still_there(watched)


def holders(subject: Subject, watched: Watched) -> list[str]:
    """Who holds a tensor, by name: what the operator's functions reach, or else a kind of object."""
    named = [
        place.name
        for place in reached(subject)
        if any(_lies_there(tensor, watched) for tensor in tensors_within(place.now()))
    ]
    if named:
        return named
    # The type itself is asked: `isinstance` wakes up objects that stand for others, and they warn of it.
    tensors: list[Tensor] = [each for each in gc.get_objects() if type(each) in (Tensor, Parameter)]
    tensors = [each for each in tensors if _lies_there(each, watched)]
    kinds: dict[str, None] = {}
    for tensor in tensors:
        for holder in gc.get_referrers(tensor):
            if holder is not tensors:
                kinds[_kind(holder)] = None
    return list(kinds)


def _lies_there(tensor: Tensor, watched: Watched) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == watched.address
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return False


def _kind(holder: Any) -> str:
    """What an object is, in words."""
    kind = type(holder)
    if kind.__name__ == "frame":
        return f"a frame of `{holder.f_code.co_qualname}`"
    if kind.__module__ == "builtins":
        return f"a {kind.__name__}"
    return f"a `{kind.__module__}.{kind.__qualname__}`"


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
