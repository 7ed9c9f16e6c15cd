"""`opsmith.check` itself: samples, properties, progress, repeatability, errors."""

import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import graph

import opsmith
from opsmith import errors
from opsmith.checking.properties import USUAL
from opsmith.testing import assert_correct

FAST = ["forward", "gradient"]


@opsmith.operator("session::cube")
def cube(x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * x * x * x


cube.gradients(x=lambda grad, x, scale: 3 * scale * grad * x * x)


@opsmith.operator("session::half")
def half(x: Tensor) -> Tensor:
    return x * 0.5


half.gradients(x=lambda grad: grad * 0.25)


def by_property(report: opsmith.Report) -> dict[str, Any]:
    return {outcome.property: outcome for outcome in report.outcomes}


def test_no_samples_is_an_error_with_its_hint() -> None:
    with pytest.raises(errors.MissingSamplesError) as raised:
        opsmith.check(cube)
    assert raised.value.message().splitlines()[0] == "session::cube: there are no samples to check it on"
    assert "write `@cube.samples` over a function of `make`" in str(raised.value)
    for none in ([], list):
        with pytest.raises(errors.MissingSamplesError):
            opsmith.check(cube, samples=none)


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        errors.SampleError, match="sample 0 does not fit the signature: `scale` has the wrong type"
    ):
        opsmith.check(cube, samples=[(torch.ones(2), "2")])


@pytest.mark.slow
def test_samples_are_a_list_or_a_function_of_nothing() -> None:
    samples = [(torch.rand(3),), (torch.rand(2, 2), 2.0)]
    for given in (samples, lambda: samples, iter(samples)):
        report = opsmith.check(cube, samples=given, only=FAST)
        assert report.passed


def test_only_operators_can_be_checked() -> None:
    with pytest.raises(errors.UsageError, match=r"only an operator .* or an `autograd"):
        opsmith.check(torch.sin)  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", [{"only": ["forwrad"]}, {"skip": ["forwrad"]}])
def test_an_unknown_property_is_an_error_that_lists_them(chosen: dict[str, list[str]]) -> None:
    with pytest.raises(errors.UsageError, match="there is no property `forwrad`") as raised:
        opsmith.check(cube, samples=[(torch.ones(2),)], **chosen)
    assert "`second_order`" in str(raised.value)
    assert "write `forward`" in str(raised.value)
    with pytest.raises(errors.UsageError, match="use these names in `only` or `skip`"):
        opsmith.check(cube, samples=[(torch.ones(2),)], only=["weather"])
    with pytest.raises(errors.UsageError, match="write `forward`"):
        opsmith.check(cube, samples=[(torch.ones(2),)], only="gradient,forwrad")


@pytest.mark.parametrize("chosen", [{"only": 5}, {"only": [1]}, {"skip": [None]}])
def test_what_is_no_name_of_a_property_is_an_error(chosen: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match="`only` and `skip` take names of properties") as raised:
        opsmith.check(cube, samples=[(torch.ones(2),)], **chosen)
    assert 'hint: call `check(operator, only=["forward", "gradient"])`' in str(raised.value)


@pytest.mark.parametrize("seed", ["1", 1.5, True, None, 2**32, -(2**32) - 1])
def test_what_is_no_seed_is_an_error(seed: Any) -> None:
    with pytest.raises(errors.UsageError, match="`seed` must be a seed") as raised:
        opsmith.check(cube, samples=[(torch.ones(2),)], only=FAST, seed=seed)
    assert "expected: a whole number from -2**32 to 2**32 - 1" in str(raised.value)


@pytest.mark.parametrize("seed", [-1, -(2**32), 2**32 - 1])
def test_every_whole_number_in_between_is_a_seed(seed: int) -> None:
    assert opsmith.check(cube, samples=[(torch.rand(3),)], only=FAST, seed=seed).passed


def test_hooks_on_saved_tensors_are_no_place_for_a_check() -> None:
    for hooks in (graph.saved_tensors_hooks(lambda x: x, lambda x: x), graph.save_on_cpu()):
        with pytest.raises(errors.UsageError) as raised, hooks:
            opsmith.check(cube, samples=[(torch.rand(3),)], only=FAST)
        assert raised.value.message().splitlines() == [
            "a check cannot run while hooks on saved tensors are active",
            "  expected: no hooks: torch refuses them under `vmap` and `torch.func`",
            "  got: hooks of `saved_tensors_hooks` or `save_on_cpu`",
            "  hint: call `check` outside of the `with`",
        ]
    with graph.disable_saved_tensors_hooks("the caller has none either"):
        assert opsmith.check(cube, samples=[(torch.rand(3),)], only=FAST).passed


