"""Detect a factor on the whole tensor, and name the factor."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from types import MappingProxyType

import torch
from torch import Tensor

from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair
from opsmith.checking.diagnosis.observation import Observation

STEADY = 1e-6
"""Relative difference below which factors of different inputs are the same."""

FEW = 3
"""Of fewer numbers each is a multiple of the other: only a constant or named factor is evidence."""


def scale(evidence: Evidence) -> Iterator[Detection]:
    """Detect a factor: constant on all inputs; or varying, but with a name or confirmed by many numbers."""
    factor = factor_of(evidence.first)
    if factor is None or abs(factor - 1) < 1e-6:
        return
    fresh = [factor_of(pair) for pair in evidence.fresh]
    factors = [factor, *(each for each in fresh if each is not None)]
    if len(factors) != len(evidence.pairs):
        return
    steady = all(cmath.isclose(each, factor, rel_tol=STEADY) for each in factors)
    if steady and abs(factor + 1) < 1e-6:
        return  # a wrong sign
    got = evidence.observation.got
    close = max(CLOSE, 16 * torch.finfo(got.dtype).eps) if got is not None else CLOSE
    if evidence.observation.tolerance is not None:
        close = max(close, 1e-4)  # finite differences have no more digits
    names = named_factors(evidence, factors, close)
    shown = shown_factor(factor, close)
    few = min(int(pair.expected.nan_to_num(0.0, 0.0, 0.0).count_nonzero()) for pair in evidence.pairs) < FEW
    if few and not (evidence.fresh and (names or steady)) and not _whole(shown):
        return
    measured = {"factor": factor.real if factor.imag == 0 else factor}
    if names:
        words = [name for name in names if name != shown]
        equals = " or ".join(words)
        reason = f"it is the right one times {shown}" + (f", which is {equals}" if words else "")
        yield Detection("scale", reason, {**measured, "equals": " or ".join(names)})
    elif steady:
        yield Detection("scale", f"it is the right one times {shown}", {**measured, "equals": shown})
    else:
        every = ", ".join(shown_factor(each, close) for each in factors)
        reason = f"it is the right one times a factor that depends on the inputs ({every} on fresh ones)"
        yield Detection("scale", reason, {**measured, "factors": every}, weak=True)


def _whole(shown: str) -> bool:
    """Return True if a factor is a whole number, or one over it."""
    return shown.lstrip("-").removeprefix("1/").isdigit()


def factor_of(pair: Pair) -> complex | None:
    """Return the factor between a pair's tensors; None if no factor explains all elements."""
    if not pair.same_shape:
        return None
    known = pair.expected.isfinite()  # finite differences do not know every element
    right, actual = pair.expected[known], pair.got[known]
    weight = float((right.abs() ** 2).sum())
    if not weight or not actual.any():
        return None
    factor = complex((right.conj() * actual).sum() / weight)
    if not pair.expected.is_complex() or abs(factor.imag) < 1e-9 * abs(factor):
        factor = complex(factor.real)
    return factor if pair.equals(pair.expected * (factor if factor.imag else factor.real)) else None


MOST = 3
"""Largest number of names in a message, where they are equally good."""

LARGEST = 64
"""Largest denominator of a factor that is shown as a fraction."""

CLOSE = 1e-9
"""Relative precision to which a factor must equal its name, if its digits suffice."""

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

Measure = Callable[[float], float]

FORMS: Mapping[str, Measure] = MappingProxyType(
    {
        "{}": lambda n: n,
        "1 over {}": lambda n: 1 / n,
        "the square root of {}": lambda n: math.sqrt(n),
        "1 over the square root of {}": lambda n: 1 / math.sqrt(n),
        "2 times {}": lambda n: 2 * n,
        "2 over {}": lambda n: 2 / n,
        "half of {}": lambda n: n / 2,
        "n/(n-1), with n {}": lambda n: n / (n - 1),
        "(n-1)/n, with n {}": lambda n: (n - 1) / n,
        "1/(n-1), with n {}": lambda n: 1 / (n - 1),
        "n-1, with n {}": lambda n: n - 1,
        "the square of {}": lambda n: n * n,
        "1 over the square of {}": lambda n: 1 / (n * n),
    }
)

_OF_SIZES = "with n"
_JUST_A_SIZE = ("{}", "1 over {}")
OF_ARGUMENTS = {form: measure for form, measure in FORMS.items() if _OF_SIZES not in form}
OF_ARGUMENTS |= {"1 minus {}": lambda a: 1 - a, "1 over 1 minus {}": lambda a: 1 / (1 - a)}


