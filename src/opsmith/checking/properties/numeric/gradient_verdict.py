"""Verdict on the backwards of a sample: one failure for each input, with its cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import leaves_out, rule_location
from opsmith.checking.causes import CAUSES, UNKNOWN, first_of
from opsmith.checking.diagnosis import Diagnosis, Observation, diagnose
from opsmith.checking.diagnosis.observation import Observer
from opsmith.checking.exceptions import Overlooking, named_by
from opsmith.checking.numerics.compare import Difference, is_close, largest_magnitude, share_of_largest
from opsmith.checking.numerics.low_precision import low_precision_in_backward
from opsmith.checking.output.replay import gradient_replay
from opsmith.checking.properties.behaviour.state import result_by_need
from opsmith.checking.properties.numeric.gradient_truth import RightGradient, by_differences
from opsmith.checking.property import Findings, Note, innermost, raised
from opsmith.checking.report import Failure, ordered
from opsmith.checking.samples.cases import case_name, dtype_name
from opsmith.checking.samples.grad_outputs import GradOutputs
from opsmith.core.backward_plan import backward_plan
from opsmith.core.formula import Formula
from opsmith.torch_library.autograd.gradient_values import CallMetadata
from opsmith.torch_library.autograd.vjp import Vjp

NAME = "gradient"


@dataclass(frozen=True)
class Attempt:
    """One backward, and the gradient of one input from it.

    Args:
        argnum: The input.
        subset: The inputs that required a gradient.
        grad_outputs: The grad_outputs.
        dtype: dtype of the inputs.
        device: Their device.
        got: The gradient; None where there was none.
        expected: The right one.
        difference: Their difference; None where they agree.
        error: The exception.
    """

    argnum: int
    subset: tuple[int, ...]
    grad_outputs: GradOutputs
    dtype: torch.dtype
    device: torch.device
    got: Tensor | None = None
    expected: Tensor | None = None
    difference: Difference | None = None
    error: Exception | None = None

    @property
    def wrong(self) -> bool:
        """True if the gradient is wrong, or the backward raised."""
        return self.difference is not None or self.error is not None


def conclude(right: RightGradient, attempts: Sequence[Attempt]) -> Findings:
    """One failure for each input whose gradient is wrong in any attempt.

    Args:
        right: The right gradients.
        attempts: Every backward that was run on the sample.
    """
    errors: dict[tuple[str, str, str], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.error is not None:  # two lines may raise in the same words
            location = innermost(attempt.error, right.subject.specification.where)
            key = (type(attempt.error).__name__, str(attempt.error), location)
            errors.setdefault(key, []).append(attempt)
    for group in errors.values():
        yield _raised(right, group, attempts)
    for argnum in right.argnums:
        judged = [each for each in attempts if each.argnum == argnum and each.error is None]
        if any(each.wrong for each in judged):
            failure = _wrong(right, judged)
            if _is_rounding(judged):
                yield _rounding(right, judged, failure)
            else:
                yield approximate(failure, max(_share_off(each) for each in judged if each.wrong))
        elif not right.confirmed and any(
            right.has_kink(argnum, grad_outputs) for grad_outputs in _tried(judged)
        ):
            label = right.sample.labels[argnum]
            yield Note(
                f"the gradient of `{label}` has a kink in {right.sample.brief}: whatever lies between its "
                "one-sided derivatives is right there"
            )
        if not any(each.wrong for each in judged):
            yield from _undecided_notes(right, argnum, _tried(judged))


def _undecided_notes(right: RightGradient, argnum: int, tried: Sequence[GradOutputs]) -> Findings:
    """Note the elements of a gradient that finite differences leave open, where nothing else decides them."""
    for grad_outputs in tried:
        if not right.trusted(argnum, grad_outputs):
            words = right.numerical(argnum, grad_outputs).describe_unknown(right.sample.labels[argnum])
            if words is not None:
                yield Note(f"{words}; in {right.sample.brief} nothing looked at them")
                return


ROUNDED = (
    "the backward and autograd through the forward differ by rounding to float32, as where one of them has a "
    "constant in float32 and the other in float64"
)


def _is_rounding(attempts: Sequence[Attempt]) -> bool:
    """True if a gradient in float64 is off by no more than rounding to float32."""
    wrong = [each for each in attempts if each.wrong]
    return all(each.dtype == torch.float64 and _near(each) for each in wrong)


def _rounding(right: RightGradient, attempts: Sequence[Attempt], failure: Failure) -> Failure | Note:
    """The cause of an error like rounding to float32, or a note if no side is known to be wrong.

    A backward that computes in float32 returns numbers of float32, which has the cause already. Autograd
    through a forward that was not written for it is no truth: there a backward alone must use low precision
    operands.
    """
    if failure.cause == UNKNOWN and not right.subject.kind.own_forward:
        message = f"{failure.message}; it is off as a constant in float32 makes it"
        return replace(failure, cause="precision", message=message)
    if failure.cause == "precision" or not right.subject.kind.own_forward:
        return failure
    shown = min((each for each in attempts if each.wrong), key=_plainness)
    operation = low_precision_in_backward(right.subject, right.sample, shown.subset, shown.grad_outputs)
    if operation is None:
        return Note(ROUNDED)
    message = (
        f"the gradient of `{failure.input}` loses digits: {shown.difference}; in the backward {operation}, "
        "where everything else, and all of the forward, has the digits of float64"
    )
    evidence = {**failure.evidence, "operation": operation}
    return replace(failure, cause="precision", message=message, evidence=evidence)


def _near(attempt: Attempt) -> bool:
    if attempt.got is None or attempt.expected is None or not attempt.got.isfinite().all():
        return False
    bound = share_of_largest(2 * torch.finfo(torch.float32).eps, attempt.expected)
    close = is_close(attempt.got.to(attempt.expected), attempt.expected, bound)
    return bool(close[attempt.expected.isfinite()].all())


def _tried(attempts: Sequence[Attempt]) -> list[GradOutputs]:
    return list({each.grad_outputs.name: each.grad_outputs for each in attempts}.values())


def _raised(right: RightGradient, group: Sequence[Attempt], attempts: Sequence[Attempt]) -> Failure:
    """The failure for an exception in the backward, with the choices of inputs for which it is raised."""
    sample, first = right.sample, group[0]
    assert first.error is not None
    known = named_by(first.error)
    tensors = [argnum for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)]
    if known.position is not None and known.position < len(tensors):
        label = sample.labels[tensors[known.position]]
    else:
        label = ", ".join(sample.labels[argnum] for argnum in first.subset)
    where = case_name(sample, first.dtype, first.device)
    failure = raised(NAME, right.subject, first.error, where, label)
    failure = replace(failure, dtypes=_dtypes(group))
    alike = _alike(first, attempts)
    fine = [*dict.fromkeys(each.subset for each in alike if not each.wrong)]
    if failure.cause != "raises" or not fine:
        return failure
    raising = [*dict.fromkeys(each.subset for each in _alike(first, group))]
    reason = f"it raises when {_needing(right, raising)}, and is right when {_needing(right, fine)}"
    return replace(
        failure,
        message=f"{failure.message}; {reason}",
        evidence={**failure.evidence, "also fits": {"input-needs-grad": reason}},
        replay=_script(right, first, None),
    )


def _dtypes(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    return ordered(dtype_name(each.dtype) for each in attempts)


def _alike(shown: Attempt, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts with the same grad_output, dtype and device."""
    wanted = (shown.grad_outputs, shown.dtype, shown.device)
    return [each for each in attempts if (each.grad_outputs, each.dtype, each.device) == wanted]


