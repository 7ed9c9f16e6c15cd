"""One call that is checked, in any dtype and on any device, made of fresh tensors each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.processes.fork import announce
from opsmith.core.calls import Call
from opsmith.core.schema import Schema
from opsmith.torch_library.flattening import Flattening


@dataclass(frozen=True)
class Sample:
    """One sample of an operator, its arguments in flat form.

    Args:
        position: Which of the samples it is, from 0.
        flattening: How the arguments lie.
        flat: Argument values as the author gave them, defaults filled in, lists of tensors spread out.
        origin: From which of the author's samples it was derived, and how; empty for one of his own.
    """

    position: int
    flattening: Flattening
    flat: tuple[Any, ...]
    origin: str = ""

    @classmethod
    def of(cls, position: int, call: Call, schema: Schema) -> Sample:
        """The sample for a call that fits the signature."""
        values = schema.call_values(call.args, call.kwargs)
        flattening = Flattening.of(schema, values)
        return cls(position, flattening, tuple(flattening.flatten(values)))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """How messages call each flat argument: `x`, or `xs[0]`, `xs[1]`, ..."""
        names = self.flattening.schema.names
        return tuple(label for name in names for label in self.flattening.labels(name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The argument that each flat argument belongs to."""
        names = self.flattening.schema.names
        return tuple(name for name in names for _ in self.flattening.labels(name))

    @cached_property
    def inexact(self) -> tuple[int, ...]:
        """Places of the floating and complex tensors."""
        return tuple(place for place, value in enumerate(self.flat) if is_inexact(value))

    @cached_property
    def elements(self) -> int:
        """How many elements its tensors have together."""
        return sum(value.numel() for value in self.flat if isinstance(value, Tensor))

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the sample can be cast to a floating dtype: complex numbers have no 16-bit form."""
        wide = dtype in (torch.float32, torch.float64)
        return wide or not any(self.flat[place].is_complex() for place in self.inexact)

    def at(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> list[Any]:
        """The flat arguments, every tensor fresh, with its strides, in this dtype and on this device.

        Args:
            dtype: dtype of floating tensors; complex tensors get the complex dtype of the same precision.
            device: Where the tensors lie.
        """
        announce(lambda: str(self) if dtype is None else f"{self} in {str(dtype).removeprefix('torch.')}")
        return [replica(value, dtype, device) for value in self.flat]

    def arguments(self, flat: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments for a call with these flat values."""
        return self.flattening.schema.split(self.flattening.pack(flat))

    @property
    def brief(self) -> str:
        """How a message calls it, without its arguments."""
        return f"sample {self.position}"

    def __str__(self) -> str:
        origin = f"; {self.origin}" if self.origin else ""
        return sample_named(self.position, self.labels, self.flat, origin)


def sample_named(position: int, labels: Iterable[str], values: Iterable[Any], origin: str = "") -> str:
    """How a message calls a sample: by its position, and by what it holds.

    Example:
        >>> sample_named(0, ["x", "scale"], [torch.ones(2, 3), 0.5])
        'sample 0 (x [2, 3], scale=0.5)'
    """
    shown = [f"{label}{_shown(value)}" for label, value in zip(labels, values, strict=True)]
    return f"sample {position} ({', '.join(shown)}{origin})"


def _shown(value: Any) -> str:
    """A value behind its name: a tensor's shape, nothing of a generator, whose text is an address."""
    if isinstance(value, Tensor):
        return f" {list(value.shape)}"
    return "" if isinstance(value, torch.Generator) else f"={value!r}"


def is_inexact(value: Any) -> bool:
    """Whether a value is a floating or complex tensor, which may have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def replica(value: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """A fresh tensor of the same values and strides, a generator of the same state; else the value."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if not isinstance(value, Tensor):
        return value
    target = value.dtype
    if dtype is not None and is_inexact(value):
        target = dtype.to_complex() if value.is_complex() else dtype
    # The whole storage is copied: only so do expanded, sliced and overlapping tensors keep their strides.
    plain = value.detach().resolve_conj().resolve_neg()
    stored = plain.untyped_storage().nbytes() // plain.element_size()
    storage = plain.as_strided((stored,), (1,), 0).to(device=device, dtype=target, copy=True)
    return storage.as_strided(plain.shape, plain.stride(), plain.storage_offset())
