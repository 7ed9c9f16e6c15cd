"""Special values: results and gradients at zeros, infinities, nan, tiny and large numbers, and boundaries.

Results must be nan where nan or infinities go in and the reference gives nan; elsewhere they must be finite
and equal where the reference's are. Gradients must be finite where the reference's are, and equal, or lie
between the one-sided derivatives. Nothing is required of gradients where something infinite or nan goes in or
comes out, of what the reference itself gives as infinite or nan for finite numbers, and of what the operator
rejects by an exception.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.calls import computed_in, differentiated, rule_location
from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.numerics.answer import Computation, unknown
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, record, vjp, vjp_or_zeros
from opsmith.checking.numerics.compare import all_finite, clearly_agrees, is_close, same_bits, unravel
from opsmith.checking.numerics.finite_differences import numerical_gradient
from opsmith.checking.properties.numeric.gradient_verdict import approximate, share_off
from opsmith.checking.properties.numeric.special_results import differing, wrong_results
from opsmith.checking.properties.numeric.ties import where_tied
from opsmith.checking.property import Coverage, Findings, Note, Property, Skipped, covered_samples, raised
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import case_name
from opsmith.checking.samples.grad_outputs import plain_grad_outputs
from opsmith.checking.samples.sample import CPU, Sample, is_inexact, replica
from opsmith.checking.samples.special_values import (
    SpecialCall,
    ValueGroup,
    boundaries,
    value_groups,
    with_values,
)
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject

NAME = "values"
ORDINARY = 4
ORDINARY_VALUES = ValueGroup("ordinary values", ())


def run(subject: Subject) -> Findings:
    """Put special values into every input of some samples, one input at a time."""
    if subject.draws:
        yield Skipped("it draws random numbers: what it gives at a value is another thing each time")
        return
    yield from covered_samples(NAME, _sample, "no sample has a floating tensor with elements", subject)


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    usable = [argnum for argnum in sample.inexact if sample.flat[argnum].numel()]
    if sample.origin or not usable or coverage.ran >= subject.effort.special_samples:
        return
    coverage.ran += 1
    surrogate = subject.specification.gradients.surrogate
    open_: tuple[int, ...] = () if surrogate else differentiated(subject, sample).argnums
    dtypes: list[torch.dtype] = []
    for dtype in (torch.float64,) if subject.single_precision else (torch.float64, torch.float32):
        failures = [*_ordinary(subject, sample, usable[0], open_, dtype)]
        if not any(
            failure.input in {result.name for result in subject.results(sample)} for failure in failures
        ):
            dtypes.append(dtype)
        nan = (failure for failure in failures if failure.cause == "nan")
        # What is not nan, and should be, `forward` reports.
        yield from (failure for failure in nan if cmath.isfinite(failure.evidence["expected"]))
        wrong = {failure.input for failure in failures}
        for label in sorted(label for label in wrong if label):
            yield Note(f"special values skipped for `{label}`: it is already wrong on {sample.brief}")
        open_ = tuple(argnum for argnum in open_ if sample.labels[argnum] not in wrong)
    for argnum in usable:
        found: list[float] = []
        with Overlooking():  # what it rejects, or cannot differentiate, other properties report
            found = _boundaries(subject, sample, argnum) if argnum in open_ else []
        for dtype in dtypes:
            # What computes in float32 has the range of it.
            ranged = computed_in(subject, sample) if dtype == torch.float64 else dtype
            for group in value_groups(ranged, found):
                yield from _group(subject, sample, argnum, open_, group, dtype, coverage)


def _ordinary(
    subject: Subject, sample: Sample, argnum: int, open_: Sequence[int], dtype: torch.dtype
) -> Iterator[Failure]:
    """Failures at the sample's own values; gradients are compared in float64 only."""
    flat = sample.at(dtype, CPU)
    argnum = open_[0] if open_ else argnum
    some = {at: float(value.real) for at, value in enumerate(flat[argnum].reshape(-1)[:ORDINARY])}
    call = SpecialCall(subject, sample, argnum, flat, some, ORDINARY_VALUES, dtype)
    held = open_ if dtype == torch.float64 else ()
    yield from (finding for finding in _check_call(call, held) if isinstance(finding, Failure))