def _wrong(right: RightGradient, attempts: Sequence[Attempt]) -> Failure:
    """The failure for a gradient that is not the right one."""
    subject, sample = right.subject, right.sample
    shown = min((each for each in attempts if each.wrong), key=_plainness)
    assert shown.difference is not None
    label, name = sample.labels[shown.argnum], sample.names[shown.argnum]
    found = _diagnosis(right, shown, attempts)
    evidence = {
        "sample": case_name(sample, shown.dtype, shown.device),
        "grad_output": shown.grad_outputs.name,
        **shown.difference.evidence(),
        **found.evidence,
    }
    if found.also_fits:
        evidence["also fits"] = dict(found.also_fits)
    message = f"the gradient of `{label}` is wrong: {shown.difference}"
    message += f"; {found.reason}" if found.reason else ""
    if found.cause == "missing-gradient" and leaves_out(subject, name):
        message += f"; {LEFT_OUT.format(name)}"
    rule = subject.specification.gradients.rules.get(name)
    derived = not isinstance(rule, Formula)
    if isinstance(rule, Formula) and subject.specification.kernels:
        used = {*rule.parameters} & {*subject.specification.schema.result_position}
        if used and _is_right_with_reference(right, shown):
            words = " and ".join(f"`{each}`" for each in sorted(used))
            message += f"; its formula is right with the {words} of the reference"
            evidence[RIGHT_WITH_REFERENCE] = sorted(used)
    if derived and not subject.specification.opaque and not right.trusted(shown.argnum, shown.grad_outputs):
        message += f". {HIDES}"
    return Failure(
        NAME,
        label,
        found.cause,
        message,
        rule_location(subject, name),
        evidence,
        _script(right, shown, _to_show(shown)),
        dtypes=_dtypes(each for each in attempts if each.wrong),
    )


