"""Special values: results and gradients at zeros, infinities, nan, tiny and large numbers, and boundaries.

Results must be nan if nan or infinities go in and the reference returns nan. Otherwise they must be finite
and equal where the reference's are finite. Gradients must be finite where the reference's are, and equal them
or lie between the one-sided derivatives. Nothing is required of gradients if an argument or result is
infinite or nan, of values for which the reference returns infinity or nan from finite numbers, and of values
that the operator rejects by an exception.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith import errors
from opsmith.checking.calls import computed_in, in_all_digits
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.numerics.finite_differences import numerical_gradient
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.properties.numeric.conventions import by_convention
from opsmith.checking.properties.numeric.gradient_truth import (
    Backward,
    RightGradients,
    approximate,
    approximate_by_differences,
    share_off,
    where_set,
    where_tied,
)
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.run import Coverage, Run, covered_runs
from opsmith.checking.samples.forms import forms_of
from opsmith.checking.samples.special_values import (
    ZEROS,
    SpecialCall,
    boundaries,
    placements,
    value_groups,
)
from opsmith.checking.subject import PERTURBATIONS, Subject
from opsmith.judging.answer import Answer, Computation, Half, in_double_on_cpu, unknown
from opsmith.judging.attribution import calls_operator
from opsmith.judging.compare import Difference, all_finite, are_equal, is_close, same_bits, unravel
from opsmith.judging.judge import wrong_elements
from opsmith.judging.tensors import CPU, is_inexact

NAME = "values"
FIRST = 4
"""Number of ordinary values that are tried at the positions of the special values first."""


def run(subject: Subject) -> Findings:
    """Put special values into every input of some samples, one input at a time."""
    if subject.draws:
        yield Skipped(
            "the operator draws random numbers, so its result for the same value differs from call to call"
        )
        return
    yield from covered_runs(NAME, _check, "no sample has a floating tensor with elements", subject)


def _check(run: Run, coverage: Coverage) -> Findings:
    subject, sample = run.subject, run.sample
    usable = [argnum for argnum in sample.inexact if sample.flat[argnum].numel()]
    if sample.origin or not usable or coverage.ran >= subject.effort.special_samples:
        return
    coverage.ran += 1
    plain = SpecialCall(subject, sample, NAME, CPU, forms=forms_of(subject))
    open_ = () if subject.specification.gradients.surrogate else run.argnums
    dtypes: list[torch.dtype] = []
    for dtype in (torch.float64,) if subject.single_precision else (torch.float64, torch.float32):
        failures = [*_ordinary(replace(plain, argnum=[*open_, *usable][0], dtype=dtype), open_)]
        wrong = {failure.input for failure in failures}
        if not wrong & {result.name for result in subject.results(sample)}:
            dtypes.append(dtype)
        nan = (failure for failure in failures if failure.cause == "nan")
        # `forward` reports a result that should be nan and is not.
        yield from (failure for failure in nan if cmath.isfinite(failure.evidence["expected"]))
        for label in sorted(label for label in wrong if label):
            yield Note(f"special values were skipped for `{label}`, which is already wrong on {sample.brief}")
        open_ = tuple(argnum for argnum in open_ if sample.labels[argnum] not in wrong)
    for argnum in usable:
        label = sample.labels[argnum]
        for call in _calls(replace(plain, argnum=argnum, by=open_), dtypes):
            if label in coverage.wrong:
                break
            for finding in _check_call(call):
                if isinstance(finding, Failure):
                    coverage.wrong.add(label)
                yield finding


def _calls(plain: SpecialCall, dtypes: Sequence[torch.dtype]) -> Iterator[SpecialCall]:
    """Every call with special values in one input."""
    subject, sample, found = plain.subject, plain.sample, list[float]()
    with Overlooking():  # other properties report values that it rejects or cannot differentiate
        found = _boundaries(plain) if plain.argnum in plain.argnums else []
    # A function that computes in float32 has float32's range.
    ranges = {each: computed_in(subject, sample) if each == torch.float64 else each for each in dtypes}
    calls = [
        replace(plain, group=group, dtype=dtype)
        for dtype in dtypes
        for group in value_groups(ranges[dtype], found)
    ]
    for form, dtype in product((form for form in plain.forms if form.label == plain.label), dtypes):
        group = replace(ZEROS, values=form.breaking, strained=True, broken=f", {form.broken}")
        kept = [each for each in plain.forms if each is not form]
        calls += [replace(plain, group=group, dtype=dtype, forms=kept)] if form.broken else []
    for call in calls:
        placed = placements(sample.flat[plain.argnum], call.group, subject.generator())
        yield from filter(None, map(call.placed, placed))


def _ordinary(plain: SpecialCall, open_: tuple[int, ...]) -> Iterator[Failure]:
    """Failures at the sample's own values; gradients are compared only in float64."""
    first = plain.kept[plain.argnum].reshape(-1)[:FIRST].tolist()
    held = open_ if plain.dtype == torch.float64 else ()
    call = replace(plain, special=dict(enumerate(first)), by=held)
    yield from (finding for finding in _check_call(call) if isinstance(finding, Failure))


