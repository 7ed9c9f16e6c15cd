"""Gradients, compared with autograd through the reference and with finite differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import Differentiated, differentiated, leaves_out, refusals_in
from opsmith.checking.causes import CAUSES, UNKNOWN, first_of
from opsmith.checking.diagnosis import Diagnosis, Observation, diagnose
from opsmith.checking.diagnosis.observation import Observer
from opsmith.checking.exceptions import Overlooking, named_by, refuse_own, stated
from opsmith.checking.numerics.low_precision import low_precision_operand
from opsmith.checking.output.replay import gradient_replay
from opsmith.checking.processes.watchdog import OutOfTimeError, time_limit
from opsmith.checking.properties.behaviour.state import result_by_need
from opsmith.checking.properties.numeric.conventions import by_convention
from opsmith.checking.properties.numeric.differentiable import (
    differentiated_names,
    each_differentiated,
    frozen_parameters,
    given_instead,
    lacks_floats,
    not_exercised,
    nothing_to_differentiate,
)
from opsmith.checking.properties.numeric.gradient_truth import (
    THOUSANDTH,
    Backward,
    RightGradient,
    RightGradients,
    approximate,
    approximate_by_differences,
    by_differences,
    share_off,
    where_set,
    where_tied,
)
from opsmith.checking.property import REFUSED, Findings, Note, Property, Skipped
from opsmith.checking.report import Failure, ordered
from opsmith.checking.run import Case, LiveCall, Run, cases, each_run
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, case_name, dtype_name, lacks_dtype
from opsmith.checking.samples.grad_outputs import GradOutputs, grad_outputs_to_try
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.liveness import record_saved_tensors
from opsmith.checking.subject import Subject
from opsmith.core.backward_plan import backward_plan
from opsmith.core.formula import Formula
from opsmith.core.location import innermost
from opsmith.judging.compare import Difference
from opsmith.judging.tensors import CPU
from opsmith.torch_library.autograd.gradient_values import CallMetadata
from opsmith.torch_library.autograd.vjp import Vjp

NAME = "gradient"


@dataclass
class GradientCoverage:
    """Progress of one run of the property.

    Args:
        confirmed: True if finite differences confirm autograd through the reference on every sample so far.
        samples: Number of differentiated samples.
        decided: True if the right gradient was known for at least one element of a sample.
        wrong: Inputs whose gradient is wrong on the author's samples, for which derived samples are skipped.
        right: For each input, the author's samples on which its gradient is right.
    """

    confirmed: bool = True
    samples: int = 0
    decided: bool = False
    wrong: set[str] = field(default_factory=set)
    right: dict[str, list[str]] = field(default_factory=dict)


def run(subject: Subject) -> Findings:
    """Differentiate every sample by each input alone and by all together.

    If there is verifiably nothing to differentiate (no result requires a gradient, though every floating
    input does), the property passes, with a note.
    """
    if subject.specification.gradients.surrogate:
        yield Skipped(
            "the gradients are surrogates, which are wrong on purpose; the property `surrogate` checks them"
        )
        return
    seen = GradientCoverage()
    found = [*each_run(NAME, partial(_check, seen=seen), subject)]
    found = [_explained(each, subject, seen) if isinstance(each, Failure) else each for each in found]
    found += not_exercised(NAME, subject, "gradient formula")
    found += frozen_parameters(NAME, subject)
    yield from found
    refused, promised = _refused(subject), subject.specification.origin.own("gradient") is not None
    if seen.decided or any(isinstance(each, Failure) for each in found):
        yield from _about_refused(subject, refused)
    elif seen.samples:
        yield Skipped(WITHOUT_ELEMENTS if lacks_floats(subject) else UNDECIDED)
    elif refused:
        yield Skipped("; ".join(reason for reason, _ in refused.values()))
    elif not (promised and lacks_floats(subject)) and nothing_to_differentiate(subject):
        yield Note("nothing to differentiate: no result requires a gradient in any sample")
    else:
        yield Skipped("no sample has a differentiable input: add a sample with floating tensors")


def _refused(subject: Subject) -> dict[str, tuple[str, Sample]]:
    """Inputs without a gradient to check, each with the reason and the first such sample."""
    refused: dict[str, tuple[str, Sample]] = {}
    for sample, inputs in each_differentiated(subject):
        for name, reason in inputs.refused.items():
            refused.setdefault(name, (reason, sample))
    return refused


def _about_refused(subject: Subject, refused: dict[str, tuple[str, Sample]]) -> Findings:
    """Note inputs without a gradient to check; a refusal by a class in some samples only is a limit."""
    some: dict[tuple[str, int], list[str]] = {}
    for name, (reason, sample) in refused.items():
        text = refusals_in(subject, sample).get(name)
        if text is None or name not in differentiated_names(subject):
            yield Note(reason)
        else:
            some.setdefault((text, sample.position), []).append(name)
    where = subject.specification.where_of("gradient")
    for (text, _), names in some.items():
        run, evidence = Run(subject, refused[names[0]][1], NAME), {REFUSED: "by an error of its own"}
        yield run.failure(", ".join(names), "raises", text, where, evidence)


WITHOUT_ELEMENTS = "no sample has a floating tensor with elements: no gradient is checked"

UNDECIDED = (
    "no method decides an element of a gradient, not even finite differences: add samples at which "
    "the results change smoothly"
)


def _explained(failure: Failure, subject: Subject, seen: GradientCoverage) -> Failure:
    """The failure, with the samples on which the gradient is right; strained if nobody promised the gradient.

    If the forward keeps only one of the values that share an index, the right gradient of the other values is
    zero. If an element was read several times, a backward that returns only one of its gradients remains an
    error.
    """
    shown, expected = str(failure.evidence.get("sample", "")), failure.evidence.get("expected")
    repeats = any(each.repeats and shown.startswith(str(each)) for each in subject.samples)
    if CAUSES[failure.cause].numeric and expected == 0 and repeats:
        message = f"{failure.message}; {DISTINCT}"
        failure = replace(failure, cause="region", message=message, given="strained")
    if failure.input in seen.right:
        evidence = {**failure.evidence, "right on": ", ".join(seen.right[failure.input])}
        failure = replace(failure, evidence=evidence)
    return where_set(where_tied(by_convention(failure, subject), subject), subject)


DISTINCT = (
    "the forward keeps only one of the values that share an index: if indices must be distinct, "
    "refuse equal indices"
)


def _check(run: Run, seen: GradientCoverage) -> Findings:
    subject, sample = run.subject, run.sample
    inputs = differentiated(subject, sample)
    if sample.origin:
        left = tuple(argnum for argnum in inputs.argnums if sample.labels[argnum] not in seen.wrong)
        inputs = replace(inputs, argnums=left)
    else:
        for name, given in given_instead(subject, sample).items():
            if given != "None":
                yield Note(f"sample {sample.position} does not differentiate `{name}`, which is {given}")
    if not inputs.argnums:
        return
    rights = RightGradients(
        subject,
        sample,
        NAME,
        by=inputs.argnums,
        confirmed=bool(sample.origin) and seen.confirmed,
        spot_checked=seen.samples >= subject.effort.spot_checked_after,
    )
    seen.samples += 1
    with torch.no_grad():
        results = subject.call(sample, sample.in_double())
    if rights.recorded and _has_other_shapes(rights, results):
        yield Note("results whose shapes differ from the reference were left out: see `forward`")
        return
    tried = grad_outputs_to_try(subject, sample, results)
    plain = [rights.one(argnum, tried[-1]) for argnum in inputs.argnums]
    if not sample.origin:
        yield from _about_reference(rights, plain)
        seen.confirmed &= all(right.trusted for right in plain)
    attempts: list[Attempt] = []
    for grad_outputs in tried:
        for found in _attempts(rights, inputs, grad_outputs):
            if isinstance(found, Attempt):
                attempts.append(found)
            else:
                yield found
    attempts += _raising_in_few_digits(plain[0])
    seen.decided |= any(rights.one(argnum, each).is_known for each in tried for argnum in inputs.argnums)
    wrong: set[str] = set()
    for finding in _conclude(rights, attempts):
        if isinstance(finding, Failure) and finding.input:
            wrong.update(finding.input.split(", "))
        yield finding
    raising = [attempt.argnums for attempt in attempts if attempt.error is not None]
    wrong.update(sample.labels[argnum] for subset in raising if len(subset) == 1 for argnum in subset)
    if not sample.is_emptied:  # a fault or a refusal without elements does not concern other inputs
        seen.wrong |= wrong
    wrong.update(sample.labels[argnum] for subset in raising for argnum in subset)
    for label in {sample.labels[argnum] for argnum in inputs.argnums} - wrong if not sample.origin else ():
        seen.right.setdefault(label, []).append(str(sample))


def _has_other_shapes(rights: RightGradients, results: list[Tensor]) -> bool:
    """Return True if results differ in shape from the reference's, so that no grad_output fits both."""
    with rights.subject.seeded(), torch.no_grad():
        expected = rights.plain(rights.sample.in_double())
    # An optional result may be None.
    got, wanted = ([getattr(each, "shape", None) for each in some] for some in (results, expected))
    return got != wanted


