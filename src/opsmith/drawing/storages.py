"""Whose memory a tensor lies in: each storage has a number, and a name if somebody keeps it anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.drawing.graph import Form, Role, Saved


@dataclass(frozen=True)
class Owner:
    """Who keeps a storage whether there is a graph or not.

    Args:
        role: What it is to the graph.
        name: What it is called.
    """

    role: Role
    name: str


class Storages:
    """The storages of one trace; a number is given when a storage is first seen.

    They are held, and so their numbers stay true, as long as this object lives.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._owners: dict[int, Owner] = {}
        self._counted: set[int] = set()
        self._next = 0

    def own(self, tensor: Tensor, role: Role, name: str) -> None:
        """Say whose the storage of a tensor is; who says so first is believed."""
        number, _ = self._of(tensor)
        self._owners.setdefault(number, Owner(role, name))

    def owner(self, tensor: Tensor) -> Owner | None:
        """Whose the storage of a tensor is; None if nobody said."""
        return self._owners.get(self._of(tensor)[0])

    def saved(self, name: str, value: Any) -> Saved:
        """A saved value; the first that lies in a storage counts its bytes."""
        if not isinstance(value, Tensor):
            self._next += 1
            return Saved(name, None, 0, self._next, "packed", True)
        number, size = self._of(value)
        owner = self._owners.get(number, Owner("intermediate", ""))
        first = number not in self._counted
        self._counted.add(number)
        return Saved(name, form_of(value), size, number, owner.role, first, owner.name)

    def _of(self, tensor: Tensor) -> tuple[int, int]:
        """Number and bytes of a tensor's storage; a tensor that has none is one of its own."""
        try:
            key: Any = tensor.untyped_storage()
            size = int(key.nbytes())
        except (NotImplementedError, RuntimeError):  # sparse, or a stand-in of a transform
            key, size = tensor, tensor.numel() * tensor.element_size()
        if id(key) not in self._numbers:
            self._next += 1
            self._numbers[id(key)] = self._next
            self._held.append(key)
        return self._numbers[id(key)], size


def form_of(tensor: Tensor) -> Form:
    """What a tensor looks like."""
    return Form(
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
    )