def _boundaries(plain: SpecialCall) -> list[float]:
    """Values at which the gradient of one element jumps."""
    position, backward = plain.kept[plain.argnum].numel() // 2, Backward(plain.alone(plain.argnum))

    def derivative(value: float) -> float:
        flat = replace(plain, special={position: value}).kept
        return float(backward([*flat, *plain.grads])[0].reshape(-1)[position].real)

    return boundaries(derivative)


def _check_call(call: SpecialCall) -> Findings:
    subject, given = call.subject, call.flat()
    try:
        with torch.no_grad():
            got = subject.call(call.sample, given)
    except errors.MutationError as error:
        yield call.raised(error, call.label)
        return
    except EndlessCallError as error:
        error.strained = call.group.strained
        error.when = f", where `{call.label}` has {call.group.name} in it ({call.listed})"
        raise
    except Exception as error:
        refuse_own(error)
        yield Note(f"the operator rejects `{call.label}` with {call.group.name} in it ({call.listed})")
        return
    yield from _written(call, given)
    wrong = _wrong_result(call, got) if subject.kind.has_reference else None
    if wrong is not None:
        yield wrong
    elif call.group.finite and call.argnums and all(all_finite(each) for each in got if is_inexact(each)):
        yield from _gradients(call)


def _written(call: SpecialCall, given: Sequence[Any]) -> Findings:
    """Report a write into an argument that only special values cause; `effects` reports all other writes."""
    subject, sample = call.subject, call.sample
    for argnum in sample.inexact:
        if same_bits(given[argnum], call.kept[argnum]):
            continue
        ordinary = sample.at(call.dtype, CPU)
        with torch.no_grad():
            subject.call(sample, ordinary)
        if not same_bits(ordinary[argnum], sample.at(call.dtype, CPU)[argnum]):
            return
        label, values = sample.labels[argnum], call.listed
        message = (
            f"the operator writes into `{label}` where `{call.label}` has {call.group.name} in it "
            f"({values}), but not at ordinary values: write into a clone"
        )
        yield call.failure(label, "mutates-input", message, evidence={"at": values}, given=call.group.given)


def _wrong_result(call: SpecialCall, got: Sequence[Any]) -> Failure | None:
    """The first result that differs from the reference both in the dtype itself and in float64.

    A kernel may be more exact than the reference, for example if that overflows in the sum of squares of a
    norm. If the reference rejects the arguments, or values close to them, the right result is unknown.
    """
    with Overlooking(), torch.no_grad():
        for position, (actual, answer) in enumerate(zip(got, _right_results(call), strict=True)):
            value, ordinary = answer.value, answer.ordinary
            if value is None or ordinary is None or not is_inexact(value) or not is_inexact(actual):
                continue
            if not actual.shape == value.shape == ordinary.shape or are_equal(actual, ordinary):
                continue
            free = next(Half(answer).bounds()).distance
            compared = _compared(call, answer) & ~is_close(actual, ordinary.to(actual.dtype), free)
            wrong = wrong_elements(torch.where(compared, actual.to(value.dtype), value), Half(answer))
            if wrong.any() and not _loses_digits_in_float32(call, position):
                name = call.subject.results(call.sample)[position].name
                failure = _failure(call, name, actual, value, wrong)
                looks, reason = explain_difference(actual, value)
                if looks == "precision":
                    failure = replace(failure, cause=looks, message=f"{failure.message}; {reason}")
                return failure
    return None


def _right_results(call: SpecialCall) -> Sequence[Answer]:
    subject, sample = call.subject, call.sample
    known, generator = partial(computed_in, subject, sample), subject.generator(PERTURBATIONS)
    options: dict[str, Any] = {"has_truth": subject.has_truth, "computed_in": known}
    computation = Computation.of(subject.plain(sample), call.kept, generator, **options)
    return computation.at(call.flat(), call.dtype)


def _compared(call: SpecialCall, answer: Answer) -> Tensor:
    """Mark the elements in which a result must equal the reference's.

    Nothing is required where the reference is infinite, or nan for finite arguments. If an argument has nan,
    it may spread further than in the reference, but must not be hidden.
    """
    given, nan = call.kept[call.argnum], answer.tensor.isnan()
    if given.isnan().any():
        return nan
    return _are_numbers(answer) if given.isfinite().all() else _are_numbers(answer) | nan


