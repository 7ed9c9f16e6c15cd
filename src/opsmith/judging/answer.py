"""Right answers: tensors with bounds of their rounding errors, measured by running their computation.

A tensor agrees with a right tensor `a` if `|got[i] - a[i]| <= e[i]`:

    e[i] = (c + 2 k) u (|a[i]| + m[i] + t[i]),    c = 8 + 2 sqrt(n)

Only the right computation is measured: a faulty computation must not be excused by its own noise.

- `a`: the function in float64, on the arguments after they were rounded to the dtype under test.
- `u`: half of the eps of that dtype, or of float32 if the function computes in float32 for all arguments.
- 8: a library function may have an error of 4 units in the last place.
- `n`: the number of input elements on which an element depends. Summing n terms one after another has a root
  mean square error of sqrt(n) / 2 roundings, since rounding errors behave as if independent (N. J. Higham and
  T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput., 2019); the bound
  is four times as large.
- `m`: the largest change of an element under random changes of the arguments by their last digit, divided by
  the size of these changes (D. S. Parker, "Monte Carlo Arithmetic", 1997). It shows the effect of the
  arguments' rounding, and of the function's own rounding, which a coarser dtype increases in proportion.
  `u m` is at most half of the digits, since a jump is no rounding.
- `k`: the error of the function itself in float32, in these units, for every dtype. Its error in half
  precision is not used, since zeros in half precision would excuse themselves.
- `t`, of derivatives: the size of the terms that cancel in an element, as in a saturated softmax. It is
  measured with smaller arguments that saturate nothing, on a plateau: near a pole, still smaller arguments
  enlarge it further. If terms cancel for all arguments, as in the gradient of `x / x.sum(-1)` over one
  element, it follows from the size that such a derivative has in other samples.

Each term is measured only if the earlier terms do not explain a difference. Most answers are right within `8
u |a|`.

An element is undecided if the function overflows in the dtype, or loses more than half of its digits in it.
In half precision, it is undecided if this happens in float32, or if results jump when the arguments change by
their last digit or by the 8 units of a library function's error: a few roundings decide which index an argmin
of distances returns, or to which step a quotient is rounded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.core.cached_property import cached_property
from opsmith.judging.attribution import raise_own
from opsmith.judging.compare import largest_magnitude, same_bits
from opsmith.judging.constants import (
    FEW_DIGITS,
    FIRST_MOVES,
    LIBRARY,
    MOVES,
    NEAR,
    PLATEAU,
    PROBES,
    ROOM,
    SHRUNK,
    SMOOTH,
    allowed_roundings,
    half_of_digits,
    unit_roundoff,
)
from opsmith.judging.tensors import CPU, dense, is_inexact, perturbed, replica
from opsmith.judging.working_precision import working_precision

Function = Callable[[list[Any]], Sequence[Tensor | None]]


@dataclass(frozen=True)
class Bound:
    """Bound of each element's distance from the right element, in units; `term` is its last term."""

    term: str
    unit: Tensor
    allowed: float

    @property
    def distance(self) -> Tensor:
        """Maximum distance of each element."""
        return self.unit * self.allowed


