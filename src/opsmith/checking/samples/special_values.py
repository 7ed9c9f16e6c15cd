"""Special values, at which operators often go wrong, placed among the ordinary values of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from opsmith.checking.report import Given
from opsmith.checking.run import Run
from opsmith.checking.samples.forms import Form, placed
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.core.cached_property import cached_property
from opsmith.judging.tensors import CPU


@dataclass(frozen=True)
class ValueGroup:
    """Values that are tried together.

    Args:
        name: Description.
        values: The values.
        finite: True if gradients are compared. Near infinities and nan, and if squares or their reciprocals
            overflow, right implementations differ.
        strained: True if they are only passed by accident: infinities and nan, huge and tiny numbers.
        everywhere: True if a value fills a row, and then the whole input. Equal elements allow several right
            gradients, so that gradients must only be finite.
        broken: Text on a relation that is true in every sample, but not with these values.
    """

    name: str
    values: tuple[float, ...]
    finite: bool = True
    strained: bool = False
    everywhere: bool = False
    broken: str = ""

    @property
    def given(self) -> Given:
        """Circumstance of failures at these values."""
        return "strained" if self.strained else "usual"


ORDINARY = ValueGroup("ordinary values", ())
ZEROS = ValueGroup("zeros", (0.0, -0.0))


def value_groups(dtype: torch.dtype, boundaries: Sequence[float]) -> list[ValueGroup]:
    """Return the values to try in a dtype.

    Args:
        dtype: Real dtype.
        boundaries: Points at which the operator changes from one piece to another.
    """
    info = torch.finfo(dtype)
    found = [
        ZEROS,
        ValueGroup("nothing but zeros", (0.0,), everywhere=True),
        ValueGroup("small whole numbers and halves", (1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0)),
        ValueGroup("values further out", (-6.5, 6.5, 11.0, -11.0, 27.0, -27.0)),
        ValueGroup("large values", (100.0, -100.0, 1000.0, -1000.0), strained=True),
        ValueGroup(
            "values near overflow", (info.max / 4, -info.max / 4, info.max**0.5), finite=False, strained=True
        ),
        ValueGroup("small values", (info.eps, -info.eps, info.eps**2), strained=True),
        ValueGroup("tiny values", (info.tiny, -info.tiny), finite=False, strained=True),
        ValueGroup("denormal values", (info.tiny / 8, -info.tiny / 8), finite=False, strained=True),
        ValueGroup("infinities", (torch.inf,), finite=False, strained=True),
        ValueGroup("infinities", (-torch.inf,), finite=False, strained=True),
        ValueGroup("nan", (torch.nan,), finite=False, strained=True),
    ]
    if boundaries:
        found.insert(0, ValueGroup("boundaries between its pieces", tuple(boundaries)))
    return found


def placements(value: Tensor, group: ValueGroup, generator: torch.Generator) -> Iterator[dict[int, float]]:
    """Yield special values to put into a tensor at once, by position, at no more than half of its elements.

    Args:
        group: The values; values to use everywhere fill the first row, then the whole tensor.
        generator: Source of the positions.
    """
    count, numbers = value.numel(), group.values
    if group.everywhere:
        row = value.shape[-1] if value.dim() else 1
        for number in numbers:
            yield from (dict.fromkeys(range(end), number) for end in dict.fromkeys((row, count)))
        return
    slots = max(1, count // 2)
    for start in range(0, len(numbers), slots):
        some = numbers[start : start + slots]
        positions: list[int] = torch.randperm(count, generator=generator)[: len(some)].tolist()
        yield dict(zip(positions, some, strict=True))


@dataclass(frozen=True, kw_only=True)
class SpecialCall(Run):
    """A run with special values in one of its inputs.

    Args:
        argnum: The input.
        special: Special value at each position; in a complex input, its imaginary part is 0.
        group: Group of the values.
        forms: Forms that inputs have in every sample, and that are restored.
    """

    dtype: torch.dtype = torch.float64
    argnum: int = 0
    special: Mapping[int, complex] = field(default_factory=dict)
    group: ValueGroup = ORDINARY
    forms: Sequence[Form] = ()

    @cached_property
    def kept(self) -> list[Any]:
        """The arguments with the special values, which must not be changed."""
        flat = self.sample.at(self.dtype, CPU)
        for argnum in self.sample.inexact:
            forms, special = self._forms(argnum), self.special if argnum == self.argnum else {}
            if forms or argnum == self.argnum:
                flat[argnum], _ = placed(forms, flat[argnum], special)
        return flat

    def _forms(self, argnum: int) -> Sequence[Form]:
        return [form for form in self.forms if form.label == self.sample.labels[argnum]]

    def placed(self, special: Mapping[int, complex]) -> Self | None:
        """The call with different special values, unless restored relations of the samples replace them."""
        forms = self._forms(self.argnum)
        if not forms:
            return replace(self, special=special)
        _, left = placed(forms, self.sample.at(torch.float64, CPU)[self.argnum], special)
        stands = {*special} <= {*left} if self.group.everywhere else bool(left)
        return replace(self, special=left) if stands else None

    def flat(self) -> list[Any]:
        """The arguments, in fresh memory."""
        return [value.clone() if isinstance(value, Tensor) else value for value in self.kept]

    @property
    def digits(self) -> bool:
        """True if gradients must be right; in float32, or for equal elements, they must only be finite."""
        return self.dtype == torch.float64 and not self.group.everywhere

    @property
    def grads(self) -> list[Tensor | None]:
        """The grad_output of each result."""
        return plain_grad_outputs(self.subject, self.sample).at(self.dtype, CPU)

    @property
    def label(self) -> str:
        """Name of the input in messages."""
        return self.sample.labels[self.argnum]

    @property
    def listed(self) -> str:
        """The special values, as text."""
        values = dict.fromkeys(self.special.values()) if self.group.everywhere else self.special.values()
        return ", ".join(f"{value:g}" for value in values)

    @property
    def filled(self) -> str:
        """Part of the input that the special values fill: all or a row."""
        return "all" if len(self.special) == self.kept[self.argnum].numel() else "a row"

    def in_float32(self) -> SpecialCall | None:
        """The same call with float32's values of its group; None if these are the same in each dtype."""
        alike = [each for each in value_groups(torch.float32, ()) if each.name == self.group.name]
        if len(alike) != 1 or alike[0].values == self.group.values:
            return None
        numbers = dict(zip(map(complex, self.group.values), alike[0].values, strict=True))
        special = {position: numbers[value] for position, value in self.special.items()}
        return replace(self, special=special, group=alike[0], dtype=torch.float32)


