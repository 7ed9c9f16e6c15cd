"""Autocast: results have the dtypes that are promised, and forward and backward fit together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, record_copies, rule_location
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.numerics.answer import Answer, Computation, Function
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, vjp
from opsmith.checking.numerics.compare import Difference, exact_difference, metadata_difference
from opsmith.checking.numerics.judge import judge
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.batched_gradients import gradients_of
from opsmith.checking.property import Coverage, Findings, Property, covered_samples, first_line, of_exception
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import dtype_name
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property

WIDE = torch.float32
"""dtype of the inputs: autocast leaves float64 alone."""


@dataclass(frozen=True)
class Casting:
    """A sample in float32, to be run under autocast.

    Args:
        subject: The subject of the check.
        sample: The sample.
        device: Its device.
        dtype: The dtype that autocast lowers to.
    """

    subject: Subject
    sample: Sample
    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.sample} under autocast to {dtype_name(self.dtype)} on {self.device.type}"

    def call(self, flat: Sequence[Any]) -> list[Any]:
        """The results, as users get them."""
        return self.subject.call(self.sample, flat)

    def region(self) -> torch.autocast:
        """The region under autocast."""
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def promised(self) -> bool:
        """True if dtypes of results are promised: a declared operator casts its arguments by its rule.

        An adopted class behaves as the class does, which promises nothing.
        """
        return self.subject.specification.origin.kind == "declared"

    def cast(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments as the operator's rule for autocast casts them."""
        rule = self.subject.specification.autocast
        dtype = self.dtype if rule == "lower" else WIDE
        return [_cast_value(value, dtype) for value in flat]

    @cached_property
    def results(self) -> Sequence[Answer]:
        """The right results, held to the digits of autocast's dtype."""
        function = self.call if self.subject.apply is not None else self.subject.plain(self.sample)
        return self._answers(function, self.sample.at(WIDE, self.device))

    def gradients(self, argnums: Sequence[int], grads: Sequence[Tensor | None]) -> Sequence[Answer]:
        """The right gradients, held to the digits of autocast's dtype.

        Args:
            argnums: The arguments to differentiate by.
            grads: The gradient of each result.
        """
        flat = [*self.sample.at(WIDE, self.device), *grads]
        function = partial(gradients_of, self.call, argnums, len(self.sample.flat))
        return self._answers(function, flat)

    def _answers(self, function: Function, flat: list[Any]) -> Sequence[Answer]:
        subject = self.subject
        right = Computation.of(function, flat, subject.generator(), has_truth=subject.has_truth)
        return right.at(flat, self.dtype)


def _cast_value(value: Any, dtype: torch.dtype) -> Any:
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(dtype) if fits else value