def _boundaries(subject: Subject, sample: Sample, argnum: int) -> list[float]:
    """Values at which the gradient of one element jumps."""
    flat = sample.in_double()
    position = flat[argnum].numel() // 2
    grads = plain_grad_outputs(subject, sample).in_double()

    def derivative(value: float) -> float:
        moved = flat[argnum].clone(memory_format=torch.contiguous_format)
        moved.view(-1)[position] = value
        values = [moved if at == argnum else each for at, each in enumerate(flat)]
        found = vjp(partial(subject.call, sample), values, (argnum,), grads)[0]
        return 0.0 if found is None else float(found.reshape(-1)[position].real)

    return boundaries(derivative)


def _group(
    subject: Subject,
    sample: Sample,
    argnum: int,
    open_: Sequence[int],
    group: ValueGroup,
    dtype: torch.dtype,
    coverage: Coverage,
) -> Findings:
    label = sample.labels[argnum]
    generator = subject.generator()
    for other, where in with_values(sample.at(dtype, CPU)[argnum], group, generator):
        if label in coverage.wrong:
            return
        flat = [other if at == argnum else value for at, value in enumerate(sample.at(dtype, CPU))]
        call = SpecialCall(subject, sample, argnum, flat, where, group, dtype)
        for finding in _check_call(call, open_):
            if isinstance(finding, Failure):
                coverage.wrong.add(label)
            yield finding


def _check_call(call: SpecialCall, open_: Sequence[int]) -> Findings:
    subject, sample = call.subject, call.sample
    given = call.fresh()
    try:
        with torch.no_grad(), without_warnings():
            got = subject.call(sample, given)
    except errors.MutationError as error:
        yield raised(NAME, subject, error, case_name(sample, call.dtype, CPU), call.label)
        return
    except Exception as error:
        refuse_own(error)
        yield Note(f"the operator rejects `{call.label}` with {call.group.name} in it ({call.listed})")
        return
    yield from _written(call, given)
    if subject.kind.has_reference:
        wrong = [*_results(call, got)]
        yield from wrong
        if wrong:
            return
    if call.group.finite and open_:
        yield from _gradients(call, got, open_)


def _written(call: SpecialCall, given: Sequence[Any]) -> Findings:
    """Report a write into an argument that only special values cause; `effects` reports any other."""
    subject, sample = call.subject, call.sample
    for argnum in sample.inexact:
        if same_bits(given[argnum], call.flat[argnum]):
            continue
        ordinary = sample.at(call.dtype, CPU)
        with torch.no_grad(), without_warnings():
            subject.call(sample, ordinary)
        if not same_bits(ordinary[argnum], sample.at(call.dtype, CPU)[argnum]):
            return
        label, values = sample.labels[argnum], call.listed
        message = (
            f"it writes into `{label}` where `{call.label}` has {call.group.name} in it ({values}), and at "
            "ordinary values it does not: write into a clone"
        )
        evidence = {"sample": case_name(sample, call.dtype, CPU), "at": values}
        where = subject.specification.where
        yield Failure(NAME, label, "mutates-input", message, where, evidence, given=call.group.given)


def _results(call: SpecialCall, got: Sequence[Any]) -> Findings:
    for name, actual, expected, wrong in wrong_results(call, got):
        yield _failure(call, name, actual, expected, wrong, f"`{name}` is wrong", None)
        return


def _gradients(call: SpecialCall, results: Sequence[Any], open_: Sequence[int]) -> Findings:
    subject, sample = call.subject, call.sample
    if not all(all_finite(each) for each in results if is_inexact(each)):
        return
    grads = plain_grad_outputs(subject, sample).at(call.dtype, CPU)
    try:
        with without_warnings():
            found = vjp(partial(subject.call, sample), call.fresh(), open_, grads)
    except Exception as error:
        refuse_own(error)
        return  # the property `gradient` reports what a backward raises
    if _all_right(call, open_, grads, found):
        return
    rights = _by_reference(call, open_, grads)
    for argnum, gradient, right in zip(open_, found, rights, strict=True):
        got = torch.zeros_like(call.flat[argnum]) if gradient is None else gradient
        suspects = _suspects(call, argnum, got, right)
        if suspects:
            yield from _judged(call, argnum, got, right, suspects, grads)