_POSITIVE = (0.1, 0.4, 0.8, 1.2, 1.7, 2.6, 3.7, 5.2, 7.3, 12.0)
GRID = (*(-point for point in reversed(_POSITIVE)), *_POSITIVE)
"""Points at which a function is evaluated."""
STEPS = 50
"""Number of bisections: enough for the last bit of a float64."""

SMOOTH = 1e-3
"""Minimum jump between two points of the grid, relative to the change between them."""

MOST = 4
"""Maximum number of boundaries, counted from below."""

NICE = 1e-9
"""Distance from a number of few digits below which a boundary is taken to be that number."""


def boundaries(function: Callable[[float], float]) -> list[float]:
    """Find the points at which a function of one number jumps, as far as a coarse grid shows them.

    Args:
        function: A derivative or a result as a function of a point.

    Example:
        >>> boundaries(lambda x: 1.0 if x > 0.25 else 0.0)
        [0.25]
    """
    values = [function(point) for point in GRID]
    found: list[float] = []
    for (low, below), (high, above) in pairwise(zip(GRID, values, strict=True)):
        point = _jump(function, low, below, high, above)
        if point is not None and len(found) < MOST:
            found.append(point)
    return found


def _jump(
    function: Callable[[float], float], low: float, below: float, high: float, above: float
) -> float | None:
    """Find the point between two others at which a function jumps; None where it changes smoothly."""
    if not (math.isfinite(below) and math.isfinite(above)):
        return None
    first = abs(above - below)
    if first <= 1e-9 * max(abs(above), abs(below)):
        return None
    remaining = first
    for _ in range(STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        value = function(middle)
        if not math.isfinite(value):
            return None
        if abs(value - below) > abs(above - value):
            high, above = middle, value
        else:
            low, below = middle, value
        before, remaining = remaining, abs(above - below)
        # The change of a smooth function halves with each step, so that its limit is known early.
        if min(remaining, abs(2 * remaining - before)) < SMOOTH * first:
            return None
    nice = float(f"{high:.6g}")
    return nice if abs(nice - high) <= NICE * max(1.0, abs(high)) else high
