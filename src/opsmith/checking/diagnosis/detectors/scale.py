"""Detect a factor of the whole tensor or of each index, or a wrong sign, and name the factor.

A factor of a part belongs to `region`, which describes this fault better.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.decompositions import NAMED
from opsmith.checking.diagnosis.observation import (
    FEW,
    OF_ENTRIES,
    SAME,
    Detection,
    Evidence,
    Observation,
    Prediction,
    Source,
    multiple,
    times,
    values_beside,
)
from opsmith.judging.compare import all_finite


def scale(evidence: Evidence) -> Iterator[Detection]:
    """Detect a factor that is constant on all inputs, or varies but has a name or many numbers as proof."""
    factors = [each for each in map(factor_of, evidence.pairs) if each is not None]
    if len(factors) != len(evidence.pairs) or abs(factors[0] - 1) < SAME:
        return
    factor = factors[0]
    steady = all(cmath.isclose(each, factor, rel_tol=SAME) for each in factors)
    if steady and abs(factor + 1) < SAME:
        return  # a wrong sign
    computed, close = evidence.first.computed, NAMED
    if computed is not None:
        close = max(NAMED, 16 * torch.finfo(computed.dtype).eps)
    if evidence.first.tolerance is not None:
        close = max(close, 1e-4)  # finite differences have only these digits
    names = named_factors(evidence, factors, close)
    shown = shown_factor(factor, close)
    few = min(int(pair.expected.nan_to_num(0.0, 0.0, 0.0).count_nonzero()) for pair in evidence.pairs) < FEW
    if few and not (evidence.fresh and (names or steady)) and not _whole(shown):
        return
    measured = {"factor": factor if factor.imag else factor.real}
    if names or steady:
        words = [name for name in names if name != shown]
        reason = f"it is the right tensor times {shown}" + (
            f", which is {' or '.join(words)}" if words else ""
        )
        yield Detection("scale", reason, {**measured, "equals": " or ".join(names or [shown])})
    else:
        every = ", ".join(shown_factor(each, close) for each in factors)
        reason = f"it is the right tensor times a factor that depends on the inputs ({every} on fresh inputs)"
        yield Detection("scale", reason, {**measured, "factors": every}, weak=True)


def _whole(shown: str) -> bool:
    """Return True if a factor is an integer, or 1 over an integer."""
    return shown.lstrip("-").removeprefix("1/").isdigit()


def factor_of(pair: Observation) -> complex | None:
    """Return the factor between a pair's two tensors; None if no factor explains all elements."""
    if not pair.same_shape or not pair.got.any():
        return None
    known = pair.expected.isfinite()  # finite differences do not know every element
    factor = multiple(pair.expected[known], pair.got[known])
    return factor if factor is not None and pair.equals(times(factor, pair.expected)) else None


def steady_factor(
    evidence: Evidence, measure: Callable[[Observation], complex | None] = factor_of
) -> complex | None:
    """Return the factor that a function finds, if it is the same in every observation."""
    first = measure(evidence.first)
    same = first is not None and evidence.everywhere(
        lambda pair: cmath.isclose(measure(pair) or 0, first, rel_tol=SAME)
    )
    return first if same else None


MOST = 3
"""Maximum number of equally good names in a message."""

LARGEST = 64
"""Maximum denominator of a factor that is shown as a fraction."""

CONSTANTS: Mapping[str, float] = MappingProxyType(
    {
        "pi": math.pi,
        "2 pi": 2 * math.pi,
        "pi/2": math.pi / 2,
        "1/pi": 1 / math.pi,
        "1/(2 pi)": 0.5 / math.pi,
        "2/pi": 2 / math.pi,
        "sqrt(2)": math.sqrt(2),
        "1/sqrt(2)": math.sqrt(0.5),
        "sqrt(pi)": math.sqrt(math.pi),
        "1/sqrt(pi)": 1 / math.sqrt(math.pi),
        "sqrt(2 pi)": math.sqrt(2 * math.pi),
        "1/sqrt(2 pi)": 1 / math.sqrt(2 * math.pi),
        "sqrt(2/pi)": math.sqrt(2 / math.pi),
        "sqrt(pi/2)": math.sqrt(math.pi / 2),
        "2/sqrt(pi)": 2 / math.sqrt(math.pi),
        "sqrt(pi)/2": math.sqrt(math.pi) / 2,
        "sqrt(3)": math.sqrt(3),
        "1/sqrt(3)": 1 / math.sqrt(3),
        "e": math.e,
        "1/e": 1 / math.e,
        "ln(2)": math.log(2),
        "1/ln(2)": 1 / math.log(2),
        "ln(10)": math.log(10),
        "1/ln(10)": 1 / math.log(10),
        "pi/180, from degrees to radians": math.pi / 180,
        "180/pi, from radians to degrees": 180 / math.pi,
    }
)

FORMS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "{}": lambda n: n,
        "1 over {}": lambda n: 1 / n,
        "the square root of {}": lambda n: math.sqrt(n),
        "1 over the square root of {}": lambda n: 1 / math.sqrt(n),
        "2 times {}": lambda n: 2 * n,
        "2 over {}": lambda n: 2 / n,
        "half of {}": lambda n: n / 2,
        "the square of {}": lambda n: n * n,
        "1 over the square of {}": lambda n: 1 / (n * n),
    }
)