THOUSANDTH = 1e-3
"""Largest share of the largest element that an approximation is off by, as another formula's derivative."""


def approximate(failure: Failure, off: float) -> Failure:
    """The failure, as a minor one where a gradient is off by at most a thousandth of its largest element.

    Args:
        failure: The failure.
        off: The largest error, as a share of that.
    """
    if off > THOUSANDTH:
        return failure
    if failure.cause not in (UNKNOWN, "region"):
        return replace(failure, minor=True)
    words = f"it is off by at most {off:.1g} of its largest element. Where that is meant, `accept` it"
    return replace(failure, cause="approximate", message=f"{failure.message}; {words}", minor=True)


def _share_off(attempt: Attempt) -> float:
    if attempt.got is None or attempt.expected is None:
        return math.inf
    return share_off(attempt.got, attempt.expected)


def share_off(got: Tensor, right: Tensor) -> float:
    """Return the largest error of a gradient as a share of the largest element of the right one.

    Example:
        >>> share_off(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 5.0]))
        0.1
    """
    known = right.isfinite()
    off, largest = (got.detach().to(right) - right)[known], largest_magnitude(right)
    return float(off.abs().max()) / largest if largest and bool(off.isfinite().all()) else math.inf


RIGHT_WITH_REFERENCE = "right with the reference's"
"""Evidence: the results with which a formula is right, where those of the operator give a wrong gradient."""


def _is_right_with_reference(right: RightGradient, shown: Attempt) -> bool:
    """Return True if the formulas give the right gradient from results of the reference, not of a kernel."""
    subject, sample = right.subject, right.sample
    flat, grads = (each.at(shown.dtype, shown.device) for each in (sample, shown.grad_outputs))
    schema, names = subject.specification.schema, [sample.names[argnum] for argnum in shown.subset]
    with Overlooking(), torch.no_grad():
        every = subject.reference(sample, flat)
        results = subject.result_flattening(sample)
        metadata = CallMetadata.of(flat, every, [argnum in shown.subset for argnum in range(len(flat))])
        plan = backward_plan(subject.specification, frozenset(names))
        saved = dict(zip(schema.names, sample.flattening.pack(flat), strict=True))
        saved |= {name: results.item(name, every) for name in schema.result_position}
        given = dict(zip(subject.visible_positions(sample), grads, strict=True))
        vjp = Vjp(subject.specification, plan, sample.flattening, results, metadata, None)
        got = vjp(saved, [given.get(position) for position in range(len(every))])[shown.argnum]
        if got is not None and shown.expected is not None:
            share = torch.finfo(shown.dtype).eps ** 0.5
            close = is_close(got.to(shown.expected), shown.expected, share_of_largest(share, shown.expected))
            return bool(close[shown.expected.isfinite()].all())
    return False


def reference_failure(right: RightGradient, argnum: int, grad_outputs: GradOutputs) -> Findings:
    """Yield the failure for a reference through which autograd gives a wrong derivative.

    Args:
        right: The right gradients.
        argnum: The input.
        grad_outputs: The grad_outputs.
    """
    sample, numerical = right.sample, right.numerical(argnum, grad_outputs)
    got = right.through_reference(argnum, grad_outputs)
    difference = right.judge_by_differences(argnum, grad_outputs, got)
    if difference is None:
        return
    found = diagnose(Observation(got, numerical.known))
    label = sample.labels[argnum]
    reason = f": {found.reason}" if found.reason else ""
    yield Failure(
        NAME,
        label,
        found.cause,
        f"autograd through the reference gives another gradient of `{label}` than finite differences of it: "
        f"{difference}{reason}. {HIDES}",
        right.subject.specification.where,
        {"sample": case_name(sample, torch.float64, torch.device("cpu")), "grad_output": grad_outputs.name},
    )