def representable(like: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A random tensor like another, of numbers that are exact in a dtype."""
    wide = torch.complex128 if like.is_complex() else torch.float64
    random = torch.randn(like.shape, generator=generator, dtype=wide)
    return random.to(dtype if not like.is_complex() else like.dtype).to(like)


def claims_autocast(subject: Subject) -> bool:
    """True if it claims to support autocast, as our operators and classes under `custom_fwd` do."""
    origin = subject.specification.origin
    return origin.kind == "declared" or origin.own("autocast") is not None


def autocast_state(kind: str) -> tuple[bool, torch.dtype, bool]:
    """Autocast's own state for a type of device: on or off, its dtype, whether it caches."""
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


NAME = "autocast"
DTYPES = (torch.bfloat16, torch.float16)


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Run every sample in float32 under autocast, and its backward outside."""
    first = not subject.rank(sample)
    if not sample.inexact or subject.rank(sample) >= subject.effort.samples:
        return
    for device in subject.devices:
        for dtype in DTYPES if subject.effort.exhaustive else DTYPES[:1]:
            casting = Casting(subject, sample, device, dtype)
            try:
                subject.call(sample, sample.at(WIDE, device))
            except Exception as error:
                refuse_own(error)
                coverage.refused[f"it does not run in float32: {first_line(error)}"] = None
                continue
            yield from _cast(casting, coverage)
            if first and coverage.ran and dtype == DTYPES[0]:
                yield from _mixed(casting, coverage)


def _cast(casting: Casting, coverage: Coverage) -> Findings:
    """One forward under autocast, and its backward outside of it."""
    subject, sample, kind = casting.subject, casting.sample, casting.device.type
    argnums = differentiated(subject, sample).argnums
    outside = autocast_state(kind)
    try:
        with without_warnings(), casting.region():
            inside = autocast_state(kind)
            leaves, results = record_copies(casting.call, sample.at(WIDE, casting.device), argnums)
            yield from _leaked(casting, inside, autocast_state(kind), "a call")
    except Exception as error:
        refuse_own(error)
        yield from _restored(casting, outside)
        coverage.refused[f"under autocast it raises {type(error).__name__}: {first_line(error)}"] = None
        return
    coverage.ran += 1
    wrong = [*_results(casting, results, coverage)]
    yield from wrong
    open_ = [has_gradient(each) for each in results]
    if wrong or not argnums or not any(open_):
        return
    yield from _backward(casting, leaves, results, open_, argnums, coverage)
    yield from _restored(casting, outside)


def _results(casting: Casting, results: Sequence[Any], coverage: Coverage) -> Findings:
    """Hold the results to the dtypes that are promised, and to the rounding of autocast's dtype."""
    subject, sample = casting.subject, casting.sample
    expected = _promised(casting)
    for position, (got, described) in enumerate(zip(results, subject.results(sample), strict=True)):
        right = expected[position] if expected is not None else None
        if not isinstance(got, Tensor):
            continue
        fault = None if right is None else metadata_difference(got, right, strides=False)
        rule = subject.specification.autocast
        if fault is not None:
            aspect, actual, wanted = fault
            yield Failure(
                NAME,
                described.name,
                aspect if aspect in ("shape", "dtype") else "dtype",
                f"under autocast `{described.name}` has the {aspect} {actual}, and autocast={rule!r} "
                f"promises {wanted}",
                subject.specification.where,
                {"sample": str(casting), "got": actual, "expected": wanted},
            )
            continue
        if right is not None and exact_difference(got, right) is None:
            continue
        if not got.is_floating_point() or not subject.has_truth:
            continue
        found = _judged(lambda: casting.results, position, got, coverage)
        if found is not None:
            yield Failure(
                NAME,
                described.name,
                "kernel-mismatch",
                f"under autocast `{described.name}` is further off than rounding to "
                f"{dtype_name(casting.dtype)} explains: {found}",
                subject.specification.where,
                {"sample": str(casting), **found.evidence()},
            )


def _judged(
    answers: Callable[[], Sequence[Answer]], position: int, got: Tensor, coverage: Coverage
) -> Difference | None:
    """The worst wrong element; None where there is none, or where the right numbers are unknown."""
    try:
        right = answers()[position]
        fits = right.value is not None and right.value.shape == got.shape
        return judge(got, right).difference if fits else None
    except Exception as error:
        refuse_own(error)
        words = "the numbers under autocast were left out, for it does not run in float64"
        coverage.refused[f"{words}: {first_line(error)}"] = None
        return None


def _promised(casting: Casting) -> list[Any] | None:
    """Results of a call whose arguments are cast as promised; None where nothing is promised."""
    if not casting.promised:
        return None
    with Overlooking():  # what it raises is reported for the call under autocast
        return casting.call(casting.cast(casting.sample.at(WIDE, casting.device)))
    return None


def _backward(
    casting: Casting,
    leaves: Sequence[Any],
    results: Sequence[Any],
    open_: Sequence[bool],
    argnums: Sequence[int],
    coverage: Coverage,
) -> Findings:
    subject, sample = casting.subject, casting.sample
    generator = subject.generator()
    grads = [
        representable(each, casting.dtype, generator) if o else None
        for each, o in zip(results, open_, strict=True)
    ]
    plain = [None if grad is None else replica(grad, WIDE) for grad in grads]
    try:
        vjp(casting.call, sample.at(WIDE, casting.device), argnums, plain)
    except Exception as error:
        refuse_own(error)
        return  # it is wrong without autocast too, which `gradient` reports
    inputs = [leaves[argnum] for argnum in argnums]
    labels = ", ".join(sample.labels[argnum] for argnum in argnums)
    try:
        with without_warnings():
            found = differentiate(results, inputs, grads)
    except NotImplementedError as error:
        coverage.refused[first_line(error)] = None
        return
    except Exception as error:
        refuse_own(error)
        message = (
            f"after a forward under autocast to {dtype_name(casting.dtype)}, the backward raises "
            f"{type(error).__name__}: {first_line(error)}; in float32 it does not. "
        )
        if not claims_autocast(subject):
            hint = "`torch.amp.custom_fwd` and `custom_bwd` over both make them fit"
            coverage.refused[message + hint] = None
            return
        cause = "dtype" if re.search(_DTYPE, str(error)) else "raises"
        message += "The dtypes that the forward saves and that come in are not the same there"
        where = rule_location(subject, sample.names[argnums[0]])
        yield Failure(NAME, labels, cause, message, where, of_exception(error, str(casting)))
        return
    if not subject.has_truth:
        return
    yield from _gradients(casting, argnums, plain, found, coverage)


_DTYPE = r"dtype|scalar type|BFloat16|Half|data type"
"""Words in torch's errors about dtypes that do not fit."""


def _gradients(
    casting: Casting,
    argnums: Sequence[int],
    plain: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    coverage: Coverage,
) -> Findings:
    """Hold the gradients to the rounding of autocast's dtype."""
    subject, sample = casting.subject, casting.sample
    answers = cache(partial(casting.gradients, argnums, plain))
    for position, (argnum, got) in enumerate(zip(argnums, found, strict=True)):
        value = sample.flat[argnum]
        actual = torch.zeros_like(value, dtype=WIDE) if got is None else got
        difference = _judged(answers, position, actual, coverage) if actual.is_floating_point() else None
        if difference is None:
            continue
        label = sample.labels[argnum]
        yield Failure(
            NAME,
            label,
            UNKNOWN,
            f"after a forward under autocast, the gradient of `{label}` is further off than rounding to "
            f"{dtype_name(casting.dtype)} explains: {difference}",
            rule_location(subject, sample.names[argnum]),
            {"sample": str(casting), **difference.evidence()},
        )


def _mixed(casting: Casting, coverage: Coverage) -> Findings:
    """Arguments of several dtypes, as layers under autocast hand them on."""
    subject, sample = casting.subject, casting.sample
    if len(sample.inexact) < 2 or any(sample.flat[argnum].is_complex() for argnum in sample.inexact):
        return
    for argnum in sample.inexact:
        flat = sample.at(WIDE, casting.device)
        flat[argnum] = replica(flat[argnum], casting.dtype)
        try:
            with without_warnings(), torch.no_grad(), casting.region():
                casting.call(flat)
        except Exception as error:
            refuse_own(error)
            label = sample.labels[argnum]
            words = f"under autocast, with `{label}` alone in {dtype_name(casting.dtype)}, it raises "
            message = f"{words}{type(error).__name__}: {first_line(error)}"
            if casting.promised and not isinstance(error, NotImplementedError):
                where, evidence = subject.specification.where, of_exception(error, str(casting))
                yield Failure(NAME, label, "raises", message, where, evidence)
            else:
                coverage.refused[message] = None


def _leaked(casting: Casting, before: Any, after: Any, what: str) -> Findings:
    """Report a call that leaves autocast in another state."""
    if before != after:
        yield Failure(
            NAME,
            None,
            "side-effect",
            f"{what} under autocast leaves autocast in another state: on, dtype and cache were {before}, and "
            f"are {after}",
            casting.subject.specification.where,
            {"sample": str(casting)},
        )


def _restored(casting: Casting, before: tuple[bool, torch.dtype, bool]) -> Findings:
    """Report a changed state outside of the region, and restore it."""
    kind = casting.device.type
    after = autocast_state(kind)
    yield from _leaked(casting, before, after, "a call and its backward")
    if after != before:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_autocast_cache_enabled(before[2])


AUTOCAST = Property(
    NAME,
    "under autocast, dtypes are as promised, and forward and backward fit",
    partial(covered_samples, NAME, _sample, "no sample has a floating tensor, which autocast casts"),
    subset=True,
    transforms=True,
    given=of_tools,
    group="integration",
)