def _all_right(
    call: SpecialCall,
    open_: Sequence[int],
    grads: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
) -> bool:
    """True if every gradient is right even for a reference that no perturbation changes."""
    if not _has_other_gradients(call):
        return False
    try:
        with without_warnings():
            rights = _through_reference(call, call.fresh(), open_, grads)
    except Exception as error:
        refuse_own(error)
        return False
    if rights is None:
        return False
    for argnum, gradient, right in zip(open_, found, rights, strict=True):
        zeros = torch.zeros_like(call.flat[argnum])
        got, expected = (zeros if each is None else each for each in (gradient, right))
        same_form = got.shape == expected.shape and not call.subject.kind.own_forward
        if same_form and clearly_agrees(got, expected):
            continue
        if _suspects(call, argnum, got, (expected, torch.zeros(()))):
            return False
    return True


def _has_other_gradients(call: SpecialCall) -> bool:
    """True if autograd through the reference gives gradients beside the operator's own."""
    return not (call.subject.kind.in_library or call.subject.specification.opaque)


def _by_reference(
    call: SpecialCall, open_: Sequence[int], grads: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor] | None]:
    """Autograd's gradient by each argument through the reference, and its change as inputs are perturbed."""
    if not _has_other_gradients(call):
        return [None] * len(open_)
    try:
        with without_warnings():
            first, above, below = (
                _through_reference(call, values, open_, grads)
                for values in (call.fresh(), *call.perturbed_copies())
            )
    except Exception as error:
        refuse_own(error)
        return [None] * len(open_)  # as where the reference has no gradient there
    if first is None or above is None or below is None:
        return [None] * len(open_)
    answers: list[tuple[Tensor, Tensor] | None] = []
    for argnum, *three in zip(open_, first, above, below, strict=True):
        right, one, other = (torch.zeros_like(call.flat[argnum]) if g is None else g for g in three)
        spread = torch.maximum((one - right).abs(), (other - right).abs()).nan_to_num(torch.inf, torch.inf)
        answers.append((right, spread))
    return answers