def _about_reference(rights: RightGradients, plain: Sequence[RightGradient]) -> Findings:
    """Yield a note if only finite differences decide; a failure if the reference's derivative is wrong."""
    subject, specification = rights.subject, rights.subject.specification
    if specification.opaque:
        return
    if not rights.recorded:
        yield Note(FORWARD_NOT_RECORDED if subject.kind.own_forward else NOT_RECORDED)
        return
    for right in plain:
        if right.trusted:
            continue
        if subject.kind.own_forward:
            yield Note(FORWARD_IS_NO_TRUTH)
        elif isinstance(specification.gradients.rules.get(rights.sample.names[right.argnum]), Formula):
            yield from _reference_failure(right)


NOT_RECORDED = (
    "the reference was left out: autograd does not record it, so only finite differences decide; if "
    "the reference is not made of torch operations, declare `opaque=True`"
)

FORWARD_NOT_RECORDED = (
    "autograd through the forward was left out, because autograd does not record the forward: "
    "finite differences decide"
)

FORWARD_IS_NO_TRUTH = (
    "autograd through the forward was left out: it contradicts finite differences of the forward. "
    "Possible causes are rounding to float32 in the forward, or a `.detach()`"
)


def _attempts(
    rights: RightGradients, inputs: Differentiated, grad_outputs: GradOutputs
) -> Iterator[Attempt | Note]:
    """Differentiate by every choice of inputs, in every dtype and on every device, for one grad_output."""
    subject, sample, arguments = rights.subject, rights.sample, grad_outputs.beside(rights.sample)
    right = {argnum: rights.one(argnum, grad_outputs) for argnum in inputs.argnums}
    known: dict[tuple[torch.dtype, torch.device], dict[bool, Case]] = {}
    for by_reference in sorted({each.trusted for each in right.values()}):
        if not by_reference and not subject.has_truth:
            continue  # the right result in other dtypes is unknown
        gradients = rights.computation(grad_outputs, by_reference=by_reference)
        for case in cases(rights, gradients, ALWAYS_CHECKED, arguments):
            if isinstance(case, Note):
                yield case
            else:
                known.setdefault((case.dtype, case.device), {})[by_reference] = case
    for device in subject.devices_with(torch.float64):
        known.setdefault((torch.float64, device), {})
    for (dtype, device), given in known.items():
        for subset in inputs.subsets(subject.effort):
            run = Attempt(subject, sample, NAME, device, dtype=dtype, by=subset, right=right[subset[0]])
            values = arguments(dtype, device)
            try:
                found = Backward(run).or_none(values)
            except Exception as error:
                refuse_own(error)
                yield replace(run, error=error)
                continue
            for argnum, got in zip(subset, found, strict=True):
                gradient = torch.zeros_like(values[argnum]) if got is None else got
                attempt = replace(run, right=right[argnum], got=gradient)
                yield _judged(attempt, gradient, given.get(right[argnum].trusted))


