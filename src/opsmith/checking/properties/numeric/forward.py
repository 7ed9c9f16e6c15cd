"""Results: compare every kernel and the call itself with the reference, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.calls import through_default_dtype
from opsmith.checking.causes import CAUSES, UNKNOWN
from opsmith.checking.diagnosis import explain_difference
from opsmith.checking.exceptions import Overlooking, first_line, refuse_own, stated
from opsmith.checking.numerics.low_precision import rounded_arguments
from opsmith.checking.output.replay import result_replay
from opsmith.checking.properties.kernels.sizes import kernel_sizes, narrow_index, taken_though_refused
from opsmith.checking.properties.kernels.unverified import runs_in
from opsmith.checking.property import Findings, Note, Property
from opsmith.checking.run import Case, Run, cases, each_run
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, dtype_name, lacks_dtype
from opsmith.checking.subject import Subject, missing_device
from opsmith.core.kernels import Kernel, Rejected, choose
from opsmith.judging.answer import Computation
from opsmith.judging.compare import form_difference
from opsmith.judging.judge import judge
from opsmith.judging.tensors import is_inexact
from opsmith.judging.working_precision import working_precision


def compare_results(
    case: Case,
    results: Sequence[Tensor | None],
    positions: Sequence[int],
    what: str,
    where: str,
    replay: Callable[[int], str | None],
) -> Findings:
    """Compare results with the truth.

    Args:
        case: The sample, its dtype and the right results.
        results: Results of the call.
        positions: Positions of these among all results.
        what: Source of the results in messages.
        where: `file:line` of this source.
        replay: Returns a script that shows that the result at a position is wrong.
    """
    for got, position in zip(results, positions, strict=True):
        name, answer = case.subject.every(case.sample)[position].name, case.answers[position]
        expected = answer.ordinary
        if got is None or expected is None:
            if got is not expected:
                actual, wanted = ("no" if value is None else "a" for value in (got, expected))
                words = f"returns {actual} tensor for `{name}`, and the reference returns {wanted} tensor"
                yield case.failure(name, "kernel-mismatch", f"{what} {words}", where)
            continue
        form = form_difference(got, expected)
        if form is not None:
            words = (
                f"`{name}` with the {form.aspect} {form.got}, but the reference returns the "
                f"{form.aspect} {form.expected}"
            )
            cause = form.aspect if form.aspect in CAUSES else "kernel-mismatch"
            yield case.failure(name, cause, f"{what} returns {words}", where, form.evidence())
            continue
        verdict = judge(got, answer)
        if verdict.difference is None:
            continue
        looks, reason = explain_difference(got.cpu(), answer.tensor) if is_inexact(got) else (UNKNOWN, "")
        rounded = rounded_arguments(got, answer, case.flat())
        if rounded is not None:
            looks, reason = "precision", f"it is right for arguments that are rounded to {rounded}"
        cause = looks if looks in ("nan", "precision") else "kernel-mismatch"
        like = {"looks like": looks} if looks not in (cause, UNKNOWN) else {}
        message = f"`{name}` from {what} is wrong: {verdict}" + (f"; {reason}" if reason else "")
        evidence = {**verdict.difference.evidence(), **like}
        minor = verdict.minor or rounded is not None
        yield case.failure(name, cause, message, where, evidence, replay=replay(position), minor=minor)


NAME = "forward"


def run(subject: Subject) -> Findings:
    """Run every kernel and the call on every sample, in every dtype, on every device."""
    for kernel in subject.specification.kernels:
        if runs_in(kernel) != NAME:
            reason = missing_device(kernel.device)
            yield Note(f"the kernel for {kernel.device}, {kernel.where}, did not run: {reason}")
    for kernel in subject.kernels_on(torch.device("cpu")):
        yield from narrow_index(NAME, subject, kernel.given)
    yield from subject.refused_float64
    yield from _lost_precision(subject)
    yield from _through_default_dtype(subject)
    more = replace(subject, samples=(*subject.samples, *kernel_sizes(subject)))
    yield from each_run(NAME, _check, more)
    yield from taken_though_refused(NAME, subject)
    if _rounds_to_float32(subject):
        yield Note(IN_FLOAT32)


def _rounds_to_float32(subject: Subject) -> bool:
    """True if it computes in float32 for the first sample in float64, without being declared so."""
    sample = next((each for each in subject.samples if each.inexact and not each.origin), None)
    if sample is not None and not subject.single_precision:
        with Overlooking(), torch.no_grad():  # its exceptions are reported
            call, flat = partial(subject.call, sample), sample.in_double()
            return working_precision(call, flat, subject.generator()) == torch.float32
    return False


IN_FLOAT32 = (
    "the operator computes in float32, also for arguments in float64: two of its computations may "
    "differ by the rounding of float32"
)


def _check(run: Run) -> Findings:
    subject, sample = run.subject, run.sample
    reference = partial(subject.reference, sample)
    results = Computation.of(reference, sample.at(), subject.generator(), has_truth=subject.has_truth)
    for case in cases(run, results, (*ALWAYS_CHECKED, *LOW_PRECISION)):
        if isinstance(case, Note):
            yield case
            continue
        if not all(answer.is_decided() for answer in case.answers):
            words = "the reference itself loses more than half of its digits"
            yield Note(f"{sample} is not checked in {dtype_name(case.dtype)}, because {words}")
        wrong: set[Kernel] = set()
        refused = False
        for kernel in subject.kernels_on(case.device):
            try:
                if isinstance(kernel.consider(sample.flattening.pack(case.flat())), Rejected):
                    continue
            except errors.OpsmithError as error:  # it does not compile; the other kernels are compared
                refused = True
                yield run.raised(error)
                subject.ran.kernels.add(kernel)
                continue
            subject.ran.kernels.add(kernel)
            for failure in _kernel(case, kernel):
                wrong.add(kernel)
                yield failure
        if not refused:  # otherwise each call that considers the kernel raises the same error
            yield from _call(case, wrong)


def _kernel(case: Case, kernel: Kernel) -> Findings:
    try:
        results = case.subject.kernel(case.sample, case.flat(), kernel.function)
    except Exception as error:
        refuse_own(error)
        yield case.raised(error)
        return
    every = range(len(case.subject.every(case.sample)))
    what = f"the kernel for {kernel.device}"
    yield from compare_results(case, results, every, what, kernel.where, partial(_replay, case))


def _call(case: Case, wrong: set[Kernel]) -> Findings:
    """The call as users make it, unless it runs a kernel known to be wrong."""
    subject, flat = case.subject, case.flat()
    chosen = choose(subject.specification.kernels, case.sample.flattening.pack(flat))[0]
    if chosen is not None and chosen.kernel in wrong:
        return
    try:
        results = subject.call(case.sample, flat)
    except Exception as error:
        refuse_own(error)
        origin = subject.specification.origin
        refused = lacks_dtype(error) or (stated(error) and not subject.kind.has_reference)
        if origin.kind == "declared" or case.dtype in ALWAYS_CHECKED or not refused:
            yield case.raised(error)
            return
        words = f"{origin.computes_by} does not run in this dtype: {first_line(error)}"
        yield Note(f"{dtype_name(case.dtype)} was left out on {case.device.type}: {words}")
        return
    visible, where = subject.visible_positions(case.sample), subject.specification.where
    yield from compare_results(case, results, visible, "the operator", where, partial(_replay, case))


def _lost_precision(subject: Subject) -> Findings:
    """Report results whose precision is below that of all inputs: they silently have half of float64's
    digits.

    Subjects with a reference, which defines the dtype, and classes declared to compute in float32 are not
    reported.
    """
    if subject.kind.has_reference or "float32" in subject.specification.origin.claims:
        return
    narrow = (torch.float32, torch.complex64, *LOW_PRECISION)
    for sample in (each for each in subject.samples if each.inexact):
        results: Sequence[Tensor | None] = ()
        with Overlooking(), torch.no_grad():  # it may take one dtype alone, and its exceptions are reported
            results = subject.call(sample, sample.in_double())
        named = subject.results(sample) if results else ()
        for described, got in zip(named, results, strict=True):
            if got is not None and got.dtype in narrow:
                name, actual = described.name, str(got.dtype)
                message = (
                    f"`{name}` is {actual} for arguments in torch.float64, and has only half of "
                    "their digits; create it in the dtype of the arguments, or cast it back"
                )
                evidence = {"got": actual, "expected": "torch.float64"}
                yield Run(subject, sample, NAME).failure(name, "precision", message, evidence=evidence)


def _through_default_dtype(subject: Subject) -> Findings:
    """Report float64 results that lose digits in a tensor of torch's default dtype."""
    for sample, name in through_default_dtype(subject):
        message = (
            f"`{name}` has only the digits of float32 for arguments in torch.float64: its values go "
            "through a tensor in torch's default dtype, for example of `torch.zeros(shape)`; create "
            "that tensor by `x.new_zeros(shape)`, or with `dtype=x.dtype`"
        )
        run, where = Run(subject, sample, NAME), subject.runs_at(sample.flat)
        yield run.failure(name, "precision", message, where, dtypes=("float64",))


def _replay(case: Case, position: int) -> str | None:
    """A script that compares the visible results of the call with the reference."""
    visible = case.subject.visible_positions(case.sample)
    if position not in visible:
        return None
    expected = case.answers[position].value
    return result_replay(case.subject, case.sample, case.flat(), visible.index(position), expected, NAME)


FORWARD = Property(
    NAME,
    "every kernel gives the results of the reference, in every dtype",
    run,
    inputs="every",
    traits=("about-results",),
)