@pytest.mark.slow
def test_a_check_sees_gradients_in_any_mode_of_its_caller() -> None:
    options: Any = {"samples": [(torch.rand(3),)], "only": [*FAST, "state"]}
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert opsmith.check(cube, **options).passed_as_asked
            assert [each.property for each in opsmith.check(half, **options).failures] == ["gradient"]
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def test_what_was_left_out_is_skipped_and_says_so() -> None:
    outcomes = by_property(opsmith.check(cube, samples=[(torch.rand(3),)], only=["forward"]))
    assert list(outcomes) == list(USUAL)
    assert outcomes["forward"].status == "passed"
    assert (outcomes["effects"].status, outcomes["effects"].reason) == ("skipped", "left out on request")
    both = by_property(opsmith.check(cube, samples=[(torch.rand(3),)], only=FAST, skip="gradient"))
    assert both["gradient"].left_out


def test_progress_is_told_before_each_property_and_at_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    opsmith.check(cube, samples=[(torch.rand(3),)], only=FAST, progress=lambda *event: told.append(event))
    names = [name for name, _, _ in told]
    assert names[:2] == ["randomness", "determinism"]
    assert names[-1] == ""
    assert sorted(names[:-1]) == sorted(USUAL)
    assert [done for _, done, _ in told] == list(range(len(USUAL) + 1))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report() -> None:
    @half.samples
    def _(make: Any) -> Any:
        yield (make(3, 4) + torch.rand(1),)

    def evidence(seed: int) -> Any:
        return [failure.evidence for failure in opsmith.check(half, only=FAST, seed=seed).failures]

    assert evidence(3) == evidence(3)
    assert evidence(3) != evidence(4)


def test_no_random_state_is_moved() -> None:
    torch_before, python_before, numpy_before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),
    )
    opsmith.check(cube, samples=[(torch.ones(3),)], skip=["integration"])
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_before, strict=True))


def test_the_samples_stay_as_they_were() -> None:
    x = torch.rand(3, requires_grad=True)
    before = x.detach().clone()
    opsmith.check(cube, samples=[(x,)], skip=["integration"])
    assert torch.equal(x.detach(), before)
    assert x.grad is None


def test_a_property_that_raises_outside_of_a_sample_is_a_failure_and_no_crash() -> None:
    @opsmith.operator("session::broken")
    def broken(x: Tensor) -> Tensor:
        raise ValueError("not today")

    report = opsmith.check(broken, samples=[(torch.ones(2),)], skip=["integration"])
    assert {failure.cause for failure in report.failures} == {"raises"}
    assert report.failures[0].property == "forward"
    assert report.failures[0].message == "ValueError: not today"
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+", report.failures[0].where or "")
    assert all(failure.follows == "forward" for failure in report.failures[1:])


def test_a_mistake_in_the_check_itself_is_not_blamed_on_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.judging import judge

    monkeypatch.delattr(judge, "Verdict")
    with pytest.raises(NameError, match="Verdict"):
        opsmith.check(cube, samples=[(torch.rand(3),)], only=["forward"])


def test_the_environment_is_in_the_report() -> None:
    environment = opsmith.check(cube, samples=[(torch.rand(3),)], only=["forward"]).environment
    assert environment["torch"] == torch.__version__
    assert environment["opsmith"] == opsmith.__version__
    assert environment["devices"].startswith("cpu")


@pytest.mark.slow
def test_assert_correct_raises_the_report() -> None:
    samples = [(torch.rand(3),)]
    assert assert_correct(cube, samples=samples, only=FAST).passed
    assert assert_correct(cube, samples=samples, only="forward").passed_as_asked
    with pytest.raises(
        AssertionError, match=r"(?s)session::half: FAILED: gradient.*it is the right tensor times 1/2"
    ):
        assert_correct(half, samples=samples, only=FAST)


class Warns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        warnings.warn("odd", stacklevel=1)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        warnings.warn("odd", stacklevel=1)
        return 2 * grad


def test_what_warns_is_silent_in_a_check(recwarn: pytest.WarningsRecorder) -> None:
    assert opsmith.check(Warns, samples=[(torch.rand(3),)], effort="quick", only=FAST).passed
    assert not recwarn
