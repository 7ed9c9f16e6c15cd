"""Values that the functions of an operator reach without taking them as arguments, and their changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.compare import same_bits
from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula
from opsmith.core.reachable import CONTAINERS, Reached, Step, uses

MOST = 2000
"""Largest number of reported values; an operator that reaches more is an application."""


def roots(subject: Subject) -> list[Any]:
    """List the functions and classes that make up an operator."""
    specification = subject.specification
    found: list[Any] = [*specification.origin.sources()]
    if subject.kind.has_reference:
        found += [specification.reference, specification.fake]
    found += [kernel.given for kernel in specification.kernels]
    found += [rule.function for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    return [each for each in found if each is not None]


def reachable_values(subject: Subject) -> list[Reached]:
    """List the values that an operator's functions reach under a name, each object once."""
    found: list[Reached] = []
    seen: dict[int, Any] = {}
    left = deque(Reached("", root) for root in roots(subject))
    while left and len(found) < MOST:
        each = left.popleft()
        if not _is_plain(each.value) and id(each.value) in seen:
            continue
        seen[id(each.value)] = each.value
        if each.path and not isinstance(each.value, ModuleType):
            found.append(each)
        left.extend(inner for inner in islice(uses(each.value), MOST) if _is_followed(inner))
    return found


def _is_followed(each: Reached) -> bool:
    """False for special methods of classes, and for items of containers that lead nowhere."""
    if each.step is Step.ITEM:
        return not _is_plain(each.value) and not isinstance(each.value, Tensor)
    return each.step is not Step.ATTRIBUTE or not (each.name.startswith("__") and each.name.endswith("__"))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def tensors_within(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or those in its containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (*CONTAINERS, tuple, frozenset)):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_within(each, depth - 1)


LARGE = 1 << 22
"""Number of elements of a tensor beyond which its bits are not copied."""


@dataclass(frozen=True)
class ValueSnapshot:
    """Snapshot of a reachable value.

    Args:
        reached: The value's location.
        contents: Copy of what is compared.
    """

    reached: Reached
    contents: Any


def take_snapshot(subject: Subject) -> list[ValueSnapshot]:
    """Take a snapshot of every value that an operator reaches."""
    return [ValueSnapshot(reached, _snapshot(reached.current())) for reached in reachable_values(subject)]


def changes_since(before: list[ValueSnapshot]) -> Iterator[tuple[str, str]]:
    """Yield the names of changed values, each with a description of the change.

    Added tensors, and those of another form, are left out: `memory` and `state` test for those that are kept
    too long, or used by later calls.
    """
    for each in before:
        value = each.reached.current()
        now = _snapshot(value)
        change = _change(each.contents, now, each.reached.value, value)
        if change is not None:
            yield each.reached.path, change


def _change(was: Any, now: Any, old: Any, new: Any) -> str | None:
    if isinstance(was, _TensorSnapshot) and isinstance(now, _TensorSnapshot):
        return was.change(now)
    if isinstance(was, _ModuleSnapshot) and isinstance(now, _ModuleSnapshot):
        return was.change(now)
    if isinstance(was, _ContainerSnapshot) and isinstance(now, _ContainerSnapshot):
        return was.change(now, new)
    if was == now or any(True for _ in tensors_within(new)) or any(True for _ in tensors_within(old)):
        return None
    return f"it was {short_repr(old)} before and is {short_repr(new)} after"


def short_repr(value: Any) -> str:
    """Format a value for a message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class _TensorSnapshot:
    tensor: Tensor
    bits: Tensor | None
    grad: _TensorSnapshot | None
    requires_grad: bool

    def change(self, now: _TensorSnapshot) -> str | None:
        if now.tensor is not self.tensor:
            return self.replaced(now)
        if self.requires_grad != now.requires_grad:
            return f"its requires_grad was {self.requires_grad} before and is {now.requires_grad} after"
        if self.bits is not None and now.bits is not None and not same_bits(self.bits, now.bits):
            return "its numbers change with each call"
        if self.grad is None and now.grad is None:
            return None
        if self.grad is None or now.grad is None or self.grad.differs(now.grad):
            return "its `.grad` was written, though `torch.autograd.grad` asked for other gradients"
        return None

    def replaced(self, now: _TensorSnapshot) -> str | None:
        """Describe another tensor of the same form under the same name, as of running statistics."""
        if self.bits is None or now.bits is None or same_bits(self.bits, now.bits):
            return None
        alike = (self.bits.shape, self.bits.dtype) == (now.bits.shape, now.bits.dtype)
        return "it is replaced by a tensor of other numbers" if alike else None

    def differs(self, now: _TensorSnapshot) -> bool:
        """Return True if it is another tensor, or has other numbers."""
        return now.tensor is not self.tensor or self.change(now) is not None


@dataclass(frozen=True)
class _ModuleSnapshot:
    parts: dict[str, _TensorSnapshot]
    training: bool

    def change(self, now: _ModuleSnapshot) -> str | None:
        if self.training != now.training:
            return f"its `training` was {self.training} before and is {now.training} after"
        for name, was in self.parts.items():
            what = was.change(now.parts[name]) if name in now.parts else None
            if what is not None:
                return f"of its `{name}`, {what}"
        return None


@dataclass(frozen=True)
class _ContainerSnapshot:
    count: int
    plain: Any

    def change(self, now: _ContainerSnapshot, value: Any) -> str | None:
        added = now.count - self.count
        if added > 0 and not any(True for _ in tensors_within(value)):
            entries = "entry" if self.count == 1 else "entries"
            return f"it grows with each call: it had {self.count} {entries} before and has {now.count} after"
        if not added and self.plain != now.plain:
            return "what it holds changes with each call"
        return None


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor_snapshot(value)
    if isinstance(value, torch.nn.Module):
        named = [*value.named_parameters(), *value.named_buffers()]
        return _ModuleSnapshot({name: _tensor_snapshot(tensor) for name, tensor in named}, value.training)
    if isinstance(value, dict):
        return _ContainerSnapshot(len(value), {_key(key): _key(item) for key, item in list(value.items())})
    if isinstance(value, CONTAINERS):
        items = [_key(item) for item in list(value)]
        return _ContainerSnapshot(len(items), sorted(map(repr, items)) if isinstance(value, set) else items)
    return _key(value)


def _key(value: Any) -> Any:
    """Return what is compared: simple values themselves, nothing of a tensor, else the type."""
    if isinstance(value, Tensor):
        return "a tensor"
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float | complex):
        return repr(value)  # nan equals nan
    if isinstance(value, tuple):
        return tuple(_key(item) for item in value)
    return type(value)


def _tensor_snapshot(tensor: Tensor) -> _TensorSnapshot:
    small = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= LARGE
    bits = tensor.detach().clone() if small else None
    grad = tensor.grad if tensor.is_leaf else None
    return _TensorSnapshot(
        tensor, bits, None if grad is None else _tensor_snapshot(grad), tensor.requires_grad
    )
