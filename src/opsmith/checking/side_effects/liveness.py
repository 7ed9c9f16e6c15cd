"""Liveness: memory that is alive after a call's graph is freed, and the objects that hold it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from opsmith.checking.run import LiveCall
from opsmith.checking.side_effects.outside_state import reachable_values, tensors_within
from opsmith.checking.subject import Subject
from opsmith.core.reachable import CONTAINERS, Step, function_uses, uses
from opsmith.torch_library.arguments import unsupported_kind


@dataclass(frozen=True)
class WatchedMemory:
    """The memory of a tensor, watched without keeping it alive.

    Args:
        words: Its owner in words; empty for a saved tensor without an owner.
        name: The argument or result to which the value or gradient belongs.
        reference: Weak reference that expires when the memory is freed.
        address: Address.
        nbytes: Number of bytes.
    """

    words: str
    name: str | None
    reference: StorageWeakRef
    address: int
    nbytes: int

    @classmethod
    def of(cls, words: str, name: str | None, tensor: Tensor) -> WatchedMemory:
        """Watch the memory of a tensor."""
        storage = tensor.untyped_storage()
        return cls(words, name, StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())

    @property
    def stays(self) -> bool:
        """True if an object still keeps the memory; False for empty memory."""
        return bool(self.nbytes and not self.reference.expired())


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def named_tensors(call: LiveCall) -> list[tuple[str, str, Tensor]]:
    """List the tensors among arguments and results of a call, each with its description and name."""
    results = [each.name for each in call.subject.results(call.sample)]
    named = [
        *((f"`{label}`", label, value) for label, value in zip(call.sample.labels, call.given, strict=True)),
        *((f"the result `{name}`", name, value) for name, value in zip(results, call.results, strict=True)),
    ]
    return [each for each in named if isinstance(each[2], Tensor)]


def await_autograd(device: torch.device) -> None:
    """Wait until autograd's thread of a device has released its latest gradients.

    The thread releases them before it begins the next backward. A backward of the CPU runs in the caller's
    thread.
    """
    if device.type != "cpu":
        with torch.enable_grad():
            leaf = torch.zeros(1, device=device, requires_grad=True)
            torch.autograd.grad(leaf.sum(), leaf)


def holders(subject: Subject, watched: WatchedMemory) -> list[str]:
    """Name the owners of a tensor: values that the operator's functions reach, or else types of objects."""
    named = [
        reached.path
        for reached in reachable_values(subject.functions)
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
        return address(tensor) == watched.address
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
"""Default of the maximum number of nodes."""


@contextmanager
def record_saved_tensors() -> Iterator[list[Tensor]]:
    """Record every tensor except sparse ones that autograd saves within the context, sharing its memory."""
    saved: list[Tensor] = []
    every: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # Detached, since a hook that returned a result itself would form a reference cycle.
        every.append(tensor.detach())
        if tensor.layout == torch.strided:
            saved.append(every[-1])
        return every[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        yield saved


def nodes(results: Sequence[Any], most: int | None = MOST_NODES) -> Iterator[Any]:
    """Yield the nodes of the graph behind results, down to the leaves.

    Args:
        results: Tensors and other values.
        most: Maximum number of nodes; None for all.
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


def attribute_tensors(results: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors that contexts of Functions hold as attributes, each with its attribute's name."""
    attributes = {
        name: value for node in nodes(results) for name, value in getattr(node, "__dict__", {}).items()
    }
    return [(name, tensor) for name, value in attributes.items() for tensor in held_tensors(value, set())]


def held_tensors(value: Any, seen: set[int], depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors that a value keeps alive: in containers, objects, closures and bound arguments.

    They are strided and dense; other tensors, such as sparse tensors, have no memory of their own.

    Args:
        value: The value.
        seen: Ids of the objects that were followed already.
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
    if isinstance(value, FunctionType):
        return [each.value for each in function_uses(value) if each.step in (Step.CLOSURE, Step.DEFAULT)]
    if isinstance(value, (*CONTAINERS, tuple, frozenset, MethodType, partial)):
        return [each.value for each in uses(value)]
    return [] if isinstance(value, type | ModuleType) else list(getattr(value, "__dict__", {}).values())