OF_SIZES: Mapping[str, Callable[[float], float]] = {
    **FORMS,
    "n/(n-1), with n {}": lambda n: n / (n - 1),
    "(n-1)/n, with n {}": lambda n: (n - 1) / n,
    "1/(n-1), with n {}": lambda n: 1 / (n - 1),
    "n-1, with n {}": lambda n: n - 1,
}
OF_ARGUMENTS: Mapping[str, Callable[[float], float]] = {
    **FORMS,
    "1 minus {}": lambda a: 1 - a,
    "1 over 1 minus {}": lambda a: 1 / (1 - a),
}


def shown_factor(factor: complex, close: float = NAMED) -> str:
    """Format a factor for a message, given its relative precision.

    Example:
        >>> shown_factor(1 / 12), shown_factor(3.14159265358979), shown_factor(2.71828)
        ('1/12', 'pi', '2.71828')
    """
    if abs(factor.imag) > NAMED * abs(factor):
        return f"{factor:.6g}"
    value = factor.real
    if not math.isfinite(value):
        return str(value)
    simple = Fraction(value).limit_denominator(LARGEST)
    if simple and abs(simple.numerator) <= 4096 and abs(value - simple) <= close * abs(value):
        tenths = simple.denominator % 5 == 0 and abs(simple.numerator) > 1
        return f"{value:.6g}" if tenths else str(simple)
    for name, constant in CONSTANTS.items():
        if abs(abs(value) - constant) <= close * constant:
            return name if value > 0 else f"-{name}"
    return f"{value:.6g}"


def named_factors(evidence: Evidence, factors: Sequence[complex], close: float) -> list[str]:
    """Name the quantities that equal the factors, also at other sizes; the likeliest name comes first.

    Args:
        evidence: Pairs; the factors are those of `evidence.pairs`.
        factors: A factor for each pair.
        close: Relative precision of the factors.
    """
    cases = [*zip(evidence.pairs, factors, strict=True)]
    for pair in evidence.other_sizes:
        factor = factor_of(pair)
        cases += [] if factor is None else [(pair, factor)]
    if any(abs(factor.imag) > close * abs(factor) for _, factor in cases):
        return []
    value = factors[0].real
    first = shown_factor(value, close)
    named = "." not in first or first.lstrip("-") in CONSTANTS
    names = (
        [first] if named and all(math.isclose(each.real, value, rel_tol=close) for _, each in cases) else []
    )
    # A small number that always fits is likelier than a function of sizes, but not than a size itself.
    simple = Fraction(abs(value)).limit_denominator(LARGEST) if math.isfinite(value) else Fraction(LARGEST)
    plain = names == [first] and max(simple.numerator, simple.denominator) <= 4
    known = [(quantities(pair, plain=plain), factor.real) for pair, factor in cases]
    for name, sign in product(known[0][0], (1, -1)):
        if all(math.isclose(each, sign * found.get(name, 0), rel_tol=close) for found, each in known):
            names.append(f"{'minus ' * (sign < 0)}{name}")
    return names[:MOST]


def quantities(pair: Observation, *, plain: bool) -> dict[str, float]:
    """Return candidates for a factor by name: sizes, number arguments, and simple functions of them.

    Args:
        pair: The observation.
        plain: True to leave out functions of sizes.
    """
    found: dict[str, float] = {}
    of_sizes = {form: FORMS[form] for form in ("{}", "1 over {}")} if plain else OF_SIZES
    for numbers, forms in ((sizes(pair), of_sizes), (arguments(pair), OF_ARGUMENTS)):
        for (name, number), (form, measure) in product(numbers.items(), forms.items()):
            with suppress(ValueError, ZeroDivisionError, OverflowError):
                found[form.format(name)] = measure(number)
    return found


def sizes(pair: Observation) -> dict[str, float]:
    """Return numbers of elements and sizes of dimensions, by name; the input's own come first."""
    every = {**pair.inputs, **pair.results}
    order = sorted(every, key=lambda label: label != pair.argument)
    tensors = {label: every[label] for label in order if isinstance(every[label], Tensor)}
    found = {f"the number of elements of `{label}`": float(each.numel()) for label, each in tensors.items()}
    for label, each in tensors.items():
        for dim, size in enumerate(each.shape if each.dim() > 1 else ()):
            found[f"the size of dimension {dim} of `{label}`"] = size
    result, own = next(iter(pair.results.values()), None), pair.own
    if result is not None and isinstance(own, Tensor) and own.numel() not in (0, result.numel()):
        per_element = f"the number of elements of the result for each element of `{pair.argument}`"
        found[per_element] = result.numel() / own.numel()
    return found


def arguments(pair: Observation) -> dict[str, float]:
    """Return the arguments that are numbers or tensors of one element."""
    return {
        f"`{label}`": float(value)
        for label, value in pair.inputs.items()
        if (isinstance(value, int | float) and not isinstance(value, bool))
        or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    }


