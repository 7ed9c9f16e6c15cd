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
from opsmith.checking.numerics.low_precision import low_precision_in_backward
from opsmith.checking.output.replay import gradient_replay
from opsmith.checking.properties.behaviour.state import result_by_need
from opsmith.checking.properties.numeric.gradient_truth import RightGradient, RightGradients, by_differences
from opsmith.checking.property import Findings, Note, innermost, raised
from opsmith.checking.report import Failure, ordered
from opsmith.checking.samples.cases import case_name, dtype_name
from opsmith.checking.samples.sample import Sample
from opsmith.core.backward_plan import backward_plan
from opsmith.core.formula import Formula
from opsmith.judging.compare import Difference, largest_magnitude
from opsmith.judging.tensors import CPU
from opsmith.torch_library.autograd.gradient_values import CallMetadata
from opsmith.torch_library.autograd.vjp import Vjp

NAME = "gradient"


@dataclass(frozen=True)
class Attempt:
    """One backward, and the gradient of one input from it.

    Args:
        right: The right gradient.
        subset: The inputs that required a gradient.
        dtype: dtype of the inputs.
        device: Their device.
        got: The gradient, with zeros where there was none.
        expected: The right one, as far as it is known in the dtype.
        difference: Their difference; None where they agree.
        error: The exception, in place of a gradient.
    """

    right: RightGradient
    subset: tuple[int, ...]
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

    @property
    def off(self) -> float:
        """The largest error, as a share of the largest element."""
        got, expected = self.got, self.expected
        return math.inf if got is None or expected is None else share_off(got, expected)

    @property
    def where(self) -> str:
        """Name of the sample, dtype and device in messages."""
        return case_name(self.right.among.sample, self.dtype, self.device)

    @property
    def plainness(self) -> tuple[bool, bool, int]:
        """Order in which wrong attempts are shown: float64, every grad_output, few inputs."""
        return self.dtype != torch.float64, " alone" in self.right.grad_outputs.name, len(self.subset)

    def alike(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Those of the attempts with the same grad_output, dtype and device."""
        wanted = (self.right.grad_outputs, self.dtype, self.device)
        return [each for each in attempts if (each.right.grad_outputs, each.dtype, each.device) == wanted]

    def script(self, expected: Tensor | None) -> str | None:
        """A few lines that run it again, beside that of the reference or beside the right gradient."""
        among = self.right.among
        flat, grads = (each.at(self.dtype, self.device) for each in (among.sample, self.right.grad_outputs))
        given = (among.subject, among.sample, flat, self.right.argnum, grads, expected)
        return gradient_replay(*given, subset=self.subset)


def conclude(rights: RightGradients, attempts: Sequence[Attempt]) -> Findings:
    """One failure for each input whose gradient is wrong in any backward that was run on the sample."""
    errors: dict[tuple[str, str, str], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.error is not None:  # two lines may raise in the same words
            location = innermost(attempt.error, rights.subject.specification.where)
            key = (type(attempt.error).__name__, str(attempt.error), location)
            errors.setdefault(key, []).append(attempt)
    for group in errors.values():
        yield _raised(group, attempts)
    for argnum in rights.argnums:
        judged = [each for each in attempts if each.right.argnum == argnum and each.error is None]
        tried = [*dict.fromkeys(each.right for each in judged)]
        label, brief = rights.sample.labels[argnum], rights.sample.brief
        if any(each.wrong for each in judged):
            yield _wrong(judged)
            continue
        if not rights.confirmed and any(right.has_kink for right in tried):
            yield Note(
                f"the gradient of `{label}` has a kink in {brief}: whatever lies between its one-sided "
                "derivatives is right there"
            )
        open_ = (right.numerical.describe_unknown(label) for right in tried if not right.trusted)
        words = next(filter(None, open_), None)
        if words is not None:
            yield Note(f"{words}; in {brief} nothing looked at them")


def _raised(group: Sequence[Attempt], attempts: Sequence[Attempt]) -> Failure:
    """The failure for an exception in the backward, with the choices of inputs for which it is raised."""
    first, among = group[0], group[0].right.among
    assert first.error is not None
    sample, known = among.sample, named_by(first.error)
    tensors = [argnum for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)]
    about = first.subset
    if known.position is not None and known.position < len(tensors):
        about = (tensors[known.position],)
    label = ", ".join(sample.labels[argnum] for argnum in about)
    failure = raised(NAME, among.subject, first.error, first.where, label)
    failure = replace(failure, dtypes=_dtypes(group))
    fine = [*dict.fromkeys(each.subset for each in first.alike(attempts) if not each.wrong)]
    if failure.cause != "raises" or not fine:
        return failure
    raising = [*dict.fromkeys(each.subset for each in first.alike(group))]
    reason = f"it raises when {_needing(sample, raising)}, and is right when {_needing(sample, fine)}"
    return replace(
        failure,
        message=f"{failure.message}; {reason}",
        evidence={**failure.evidence, "also fits": {"input-needs-grad": reason}},
        replay=first.script(None),
    )


def _dtypes(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    return ordered(dtype_name(each.dtype) for each in attempts)


def _wrong(attempts: Sequence[Attempt]) -> Failure | Note:
    """The failure for a gradient that is not the right one; a note if rounding alone may explain it."""
    wrong = [each for each in attempts if each.wrong]
    shown = min(wrong, key=lambda each: each.plainness)
    right, subject, sample = shown.right, shown.right.among.subject, shown.right.among.sample
    assert shown.difference is not None
    assert shown.got is not None
    assert shown.expected is not None
    name = sample.names[right.argnum]
    found = _diagnosis(shown, attempts)
    evidence = {
        "sample": shown.where,
        "grad_output": right.grad_outputs.name,
        **shown.difference.evidence(),
        **found.evidence,
    }
    if found.also_fits:
        evidence["also fits"] = dict(found.also_fits)
    message = f"the gradient of `{right.label}` is wrong: {shown.difference}"
    message += f"; {found.reason}" if found.reason else ""
    if found.cause == "missing-gradient" and leaves_out(subject, name):
        message += f"; {LEFT_OUT.format(name)}"
    rule = subject.specification.gradients.rules.get(name)
    if isinstance(rule, Formula) and subject.specification.kernels:
        used = {*rule.parameters} & {*subject.specification.schema.result_position}
        if used and _is_right_with_reference(shown):
            words = " and ".join(f"`{each}`" for each in sorted(used))
            message += f"; its formula is right with the {words} of the reference"
            evidence[RIGHT_WITH_REFERENCE] = sorted(used)
    if not isinstance(rule, Formula) and not subject.specification.opaque and not right.trusted:
        message += f". {HIDES}"
    # What is unknown is, in a replay, what came.
    expected = torch.where(shown.expected.isnan(), shown.got.to(shown.expected), shown.expected)
    failure = Failure(
        NAME,
        right.label,
        found.cause,
        message,
        rule_location(subject, name),
        evidence,
        shown.script(expected),
        dtypes=_dtypes(wrong),
    )
    off = max(each.off for each in wrong)
    if off <= 2 * torch.finfo(torch.float32).eps and all(each.dtype == torch.float64 for each in wrong):
        return _rounding(shown, failure)
    return approximate(failure, off)


ROUNDED = (
    "the backward and autograd through the forward differ by rounding to float32, as where one of them has a "
    "constant in float32 and the other in float64"
)


def _rounding(shown: Attempt, failure: Failure) -> Failure | Note:
    """The cause of an error like rounding to float32, or a note if no side is known to be wrong.

    A backward that computes in float32 returns numbers of float32, which has the cause already. Autograd
    through a forward that was not written for it is no truth: there a backward alone must use low precision
    operands.
    """
    right, among = shown.right, shown.right.among
    if failure.cause == UNKNOWN and not among.subject.kind.own_forward:
        message = f"{failure.message}; it is off as a constant in float32 makes it"
        return replace(failure, cause="precision", message=message)
    if failure.cause == "precision" or not among.subject.kind.own_forward:
        return failure
    operation = low_precision_in_backward(among.subject, among.sample, shown.subset, right.grad_outputs)
    if operation is None:
        return Note(ROUNDED)
    message = (
        f"the gradient of `{failure.input}` loses digits: {shown.difference}; in the backward {operation}, "
        "where everything else, and all of the forward, has the digits of float64"
    )
    evidence = {**failure.evidence, "operation": operation}
    return replace(failure, cause="precision", message=message, evidence=evidence)


THOUSANDTH = 1e-3
"""Largest share of the largest element that an approximation is off by, as another formula's derivative."""


def approximate(failure: Failure, off: float) -> Failure:
    """The failure, as a minor one where a gradient is off by at most a thousandth of its largest element."""
    if off > THOUSANDTH:
        return failure
    if failure.cause not in (UNKNOWN, "region"):
        return replace(failure, minor=True)
    words = f"it is off by at most {off:.1g} of its largest element. Where that is meant, `accept` it"
    return replace(failure, cause="approximate", message=f"{failure.message}; {words}", minor=True)


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


def _is_right_with_reference(shown: Attempt) -> bool:
    """Return True if the formulas give the right gradient from results of the reference, not of a kernel."""
    subject, sample = shown.right.among.subject, shown.right.among.sample
    flat, grads = (each.at(shown.dtype, shown.device) for each in (sample, shown.right.grad_outputs))
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
        got = vjp(saved, [given.get(position) for position in range(len(every))])[shown.right.argnum]
        return bool(replace(shown, got=got).off <= torch.finfo(shown.dtype).eps ** 0.5)
    return False


def reference_failure(right: RightGradient) -> Findings:
    """Yield the failure for a reference through which autograd gives a wrong derivative."""
    difference = right.judge(right.through_reference)
    if difference is None:
        return
    found = diagnose(Observation(right.through_reference, right.numerical.known))
    reason = f": {found.reason}" if found.reason else ""
    sample = case_name(right.among.sample, torch.float64, CPU)
    yield Failure(
        NAME,
        right.label,
        found.cause,
        f"autograd through the reference gives another gradient of `{right.label}` than finite differences "
        f"of it: {difference}{reason}. {HIDES}",
        right.among.subject.specification.where,
        {"sample": sample, "grad_output": right.grad_outputs.name},
    )


LEFT_OUT = (
    "its backward returns None there in every case: where that is meant, adopt the class, and declare it by "
    "`operator.gradients({}=opsmith.non_differentiable)`"
)

HIDES = "The reference hides a dependence from autograd (`.detach()`, `no_grad`, `.data`, a cast)"


def _diagnosis(shown: Attempt, attempts: Sequence[Attempt]) -> Diagnosis:
    """The cause of a wrong gradient, seen on fresh inputs, and for which inputs that require one."""
    right, subject, sample = shown.right, shown.right.among.subject, shown.right.among.sample
    truth = None if right.trusted else partial(by_differences, subject)
    observer = Observer(
        subject, sample, NAME, shown.device, shown.dtype, shown.subset, argnum=right.argnum, right=truth
    )
    found = diagnose(observer.observe(sample.in_double(), right.grad_outputs.in_double()))
    changed = result_by_need(subject, sample, shown.subset, shown.dtype, shown.device)
    if changed is not None:
        reason = f"it is the gradient of another result, when {_needing(sample, [shown.subset])}: {changed}"
        return Diagnosis("input-needs-grad", reason, evidence=found.evidence)
    alike = shown.alike(attempts)
    wrong, fine = ([each.subset for each in alike if each.wrong == side] for side in (True, False))
    if fine:
        reason = f"it is wrong when {_needing(sample, wrong)}, and right when {_needing(sample, fine)}"
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


def _needing(sample: Sample, subsets: Sequence[tuple[int, ...]]) -> str:
    words = [" and ".join(f"`{sample.labels[argnum]}`" for argnum in subset) for subset in subsets]
    alone = [
        f"{word} alone" if len(subset) == 1 else word for word, subset in zip(words, subsets, strict=True)
    ]
    verb = "requires" if len(subsets) == 1 and len(subsets[0]) == 1 else "require"
    return f"{', or '.join(alone)} {verb} a gradient"