LEFT_OUT = (
    "its backward returns None there in every case: where that is meant, adopt the class, and declare it by "
    "`operator.gradients({}=opsmith.non_differentiable)`"
)

HIDES = "The reference hides a dependence from autograd (`.detach()`, `no_grad`, `.data`, a cast)"


def _plainness(attempt: Attempt) -> tuple[bool, bool, int]:
    """Order in which wrong attempts are shown: float64, every grad_output, few inputs."""
    alone = " alone" in attempt.grad_outputs.name
    return (attempt.dtype != torch.float64, alone, len(attempt.subset))


def _script(right: RightGradient, shown: Attempt, expected: Tensor | None) -> str | None:
    """A few lines that run one backward again, beside that of the reference or beside the right gradient."""
    flat, grads = (each.at(shown.dtype, shown.device) for each in (right.sample, shown.grad_outputs))
    subject, sample = right.subject, right.sample
    return gradient_replay(subject, sample, flat, shown.argnum, grads, expected, subset=shown.subset)


def _to_show(shown: Attempt) -> Tensor | None:
    """The right gradient for a replay; elements that are unknown are those that came."""
    if shown.expected is None or shown.got is None:
        return shown.expected
    return torch.where(shown.expected.isnan(), shown.got.to(shown.expected), shown.expected)


def _diagnosis(right: RightGradient, shown: Attempt, attempts: Sequence[Attempt]) -> Diagnosis:
    alike = _alike(shown, attempts)
    wrong = [each.subset for each in alike if each.wrong]
    fine = [each.subset for each in alike if not each.wrong]
    found = diagnose(_observed(right, shown))
    changed = result_by_need(right.subject, right.sample, shown.subset, shown.dtype, shown.device)
    if changed is not None:
        reason = f"it is the gradient of another result, when {_needing(right, [shown.subset])}: {changed}"
        return Diagnosis("input-needs-grad", reason, evidence=found.evidence)
    if fine:
        reason = f"it is wrong when {_needing(right, wrong)}, and right when {_needing(right, fine)}"
        also = {found.cause: found.reason, **found.also_fits}
        # What differs from run to run explains better why one run is right and another wrong.
        cause = first_of({"input-needs-grad", *(name for name in also if CAUSES[name].unsteady)})
        if cause == "input-needs-grad":
            return Diagnosis(cause, reason, {k: v for k, v in also.items() if k != "unknown"}, found.evidence)
    if shown.dtype != torch.float64:
        words = f"in float64 it is right, and in {dtype_name(shown.dtype)} it is not"
        reason = f"{found.reason}; {words}" if found.reason else words
        return Diagnosis(found.cause, reason, found.also_fits, found.evidence)
    return found


def _observed(right: RightGradient, shown: Attempt) -> Observation:
    """A wrong gradient as the diagnosis looks at it, with a way to see it on fresh inputs."""
    subject, sample = right.subject, right.sample
    by_reference = right.trusted(shown.argnum, shown.grad_outputs)
    observer = Observer(
        subject,
        sample,
        shown.argnum,
        shown.subset,
        None if by_reference else partial(by_differences, subject),
        dtype=shown.dtype,
        device=shown.device,
    )
    return observer.observe(sample.in_double(), shown.grad_outputs.in_double())


def _needing(right: RightGradient, subsets: Sequence[tuple[int, ...]]) -> str:
    labels = right.sample.labels
    words = [" and ".join(f"`{labels[argnum]}`" for argnum in subset) for subset in subsets]
    alone = [
        f"{word} alone" if len(subset) == 1 else word for word, subset in zip(words, subsets, strict=True)
    ]
    verb = "requires" if len(subsets) == 1 and len(subsets[0]) == 1 else "require"
    return f"{', or '.join(alone)} {verb} a gradient"
