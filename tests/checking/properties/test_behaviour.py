"""Check finds what a class writes, shares, keeps and remembers, in these words; and lets right ones be."""

import itertools
import warnings
from typing import Any

import class_mutants
import pytest
import torch
import wrong_again
import wrong_class_effects
import wrong_fresh_memory
import wrong_memory
import wrong_sharing
import wrong_state
import wrong_writes
from class_mutants import MUTANTS, TWINS
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.side_effects.global_settings import SETTINGS, other_settings, settings

MODULES = (
    class_mutants,
    wrong_again,
    wrong_class_effects,
    wrong_fresh_memory,
    wrong_memory,
    wrong_sharing,
    wrong_state,
    wrong_writes,
)
ONLY = ["determinism", "effects", "state", "backward_again", "memory"]


def failures_of(built: tuple[Any, Any], **options: Any) -> tuple[opsmith.Report, list[Any]]:
    checked, samples = built
    report = opsmith.check(checked, samples=samples, only=ONLY, **options)
    return report, [failure for failure in report.failures if failure.follows is None]


@pytest.mark.every(24)
@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_found_and_named(name: str) -> None:
    mutant = MUTANTS[name]
    report, failures = failures_of(mutant.build())
    found = {(failure.property, failure.cause, failure.input): failure for failure in failures}
    assert (mutant.property, mutant.cause, mutant.input) in found, str(report)
    failure = found[mutant.property, mutant.cause, mutant.input]
    assert mutant.says in failure.message
    assert failure.where is not None
    assert failure.where.rpartition(":")[0] in {str(module.__file__) for module in MODULES}
    assert {each.cause for each in failures} <= {mutant.cause, *mutant.also}, str(report)


@pytest.mark.every(24)
@pytest.mark.parametrize("effort", ["quick", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_that_is_right_passes(name: str, effort: Any) -> None:
    report, failures = failures_of(TWINS[name](), effort=effort)
    assert not failures, str(report)


def test_state_alone_tells_that_two_runs_differ() -> None:
    calls: Any = itertools.count()

    class Drifts(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x + next(calls)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    (failure,) = opsmith.check(Drifts, samples=[(torch.ones(2),)], only=["state"]).failures
    assert failure.cause == "nondeterministic"
    assert "the same call gives a different result the second time: at [0] it is" in failure.message


def test_what_is_not_differentiated_has_no_ways_to_ask_for_gradients() -> None:
    class Positive(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x > 0

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None

    report = opsmith.check(Positive, samples=[(torch.ones(2),)], only=["backward_again"])
    (outcome,) = [each for each in report.outcomes if each.property == "backward_again"]
    assert (outcome.status, outcome.reason) == ("skipped", "there is nothing to differentiate")


def test_a_kernel_that_asks_for_the_mode_is_told_by_the_reference() -> None:
    @opsmith.operator("touching::logistic_of_inference")
    def logistic(x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return 0.5 + 0.5 * x / (1 + x.abs()) if torch.is_inference_mode_enabled() else x.sigmoid()

    logistic.kernel("cpu", kernel)
    logistic.samples(lambda make: [(make(3, 4),)])
    (failure,) = opsmith.check(logistic, only=["state"]).failures
    assert (failure.cause, failure.input) == ("kernel-mismatch", "result")
    assert (
        "made under `torch.inference_mode()` differs, but the reference's result does not" in failure.message
    )


@pytest.mark.slow
def test_a_result_that_asks_whether_a_gradient_is_needed_is_what_is_wrong_with_its_gradient() -> None:
    class SoftStep(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return (4 * x).sigmoid() if ctx.needs_input_grad[0] else (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            soft = (4 * ctx.saved_tensors[0]).sigmoid()
            return grad * 4 * soft * (1 - soft)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
    report = opsmith.check(SoftStep, samples=[(x,)], only=["gradient", "state"], effort="quick")
    causes = [(each.property, each.input, each.cause) for each in report.failures]
    assert causes == [("gradient", "x", "input-needs-grad"), ("state", "x", "input-needs-grad")]
    assert (
        "the gradient of a different result: when `x` alone requires a gradient" in report.failures[0].message
    )


def test_filters_that_are_put_back_hold_for_what_was_warned_of_before() -> None:
    def speak() -> None:
        warnings.warn("as before", UserWarning, stacklevel=1)

    (setting,) = (each for each in SETTINGS if each.name == "Python's warning filters")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        speak()
        setting.put([("error", None, Warning, None, 0)])
        with pytest.raises(UserWarning, match="as before"):
            speak()


def test_settings_are_put_back_though_the_region_raises() -> None:
    before, seen = settings(), []

    def leave() -> None:
        with other_settings() as changed:
            seen.append(changed)
            torch.set_num_threads(7)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert settings() == before
    assert seen[0]["the number of torch's threads"][1] == 7


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("writes", [False, True])
def test_a_kernel_whose_result_has_another_shape(writes: bool) -> None:
    """The check goes on where no grad_output fits kernel and reference both."""

    def twice(x: Tensor) -> Tensor:
        return x * 2

    def double(x: Tensor) -> None:
        x.mul_(2)

    def resize(x: Tensor) -> None:
        x.mul_(2).resize_(1, 3)

    operator = opsmith.operator(f"other_shape::{writes}".lower(), mutates=["x"] if writes else [])(
        double if writes else twice
    )
    operator.kernel("cpu", resize if writes else lambda x: x[:1] * 2)
    report = opsmith.check(operator, samples=[(torch.randn(5, 3),)], effort="quick")
    failure = next(each for each in report.failures if each.property == "forward")
    assert failure.cause == "shape"
    words = (
        "it changed the shape" if writes else "the shape of `result` differs from the shape of the reference"
    )
    assert words in failure.message
    assert len(report.errors) <= 2