@dataclass(frozen=True, eq=False)
class Answer:
    """A right tensor, which measures its bounds on demand.

    Args:
        value: The right tensor on the CPU, in float64 or complex128 if it is inexact; None if there is none.
        ordinary: Result of the function itself in the dtype, for its metadata and for integers, which count
            as right as well.
        dtype: dtype whose precision is expected.
        computation: Computation of the tensor; None if nothing can be run, so that its largest element is
            used for the size of its changes.
        position: Its position among the results of the computation.
        summands: Number of input elements on which an element depends, if nothing can be run.
        more_exact: True if the value was computed in a higher precision than `ordinary`.
    """

    value: Tensor | None
    ordinary: Tensor | None
    dtype: torch.dtype
    computation: Computation | None
    position: int = 0
    summands: int = 1
    more_exact: bool = False

    def bounds(self) -> Iterator[Bound]:
        """Yield bounds with more and more terms, each measured when it is reached."""
        size = self.tensor.abs()
        yield Bound("library", self.unit(size), LIBRARY)
        computation = self.computation
        if computation is None or not computation.has_truth:
            largest = size.max().expand(size.shape) if size.numel() else size
            own = self.own_error(self.unit(largest))
            yield Bound("largest", self.unit(largest), allowed_roundings(self.summands) + 2 * own)
            return
        allowed = allowed_roundings(computation.summands[self.position])
        yield Bound("moves", self.unit(size + self.moved_by(FIRST_MOVES)), allowed)
        size = size + self.moved_by(MOVES)
        unit = self.unit(size)
        allowed += 2 * max(self.own_error(unit), computation.own_errors[self.position])
        yield Bound("own error", unit, allowed)
        if computation.usual is not None:
            terms = computation.terms[self.position]
            if terms is not None and terms.shape == size.shape:
                size = size + terms
            usual = ROOM * computation.usual(self.position)
            yield Bound("terms", self.unit(size + usual), allowed)

    @property
    def tensor(self) -> Tensor:
        """The right tensor of an answer that has one."""
        assert self.value is not None
        return self.value

    @property
    def distance(self) -> Tensor:
        """Maximum distance of each element that all terms explain."""
        return [*self.bounds()][-1].distance

    def judged(self) -> Tensor | None:
        """Mask of the elements that are decided; None if all are."""
        value, ordinary = self.value, self.ordinary
        if value is None or ordinary is None or not self.more_exact:
            return None
        if ordinary.shape != value.shape:
            return torch.zeros_like(value, dtype=torch.bool)  # rounding changes the shape
        if self.held_in not in FEW_DIGITS:
            return keeps_digits(ordinary, value, self.held_in, value.abs() + self.moved_by(MOVES))
        kept = ordinary.to(value).isfinite() | ~value.isfinite()
        if self.computation is None:
            return kept
        computation, position = self.computation, self.position
        leap = computation.leaps(self.held_in)[position]
        leaps = None if leap is None else leap > LIBRARY * self.unit(value.abs() + self.moved_by(MOVES))
        for lost in (computation.jumps(self.held_in)[position], computation.lost[position], leaps):
            kept = kept & ~lost if lost is not None and lost.shape == kept.shape else kept
        return kept

    def is_decided(self) -> bool:
        """True if at least one element is decided, or if there are no elements."""
        value, ordinary = self.value, self.ordinary
        if value is None or ordinary is None or not is_inexact(value) or not value.numel():
            return True
        # Including the changes of elements makes sizes larger, and more elements decided.
        if ordinary.shape == value.shape and keeps_digits(ordinary, value, self.dtype, value.abs()).any():
            return True
        judged = self.judged()
        return judged is None or bool(judged.any())

    @cached_property
    def held_in(self) -> torch.dtype:
        """The dtype whose precision is expected, or the coarser dtype in which it is computed."""
        return self.dtype if self.computation is None else self.computation.held_to(self.dtype)

    def unit(self, size: Tensor) -> Tensor:
        """One rounding of numbers of a size, or the smallest number of the dtype."""
        coarse = unit_roundoff(self.held_in)
        if self.ordinary is not None and is_inexact(self.ordinary):
            coarse = max(coarse, unit_roundoff(self.ordinary.dtype))
        underflow = max(torch.finfo(self.held_in).tiny * coarse, torch.finfo(torch.float64).tiny)
        return coarse * size + underflow

    def moved_by(self, count: int) -> Tensor | float:
        """The sensitivity of each element: its largest change divided by the arguments' relative change."""
        if self.computation is None:
            return largest_magnitude(self.tensor)
        digits = self.computation.precision
        moves = self.computation.moves(digits, count)[self.position]
        if moves is None or moves.shape != self.tensor.shape:
            return 0.0
        largest = max(largest_magnitude(self.tensor), self.computation.largest_argument)
        half = half_of_digits(self.held_in) * largest  # for a result of zero
        return moves.clamp(max=half / unit_roundoff(self.held_in))

    def own_error(self, unit: Tensor) -> float:
        """The error of the function itself in the dtype, in units."""
        value, ordinary = self.value, self.ordinary
        if not self.more_exact or not is_inexact(value) or self.held_in in FEW_DIGITS:
            return 0.0
        if value is None or ordinary is None or ordinary.shape != value.shape:
            return 0.0
        size = unit / unit_roundoff(self.held_in)
        kept = keeps_digits(ordinary, value, self.held_in, size) & value.isfinite()
        measured = ((ordinary.to(value) - value).abs() / unit)[kept]
        return float(measured.max()) if measured.numel() else 0.0


