"""A sample under autocast: what is promised of it, how it runs, and what its numbers may be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast_mode

from opsmith.checking.numerics.compare import Difference, unequal
from opsmith.checking.numerics.rounding import Bound, unit_roundoff
from opsmith.checking.numerics.truth import Measure, widened
from opsmith.checking.properties.torch.batched_gradients import gradients_of
from opsmith.checking.samples.cases import short
from opsmith.checking.samples.perturb import nudged
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject

WIDE = torch.float32
"""What comes in: autocast leaves float64 alone."""


@dataclass(frozen=True)
class Casting:
    """A sample in float32, to be run under autocast.

    Args:
        subject: What is under check.
        sample: The sample.
        device: Where it lies.
        dtype: The dtype that autocast lowers to.
    """

    subject: Subject
    sample: Sample
    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.sample} under autocast to {short(self.dtype)} on {self.device.type}"

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results, as users get them."""
        return self.subject.call(self.sample, flat)

    def region(self) -> torch.autocast:
        """The region under autocast."""
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def promised(self) -> bool:
        """Whether dtypes of results are promised: a declared operator casts its arguments by its rule.

        A class that was adopted does what the class does, which promises nothing.
        """
        specification = self.subject.specification
        taken = specification.adopted is not None or specification.own is not None
        return not (taken or self.subject.foreign)

    def cast(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments as the operator's rule for autocast casts them."""
        rule = self.subject.specification.autocast
        dtype = self.dtype if rule == "lower" else WIDE
        return [_cast(value, dtype) for value in flat]

    @cached_property
    def results(self) -> Rounded:
        """What the results may be."""
        function = self.call if self.subject.apply is not None else self.subject.plain(self.sample)
        return Rounded(self.subject, function, self.sample.at(WIDE, self.device), self.dtype)

    def gradients(self, places: Sequence[int], grads: Sequence[Tensor | None]) -> Rounded:
        """What the gradients may be.

        Args:
            places: The arguments to differentiate by.
            grads: The gradient of each result.
        """
        flat = [*self.sample.at(WIDE, self.device), *grads]
        function = partial(gradients_of, self.call, places, len(self.sample.flat))
        return Rounded(self.subject, function, flat, self.dtype)


@dataclass(frozen=True)
class Rounded:
    """What a function may give whose arguments, and what it computes on the way, are rounded to a dtype.

    Args:
        subject: What is under check.
        function: Takes flat arguments.
        flat: Arguments, in float32.
        dtype: What is rounded to.
    """

    subject: Subject
    function: Callable[[list[Any]], Sequence[Tensor | None]]
    flat: list[Any]
    dtype: torch.dtype

    def judge(self, position: int, got: Tensor) -> Difference | None:
        """The worst element, if rounding to the dtype does not explain it."""
        bound = self._bounds[position]
        if bound is None or got.shape != bound.truth.shape:
            return None
        return bound.judge(got.detach().cpu())

    @cached_property
    def _bounds(self) -> list[Bound | None]:
        generator = self.subject.generator()
        measure = Measure.of(self.function, self.flat, generator, has_truth=self.subject.has_truth)
        bounds = measure.truth(self.flat, self.dtype).bounds
        moves = self._moves([None if bound is None else bound.truth for bound in bounds], generator)
        return [
            None if bound is None or move is None else replace(bound, unit=bound.unit + move)
            for bound, move in zip(bounds, moves, strict=True)
        ]

    def _moves(self, truth: Sequence[Tensor | None], generator: torch.Generator) -> list[Tensor | None]:
        """How far the results move if the arguments are rounded to the dtype: next to a jump, that is far."""
        farthest: list[Tensor | None] = [
            None if each is None else torch.zeros_like(each).abs() for each in truth
        ]
        step = unit_roundoff(self.dtype)
        for _ in range(DRAWS):
            moved = self.function([nudged(value, step, generator) for value in widened(self.flat)])
            for position, (right, other) in enumerate(zip(truth, moved, strict=True)):
                known = farthest[position]
                if known is None or right is None or other is None:
                    continue
                if other.shape != right.shape:
                    farthest[position] = torch.full_like(known, torch.inf)
                else:
                    far = (other.detach() - right).abs().nan_to_num(0.0, 0.0, 0.0)
                    farthest[position] = torch.maximum(known, far)
        return farthest


DRAWS = 3


def _cast(value: Any, dtype: torch.dtype) -> Any:
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if fits else value


def representable(like: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A random tensor of the form of another, of numbers that a narrow dtype has."""
    wide = torch.complex128 if like.is_complex() else torch.float64
    random = torch.randn(like.shape, generator=generator, dtype=wide)
    return random.to(dtype if not like.is_complex() else like.dtype).to(like)


def claims_autocast(subject: Subject) -> bool:
    """Whether it says that it serves autocast: ours do, and classes under `custom_fwd` or `custom_bwd`."""
    adopted, own = subject.specification.adopted, subject.specification.own
    if adopted is None:
        return own is None or bool(own.autocast)
    methods = [inspect.getattr_static(adopted.function_class, name, None) for name in ("forward", "backward")]
    codes = [getattr(getattr(each, "__func__", each), "__code__", None) for each in methods]
    return any(code is not None and code.co_filename == autocast_mode.__file__ for code in codes)


def equal(got: Tensor | None, right: Tensor | None) -> bool:
    """Whether two results are the same number for number: nan equals nan, and 0.0 equals -0.0."""
    if got is None or right is None:
        return got is right
    return got.shape == right.shape and got.dtype == right.dtype and unequal(got, right) is None


def state(kind: str) -> tuple[bool, torch.dtype, bool]:
    """Autocast's own state for a type of device: on or off, its dtype, whether it caches."""
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def floating(results: Sequence[Any]) -> list[bool]:
    """Which results are floating tensors that autograd follows."""
    return [is_inexact(each) and each.requires_grad for each in results]
