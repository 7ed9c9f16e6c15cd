"""How far a right result may lie from the truth: bounds that follow from the dtype and from the mathematics.

The truth `t` is the reference, run in float64 on the very inputs that were rounded to the dtype under test.
An element's *rounding unit* is what one rounding of every input does to it, plus one rounding of itself:

    unit[i] = u |t[i]| + s[i],   u = half of the dtype's eps,

where `s[i]` is how far `t[i]` moves when each input is scaled by 1 + u or 1 - u (the largest of a few random
choices of signs: D. S. Parker, "Monte Carlo Arithmetic", 1997). An element is right if

    |got[i] - t[i]|  <=  (2 k + 8 + 2 sqrt(n)) unit[i],

with `n` the number of input elements that the result element depends on, and `k` the error of the reference
itself, run in that dtype, in the same units.

- 8: a library function may be off by 4 units in the last place.
- 2 sqrt(n): summing n terms in the dtype itself, one after the other, errs by sqrt(n) / 2 units in the root
  mean square, since rounding errors are as good as independent (N. J. Higham and T. Mary, "A new approach to
  probabilistic rounding error analysis", SIAM J. Sci. Comput., 2019); this is four times as much.
- 2 k: a kernel may order its operations in another way than the reference does, and need not be better.

Where the reference loses more than half of its digits in a dtype, that dtype says nothing about a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.autodiff import dense
from opsmith.checking.numerics.compare import Difference, largest
from opsmith.checking.numerics.directional import coordinates
from opsmith.checking.samples.perturb import nudged
from opsmith.checking.samples.sample import is_inexact

LIBRARY = 8
SUMMATION = 2
DRAWS = 4
PROBES = 3

Function = Callable[[list[Any]], Sequence[Tensor | None]]


@dataclass(frozen=True)
class Conditioning:
    """How sensitive results are to their inputs, whatever the dtype.

    Args:
        sensitivity: For each result how far each element moves, per unit of relative change of the inputs.
        accumulated: For each result how many input elements an element of it depends on.
    """

    sensitivity: tuple[Tensor | None, ...]
    accumulated: tuple[int, ...]

    @classmethod
    def unknown(cls, flat: Sequence[Any], count: int) -> Conditioning:
        """Where a function has no truth in float64: nothing is known but the size of its inputs."""
        largest = _largest([value for value in flat if is_inexact(value)])
        return cls((None,) * count, (largest,) * count)


def conditioning(
    function: Function, flat: list[Any], truth: Sequence[Tensor | None], generator: torch.Generator
) -> Conditioning:
    """Measure it, by running a float64 function on inputs that are moved a little.

    Args:
        function: Takes flat arguments, returns results.
        flat: Arguments, floating ones in float64.
        truth: What the function returns for them.
        generator: Source of the signs.
    """
    step = _step(truth)
    moved = [torch.zeros_like(t).abs() if t is not None and is_inexact(t) else None for t in truth]
    for _ in range(DRAWS):
        for position, other in enumerate(function([nudged(value, step, generator) for value in flat])):
            known, result = moved[position], truth[position]
            if known is None or other is None or result is None:
                continue
            if other.shape != result.shape:
                moved[position] = torch.full_like(known, torch.inf)  # as far as can be: nothing is held there
            else:
                far = (other - result).abs().nan_to_num(0.0, 0.0, 0.0) / step
                moved[position] = torch.maximum(known, far)
    accumulated = tuple(fan_in(function, flat, position) for position in range(len(truth)))
    return Conditioning(tuple(moved), accumulated)


def _step(truth: Sequence[Tensor | None]) -> float:
    """What part of themselves the inputs are moved by: half of the digits that the function computes in.

    Less would be lost in its own rounding. Most compute in float64; of others the results tell.
    """
    numbers = [coordinates(each).nan_to_num() for each in truth if each is not None and is_inexact(each)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if numbers and all(torch.equal(each.to(dtype).to(each.dtype), each) for each in numbers):
            return math.sqrt(torch.finfo(dtype).eps)
    return math.sqrt(torch.finfo(torch.float64).eps)


def fan_in(function: Function, flat: list[Any], position: int) -> int:
    """How many input elements one element of a result depends on: the largest of a few elements.

    Where autograd cannot tell, as for an opaque function, it is the size of the largest input.
    """
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() if is_inexact(value) else value for value in flat]
        inputs = [leaf for leaf in leaves if is_inexact(leaf)]
        try:
            result = function(leaves)[position]
            if result is None or not result.requires_grad or not result.numel():
                return _largest(inputs)
            places = sorted({0, result.numel() // 2, result.numel() - 1})[:PROBES]
            real = torch.view_as_real(result.resolve_conj()).sum(-1) if result.is_complex() else result
            return max(1, *(_reached(real.flatten()[place], inputs) for place in places))
        except RuntimeError as error:
            refuse_own(error)
            return _largest(inputs)


@dataclass(frozen=True)
class Bound:
    """What one result may be.

    Args:
        truth: The right values, in float64 where there is a truth in float64.
        unit: Rounding unit of each element.
        own_error: Error of the reference itself in the dtype under test, in units.
        accumulated: How many input elements each element depends on.
        judged: Elements that are judged. In the others the reference itself overflows in this dtype, or loses
            half of its digits, as next to a jump.
    """

    truth: Tensor
    unit: Tensor
    own_error: float
    accumulated: int
    judged: Tensor

    @property
    def allowed(self) -> float:
        """How many units an element may be off."""
        return 2 * self.own_error + LIBRARY + SUMMATION * math.sqrt(self.accumulated)

    def judge(self, got: Tensor) -> Difference | None:
        """The worst element of a result, if it is further from the truth than allowed."""
        return largest(got, self.truth, self.unit, self.allowed, self.judged)


def bound(
    truth: Tensor, ordinary: Tensor | None, dtype: torch.dtype, sensitivity: Tensor | None, accumulated: int
) -> Bound:
    """The bound for one floating result.

    Args:
        truth: The right result, in float64 or complex128.
        ordinary: The reference's result in the dtype under test, if that is not the truth itself.
        dtype: The dtype under test.
        sensitivity: From `conditioning`; None where there is no truth in float64.
        accumulated: From `conditioning`.
    """
    coarse = max(unit_roundoff(dtype), unit_roundoff(ordinary.dtype) if ordinary is not None else 0.0)
    size = truth.abs()
    if sensitivity is not None:
        size = size + sensitivity.to(size.device)
    elif size.numel():  # nothing is known about cancellation: the largest element stands for its terms
        size = size.max().expand(size.shape)
    underflow = max(torch.finfo(dtype).tiny * coarse, torch.finfo(torch.float64).tiny)
    unit = coarse * size + underflow
    judged = torch.ones_like(unit, dtype=torch.bool)
    own_error = 0.0
    if ordinary is not None and ordinary.shape != truth.shape:
        judged = ~judged  # rounding makes another form of it
    elif ordinary is not None:
        error = (ordinary.to(truth.dtype) - truth).abs()
        kept = torch.finfo(dtype).eps ** 0.5 * size.nan_to_num(0.0, 0.0, 0.0).max() if size.numel() else 0.0
        judged = ~(error > kept) & (ordinary.isfinite() | ~truth.isfinite())
        measured = (error / unit)[judged & truth.isfinite()]
        own_error = float(measured.max()) if measured.numel() else 0.0
    return Bound(truth, unit, own_error, accumulated, judged)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half of the dtype's eps: the largest relative error of rounding once."""
    return float(torch.finfo(dtype).eps) / 2


def neighbours(flat: Sequence[Any], generator: torch.Generator) -> Iterator[list[Any]]:
    """Some arguments, and others near them that round in other ways."""
    yield list(flat)
    for _ in range(DRAWS - 1):
        yield [nudged(value, 2.0**-10, generator) for value in flat]


def _reached(element: Tensor, inputs: list[Tensor]) -> int:
    found = dense(torch.autograd.grad(element, inputs, retain_graph=True, allow_unused=True))
    return sum(int(gradient.count_nonzero()) for gradient in found if gradient is not None)


def _largest(inputs: list[Tensor]) -> int:
    return max((tensor.numel() for tensor in inputs), default=1)