def _judged(attempt: Attempt, got: Tensor, case: Case | None) -> Attempt:
    """Compare a gradient with autograd's through the reference if this is trusted, else with differences."""
    right = attempt.right
    if right.trusted or attempt.dtype != torch.float64:
        if case is None:
            return attempt
        answer = case.answers[right.position]
        expected = answer.tensor
    else:
        answer, expected = None, right.numerical.known
    return replace(attempt, expected=expected, difference=right.judge(got, answer))


def _raising_in_few_digits(right: RightGradient) -> Iterator[Attempt]:
    """The backwards that raise unexpectedly in bfloat16 and float16, although the forward returns.

    Numbers are compared in float64 and float32.
    """
    subject, sample, argnums = right.among.subject, right.among.sample, right.among.argnums
    if sample.origin or subject.single_precision:
        return
    seen = {*subject.ran.seen}
    for dtype in (each for each in LOW_PRECISION if sample.takes(each)):
        for device in subject.devices_with(dtype):
            call, run = None, Attempt(subject, sample, NAME, device, dtype=dtype, by=argnums, right=right)
            try:
                call = run.call()
                grads = right.grad_outputs.at(dtype, device)
                pairs = [(grads[at], call.results[at].dtype) for at in call.open]
                call.backward([None if grad is None else grad.to(own) for grad, own in pairs])
            except Exception as error:
                refuse_own(error)
                if call is not None and not (lacks_dtype(error) or stated(error)):
                    yield replace(run, error=error)  # `forward` reports an exception of the forward
    subject.ran.seen &= seen  # numbers are not compared: the report must not say that they passed


