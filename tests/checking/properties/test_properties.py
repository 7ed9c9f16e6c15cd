"""Cases that properties leave out and report, and findings that need a special operator."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking import Outcome

names = itertools.count()


def declare(reference: Any, **options: Any) -> Any:
    return opsmith.operator(f"properties::op{next(names)}", **options)(reference)


def outcome(operator: Any, check: str, *samples: Any, **options: Any) -> Outcome:
    """The outcome of one property on these samples."""
    report = opsmith.check(operator, samples=list(samples), only=[check], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == check)


def square(x: Tensor) -> Tensor:
    return x * x


def numpy_square(x: Tensor) -> Tensor:
    return torch.from_numpy(np.square(x.detach().numpy()))


X = torch.rand(3, 4, dtype=torch.float64) + 0.5


# What forward leaves out.


def test_a_kernel_for_a_device_that_is_not_here_is_a_limit() -> None:
    missing = next(kind for kind in ("cuda", "mps", "xpu") if not _runs(kind))
    operator = declare(square).kernel(missing, lambda x: x * x)
    found = outcome(operator, "forward", (X,))
    (limit,) = found.failures
    assert (found.status, limit.severity, limit.cause) == ("passed", "limit", "not-exercised")
    assert missing in limit.message


def _runs(kind: str) -> bool:
    return torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == kind  # type: ignore[union-attr]


def test_a_dtype_that_the_reference_does_not_run_in_is_noted() -> None:
    def wide_only(x: Tensor) -> Tensor:
        if x.dtype.itemsize < 4:
            raise TypeError("too narrow")
        return x * 2

    notes = outcome(declare(wide_only), "forward", (X,)).notes
    reason = "was left out: the reference does not run in this dtype: too narrow"
    assert notes == (f"bfloat16 {reason}", f"float16 {reason}")


def test_a_reference_that_does_not_run_in_float32_is_a_failure() -> None:
    def float64_only(x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            raise TypeError("float64 alone")
        return x * 2

    found = outcome(declare(float64_only), "forward", (X,))
    assert [failure.message for failure in found.failures] == ["TypeError: float64 alone"]


def test_complex_samples_leave_the_narrow_dtypes_out() -> None:
    notes = outcome(declare(square), "forward", (torch.complex(X, X),)).notes
    assert notes[0] == "bfloat16 was left out for complex samples: this dtype has no complex form"


def test_a_dtype_in_which_the_reference_is_lost_is_noted() -> None:
    notes = outcome(declare(_variance), "forward", (torch.tensor([[100.0, 100.5, 101.0, 101.5]]),)).notes
    assert any(
        "is not checked in bfloat16, because the reference itself loses more than half of its digits" in note
        for note in notes
    )


def _variance(x: Tensor) -> Tensor:
    return x.square().mean(-1) - x.mean(-1).square()


def test_a_missing_fake_kernel_is_noted_with_its_hint() -> None:
    operator = declare(numpy_square, opaque=True).gradients(x=opsmith.non_differentiable)
    found = outcome(operator, "fake", (X,))
    assert found.status == "passed"
    assert found.notes[0].startswith("there is no fake kernel to check: write `@op.fake`")


# What gradient leaves out.


def test_an_opaque_operator_without_gradients_is_skipped_with_its_hint() -> None:
    operator = declare(numpy_square, opaque=True)
    report = opsmith.check(operator, samples=[(X,)], only=["forward", "gradient"])
    found = next(outcome for outcome in report.outcomes if outcome.property == "gradient")
    assert (found.status, found.reason) == (
        "skipped",
        "`x` has no gradient: the operator is opaque; write `.gradients(x=lambda grad: ...)`, "
        "or `x=opsmith.non_differentiable`",
    )
    assert not report.passed


def test_where_nothing_can_be_differentiated_the_gradient_passes_and_says_so() -> None:
    operator = declare(numpy_square, opaque=True).gradients(x=opsmith.non_differentiable)
    found = outcome(operator, "gradient", (X,))
    assert found.status == "passed"
    assert found.notes == ("nothing to differentiate: no result requires a gradient in any sample",)


def test_gradients_that_are_all_not_implemented_are_skipped() -> None:
    operator = declare(square).gradients(x=opsmith.not_implemented("later"))
    for check in ("gradient", "second_order", "forward_mode"):
        found = outcome(operator, check, (X,))
        assert (found.status, found.reason) == ("skipped", "the gradient of `x` is not implemented: later")


def test_where_nothing_has_elements_no_derivative_passes() -> None:
    operator = declare(square).gradients(x=lambda grad, x: 17 * grad * x)
    for check in ("gradient", "linearity", "second_order", "forward_mode"):
        found = outcome(operator, check, (torch.rand(0, 3),))
        assert (found.status, bool(found.reason)) == ("skipped", True), check


def test_where_gradients_are_no_numbers_their_derivatives_do_not_pass() -> None:
    operator = declare(square).gradients(x=lambda grad, x: 2 * grad * x / (x - x))
    for check in ("linearity", "second_order"):
        found = outcome(operator, check, (X,))
        assert found.status == "skipped", check
    assert found.reason == "sample 0 was left out: the gradient itself is infinite or nan there"


def test_a_sample_that_does_not_differentiate_is_noted() -> None:
    operator = declare(square).gradients(x=lambda grad, x: 2 * grad * x)
    found = outcome(operator, "gradient", (X,), (torch.arange(3),))
    assert found.status == "passed"
    assert found.notes == ("sample 1 does not differentiate `x`, which is torch.int64",)


def test_a_formula_for_an_empty_list_is_not_exercised() -> None:
    def total(xs: list[Tensor], y: Tensor) -> Tensor:
        return y * 2 + sum(xs)

    operator = declare(total).gradients(xs=lambda grad, xs: [grad for _ in xs], y=lambda grad: 2 * grad)
    (failure,) = outcome(operator, "gradient", ([], X)).failures
    assert (failure.cause, failure.input) == ("not-exercised", "xs")
    assert failure.message.endswith("got an empty list")


@pytest.mark.slow
def test_a_reference_that_autograd_does_not_follow_is_noted_and_judged_by_numbers() -> None:
    def detached(x: Tensor) -> Tensor:
        return torch.from_numpy(np.square(x.detach().double().numpy())).to(x.dtype)

    right = declare(detached).gradients(x=lambda grad, x: 2 * grad * x)
    found = outcome(right, "gradient", (X,))
    assert found.status == "passed"
    assert found.notes[0].startswith("the reference was left out: autograd does not follow it")
    wrong = declare(detached).gradients(x=lambda grad, x: -2 * grad * x)
    (failure,) = outcome(wrong, "gradient", (X,)).failures
    assert failure.cause == "sign"


def test_a_reference_that_hides_everything_is_found() -> None:
    (failure,) = outcome(declare(_detached), "gradient", (X,)).failures
    assert failure.cause == "missing-gradient"
    assert "the reference hides a dependence" in failure.message.lower()


def _detached(x: Tensor) -> Tensor:
    return x.detach() * 2


@pytest.mark.slow
def test_a_large_sample_passes_every_derivative() -> None:
    operator = declare(square).gradients(x=lambda grad, x: 2 * grad * x)
    for check in ("gradient", "forward_mode", "second_order"):
        found = outcome(operator, check, (torch.rand(1100, dtype=torch.float64),))
        assert found.status == "passed"
        assert found.notes == ()


@pytest.mark.slow
def test_a_large_sample_is_still_checked_element_by_element() -> None:
    def one_wrong(grad: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        mask[777] = 1.001
        return 2 * grad * x * mask

    operator = declare(square).gradients(x=one_wrong)
    (failure,) = outcome(operator, "gradient", (torch.rand(1100, dtype=torch.float64),)).failures
    assert failure.evidence["index"] == [777]


# What gradient finds.


@pytest.mark.slow
def test_wrong_results_are_not_blamed_on_the_gradient() -> None:
    operator = declare(square).kernel("cpu", lambda x: 2 * x * x).gradients(x=lambda grad, x: 2 * grad * x)
    assert outcome(operator, "gradient", (X,)).status == "passed"
    (failure,) = outcome(operator, "forward", (X,)).failures
    assert failure.cause == "kernel-mismatch"


def test_two_samples_that_look_different_are_not_explained_by_either() -> None:
    operator = declare(square).gradients(x=lambda grad, x: (-2 if x.dim() > 1 else 3) * grad * x)
    (failure,) = outcome(operator, "gradient", (X,), (X[0],)).failures
    assert failure.cause == "unknown"
    assert failure.evidence["looks like"] == "scale, sign"
    assert failure.evidence["seen"] == "in 2 runs; one run is shown"


@pytest.mark.slow
def test_an_item_of_a_list_is_named() -> None:
    def total(xs: list[Tensor]) -> Tensor:
        return xs[0] + 3 * xs[1]

    operator = declare(total).gradients(xs=lambda grad, xs: [grad, 2 * grad])
    (failure,) = outcome(operator, "gradient", ([X, X],)).failures
    assert (failure.input, failure.cause) == ("xs[1]", "scale")


# Surrogates, randomness, effects.


@pytest.mark.slow
def test_surrogates_are_compared_with_no_differences_of_a_result() -> None:
    operator = declare(square).surrogate_gradients(x=lambda grad: grad)
    report = opsmith.check(operator, samples=[(X,)], skip=["integration"])
    assert report.passed
    skipped = {outcome.property: outcome.reason for outcome in report.outcomes if outcome.status == "skipped"}
    reason = "the gradients are surrogates, which are wrong on purpose; the property `surrogate` checks them"
    assert {skipped[check] for check in ("gradient", "forward_mode")} == {reason}
    assert "second_order" not in skipped


@pytest.mark.slow
def test_a_random_operator_with_formulas_on_what_it_drew_has_all_but_forward_mode() -> None:
    def dropout(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        return x * mask, mask

    operator = declare(dropout, results=("y", "mask"), hidden=("mask",), random=True)
    operator.gradients(x=lambda grad_y, mask: grad_y * mask)
    report = opsmith.check(operator, samples=[(X,)], skip=["integration"])
    assert report.passed, str(report)


def test_numbers_from_a_seed_of_its_own_are_no_randomness() -> None:
    def rotated(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(7)
            return x * torch.randn(x.shape).sign()

    assert outcome(declare(rotated), "randomness", (X,)).status == "passed"

    def noisy(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=()):
            return x * torch.rand(x.shape)  # from the caller's state, which it puts back

    failures = outcome(declare(noisy), "randomness", (X,)).failures
    assert [each.cause for each in failures] == ["nondeterministic"]


def test_rounding_that_differs_from_run_to_run_is_noted() -> None:
    calls = itertools.count()
    operator = declare(square).kernel("cpu", lambda x: x * x * (1 + 2.0**-50 * (next(calls) % 2)))
    found = outcome(operator, "determinism", (X,))
    assert found.status == "passed"
    note = found.notes[0]
    assert note.startswith(
        "two calls give different `result`, but only rounding differs: a sum whose order changes"
    )


@pytest.mark.compile
def test_opcheck_leaves_out_what_a_generator_makes_unlike() -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.empty_like(x).uniform_(generator=generator)

    found = outcome(declare(noisy), "opcheck", (X, torch.Generator()))
    assert found.status == "passed"
    (note,) = found.notes
    assert note.startswith(
        "test_aot_dispatch_dynamic was left out for a sample with a generator, because the test would "
        "draw from it twice"
    )


@pytest.mark.compile
def test_opcheck_without_a_fake_kernel_is_noted() -> None:
    operator = declare(numpy_square, opaque=True).gradients(x=opsmith.non_differentiable)
    found = outcome(operator, "opcheck", (X,))
    assert found.status == "passed", found.failures
    assert any(
        "was left out, because there is no fake kernel: write `@op.fake`" in note for note in found.notes
    )


def test_what_cannot_be_compared_is_skipped_and_says_where_to_look() -> None:
    calls = itertools.count()
    operator = declare(square).kernel("cpu", lambda x: x * x + next(calls))
    report = opsmith.check(operator, samples=[(X,)], skip=["integration"])
    skipped = {outcome.property: outcome.reason for outcome in report.outcomes if not outcome.left_out}
    assert skipped["forward"] == "not compared: two runs give different numbers (see `determinism`)"
    assert report.verdict().endswith("FAILED: determinism; 1 error")


@pytest.mark.gpu
def test_a_kernel_on_the_gpu_is_checked_there() -> None:
    right = declare(square).kernel("cuda", lambda x: x * x).gradients(x=lambda grad, x: 2 * grad * x)
    report = opsmith.check(right, samples=[(X,)])
    assert report.passed, str(report)
    assert not any("did not run" in note for outcome in report.outcomes for note in outcome.notes)
    wrong = declare(square).kernel("cuda", lambda x: x * x * 2)
    failures = opsmith.check(wrong, samples=[(X,)], only=["forward"]).failures
    assert [(failure.cause, failure.input) for failure in failures] == [("kernel-mismatch", "result")]
    assert failures[0].evidence["looks like"] == "scale"
    assert "on cuda" in failures[0].evidence["sample"]
    layout = declare(square).kernel("cuda", lambda x: x * x)
    layout.gradients(
        x=lambda grad, x: 2 * x * (grad.view(-1) if grad.is_cuda else grad.reshape(-1)).view(x.shape)
    )
    failures = opsmith.check(layout, samples=[(X,)], only=["layouts"]).failures
    assert [(failure.cause, failure.input) for failure in failures] == [("layout", "x")]
