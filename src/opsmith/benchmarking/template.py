"""A sample as a template: the same call in other sizes, with tensors of the sample's own numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.core.calls import tensors_in
from opsmith.core.shapes import LEADING, Shapes
from opsmith.core.specification import Specification

Letters = dict[str, Any]
"""What each letter stands for; under `...` the leading sizes."""


@dataclass(frozen=True)
class Template:
    """A sample whose tensors can be made anew in other sizes.

    Args:
        specification: The operator.
        sample: The sample.
        letters: What its letters stand for: those of `shapes=`, else one for every size that it has.
        named: Whether they are the author's own.
    """

    specification: Specification
    sample: Sample
    letters: Letters
    named: bool

    @classmethod
    def of(cls, specification: Specification, sample: Sample) -> Template:
        """The template that a sample makes."""
        shapes = specification.shapes
        if shapes is not None:
            sizes, fault = shapes.bind(specification.schema, sample.flattening.pack(sample.flat))
            if fault is None:
                return cls(specification, sample, sizes, True)
        every = {size for value in sample.flat if isinstance(value, Tensor) for size in value.shape}
        return cls(specification, sample, {f"{size}": size for size in sorted(every)}, False)

    def values(self, letters: Letters) -> list[Any]:
        """The flat arguments in these sizes, tensors on `meta`.

        Raises:
            ValueError: If an expression of letters is no size.
        """
        found = []
        for name, value in zip(self.sample.names, self.sample.flat, strict=True):
            if isinstance(value, Tensor):
                found.append(torch.empty(self._shape(name, value, letters), dtype=value.dtype, device="meta"))
            else:
                found.append(letters[name] if self._is_size(name) and name in letters else value)
        return found

    def _is_size(self, name: str) -> bool:
        shapes = self.specification.shapes
        return self.named and shapes is not None and name in shapes.integers

    def _shape(self, name: str, value: Tensor, letters: Letters) -> tuple[int, ...]:
        shapes = self.specification.shapes
        if not self.named or shapes is None:
            return tuple(letters[f"{size}"] for size in value.shape)
        return _evaluated(shapes, name, value, letters)

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Why the operator does not take these arguments; None where it does, as far as `meta` tells."""
        found = self.attempt(values)
        return found if isinstance(found, str) else None

    def attempt(self, values: Sequence[Any]) -> int | str:
        """How many elements the results for these arguments have; or why the operator does not take them."""
        args, kwargs = self.sample.arguments(list(values))
        shapes = self.specification.shapes
        if shapes is not None:
            fault = shapes.bind(self.specification.schema, self.sample.flattening.pack(list(values)))[1]
            if fault is not None:
                return f"`{fault[0]}` is to be {fault[1]}, and is {fault[2]}"
        try:
            with torch.no_grad(), torch.device("meta"):
                returned = self.specification.reference(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        results = returned if isinstance(returned, tuple) else (returned,)
        return sum(each.numel() for each in tensors_in(list(results)))

    def filled(self, values: Sequence[Any], generator: torch.Generator) -> list[Any]:
        """The same arguments on the CPU: each tensor drawn from the numbers of the sample's own.

        What a sample holds is in the operator's domain: positive numbers, indices that there are.
        """
        pairs = zip(values, self.sample.flat, strict=True)
        return [
            _drawn(own, made.shape, generator) if isinstance(own, Tensor) else made for made, own in pairs
        ]


def _evaluated(shapes: Shapes, name: str, value: Tensor, letters: Letters) -> tuple[int, ...]:
    dims = shapes.arguments.get(name)
    if dims is None:
        return tuple(value.shape)
    lead = len(letters.get(LEADING, ())) if dims.leading else 0
    found = dims.evaluate(letters)
    shape = tuple(
        own if size is None else size
        for size, own in zip(
            found, (*([0] * lead), *value.shape[value.dim() - len(dims.sizes) :]), strict=True
        )
    )
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"`{dims.text}` of `{name}` is no shape with these sizes")
    return shape


def _drawn(own: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if own.shape == torch.Size(shape):
        return own
    if not own.numel():
        return torch.zeros(tuple(shape), dtype=own.dtype)
    places = torch.randint(own.numel(), (math.prod(shape),), generator=generator)
    return own.detach().reshape(-1)[places].reshape(tuple(shape)).clone()


def elements(values: Sequence[Any]) -> int:
    """How many elements tensors have together.

    Example:
        >>> elements([torch.ones(2, 3), 4, torch.ones(5)])
        11
    """
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def usable(sample: Sample) -> bool:
    """Whether a sample can be a template: it has floating tensors, and none that is empty."""
    tensors = [value for value in sample.flat if isinstance(value, Tensor)]
    return any(map(is_inexact, tensors)) and all(each.numel() for each in tensors)


def shown_letters(letters: Mapping[str, Any]) -> dict[str, int]:
    """Letters as a benchmark keeps them: leading sizes under names of their own.

    Example:
        >>> shown_letters({"...": (2, 3), "M": 4})
        {'...0': 2, '...1': 3, 'M': 4}
    """
    found: dict[str, int] = {}
    for name, size in letters.items():
        if name == LEADING:
            found |= {f"{LEADING}{at}": int(each) for at, each in enumerate(size)}
        elif isinstance(size, int) and not isinstance(size, bool):
            found[name] = size
    return found


def no_such_size(operator: str, problem: str, expected: str, got: str, hint: str) -> errors.UsageError:
    """The error for `sizes=` that cannot be used."""
    return errors.UsageError(
        problem, operator=operator, argument="sizes", expected=expected, got=got, hint=hint
    )