@dataclass(frozen=True, kw_only=True)
class Attempt(Run):
    """One backward, and the gradient of one input that it returned.

    Args:
        right: The right gradient.
        got: The gradient; zeros if none was returned.
        expected: The right gradient, as far as it is known in the dtype.
        difference: Difference of the two; None if they agree.
        error: The exception, if there is no gradient.
    """

    dtype: torch.dtype = torch.float64
    right: RightGradient
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
    def plainness(self) -> tuple[bool, bool, int]:
        """Key for the order in which wrong attempts are shown: float64, every grad_output, few inputs."""
        return self.dtype != torch.float64, " alone" in self.right.grad_outputs.name, len(self.argnums)

    def alike(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """The attempts that have the same grad_output, dtype and device."""
        wanted = (self.right.grad_outputs, self.dtype, self.device)
        return [each for each in attempts if (each.right.grad_outputs, each.dtype, each.device) == wanted]

    def script(self, expected: Tensor | None) -> str | None:
        """A few lines that run it again and compare it with the reference's or the right gradient."""
        grads = self.right.grad_outputs.at(self.dtype, self.device)
        given = (self.subject, self.sample, self.flat(), self.right.argnum, grads, expected)
        return gradient_replay(*given, subset=self.argnums)


def _conclude(rights: RightGradients, attempts: Sequence[Attempt]) -> Findings:
    """One failure for each input whose gradient is wrong in any backward on the sample."""
    errors: dict[tuple[str, str, str], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.error is not None:  # two lines may raise the same message
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
                f"the gradient of `{label}` has a kink in {brief}: any value between its one-sided "
                "derivatives is right there"
            )
        open_ = (right.numerical.describe_unknown(label) for right in tried if not right.trusted)
        words = next(filter(None, open_), None)
        if words is not None:
            yield Note(f"{words}; these elements are not checked in {brief}")


def _raised(group: Sequence[Attempt], attempts: Sequence[Attempt]) -> Failure:
    """The failure for an exception in the backward, with the choices of inputs that lead to it."""
    first = group[0]
    assert first.error is not None
    sample, known = first.sample, named_by(first.error)
    tensors = [argnum for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)]
    about = first.argnums
    if known.position is not None and known.position < len(tensors):
        about = (tensors[known.position],)
    label = ", ".join(sample.labels[argnum] for argnum in about)
    failure = replace(first.raised(first.error, label), dtypes=_dtypes(group))
    fine = [*dict.fromkeys(each.argnums for each in first.alike(attempts) if not each.wrong)]
    if failure.cause != "raises" or not fine:
        return failure
    raising = [*dict.fromkeys(each.argnums for each in first.alike(group))]
    reason = (
        f"the backward raises when {_needing(sample, raising)}, and is right when {_needing(sample, fine)}"
    )
    return replace(
        failure,
        message=f"{failure.message}; {reason}",
        evidence={**failure.evidence, "also fits": {"input-needs-grad": reason}},
        replay=first.script(None),
    )


