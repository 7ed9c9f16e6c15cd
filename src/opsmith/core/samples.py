"""Representative inputs of an operator: what check, benchmark, export and pages run it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from opsmith import errors
from opsmith.core.calls import Call, call_fault
from opsmith.core.location import where
from opsmith.core.schema import Schema


@dataclass(frozen=True)
class Make:
    """Makes random tensors for samples, all from one seed.

    Args:
        dtype: dtype of floating tensors.
        device: Where tensors are made.
        generator: Source of randomness, on the CPU, so that every device gets the same numbers.

    Example:
        >>> make = Make(torch.float64)
        >>> make(2, 3).shape, make.integers(4, high=10).dtype
        (torch.Size([2, 3]), torch.int64)
    """

    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
        """Uniform numbers in [low, high) of this shape."""
        real = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        if self.dtype.is_complex:
            imaginary = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
            return torch.complex(real, imaginary).to(self.device, self.dtype)
        return real.to(self.device, self.dtype)

    def integers(self, *shape: int, low: int = 0, high: int = 10) -> torch.Tensor:
        """Whole numbers in [low, high) of this shape, int64.

        Example:
            >>> Make().integers(3, low=5, high=6)
            tensor([5, 5, 5])
        """
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """A call with keyword arguments; a plain tuple serves for a call without.

        Example:
            >>> Make().call(2.0, stride=1)
            Call(args=(2.0,), kwargs={'stride': 1})
        """
        return Call(args, kwargs)


Samples = Callable[..., Iterable[Any]]


def as_call(sample: Any, schema: Schema, operator: str, place: str) -> Call:
    """One sample as a call, checked against the signature.

    Raises:
        SampleError: If it is neither a tuple nor a call, or does not fit the operator's arguments.
    """
    if isinstance(sample, torch.Tensor):
        sample = (sample,)
    if isinstance(sample, tuple | list):
        sample = Call(tuple(sample))
    if not isinstance(sample, Call):
        raise errors.SampleError(
            "a sample is neither a tuple of arguments nor `make.call(...)`",
            operator=operator,
            got=repr(sample),
            where=place,
            mend="yield `(x, weight)` or `make.call(x, weight, stride=2)`",
        )
    fault = call_fault(sample.args, sample.kwargs, schema)
    if fault is not None:
        raise errors.SampleError(
            f"a sample does not fit the signature: {fault[0]}",
            operator=operator,
            argument=fault[1],
            expected=fault[2],
            got=fault[3],
            where=place,
            mend="yield the arguments as a call of the operator would give them",
        )
    return sample


def samples_of(function: Samples, make: Make, schema: Schema, operator: str) -> list[Call]:
    """Every sample that an operator's `samples` function yields; it may leave out its parameter `make`."""
    place = where(function)
    samples = function(make) if inspect.signature(function).parameters else function()
    return [as_call(sample, schema, operator, place) for sample in samples]