def _through_reference(
    call: SpecialCall, values: Sequence[Any], open_: Sequence[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None] | None:
    """The gradient by each argument through the reference; None if no result of it requires a gradient.

    A single gradient may be None as well, which stands for zeros: the result does not depend on the argument.
    """
    leaves, _, results = record(call.subject.plain(call.sample), values, open_)
    if not any(grad is not None and has_gradient(each) for each, grad in zip(results, grads, strict=True)):
        return None
    return differentiate(results, [leaves[argnum] for argnum in open_], grads)


MOST_SUSPECTS = 8


def _suspects(call: SpecialCall, argnum: int, got: Tensor, right: tuple[Tensor, Tensor] | None) -> list[int]:
    """Positions of a gradient to judge by differences: where it is not the reference's; at the values."""
    if got.shape != call.flat[argnum].shape:
        return []
    if right is None:
        odd = ~got.isfinite().reshape(-1)
        special = list(call.where) if argnum == call.argnum and call.dtype == torch.float64 else []
    else:
        odd = differing(call, got, right, hold_nan=False).reshape(-1)
        if (
            call.subject.kind.own_forward
        ):  # its forward was not written for autograd, whose nan proves nothing
            odd |= ~(got.isfinite() | right[0].isfinite()).reshape(-1)
        if call.dtype != torch.float64:  # digits are compared in float64
            odd &= ~got.isfinite().reshape(-1)
        special = []
    if call.group.everywhere:
        odd, special = odd & ~got.isfinite().reshape(-1), []
    return [*dict.fromkeys([*odd.nonzero().flatten().tolist(), *special])][:MOST_SUSPECTS]


def _judged(
    call: SpecialCall,
    argnum: int,
    got: Tensor,
    right: tuple[Tensor, Tensor] | None,
    suspects: Sequence[int],
    grads: Sequence[Tensor | None],
) -> Findings:
    """Judge by finite differences: at a kink, any value between the one-sided derivatives is right."""
    subject, sample = call.subject, call.sample
    label = sample.labels[argnum]
    flat = [replica(value, torch.float64) for value in call.fresh()]
    wide = [replica(grad, torch.float64) for grad in grads]
    double = 2 if got.is_complex() else 1
    function = partial(subject.call, sample) if right is None else subject.plain(sample)
    with without_warnings():
        numbers = numerical_gradient(
            function,
            flat,
            argnum,
            wide,
            generator=subject.generator(),
            only=[double * at + axis for at in suspects for axis in range(double)],
        )
    wrong = torch.zeros(got.numel(), dtype=torch.bool)
    if right is None:
        wrong[list(suspects)] = numbers.wrong(got).reshape(-1)[list(suspects)]
    else:
        decided = numbers.is_known.any(-1) if got.is_complex() else numbers.is_known
        disagrees = numbers.wrong(got)
        bears_out = decided & ~numbers.wrong(right[0])
        for at in suspects:
            known = bool(decided.reshape(-1)[at] | numbers.kinks.reshape(-1)[at])
            nan = bool(right[0].reshape(-1)[at].isfinite() & ~got.reshape(-1)[at].isfinite())
            wrong[at] = disagrees.reshape(-1)[at] if known else nan
            wrong[at] |= nan & bears_out.reshape(-1)[at]
    if wrong.any() and call.dtype == torch.float64:
        right_ones, count = numbers.values if right is None else right[0], len(flat)
        gradient = Computation.of(
            lambda given: vjp_or_zeros(function, given[:count], (argnum,), given[count:]),
            [*flat, *wide],
            subject.generator(),
            usual=unknown,
        )
        (answer,) = gradient.twins([*flat, *wide], torch.float64)
        wrong &= ~is_close(got, right_ones.to(got), answer.distance).reshape(-1)
    if wrong.any():
        expected = numbers.values.to(got.dtype)
        if right is not None:
            expected = torch.where(right[0].isfinite(), right[0], expected)
        what = f"the gradient of `{label}` is wrong"
        found = _failure(call, label, got, expected, wrong.view(got.shape), what, argnum)
        found = approximate(found, share_off(got, expected))
        yield where_tied(found, subject, moved=call.label)
        return
    edges = (numbers.kinks | ~numbers.known.isfinite()).reshape(-1)
    odd = next((at for at in suspects if bool(edges[at])), None)
    if right is not None and odd is not None:
        where = f"`{label}` = {_shown(call.flat[argnum].reshape(-1)[odd])}"
        ours, others = _shown(got.reshape(-1)[odd]), _shown(right[0].reshape(-1)[odd])
        yield Note(
            f"the gradient of `{label}` at {where} is {ours}, and autograd's through the reference {others}: "
            "it is a kink or an edge, where both are as good"
        )


def _failure(
    call: SpecialCall, name: str, got: Tensor, expected: Tensor, wrong: Tensor, what: str, argnum: int | None
) -> Failure:
    subject, sample = call.subject, call.sample
    elements = wrong.reshape(-1).nonzero().flatten().tolist()
    at = elements[0]
    index = list(unravel(at, wrong.shape))
    held = [got, expected] if argnum is None else [got]
    nan = not all(bool(each.reshape(-1)[at].isfinite()) for each in held)
    elementwise = argnum in (None, call.argnum) and wrong.shape == call.flat[call.argnum].shape
    special = [_shown(call.where[p]) for p in elements if p in call.where]
    values = ", ".join(f"{_shown(v)} at {p}" for p, v in call.where.items())
    if call.group.everywhere:
        condition = f"{call.filled} of `{call.label}` is {call.listed}"
        values = f"{call.listed} in {call.filled} of it"
    elif elementwise and special:
        condition = f"`{call.label}` is {' or '.join(dict.fromkeys(special))}"
    else:
        condition = f"`{call.label}` holds {' or '.join(_shown(value) for value in call.where.values())}"
    place_words = f"at {index} " if index else ""
    actual, truth = got.reshape(-1)[at], expected.reshape(-1)[at]
    numbers = f"it is {_shown(actual)} where {_shown(truth)} is right"
    message = f"{what} where {condition}: {place_words}{numbers}"
    cause = "nan" if nan else "region" if argnum is not None else "kernel-mismatch"
    evidence = {
        "sample": case_name(sample, call.dtype, CPU),
        "values": values,
        "index": index,
        "got": actual.item(),
        "expected": truth.item(),
        "wrong elements": f"{int(wrong.sum())} of {wrong.numel()}",
    }
    where = subject.runs_at(call.flat) if argnum is None else rule_location(subject, sample.names[argnum])
    return Failure(NAME, name, cause, message, where, evidence, given=call.group.given)


def _shown(value: complex | Tensor) -> str:
    return f"{value.item() if isinstance(value, Tensor) else value:.6g}"


VALUES = Property(
    NAME,
    "results and gradients are right at zero, infinities, nan, and other special values",
    run,
    differences=True,
    sends_gradients=True,
)