def _dtypes(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    return ordered(dtype_name(each.dtype) for each in attempts)


def _wrong(attempts: Sequence[Attempt]) -> Failure | Note:
    """The failure for a wrong gradient; a note if only rounding may explain the difference."""
    wrong = [each for each in attempts if each.wrong]
    shown = min(wrong, key=lambda each: each.plainness)
    try:
        found = _diagnosis(shown, attempts)
    except OutOfTimeError:  # the fault is known
        found = Diagnosis(UNKNOWN, "no time was left to look for the cause")
    with time_limit(math.inf):
        return _described(wrong, shown, found)


def _described(wrong: Sequence[Attempt], shown: Attempt, found: Diagnosis) -> Failure | Note:
    right, subject, name = shown.right, shown.subject, shown.sample.names[shown.right.argnum]
    assert shown.difference is not None
    assert shown.got is not None
    assert shown.expected is not None
    evidence = {"grad_output": right.grad_outputs.name, **shown.difference.evidence(), **found.evidence}
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
    # In a replay, unknown elements equal the gradient that was returned.
    expected = torch.where(shown.expected.isnan(), shown.got.to(shown.expected), shown.expected)
    failure = replace(
        shown.failure(right.argnum, found.cause, message, evidence=evidence),
        replay=shown.script(expected),
        dtypes=_dtypes(wrong),
    )
    off = max(each.off for each in wrong)
    narrow = _saved_in(shown) if failure.cause in (UNKNOWN, "precision") else None
    if narrow is not None:
        words = f"the forward saves values in {dtype_name(narrow)}; for these values the gradient is right"
        return replace(failure, cause="precision", message=f"{failure.message}; {words}")
    if off <= 2 * torch.finfo(torch.float32).eps and all(each.dtype == torch.float64 for each in wrong):
        return _rounding(shown, failure)
    if right.trusted:
        return approximate(failure, off)
    values = right.grad_outputs.beside(shown.sample)(torch.float64, CPU)
    return approximate_by_differences(failure, shown, right.argnum, values, off, shown.expected)


def _saved_in(shown: Attempt) -> torch.dtype | None:
    """The dtype of few digits in which arguments are saved, if the gradient is right for the saved values."""
    subject, sample, right = shown.subject, shown.sample, shown.right
    with Overlooking(), record_saved_tensors() as saved:
        replace(shown, dtype=torch.float64).call()
    for narrow in {each.dtype for each in saved if each.is_floating_point()} - {torch.float32, torch.float64}:
        kept = [each.double() for each in saved if each.dtype == narrow]
        with Overlooking():
            fewer = {at: sample.flat[at].to(narrow) for at in sample.inexact}
            packed = [at for at in fewer if any(torch.equal(fewer[at].double(), each) for each in kept)]
            if not packed:
                continue  # for example a mask
            rounded = [*sample.flat]
            for at in packed:
                rounded[at] = fewer[at].to(rounded[at].dtype)
            other = replace(sample, flat=tuple(rounded), copies={})
            rights = RightGradients(subject, other, NAME, by=(right.argnum,))
            known = rights.one(right.argnum, right.grad_outputs).known
            if shown.got is not None and share_off(shown.got, known) <= THOUSANDTH:
                return narrow
    return None


ROUNDED = (
    "the backward and autograd through the forward differ by rounding to float32, for example "
    "because one of them has a constant in float32 and the other has it in float64"
)


def _rounding(shown: Attempt, failure: Failure) -> Failure | Note:
    """The failure for an error like rounding to float32, or a note if neither side is known to be wrong.

    A backward that computes in float32 returns float32 numbers, for which the cause is known already.
    Autograd through a forward that was not written for it need not be right, so only a backward that is known
    to use low precision operands fails.
    """
    subject = shown.subject
    if failure.cause == UNKNOWN and not subject.kind.own_forward:
        message = f"{failure.message}; the size of the error suggests a constant in float32"
        return replace(failure, cause="precision", message=message)
    if failure.cause == "precision" or not subject.kind.own_forward:
        return failure
    calls: list[LiveCall] = []
    on_cpu, grads = replace(shown, place=CPU), shown.right.grad_outputs.in_double()
    forward = low_precision_operand(lambda: calls.append(on_cpu.call()), mixed=False)
    operation = low_precision_operand(lambda: calls[0].backward([grads[at] for at in calls[0].open]))
    if forward is not None or operation is None:
        return Note(ROUNDED)
    message = (
        f"the gradient of `{failure.input}` loses digits: {shown.difference}; in the backward, "
        f"{operation}, but all other operations and the forward have the digits of float64"
    )
    evidence = {**failure.evidence, "operation": operation}
    return replace(failure, cause="precision", message=message, evidence=evidence)


RIGHT_WITH_REFERENCE = "right with the reference's"
"""Evidence: the results for which a formula is right if they are the reference's instead of the
operator's."""


def _is_right_with_reference(shown: Attempt) -> bool:
    """Return True if the formulas are right for the reference's results, but not for a kernel's results."""
    subject, sample, flat = shown.subject, shown.sample, shown.flat()
    grads = shown.right.grad_outputs.at(shown.dtype, shown.device)
    schema, names = subject.specification.schema, [sample.names[argnum] for argnum in shown.argnums]
    with Overlooking(), torch.no_grad():
        every = subject.reference(sample, flat)
        results = subject.result_flattening(sample)
        metadata = CallMetadata.of(flat, every, [argnum in shown.argnums for argnum in range(len(flat))])
        plan = backward_plan(subject.specification, frozenset(names))
        saved = dict(zip(schema.names, sample.flattening.pack(flat), strict=True))
        saved |= {name: results.item(name, every) for name in schema.result_position}
        given = dict(zip(subject.visible_positions(sample), grads, strict=True))
        vjp = Vjp(subject.specification, plan, sample.flattening, results, metadata, None)
        got = vjp(saved, [given.get(position) for position in range(len(every))])[shown.right.argnum]
        return bool(replace(shown, got=got).off <= torch.finfo(shown.dtype).eps ** 0.5)
    return False


def _reference_failure(right: RightGradient) -> Findings:
    """Yield the failure for a reference through which autograd gives a wrong derivative."""
    difference = right.judge(right.through_reference)
    if difference is None:
        return
    found = diagnose(Observation(right.through_reference, right.numerical.known))
    reason = f": {found.reason}" if found.reason else ""
    sample = case_name(right.among.sample, torch.float64, CPU)
    yield right.among.failure(
        right.label,
        found.cause,
        f"autograd through the reference gives a gradient of `{right.label}` that differs from "
        f"finite differences: {difference}{reason}. {HIDES}",
        evidence={"sample": sample, "grad_output": right.grad_outputs.name},
    )


LEFT_OUT = (
    "the backward always returns None for this input: if you intend this, adopt the class, and "
    "declare it by `operator.gradients({}=opsmith.non_differentiable)`"
)

HIDES = "The reference hides a dependence from autograd (`.detach()`, `no_grad`, `.data`, a cast)"


def _diagnosis(shown: Attempt, attempts: Sequence[Attempt]) -> Diagnosis:
    """The cause of a wrong gradient, from fresh inputs and from choices of inputs that require one."""
    right, subject, sample = shown.right, shown.subject, shown.sample
    truth = None if right.trusted else partial(by_differences, subject)
    observer = Observer(
        subject, sample, NAME, shown.device, shown.dtype, shown.argnums, argnum=right.argnum, right=truth
    )
    found = diagnose(observer.observe(sample.in_double(), right.grad_outputs.in_double()))
    changed = result_by_need(subject, sample, shown.argnums, shown.dtype, shown.device)
    if changed is not None:
        reason = (
            f"it is the gradient of a different result: when {_needing(sample, [shown.argnums])}, {changed}"
        )
        return Diagnosis("input-needs-grad", reason, evidence=found.evidence)
    alike = shown.alike(attempts)
    wrong, fine = ([each.argnums for each in alike if each.wrong == side] for side in (True, False))
    if fine:
        reason = f"it is wrong when {_needing(sample, wrong)}, and right when {_needing(sample, fine)}"
        also = {found.cause: found.reason, **found.also_fits}
        # A difference between runs explains better why one run is right and another wrong.
        cause = first_of({"input-needs-grad", *(name for name in also if CAUSES[name].unsteady)})
        if cause == "input-needs-grad":
            return Diagnosis(cause, reason, {k: v for k, v in also.items() if k != "unknown"}, found.evidence)
    if shown.dtype != torch.float64 and any(map(_is_right_in_float64, attempts)):
        words = f"it is right in float64, but not in {dtype_name(shown.dtype)}"
        reason = f"{found.reason}; {words}" if found.reason else words
        return Diagnosis(found.cause, reason, found.also_fits, found.evidence)
    return found


def _is_right_in_float64(attempt: Attempt) -> bool:
    """True if a gradient is right in float64; a function that takes only float32 gets numbers cast to it."""
    compared = attempt.dtype == torch.float64 and attempt.expected is not None
    return compared and not attempt.wrong and not attempt.subject.narrow


def _needing(sample: Sample, choices: Sequence[tuple[int, ...]]) -> str:
    """The smallest choices of inputs, in words, since the choices that contain them are too many."""
    subsets = [each for each in choices if not any({*other} < {*each} for other in choices)]
    words = [" and ".join(f"`{sample.labels[argnum]}`" for argnum in subset) for subset in subsets]
    alone = [
        f"{word} alone" if len(subset) == 1 else word for word, subset in zip(words, subsets, strict=True)
    ]
    verb = "requires" if len(subsets) == 1 and len(subsets[0]) == 1 else "require"
    return f"{', or '.join(alone)} {verb} a gradient"


GRADIENT = Property(
    NAME,
    "the gradient of every input is right, for every choice of inputs that require a gradient",
    run,
    inputs="every",
    traits=("differences", "explains-gradients", "sends-gradients"),
)
