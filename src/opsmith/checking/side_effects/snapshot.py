"""What an operator leaves behind in what it reaches: a snapshot before, and what is another thing after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.compare import same_bits
from opsmith.checking.side_effects.reachable import CONTAINERS, Place, reached, tensors_within
from opsmith.checking.subject import Subject

LARGE = 1 << 22
"""Elements of a tensor beyond which its bits are not copied."""


@dataclass(frozen=True)
class Before:
    """What a place held.

    Args:
        place: The place.
        print: What of it compares.
    """

    place: Place
    print: Any


def footprints(subject: Subject) -> list[Before]:
    """A snapshot of everything that an operator reaches."""
    return [Before(place, _print(place.now())) for place in reached(subject)]


def left_behind(before: list[Before]) -> Iterator[tuple[str, str]]:
    """The places that hold something else now, each with what has become of it.

    Tensors that are added or exchanged are left out: whether they are kept too long, or answer for later
    calls, is looked at elsewhere.
    """
    for each in before:
        value = each.place.now()
        now = _print(value)
        what = _change(each.print, now, each.place.value, value)
        if what is not None:
            yield each.place.name, what


def _change(was: Any, now: Any, old: Any, new: Any) -> str | None:
    if isinstance(was, _TensorPrint) and isinstance(now, _TensorPrint):
        return was.change(now)
    if isinstance(was, _ModulePrint) and isinstance(now, _ModulePrint):
        return was.change(now)
    if isinstance(was, _ContainerPrint) and isinstance(now, _ContainerPrint):
        return was.change(now, new)
    if was == now or any(True for _ in tensors_within(new)) or any(True for _ in tensors_within(old)):
        return None
    return f"it was {shown_shortly(old)} before and is {shown_shortly(new)} after"


def shown_shortly(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class _TensorPrint:
    tensor: Tensor
    bits: Tensor | None
    grad: _TensorPrint | None
    requires_grad: bool

    def change(self, now: _TensorPrint) -> str | None:
        if now.tensor is not self.tensor:
            return None
        if self.requires_grad != now.requires_grad:
            return f"its requires_grad was {self.requires_grad} before and is {now.requires_grad} after"
        if self.bits is not None and now.bits is not None and not same_bits(self.bits, now.bits):
            return "its numbers change with each call"
        if self.grad is None and now.grad is None:
            return None
        if self.grad is None or now.grad is None or self.grad.differs(now.grad):
            return "its `.grad` was written, though `torch.autograd.grad` asked for other gradients"
        return None

    def differs(self, now: _TensorPrint) -> bool:
        """Whether it is another tensor, or has other numbers."""
        return now.tensor is not self.tensor or self.change(now) is not None


@dataclass(frozen=True)
class _ModulePrint:
    parts: dict[str, _TensorPrint]
    training: bool

    def change(self, now: _ModulePrint) -> str | None:
        if self.training != now.training:
            return f"its `training` was {self.training} before and is {now.training} after"
        for name, was in self.parts.items():
            what = was.change(now.parts[name]) if name in now.parts else None
            if what is not None:
                return f"of its `{name}`, {what}"
        return None


@dataclass(frozen=True)
class _ContainerPrint:
    count: int
    plain: Any

    def change(self, now: _ContainerPrint, value: Any) -> str | None:
        added = now.count - self.count
        if added > 0 and not any(True for _ in tensors_within(value)):
            entries = "entry" if self.count == 1 else "entries"
            return f"it grows with each call: it had {self.count} {entries} before and has {now.count} after"
        if not added and self.plain != now.plain:
            return "what it holds changes with each call"
        return None


def _print(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor_print(value)
    if isinstance(value, torch.nn.Module):
        named = [*value.named_parameters(), *value.named_buffers()]
        return _ModulePrint({name: _tensor_print(tensor) for name, tensor in named}, value.training)
    if isinstance(value, dict):
        return _ContainerPrint(len(value), {_key(key): _key(item) for key, item in list(value.items())})
    if isinstance(value, CONTAINERS):
        items = [_key(item) for item in list(value)]
        return _ContainerPrint(len(items), sorted(map(repr, items)) if isinstance(value, set) else items)
    return _key(value)


def _key(value: Any) -> Any:
    """What of a value compares: itself where it is simple, nothing of a tensor, else its type."""
    if isinstance(value, Tensor):
        return "a tensor"
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float | complex):
        return repr(value)  # nan is itself
    if isinstance(value, tuple):
        return tuple(_key(item) for item in value)
    return type(value)


def _tensor_print(tensor: Tensor) -> _TensorPrint:
    small = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= LARGE
    bits = tensor.detach().clone() if small else None
    grad = tensor.grad if tensor.is_leaf else None
    return _TensorPrint(tensor, bits, None if grad is None else _tensor_print(grad), tensor.requires_grad)
