"""A sample: one checked call, in any dtype and on any device, with fresh tensors each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.processes.fork import announce
from opsmith.checking.report import Failure, Given
from opsmith.checking.samples.object_arguments import ObjectArguments, copied_object
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import CallArguments, tensors_in
from opsmith.core.schema import Schema
from opsmith.judging.tensors import CPU, is_inexact, replica
from opsmith.torch_library.flattening import ArgumentFlattening


@dataclass(frozen=True, order=True)
class SizeLocation:
    """Location of a size: a dimension of a tensor, or an integer argument.

    Args:
        argnum: Position of the flat argument.
        index: Dimension of the tensor, or index in a list of integers; 0 for an integer.
        number: True for an integer argument.
    """

    argnum: int
    index: int
    number: bool = False


@dataclass(frozen=True)
class Symbol:
    """Sizes of a sample that are changed together.

    Args:
        name: Name in messages: `x.shape[0]`, or the author's letter.
        size: Value in the sample.
        locations: Locations of the size.
        varies: True if the samples or the author show that it may change.
        divisor: Number that divides it in every sample, if samples have several sizes.
    """

    name: str
    size: int
    locations: tuple[SizeLocation, ...]
    varies: bool
    divisor: int = 1

    @property
    def doubled(self) -> bool:
        """True if a tensor has the size twice, like a square matrix."""
        argnums = [location.argnum for location in self.locations if not location.number]
        return len(argnums) > len(set(argnums))


@dataclass(frozen=True)
class Sample:
    """One sample of an operator, with flat arguments.

    Args:
        position: Position among the samples, from 0.
        flattening: Arrangement of the arguments.
        flat: Argument values as the author gave them, with defaults, and with lists of tensors expanded.
        origin: Description of the author's sample from which it was derived; empty for an author's sample.
        repeats: True if it repeats an index that no author's sample repeats.
        change: The change by which it was derived; None for an author's sample.
        copies: Copies of its objects, which derived samples share, so that code compiled for one of them
            works for all.
        own: The arguments of the author's sample, which its objects may contain.
    """

    position: int
    flattening: ArgumentFlattening
    flat: tuple[Any, ...]
    origin: str = ""
    repeats: bool = False
    change: Variation | None = field(default=None, compare=False, repr=False)
    copies: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    own: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, position: int, call: CallArguments, schema: Schema) -> Sample:
        """Make the sample of a call that fits the signature."""
        values = schema.call_values(call.args, call.kwargs)
        flattening = ArgumentFlattening.of(schema, values)
        flat = flattening.flatten(values)
        return cls(position, flattening, flat, own=flat)

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each flat argument in messages: `x`, or `xs[0]`, `xs[1]`, ..."""
        return self.flattening.labels

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the argument to which each flat argument belongs."""
        return self.flattening.names

    @cached_property
    def inexact(self) -> tuple[int, ...]:
        """Positions of the floating and complex tensors."""
        return tuple(argnum for argnum, value in enumerate(self.flat) if is_inexact(value))

    @cached_property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(value.numel() for value in self.flat if isinstance(value, Tensor))

    @property
    def given(self) -> Given:
        """Circumstance of failures on it: its change's, or `undeclared` for a lack of elements."""
        changed: Given = "usual" if self.change is None else self.change.given
        return "undeclared" if self.is_emptied and changed == "usual" else changed

    def is_buffer(self, argnum: int) -> bool:
        """True if a tensor has no elements in the author's sample: a call may resize it to write into it."""
        value = self.flat[argnum]
        return isinstance(value, Tensor) and not value.numel() and not self.is_emptied

    @property
    def is_emptied(self) -> bool:
        """True if a tensor has no elements, but all tensors of the original sample have elements."""
        return self.is_empty and self.change is not None and not self.change.of.is_empty

    @property
    def is_empty(self) -> bool:
        """True if a tensor has no elements."""
        return any(isinstance(value, Tensor) and not value.numel() for value in self.flat)

    @cached_property
    def ranks(self) -> tuple[int | None, ...]:
        """Rank of each tensor; None for other arguments."""
        return tuple(value.dim() if isinstance(value, Tensor) else None for value in self.flat)

    @property
    def dims(self) -> int:
        """Largest rank of its tensors; 0 without tensors."""
        return max((rank for rank in self.ranks if rank is not None), default=0)

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if the sample can be cast to a floating dtype: complex numbers have no 16-bit form."""
        wide = dtype in (torch.float32, torch.float64)
        return wide or not any(self.flat[argnum].is_complex() for argnum in self.inexact)

    def at(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> list[Any]:
        """Return the flat arguments in fresh memory, with their strides, in this dtype and on this device.

        Args:
            dtype: dtype of floating tensors; complex tensors get the complex dtype of the same precision.
            device: Device of the tensors; if it is the sample's own device, each tensor keeps its own.
        """
        announce(lambda: str(self) if dtype is None else f"{self} in {str(dtype).removeprefix('torch.')}")
        elsewhere = device if device is not None and device.type != self.home.type else None
        if elsewhere is not None or torch.compiler.is_compiling():
            return self.objects.fresh([replica(value, dtype, elsewhere) for value in self.flat])
        if dtype not in self._kept:
            self._kept[dtype] = [_kept(value, dtype) for value in self.flat]
        pairs = zip(self.flat, self._kept[dtype], strict=True)
        return self.objects.fresh(
            [replica(value, dtype) if kept is None else kept.clone() for value, kept in pairs]
        )

    @cached_property
    def _kept(self) -> dict[torch.dtype | None, list[Tensor | None]]:
        """Small tensors by dtype, since a check makes hundreds of copies."""
        return {}

    def in_double(self) -> list[Any]:
        """Return the flat arguments in float64 on the CPU, as a check computes with them."""
        return self.at(torch.float64, CPU)

    def placed(self, flat: Sequence[Any], device: torch.device) -> list[Any]:
        """Return arguments on a device, differentiably; on the sample's own, as the author placed them."""
        own = [value.device if isinstance(value, Tensor) else device for value in self.flat]
        places = own if device == self.home else [device] * len(own)
        return [
            value.to(place) if isinstance(value, Tensor) else value
            for value, place in zip(flat, places, strict=True)
        ]

    def on_cpu(self) -> Sample:
        """Return the sample on the CPU, for a kernel that runs there."""
        return self if self.home == CPU else self.cast(device=CPU)

    def cast(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Sample:
        """Return the sample in a dtype and on a device, with independent copies of its objects."""
        flat = self.at(dtype, device)
        memo = {id(each): each for each in flat if isinstance(each, Tensor)}  # which objects may contain
        pairs = enumerate(flat)
        made = (copied_object(each, None, None, memo) if at in self.objects else each for at, each in pairs)
        return replace(self, flat=tuple(made), own=())

    @cached_property
    def home(self) -> torch.device:
        """Device of the sample: the device of its first tensor that is not on the CPU, else the CPU.

        A kernel for another device may take some tensors on the CPU, such as lengths.
        """
        tensors = tensors_in([*self.flat])
        return next((each.device for each in tensors if each.device.type != CPU.type), CPU)

    @cached_property
    def is_plain(self) -> bool:
        """True if only tensors among its arguments have state: no generators, and no objects with tensors."""
        return not self.objects and not any(isinstance(value, torch.Generator) for value in self.flat)

    @cached_property
    def objects(self) -> ObjectArguments:
        """The objects that hold tensors, such as modules, by position."""
        return ObjectArguments(self.flat, self.copies, self.own)

    def arguments(self, flat: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for a call with these flat values."""
        return self.flattening.schema.split(self.flattening.pack(flat))

    def with_value(self, argnum: int, value: Any) -> tuple[Any, ...]:
        """Return the flat arguments with a new value at one position."""
        return (*self.flat[:argnum], value, *self.flat[argnum + 1 :])

    @property
    def brief(self) -> str:
        """Name in messages, without the arguments."""
        return f"sample {self.position}"

    def __str__(self) -> str:
        origin = f"; {self.origin}" if self.origin else ""
        return sample_named(self.position, self.labels, self.flat, origin)


@dataclass(frozen=True)
class Variation:
    """A sample with one thing changed.

    Args:
        of: Original sample.
        what: Description of the change, which follows `sample 0 with`.
        flat: Changed flat arguments.
        fresh_numbers: True if it counts as a new input although its shapes are known.
        silent: True if its rejection need not be reported.
        without: The size that is 0 in it, if only this size and the number of indices into it are changed.
        given: Circumstance: `undeclared` if no sample and no type shows that a value is valid with the other
            values, `strained` for a number that nobody uses.
        uneven: True if a number that divides a size in every sample does not divide it here.
        rescaled: True if the magnitude of its numbers differs from the sample's.
        repeats: True if it repeats an index that no sample repeats.
    """

    of: Sample
    what: str
    flat: tuple[Any, ...]
    fresh_numbers: bool = False
    silent: bool = False
    without: Symbol | None = None
    given: Given = "usual"
    uneven: bool = False
    rescaled: bool = False
    repeats: bool = False

    @property
    def is_drawn(self) -> bool:
        """True if floating numbers were drawn, not scaled."""
        changed = [now for now, had in zip(self.flat, self.of.flat, strict=True) if now is not had]
        return any(is_inexact(value) and value.numel() for value in changed) and not self.rescaled

    @property
    def origin(self) -> str:
        """Description of its origin."""
        return f"sample {self.of.position} with {self.what}"

    def sample(self, position: int) -> Sample:
        """Return the changed sample."""
        made = replace(self.of, position=position, flat=self.flat, origin=self.origin)
        return replace(made, repeats=self.repeats, change=self)


def sample_named(position: int, labels: Iterable[str], values: Iterable[Any], origin: str = "") -> str:
    """Name a sample in a message by its position and its values.

    Example:
        >>> sample_named(0, ["x", "scale"], [torch.ones(2, 3), 0.5])
        'sample 0 (x [2, 3], scale=0.5)'
    """
    shown = [f"{label}{_shown(value)}" for label, value in zip(labels, values, strict=True)]
    return f"sample {position} ({', '.join(shown)}{origin})"


def _shown(value: Any) -> str:
    """Format a value: a tensor as its shape; nothing for a generator, whose text is an address."""
    if isinstance(value, Tensor):
        return f" {list(value.shape)}"
    return "" if isinstance(value, torch.Generator) else f"={value!r}"


def shown_sample(failure: Failure, samples: Iterable[Sample]) -> Sample | None:
    """Return the sample that the evidence of a failure names; None if it names no sample."""
    text = str(failure.evidence.get("sample", ""))
    return next((each for each in samples if text.startswith(str(each))), None)


def places_of(samples: Iterable[Sample], name: str) -> list[tuple[Sample, int]]:
    """Return the samples that have an argument, each with the position of its first value."""
    return [(sample, sample.names.index(name)) for sample in samples if name in sample.names]


KEPT = 2**16
"""Maximum number of elements of a tensor that is kept in each dtype."""


def _kept(value: Any, dtype: torch.dtype | None) -> Tensor | None:
    """Copy of a small tensor that clones can copy; None for other values, and for tensors of a mode."""
    if type(value) is not Tensor or value.numel() > KEPT or not _fills_its_memory(value):
        return None
    made = replica(value, dtype)
    usual = type(made) is Tensor and not made.is_inference()
    return made if usual else None


def _fills_its_memory(tensor: Tensor) -> bool:
    own = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return own and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