def shown_factor(factor: complex, close: float = CLOSE) -> str:
    """Format a factor for a message.

    Args:
        factor: The factor.
        close: Its relative precision.

    Example:
        >>> shown_factor(1 / 12), shown_factor(3.14159265358979), shown_factor(2.71828)
        ('1/12', 'pi', '2.71828')
    """
    if abs(factor.imag) > 1e-12 * abs(factor):
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
    """Name the quantities that the factors equal, on their inputs and at other sizes; the likeliest first.

    Args:
        evidence: Pairs; the factors are those of `evidence.pairs`.
        factors: One for each pair.
        close: Relative precision of the factors.
    """

    at_other_sizes = [(pair.observation, factor_of(pair)) for pair in evidence.other_sizes]
    known = [(each, factor) for each, factor in at_other_sizes if factor is not None]
    cases = [*zip((pair.observation for pair in evidence.pairs), factors, strict=True), *known]
    if any(abs(factor.imag) > close * abs(factor) for _, factor in cases):
        return []
    names = []
    first = shown_factor(factors[0], close)
    named = "." not in first or first.lstrip("-") in CONSTANTS
    if named and all(_close(factor.real, factors[0].real, close) for _, factor in cases):
        names.append(first)
    # A small number that fits everywhere is likelier than a function of sizes, unless it is just a size.
    plain = names == [first] and _plain(factors[0].real)
    for name in _names(evidence.observation, factors[0].real, close):
        if plain and name[1] == "size" and name[0].removeprefix("minus ") not in _JUST_A_SIZE:
            continue
        if all(_close(factor.real, _value(name, each), close) for each, factor in cases):
            names.append(name[0].format(name[2]))
    # A size is likelier than 1/12.
    if names and names[0] == first and len(names) > 1 and not plain:
        names = [*names[1:MOST], first]
    return names[:MOST]


Name = tuple[str, str, str]
"""Form, kind of quantity, and label of the quantity."""


def _names(observation: Observation, factor: float, close: float) -> Iterator[Name]:
    """Yield the names that the first factor may have."""
    for kind, quantities in (("size", sizes(observation)), ("argument", arguments(observation))):
        for which in quantities:
            for form in OF_ARGUMENTS if kind == "argument" else FORMS:
                for sign in ("", "minus "):
                    name = (sign + form, kind, which)
                    if _close(factor, _value(name, observation), close):
                        yield name


def _value(name: Name, observation: Observation) -> float | None:
    form, kind, which = name
    quantities = sizes(observation) if kind == "size" else arguments(observation)
    if which not in quantities:
        return None
    measure: Measure = {**FORMS, **OF_ARGUMENTS}[form.removeprefix("minus ")]
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        return (-1 if form.startswith("minus ") else 1) * measure(quantities[which])
    return None


def sizes(observation: Observation) -> dict[str, float]:
    """Return numbers of elements and sizes of dimensions, by name; the input's own first."""
    every = {**observation.inputs, **observation.results}
    tensors = {label: each for label, each in every.items() if isinstance(each, Tensor) and each.numel()}
    order = sorted(tensors, key=lambda label: label != observation.argument)
    found: dict[str, float] = {
        f"the number of elements of `{label}`": tensors[label].numel() for label in order
    }
    for label in order:
        for dim, size in enumerate(tensors[label].shape if tensors[label].dim() > 1 else ()):
            found[f"the size of dimension {dim} of `{label}`"] = size
    result = next((value for value in observation.results.values() if value.numel()), None)
    own = observation.inputs.get(observation.argument or "")
    if result is not None and isinstance(own, Tensor) and own.numel() and result.numel() != own.numel():
        found[f"the number of elements of the result for each of `{observation.argument}`"] = (
            result.numel() / own.numel()
        )
    return found


def arguments(observation: Observation) -> dict[str, float]:
    """Return the numbers among the arguments, and tensors of one element."""
    found: dict[str, float] = {}
    for label, value in observation.inputs.items():
        single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if single or (isinstance(value, int | float) and not isinstance(value, bool)):
            found[f"`{label}`"] = float(value)
    return found


def _close(factor: float, value: float | None, close: float) -> bool:
    return value is not None and math.isclose(factor, value, rel_tol=close)


def _plain(factor: float) -> bool:
    if not math.isfinite(factor):
        return False
    simple = Fraction(abs(factor)).limit_denominator(LARGEST)
    return max(simple.numerator, simple.denominator) <= 4