def _are_numbers(answer: Answer) -> Tensor:
    """Mark the elements that are finite, also in the dtype itself."""
    assert answer.ordinary is not None
    return answer.tensor.isfinite() & answer.ordinary.isfinite()


def _loses_digits_in_float32(call: SpecialCall, position: int) -> bool:
    """True if the reference overflows or loses digits at float32's special values instead of float64's.

    No dtype is wider than float64, so the reference in float64 may be wrong at such values.
    """
    narrow = call.in_float32() if call.dtype == torch.float64 and call.subject.has_truth else None
    if narrow is not None:
        with Overlooking():
            answer = _right_results(narrow)[position]
            decided = answer.judged()
            return decided is not None and bool((_compared(narrow, answer) & ~decided).any())
    return False


def _gradients(call: SpecialCall) -> Findings:
    """Compare gradients with autograd through the reference; where they differ, with finite differences."""
    found: list[Tensor | None] = []
    rights: Sequence[Answer] = ()
    with Overlooking():  # the property `gradient` reports exceptions of a backward
        found = Backward(call).or_none([*call.flat(), *call.grads])
    if not call.digits and all(each is None or all_finite(each) for each in found):
        return
    with Overlooking():  # for example, the reference has no gradient there
        rights = _right_gradients(call)
    for at, (argnum, gradient) in enumerate(zip(call.argnums, found, strict=False)):
        got = torch.zeros_like(call.kept[argnum]) if gradient is None else gradient
        if got.shape == call.kept[argnum].shape:
            yield from _judged(call, argnum, got, rights[at] if rights else None)


def _right_gradients(call: SpecialCall) -> Sequence[Answer]:
    """Autograd's gradients through the reference; none if there is no reference, or it is not recorded."""
    subject, sample = call.subject, call.sample
    if subject.kind.in_library or not RightGradients(subject, sample, by=call.argnums).recorded:
        return ()
    return _answers(call, Backward(call, subject.plain(sample)))


def _answers(call: SpecialCall, backward: Backward) -> Sequence[Answer]:
    """Gradients of the reference, or of the call itself, with the call's precision."""
    values, known = [*call.kept, *call.grads], partial(computed_in, call.subject, call.sample)
    truth = call.subject.has_truth
    computation = backward.computation(values, has_truth=truth, computed_in=known, usual=unknown)
    return computation.at(values, call.dtype)


MOST_SUSPECTS = 8


def _suspects(call: SpecialCall, argnum: int, got: Tensor, right: Answer | None) -> list[int]:
    """Positions of a gradient to judge by differences: where it is not the reference's, at the values."""
    odd, special = ~got.isfinite(), [*call.special] if call.digits and argnum == call.argnum else []
    if right is not None:
        known, special = _are_numbers(right), []
        # A class's forward was not written for autograd, so that autograd's nan prove nothing.
        odd = odd if call.subject.kind.own_forward else odd & known
        if call.digits:
            odd |= wrong_elements(torch.where(known, got.to(right.tensor.dtype), right.tensor), Half(right))
    return [*dict.fromkeys([*odd.flatten().nonzero().flatten().tolist(), *special])][:MOST_SUSPECTS]


def _judged(call: SpecialCall, argnum: int, got: Tensor, right: Answer | None) -> Findings:
    """Judge by finite differences: at a kink, any value between the one-sided derivatives is right."""
    subject, sample = call.subject, call.sample
    suspects = _suspects(call, argnum, got, right)
    if not suspects:
        return
    label = sample.labels[argnum]
    double = 2 if got.is_complex() else 1
    numbers = numerical_gradient(
        in_all_digits(subject, partial(subject.call, sample) if right is None else subject.plain(sample)),
        in_double_on_cpu(call.kept),
        argnum,
        in_double_on_cpu(call.grads),
        generator=subject.generator(),
        only=[double * at + axis for at in suspects for axis in range(double)],
    )
    wrong, expected = numbers.wrong(got), numbers.values
    decided = numbers.known.isfinite()
    if right is not None:
        wrong = torch.where(decided, wrong, _are_numbers(right) & ~got.isfinite())
        expected = torch.where(right.tensor.isfinite(), right.tensor, expected)
    elif wrong.any() and call.digits:  # it may differ by the rounding noise of its terms, which cancel
        (own,) = _answers(call, Backward(call.alone(argnum)))
        wrong &= ~is_close(got, expected, own.distance)
    chosen = torch.zeros(got.numel(), dtype=torch.bool)
    chosen[suspects] = True
    wrong &= chosen.view(got.shape)
    if wrong.any():
        failure = _failure(call, argnum, got, expected.to(got.dtype), wrong)
        off = share_off(got, expected)
        if right is None:
            values = in_double_on_cpu([*call.kept, *call.grads])
            failure = approximate_by_differences(failure, call, argnum, values, off, expected)
        else:
            failure = approximate(failure, off)
        failure = where_set(where_tied(failure, subject, moved=call.label), subject, moved=call.label)
        if failure.cause != "nan":
            yield by_convention(failure, subject, call.kept)
        elif subject.kind.own_forward and _divides_by_zero(call):
            words = "; its forward itself divides by zero there"
            yield replace(failure, message=failure.message + words, given="strained")
        else:
            yield failure
        return
    edges = (numbers.kinks | ~decided).reshape(-1)
    odd = next((at for at in suspects if bool(edges[at])), None)
    if right is not None and odd is not None:
        where = f"`{label}` = {_shown(call.kept[argnum].reshape(-1)[odd])}"
        ours, others = _shown(got.reshape(-1)[odd]), _shown(right.tensor.reshape(-1)[odd])
        yield Note(
            f"the gradient of `{label}` at {where} is {ours}, and autograd's gradient through the "
            f"reference is {others}: the function has a kink or an edge there, and both values are "
            "valid"
        )