@dataclass(frozen=True, eq=False)
class Half:
    """A right tensor that also allows errors of half of the digits of each element and of the usual element.

    Two computations of the same value may differ so much at numbers for which neither was written.

    Args:
        answer: The answer.
    """

    answer: Answer

    @property
    def value(self) -> Tensor:
        """The right tensor."""
        return self.answer.tensor

    def bounds(self) -> Iterator[Bound]:
        """Yield half of the digits of the dtype, then of the dtype that it is computed in, with all terms."""
        yield Bound("half", self._free(self.answer.dtype), 1.0)
        free = self._free(self.answer.held_in)
        for bound in self.answer.bounds():
            yield Bound(bound.term, free + bound.distance, 1.0)

    def _free(self, dtype: torch.dtype) -> Tensor:
        size, half = self.answer.tensor.abs(), half_of_digits(dtype)
        present = size[size.isfinite() & (size != 0)]
        usual = present.median() if present.numel() else 0.0
        free: Tensor = half * (size + usual) + torch.finfo(dtype).tiny / half
        return free

    def judged(self) -> Tensor | None:
        """Mask of the decided elements; elements outside of the computing dtype's range are undecided."""
        judged, beyond = self.answer.judged(), torch.finfo(self.answer.held_in).max
        within = ~(self.answer.tensor.abs() > beyond)
        return within if judged is None else judged & within


@dataclass(frozen=True, eq=False)
class Combination:
    """A right tensor that follows from other answers: the sum of answers, each times a factor.

    Args:
        terms: The factors and the answers.
        beside: Answer of the tensor that is compared with it, whose rounding is also allowed.
        tolerated: Additional allowed distance.

    Example:
        >>> x = torch.tensor([0.5], dtype=torch.float64)
        >>> square = Computation.of(lambda flat: [flat[0] ** 2], [x], torch.Generator()).at([x], x.dtype)[0]
        >>> Combination(((3.0, square), (-1.0, square)), square, 1e-3).value
        tensor([0.5000], dtype=torch.float64)
    """

    terms: tuple[tuple[float, Answer], ...]
    beside: Answer
    tolerated: float = 0.0

    @property
    def value(self) -> Tensor:
        """The sum."""
        parts = [factor * answer.value for factor, answer in self.terms if answer.value is not None]
        return torch.stack(parts).sum(0)

    def bounds(self) -> Iterator[Bound]:
        """Yield bounds with more and more terms, like the bounds of the answers."""
        floor = max(self.tolerated, torch.finfo(torch.float64).tiny)
        yield Bound("tolerated", torch.full(self.value.shape, floor, dtype=torch.float64), 1.0)
        rounded = (*self.terms, (1.0, self.beside))
        for bounds in zip(*(answer.bounds() for _, answer in rounded), strict=False):
            parts = [abs(factor) * each.distance for (factor, _), each in zip(rounded, bounds, strict=True)]
            yield Bound(bounds[0].term, floor + torch.stack(parts).sum(0), 1.0)

    def judged(self) -> None:
        """Every element is decided."""


def unknown(position: int) -> float:
    """The size of terms if other samples do not show it."""
    return 0.0


def keeps_digits(ordinary: Tensor, truth: Tensor, dtype: torch.dtype, size: Tensor) -> Tensor:
    """Mark the elements in which a function keeps half of its digits, given their size or sensitivity."""
    largest = size.nan_to_num(0.0, 0.0, 0.0).max() if size.numel() else 0.0
    wide = ordinary.to(truth)
    lost = (wide - truth).abs() > half_of_digits(dtype) * largest
    kept: Tensor = ~lost & (wide.isfinite() | ~truth.isfinite())
    return kept