SHOWN = 6
"""Maximum number of factors in a message."""


def per_index_scale(evidence: Evidence) -> Iterator[Detection]:
    """Detect factors that equal the number of occurrences of an index, or are constant on fresh inputs."""
    numbers = [torch.stack([pair.got, pair.expected]) for pair in evidence.pairs]
    if all(all_finite(each) and not each.is_complex() and each.numel() > 2 for each in numbers):
        yield from _of_groups(evidence.first)
        yield from _steady(evidence)


def _steady(evidence: Evidence) -> Iterator[Detection]:
    """Detect factors that depend only on the position, and are the same on every fresh input."""
    rights, mines = (
        torch.stack([getattr(pair, side) for pair in evidence.pairs]) for side in ("expected", "got")
    )
    known = (rights != 0).sum(0) >= FEW
    if not bool((known | (rights == 0).all(0)).all()):
        return

    def fitted(*dims: int) -> Tensor:
        """Fit factors that are constant along some dimensions."""
        over = (0, *(dim + 1 for dim in dims))
        weight = (rights * rights).sum(over, keepdim=True)[0]
        return torch.where(weight > 0, (rights * mines).sum(over, keepdim=True)[0] / weight, 1.0)

    def fits(factors: Tensor) -> bool:
        return evidence.fits(lambda pair: pair.expected * factors)

    factors = fitted()
    if not _varied(factors[known]) or not fits(factors):
        return
    words = f"it is the right tensor times a different factor for each element: {_listed(factors)}"
    for dim in range(factors.dim()) if factors.dim() > 1 else ():
        alike = fitted(*(other for other in range(factors.dim()) if other != dim))
        if fits(alike):
            words = (
                f"it is the right tensor times a factor for each index of dimension {dim}: {_listed(alike)}"
            )
            break
    other = factors[known & ((factors - 1).abs() > SAME)]
    part = not _varied(other) or 2 * len(other) <= int(known.sum())  # `region` describes a wrong part better
    yield Detection(
        "scale",
        f"{words}; the factors are the same on fresh inputs",
        {"factors": factors.tolist()},
        weak=part,
    )


def _varied(factors: Tensor) -> bool:
    """Return True if there is more than one factor."""
    low, high = (float(each) for each in factors.aminmax()) if factors.numel() else (1.0, 1.0)
    return not math.isclose(low, high, rel_tol=SAME)


def _listed(factors: Tensor) -> str:
    shown = [shown_factor(each, SAME) for each in factors.flatten().tolist()]
    return ", ".join(shown[:SHOWN]) + (", ..." if len(shown) > SHOWN else "")


COUNTS = MappingProxyType(
    {
        "1 over the number of times that {}": lambda count: 1 / count,
        "the number of times that {}": lambda count: count,
    }
)


def _of_groups(first: Observation) -> Iterator[Detection]:
    """Yield hypotheses of means over groups in place of sums, and of sums in place of means."""
    for (name, how), counts in values_beside(first).items():
        if not how.startswith("times") or not _varied(counts.clamp_min(1)[first.expected != 0]):
            continue
        dim = next(at for at in range(counts.dim()) if not torch.equal(counts, counts.roll(1, at)))
        tensor = name.rpartition(" in ")[2]
        occurs = (
            f"the entry of {tensor} at this index occurs in {tensor}"
            if how in OF_ENTRIES
            else f"the index occurs in {tensor}"
        )
        for form, take in COUNTS.items():
            equals = form.format(occurs)
            words = f"it is the right tensor times a factor for each index of dimension {dim}: {equals}"
            predicted = partial(_counted, source=(name, how), take=take)
            yield Detection("scale", words, {"equals": equals}, predicted=predicted)


def _counted(pair: Observation, source: Source, take: Callable[[Tensor], Tensor]) -> Tensor | None:
    counts = values_beside(pair).get(source, torch.ones(())).clamp_min(1)
    varied = _varied(counts.expand(pair.expected.shape)[pair.expected != 0])
    return pair.expected * take(counts) if varied else None


def sign(evidence: Evidence) -> Iterator[Detection]:
    """Detect the negative, the complex conjugate, or the result of a forgotten conjugate."""
    if evidence.first.expected.any():
        yield from (Detection("sign", reason, predicted=predicted) for reason, predicted in SIGNS.items())


def _holomorphic(pair: Observation) -> Tensor | None:
    """Compute grad * f' by two conjugations; for a holomorphic f, grad * conj(f') is right."""
    found = pair.if_changed(torch.conj)
    return None if found is None else found.conj().resolve_conj()


SIGNS: Mapping[str, Prediction] = MappingProxyType(
    {
        "it is the right tensor times -1": lambda pair: -pair.expected,
        "it is the complex conjugate of the right tensor: its imaginary part has the wrong sign": (
            lambda pair: pair.expected.conj().resolve_conj()
        ),
        "it is minus the complex conjugate of the right tensor: its real part has the wrong sign": (
            lambda pair: -pair.expected.conj().resolve_conj()
        ),
        "it lacks a conjugate: it is grad * f'(x), where grad * conj(f'(x)) is right": _holomorphic,
    }
)