class Divisions(TorchFunctionMode):
    """A mode that finds divisions by zero.

    Attributes:
        by_zero: True if a division of finite numbers is not finite.
        handled: True if numbers that are not finite were selected or replaced, so that zero is expected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_zero = self.handled = False

    @calls_operator
    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a function, and look at the result of a division."""
        finite = all(all_finite(each) for each in args if is_inexact(each))
        name = getattr(function, "__name__", "").strip("_")
        self.handled |= name in HANDLING and not finite
        result = function(*args, **(kwargs or {}))
        self.by_zero |= name in DIVIDING and finite and is_inexact(result) and not all_finite(result)
        return result


DIVIDING = frozenset({"div", "divide", "true_divide", "truediv", "rtruediv", "rdiv", "reciprocal", "rsqrt"})
"""Functions of torch that divide, without the underscores of operators and in-place functions."""

HANDLING = frozenset({"where", "masked_fill", "masked_scatter", "nan_to_num", "setitem"})
"""Functions of torch that select or replace numbers."""


def _divides_by_zero(call: SpecialCall) -> bool:
    """True if the forward divides by zero without handling it, only at the special values."""
    found = []
    for flat in (call.flat(), call.sample.at(call.dtype, CPU)):
        with Overlooking(), torch.no_grad(), Divisions() as mode:
            call.subject.call(call.sample, flat)
        found.append(mode.by_zero and not mode.handled)
    return found == [True, False]


def _failure(call: SpecialCall, about: str | int, got: Tensor, expected: Tensor, wrong: Tensor) -> Failure:
    """The failure at the first wrong element, with the special values at which elements are wrong.

    Args:
        call: The call.
        about: The result, or the position of the input whose gradient is wrong.
        got: The tensor.
        expected: The right tensor.
        wrong: Mask of its wrong elements.
    """
    elements = wrong.reshape(-1).nonzero().flatten().tolist()
    index = unravel(elements[0], wrong.shape)
    difference = Difference(index, got[index].item(), expected[index].item(), len(elements), wrong.numel())
    if isinstance(about, str):
        what, cause, where = f"`{about}` is wrong", "kernel-mismatch", call.subject.runs_at(call.kept)
        held = [difference.got, difference.expected]
    else:
        what, cause, where = f"the gradient of `{call.sample.labels[about]}` is wrong", "region", None
        held = [difference.got]
    values = ", ".join(f"{_shown(v)} at {p}" for p, v in call.special.items())
    condition = f"`{call.label}` holds {' or '.join(dict.fromkeys(map(_shown, call.special.values())))}"
    if call.group.everywhere:
        condition = f"{call.filled} of `{call.label}` is {call.listed}"
        values = f"{call.listed} in {call.filled} of it"
    elif (isinstance(about, str) or about == call.argnum) and wrong.shape == call.kept[call.argnum].shape:
        special = dict.fromkeys(_shown(call.special[p]) for p in elements if p in call.special)
        condition = f"`{call.label}` is {' or '.join(special)}" if special else condition
    return call.failure(
        about,
        cause if all(map(cmath.isfinite, held)) else "nan",
        f"{what} where {condition}{call.group.broken}: {difference}",
        where,
        {"values": values, **difference.evidence()},
        given=call.group.given,
    )


def _shown(value: complex | Tensor) -> str:
    return f"{value.item() if isinstance(value, Tensor) else value:.6g}"


VALUES = Property(
    NAME,
    "results and gradients are right at zero, infinities, nan, and other special values",
    run,
    traits=("differences", "sends-gradients"),
)
