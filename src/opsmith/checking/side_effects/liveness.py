"""Liveness: memory that is alive after a call's graph is freed, and the objects that hold it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from opsmith.checking.side_effects.reachable_state import reachable_values, tensors_within
from opsmith.checking.subject import Subject
from opsmith.core.reachable import CONTAINERS
from opsmith.torch_library.arguments import unsupported_kind


@dataclass(frozen=True)
class WatchedMemory:
    """The memory of a tensor, watched without keeping it alive.

    Args:
        label: Description of its owner.
        reference: Weak reference that expires when it is freed.
        address: Address.
        nbytes: Number of bytes.
    """

    label: str
    reference: StorageWeakRef
    address: int
    nbytes: int

    @classmethod
    def of(cls, label: str, tensor: Tensor) -> WatchedMemory:
        """Watch the memory of a tensor."""
        storage = tensor.untyped_storage()
        return cls(label, StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())

    @property
    def freed(self) -> bool:
        """True if no object holds the memory any more."""
        return bool(self.reference.expired())


def not_freed(watched: Sequence[WatchedMemory]) -> list[WatchedMemory]:
    """Return the memory that was not freed; empty memory is left out."""
    return [each for each in watched if each.nbytes and not each.freed]


def not_freed_after_collection(watched: Sequence[WatchedMemory]) -> list[WatchedMemory]:
    """Return the memory that was not freed even after collecting reference cycles."""
    gc.collect()
    return not_freed(watched)


def await_autograd(device: torch.device) -> None:
    """Wait until autograd's thread of a device has dropped the gradients that it computed last.

    It drops them before it begins the next backward; that of the CPU runs in the thread of the caller.
    """
    if device.type != "cpu":
        with torch.enable_grad():
            leaf = torch.zeros(1, device=device, requires_grad=True)
            torch.autograd.grad(leaf.sum(), leaf)


def holders(subject: Subject, watched: WatchedMemory) -> list[str]:
    """Name the holders of a tensor: values that the operator's functions reach, or else types of objects."""
    named = [
        reached.path
        for reached in reachable_values(subject)
        if any(_has_memory(tensor, watched) for tensor in tensors_within(reached.current()))
    ]
    if named:
        return named
    # `type` instead of `isinstance`, which makes proxy objects warn.
    tensors: list[Tensor] = [each for each in gc.get_objects() if type(each) in (Tensor, Parameter)]
    tensors = [each for each in tensors if _has_memory(each, watched)]
    kinds: dict[str, None] = {}
    for tensor in tensors:
        for holder in gc.get_referrers(tensor):
            if holder is not tensors:
                kinds[_kind(holder)] = None
    return list(kinds)


def _has_memory(tensor: Tensor, watched: WatchedMemory) -> bool:
    """Return True if a tensor has the watched memory."""
    try:
        return tensor.untyped_storage().data_ptr() == watched.address
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return False


def _kind(holder: Any) -> str:
    """Name the type of an object."""
    kind = type(holder)
    if kind.__name__ == "frame":
        return f"a frame of `{holder.f_code.co_qualname}`"
    if kind.__module__ == "builtins":
        return f"a {kind.__name__}"
    return f"a `{kind.__module__}.{kind.__qualname__}`"


MOST_NODES = 1000
"""Largest number of nodes, unless another one is given."""


@contextmanager
def record_saved_tensors() -> Iterator[list[Tensor]]:
    """Record every tensor that autograd saves within the context, sharing its memory; no sparse ones."""
    saved: list[Tensor] = []
    every: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # Detached: a hook that returned a result itself would close a reference cycle.
        every.append(tensor.detach())
        if tensor.layout == torch.strided:
            saved.append(every[-1])
        return every[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield saved


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def nodes(results: Sequence[Any], most: int | None = MOST_NODES) -> Iterator[Any]:
    """Yield the nodes of the graph behind results, down to the leaves.

    Args:
        results: Tensors and other values.
        most: Largest number of nodes; None for all.
    """
    left = [each.grad_fn for each in results if isinstance(each, Tensor) and each.grad_fn is not None]
    seen: set[Any] = set()
    while left and (most is None or len(seen) < most):
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        left += [after for after, _ in node.next_functions if after is not None]


def attributes(results: Sequence[Any]) -> dict[str, Any]:
    """Return the attributes that Functions set on their contexts, by name."""
    return {name: value for node in nodes(results) for name, value in getattr(node, "__dict__", {}).items()}


def attribute_tensors(results: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors that the attributes hold, with the attribute's name."""
    return [
        (name, tensor) for name, value in attributes(results).items() for tensor in held_tensors(value, set())
    ]


def held_tensors(value: Any, seen: set[int], depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors that a value keeps alive: in containers, objects, closures and bound arguments.

    They are strided and dense: others, such as sparse ones, have no memory of their own.

    Args:
        value: The value.
        seen: Identities of the objects that were followed already.
        depth: Number of objects to follow from here.
    """
    if isinstance(value, Tensor):
        if unsupported_kind(value) is None:
            yield value
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for each in _held(value):
            yield from held_tensors(each, seen, depth - 1)


def _held(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return list(value)
    if isinstance(value, FunctionType):
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type | ModuleType):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None