@dataclass(frozen=True)
class Computation:
    """A function with the arguments of a sample, which computes right answers and measures their errors.

    Args:
        function: Function of flat arguments; some of its results may be None.
        wide: The arguments of the sample on the CPU, with floating tensors in float64.
        results: Results of the function for them.
        generator: Source of perturbations.
        has_truth: True if a run in float64 is a better answer than one in the dtype itself.
        computed_in: Returns the dtype in which it computes, if this is known from elsewhere; else it is
            measured.
        usual: Returns the usual size of a result, given by position, such as of a derivative whose terms
            cancel; None if no terms cancel.
    """

    function: Function
    wide: Sequence[Any]
    results: tuple[Tensor | None, ...]
    generator: torch.Generator
    has_truth: bool = True
    computed_in: Callable[[], torch.dtype] | None = None
    usual: Callable[[int], float] | None = None

    @classmethod
    def of(
        cls,
        function: Function,
        flat: Sequence[Any],
        generator: torch.Generator,
        *,
        has_truth: bool = True,
        computed_in: Callable[[], torch.dtype] | None = None,
        usual: Callable[[int], float] | None = None,
    ) -> Computation:
        """Run a function on these arguments; measurements are made when an answer needs them."""
        wide = in_double_on_cpu(flat)
        results = tuple(None if each is None else each.detach() for each in function([*map(replica, wide)]))
        return cls(function, wide, results, generator, has_truth, computed_in, usual)

    def at(self, flat: Sequence[Any], dtype: torch.dtype) -> tuple[Answer, ...]:
        """Compute the right answers for these arguments, given in this dtype.

        Example:
            >>> x = torch.tensor([0.1, 0.2])
            >>> double = Computation.of(lambda flat: [2 * flat[0]], [x], torch.Generator())
            >>> double.at([x], torch.float32)[0].value.dtype
            torch.float64
        """
        if self.has_truth and self._is_sample(flat):
            return tuple(self.twin(at, each, dtype) for at, each in enumerate(self.results))
        ordinary = [None if each is None else each.detach() for each in self.function(list(flat))]
        if not self.has_truth:
            return tuple(self.twin(at, each, dtype) for at, each in enumerate(ordinary))
        values = enumerate(zip(self._in_double(flat), ordinary, strict=True))
        return tuple(self._answer(at, *pair, dtype, more_exact=True) for at, pair in values)

    def twin(self, position: int, result: Tensor | None, dtype: torch.dtype) -> Answer:
        """The answer that counts as right because the function itself computed it in this dtype."""
        return self._answer(position, result, None if result is None else result.detach(), dtype)

    def _answer(
        self,
        position: int,
        value: Tensor | None,
        ordinary: Tensor | None,
        dtype: torch.dtype,
        *,
        more_exact: bool = False,
    ) -> Answer:
        (wide,) = in_double_on_cpu([value])
        summands = 1 if self.has_truth else self.summands[position]
        return Answer(wide, ordinary, dtype, self, position, summands, more_exact)

    def held_to(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype, or float32 if the function computes in float32 for float64 arguments."""
        single = self.has_truth and dtype == torch.float64 and self.precision == torch.float32
        return torch.float32 if single else dtype

    def moves(self, dtype: torch.dtype, count: int = MOVES) -> Sequence[Tensor | None]:
        """Measure the largest changes of floating results, relative to changes of the arguments' last digit.

        Args:
            dtype: dtype of the last digit.
            count: Number of random moves.
        """
        generator, known = self._moves.setdefault(dtype, (self._own_generator(), [self._still]))
        for draw in range(len(known) - 1, count):
            step = torch.finfo(dtype).eps * (1 + draw / MOVES)  # for one element, signs give two values
            found = self.function([perturbed(value, step, generator) for value in self.wide])
            known.append([*map(partial(_farther, step), known[-1], self.results, found)])
        return known[-1]

    def _in_float32(self, draws: int) -> list[tuple[Answer, ...]]:
        """The answers in float32, for the arguments and for close arguments that round differently."""
        try:
            streams = ((NEAR if draw else 0.0, self._own_generator(draw)) for draw in range(draws))
            near = [[perturbed(value, *stream) for value in self.wide] for stream in streams]
            return [self.at([replica(v, torch.float32) for v in flat], torch.float32) for flat in near]
        except (RuntimeError, TypeError, ValueError) as error:
            raise_own(error)  # the property reports that it does not run in float32
            return []

    @cached_property
    def lost(self) -> Sequence[Tensor | None]:
        """Mark the elements that keep less than half of their digits in float32."""
        found = [each for answers in self._in_float32(1) for each in answers]
        kept = [each.judged() if is_inexact(each.value) else None for each in found]
        return [None if each is None else ~each for each in kept] or [None] * len(self.results)

    @property
    def _still(self) -> list[Tensor | None]:
        return [torch.zeros_like(t).abs() if t is not None and is_inexact(t) else None for t in self.results]

    @cached_property
    def _moves(self) -> dict[torch.dtype, tuple[torch.Generator, list[list[Tensor | None]]]]:
        """For each dtype, the source of random moves, and the largest changes after each move."""
        return {}

    def jumps(self, dtype: torch.dtype) -> Sequence[Tensor | None]:
        """Mark the elements that lose more than half of their digits if the arguments' last digit changes."""
        if not self.has_truth:
            return [None] * len(self.results)
        share = 1 / half_of_digits(dtype)
        return [
            None if move is None or result is None else move > share * largest_magnitude(result)
            for move, result in zip(self.moves(dtype), self.results, strict=True)
        ]

    def leaps(self, dtype: torch.dtype) -> Sequence[Tensor | None]:
        """Measure the jumps of results when the arguments move by the error of a library function.

        With half of the step, the second difference of a smooth function shrinks to a quarter, or less if its
        curvature vanishes. If there is a jump on the way, the second difference keeps its size, or vanishes.

        Example:
            >>> x = torch.tensor([0.49, 0.2], dtype=torch.float64)
            >>> both = Computation.of(lambda flat: [flat[0].round() + flat[0] ** 8], [x], torch.Generator())
            >>> both.leaps(torch.bfloat16)[0].round()
            tensor([1., 0.], dtype=torch.float64)
        """
        if not self.has_truth:
            return [None] * len(self.results)
        if dtype not in self._leaps:
            found = self._still
            for draw in range(MOVES):
                step = LIBRARY * unit_roundoff(dtype) * (1 + draw / MOVES)
                moved = [self._moved(step * share, draw) for share in (1.0, 0.5, 0.25)]
                found = [*map(_leap, found, self.results, *moved)]
            self._leaps[dtype] = found
        return self._leaps[dtype]

    @cached_property
    def _leaps(self) -> dict[torch.dtype, Sequence[Tensor | None]]:
        return {}

    def _moved(self, step: float, draw: int) -> Sequence[Tensor | None]:
        generator = self._own_generator(draw)
        return self.function([perturbed(value, step, generator) for value in self.wide])

    @cached_property
    def largest_argument(self) -> float:
        """The largest number of any argument."""
        return max((largest_magnitude(value) for value in self.wide if is_inexact(value)), default=0.0)

    def noise(self, dtype: torch.dtype = torch.float64) -> float:
        """Return the largest rounding error of any element, which remains if all right terms cancel."""
        found = [largest_magnitude(each) for each in self.moves(dtype) if each is not None]
        return allowed_roundings(1) * torch.finfo(dtype).eps * max(found, default=0.0)

    @cached_property
    def summands(self) -> tuple[int, ...]:
        """For each result, the maximum number of input elements on which one of its elements depends."""
        if not self.has_truth:
            return (_largest([value for value in self.wide if is_inexact(value)]),) * len(self.results)
        return tuple(fan_in(self.function, [*self.wide], position) for position in range(len(self.results)))

    @cached_property
    def own_errors(self) -> tuple[float, ...]:
        """Error of the function itself in float32, in units; the same number is used for every dtype."""
        found = [[*map(_own_error, answers)] for answers in self._in_float32(FIRST_MOVES)]
        return tuple(map(max, zip(*found, strict=True))) or (0.0,) * len(self.results)

    @cached_property
    def terms(self) -> tuple[Tensor | None, ...]:
        """For each result, the size of the terms that cancel in each element.

        Example:
            >>> x = torch.full((1,), 99.0, dtype=torch.float64)
            >>> slope = Computation.of(lambda flat: [1 - flat[0].tanh() ** 2], [x], torch.Generator())
            >>> [f"{float(each):.1f}" for each in (slope.results[0], slope.terms[0])]
            ['0.0', '0.9']
        """
        inexact = [position for position, value in enumerate(self.wide) if is_inexact(value)]
        found = tuple(self._still)
        for group in _groups(inexact):
            before: Sequence[Tensor | None] | None = None
            for factor in SHRUNK:
                sizes = self._sizes([v * factor if at in group else v for at, v in enumerate(self.wide)])
                if before is not None and sizes is not None:
                    found = tuple(map(_plateau, found, before, sizes))
                before = sizes
        return found

    def _sizes(self, flat: Sequence[Any]) -> Sequence[Tensor | None] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = self.function([*map(replica, flat)])
            except (Exception, SystemExit) as error:  # an argument outside of its domain shows nothing
                raise_own(error)
                return None
        return [
            None if each is None or not is_inexact(each) else each.detach().abs().nan_to_num(0, 0, 0)
            for each in found
        ]

    @cached_property
    def precision(self) -> torch.dtype:
        """The dtype in which it computes for float64 arguments: float64 or float32."""
        try:
            if self.computed_in is not None and self.computed_in() == torch.float32:
                return torch.float32
            return working_precision(self.function, self.wide, self._own_generator())
        except (RuntimeError, TypeError, ValueError) as error:
            raise_own(error)  # for example if arguments must be integers
            return torch.float64

    def _own_generator(self, stream: int = 0) -> torch.Generator:
        """A separate generator, so that the state of `generator` does not change."""
        return torch.Generator().manual_seed(self.generator.initial_seed() + stream)

    def _in_double(self, flat: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The results in float64; the sample's own results are known."""
        wide = in_double_on_cpu(flat)
        return self.results if self._is_sample(wide) else tuple(self.function(wide))

    def _is_sample(self, flat: Sequence[Any]) -> bool:
        """True if arguments equal the sample's in float64, bit for bit."""
        return all(map(_same_argument, flat, self.wide))


def _own_error(answer: Answer) -> float:
    """The error of the function itself, in units of an element's sensitivity."""
    if not is_inexact(answer.value) or answer.ordinary is None:
        return 0.0
    return answer.own_error(answer.unit(answer.tensor.abs() + answer.moved_by(MOVES)))


def _farther(
    step: float, known: Tensor | None, unmoved: Tensor | None, moved: Tensor | None
) -> Tensor | None:
    """The larger of a known change and this change, divided by the step."""
    if known is None or unmoved is None or moved is None:
        return known
    if moved.shape != unmoved.shape:
        return torch.full_like(known, torch.inf)  # a different shape: half of the digits are allowed there
    return torch.maximum(known, (moved.detach() - unmoved).abs().nan_to_num(0.0, 0.0, 0.0) / step)


def _leap(
    known: Tensor | None,
    still: Tensor | None,
    far: Tensor | None,
    half: Tensor | None,
    quarter: Tensor | None,
) -> Tensor | None:
    """The larger of a known jump and the jump between a result and the results for three steps."""
    if known is None or still is None or far is None or half is None or quarter is None:
        return known
    if not still.shape == far.shape == half.shape == quarter.shape:
        return torch.full_like(known, torch.inf)
    curved, less = ((b - 2 * a + still).abs().nan_to_num(0.0) for a, b in ((half, far), (quarter, half)))
    smooth = (SMOOTH[0] * curved <= less) & (less <= SMOOTH[1] * curved)
    return torch.where(smooth, known, torch.maximum(known, torch.maximum(curved, less)))


def _groups(positions: Sequence[int]) -> list[tuple[int, ...]]:
    """Each position alone, all except one, and all; among them are grad_outputs, which scale a gradient."""
    found: list[tuple[int, ...]] = [(each,) for each in positions]
    found += [tuple(other for other in positions if other != each) for each in positions]
    return [group for group in dict.fromkeys([*found, tuple(positions)]) if group]


def _plateau(found: Tensor | None, larger: Tensor | None, smaller: Tensor | None) -> Tensor | None:
    """The largest size so far, updated where smaller arguments do not enlarge it further."""
    if found is None or larger is None or smaller is None or not found.shape == larger.shape == smaller.shape:
        return found
    return torch.maximum(found, torch.where(smaller <= PLATEAU * larger, larger, 0.0))


def fan_in(function: Function, flat: list[Any], position: int) -> int:
    """Count the input elements on which one element of a result depends: the maximum over a few elements.

    Without autograd, as for an opaque function, return the size of the largest input.
    """
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() if is_inexact(value) else value for value in flat]
        inputs = [leaf for leaf in leaves if is_inexact(leaf)]
        try:
            result = function(leaves)[position]
            if result is None or not result.requires_grad or not result.numel():
                return _largest(inputs)
            indices = sorted({0, result.numel() // 2, result.numel() - 1})[:PROBES]
            real = torch.view_as_real(result.resolve_conj()).sum(-1) if result.is_complex() else result
            return max(1, *(_reached(real.flatten()[index], inputs) for index in indices))
        except RuntimeError as error:
            raise_own(error)
            return _largest(inputs)


def _reached(element: Tensor, inputs: list[Tensor]) -> int:
    found = dense(torch.autograd.grad(element, inputs, retain_graph=True, allow_unused=True))
    return sum(int(gradient.count_nonzero()) for gradient in found if gradient is not None)


def _largest(inputs: list[Tensor]) -> int:
    return max((tensor.numel() for tensor in inputs), default=1)


def _same_argument(one: Any, other: Any) -> bool:
    """True if two arguments are the same: tensors bit for bit, other values by identity."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.stride() == other.stride() and same_bits(one, other)
    return one is other


def in_double_on_cpu(flat: Sequence[Any]) -> list[Any]:
    """Return the arguments on the CPU, with floating tensors in float64 and complex tensors in complex128."""
    return [replica(value, torch.float64, CPU) for value in flat]
