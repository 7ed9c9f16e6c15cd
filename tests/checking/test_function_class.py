"""`opsmith.check` of an `autograd.Function` class, which is adopted for the check alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from functions import Product
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith import errors
from opsmith.checking.processes import watchdog

_NUMBERS = itertools.count()

FAST = ["forward", "gradient", "surrogate"]


class Half(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, power: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x ** (ctx.power - 1), None


class Mean(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.count = len(tensors)
        return sum(tensors) / len(tensors)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (grad / ctx.count,) * ctx.count


class Rounded(Function):
    """Its forward rounds a factor to float32, so that autograd through it gives another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * torch.where(x > 0, 1.0, 0.01)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.unused = None
        return grad

    @staticmethod
    def right(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, 0.01 * grad)


class RoundedRight(Rounded):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return Rounded.forward(ctx, x)

    backward = Rounded.right


class RoundedThrough(RoundedRight):
    """The same, with a backward whose answers are numbers of float32."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return Rounded.right(ctx, grad.float()).double()


class RoundedAndFlat(RoundedRight):
    """The same, and it reads the grad_output as if it were contiguous."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        rows, columns = grad.shape
        return Rounded.right(ctx, grad.as_strided((rows, columns), (columns, 1)))


class Pick(Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, indices: Any) -> Any:
        ctx.save_for_backward(weight, indices)
        return weight[indices]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        weight, indices = ctx.saved_tensors
        return torch.zeros_like(weight).index_add(0, indices, grad), None


class Positive(Function):
    """The number of results depends on the values."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x[x > 0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x).masked_scatter(x > 0, grad)


class PositiveFirst(Positive):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return Positive.backward(ctx, grad.flip(0))


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.clamp(-0.5, 0.5)


class Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mask = torch.rand_like(x) > 0.5
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.mask


def outcome(report: opsmith.Report, name: str) -> Any:
    return next(each for each in report.outcomes if each.property == name)


def matrix() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_class_is_checked_on_samples_from_which_its_types_are_told() -> None:
    report = opsmith.check(Half, samples=[(torch.rand(3) + 1, 2)], only=FAST)
    (failure,) = report.failures
    assert (failure.input, failure.cause) == ("x", "scale")
    assert "it is the right tensor times 1/2" in failure.message
    assert failure.where is not None
    assert failure.where.startswith(__file__)


@pytest.mark.slow
def test_checking_it_again_replaces_it_and_other_samples_may_have_other_types() -> None:
    first = opsmith.check(Half, samples=[(torch.rand(3) + 1, 1)], only=FAST)
    second = opsmith.check(Half, samples=lambda: [(torch.rand(3) + 1, 2.5)], only=FAST)
    assert first.passed
    assert not second.passed
    assert first.operator == second.operator
    assert first.operator == "Half"


@pytest.mark.slow
def test_what_args_took_is_given_side_by_side() -> None:
    assert opsmith.check(Mean, samples=iter([(matrix(), matrix(), matrix())]), only=FAST).passed


@pytest.mark.slow
def test_classes_of_one_name_are_apart() -> None:
    def made(power: int) -> type[Function]:
        class Local(Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                ctx.save_for_backward(x)
                return x**power

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return grad * 2 * ctx.saved_tensors[0]

        return Local

    assert opsmith.check(made(2), samples=[(matrix(),)], only=FAST).passed
    assert not opsmith.check(made(3), samples=[(matrix(),)], only=FAST).passed
    assert opsmith.check(made(2), samples=[(matrix(),)], only=FAST).passed


@pytest.mark.parametrize("none", [None, [], list])
def test_without_samples_it_says_how_to_give_them(none: Any) -> None:
    with pytest.raises(errors.MissingSamplesError, match="there are no samples to check") as raised:
        opsmith.check(Half, samples=none)
    if not callable(none):
        assert "call `opsmith.check(Half, samples=[(x, 2.0)])`" in str(raised.value)
        assert f"{__file__}:" in str(raised.value)


def test_another_class_cannot_be_checked() -> None:
    with pytest.raises(errors.UsageError, match=r"only an operator .* or an `autograd"):
        opsmith.check(torch.nn.Linear)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_forward_that_rounds_is_no_truth_for_a_backward_that_finite_differences_agree_with() -> None:
    report = opsmith.check(RoundedRight, samples=[(matrix(),)], only=FAST)
    assert report.passed
    assert "differ by rounding to float32" in " ".join(outcome(report, "gradient").notes)
    wrong = opsmith.check(Rounded, samples=[(matrix(),)], only=FAST)
    assert {failure.property for failure in wrong.failures} == {"gradient"}


def test_tangents_differ_from_a_forward_that_rounds_by_no_more_than_its_rounding() -> None:
    right, wrong = (
        opsmith.check(
            opsmith.adopt(each, f"function_class::{name}"), samples=[(matrix(),)], only=["forward_mode"]
        )
        for each, name in ((RoundedRight, "rounded"), (RoundedThrough, "rounded_through"))
    )
    assert outcome(right, "forward_mode").status == "passed", right
    assert (
        "the tangents and the finite differences of the forward differ by rounding to float32, for "
        "example because the backward has a constant in float64 and the forward has it in float32"
    ) in " ".join(outcome(right, "forward_mode").notes)
    assert outcome(wrong, "forward_mode").word() == "warning"


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("values", [matrix(), matrix().abs() + 0.5], ids=["any", "positive"])
def test_how_many_results_there_are_may_depend_on_the_numbers(values: Tensor) -> None:
    right = opsmith.check(Positive, samples=[(values,)], effort="quick")
    assert right.passed, right
    wrong = opsmith.check(PositiveFirst, samples=[(values,)], effort="quick", only=FAST)
    assert [failure.cause for failure in wrong.failures] != []
    assert {failure.cause for failure in wrong.failures}.isdisjoint({"raises"})


class AboveThreshold(Positive):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x - 0.3)
        return x[x > 0.3]


def test_other_numbers_may_give_more_results_than_there_are_grad_outputs() -> None:
    below = torch.linspace(0.25, 0.299, 20)  # a step that measures rounding lifts some of them
    report = opsmith.check(AboveThreshold, samples=[(below,)], effort="quick", only=["gradient", "autocast"])
    assert report.passed_as_asked, report
    assert "does not run in float64" not in " ".join(outcome(report, "autocast").notes)


class Decay(Function):
    """Its backward has the factor in a tensor of float32, its forward has it as a number."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.exp(-0.3 * x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return -grad * torch.tensor(0.3) * torch.exp(-0.3 * x)


class DecayOfItsDtype(Decay):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        kept = (x == x).float()  # a mask of float32 loses nothing
        return -grad * kept * x.new_tensor(0.3) * torch.exp(-0.3 * x)


@pytest.mark.slow
def test_a_backward_that_alone_has_a_constant_of_float32_loses_digits() -> None:
    failures = opsmith.check(Decay, samples=[(matrix().double(),)], only=FAST).failures
    assert [(each.property, each.input, each.cause) for each in failures] == [("gradient", "x", "precision")]
    (failure,) = failures
    assert "in the backward, aten.mul.Tensor takes float32 together with float64" in failure.message
    assert opsmith.check(DecayOfItsDtype, samples=[(matrix().double(),)], only=FAST).passed


class IntoDefault(Function):
    """It fills a tensor of torch's default dtype, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.zeros(x.shape)
        y[:] = x * 2
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


class InSingle(IntoDefault):
    """It computes in float32 as well, and hands back the dtype that came in."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.dtype = x.dtype
        return (x.float() * 2).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_of_float32_for_float64_lose_digits(dtype: torch.dtype) -> None:
    (failure,) = opsmith.check(IntoDefault, samples=[(matrix().to(dtype),)], only=["forward"]).failures
    assert (failure.input, failure.cause, failure.severity) == ("result", "precision", "warning")
    assert "`result` is torch.float32 for arguments in torch.float64" in failure.message
    single = opsmith.check(InSingle, samples=[(matrix().to(dtype),)], only=["forward"])
    assert single.passed_as_asked
    left_out = "dtypes other than float32 were left out: the operator computes in float32"
    assert left_out in outcome(single, "forward").notes


@pytest.mark.slow
def test_a_layout_is_still_looked_at_where_the_forward_is_no_truth() -> None:
    report = opsmith.check(RoundedAndFlat, samples=[(matrix(),)], only=[*FAST, "layouts"])
    assert {failure.cause for failure in report.failures} == {"layout"}


@pytest.mark.slow
def test_a_tensor_of_whole_numbers_needs_no_gradient() -> None:
    samples = [(matrix(), torch.tensor([2, 0, 2]))]
    report = opsmith.check(Pick, samples=samples, only=FAST)
    assert report.passed
    assert "no sample differentiates `indices`, which is torch.int64" in outcome(report, "gradient").notes
    surrogate = opsmith.adopt(Pick, "function_class::pick", kind="surrogate")
    assert opsmith.check(surrogate, samples=samples, only=FAST).passed


@pytest.mark.slow
def test_a_gradient_that_is_said_to_be_nonlinear_is_not_held_to_linearity() -> None:
    clipped = opsmith.adopt(Clipped, "function_class::clipped", kind="nonlinear")
    report = opsmith.check(clipped, samples=[(matrix(),)], only=FAST)
    assert report.passed
    assert "linearity in grad_output was left out" in " ".join(outcome(report, "surrogate").notes)
    as_surrogate = opsmith.adopt(Clipped, "function_class::surrogate", kind="surrogate")
    (failure,) = opsmith.check(as_surrogate, samples=[(matrix(),)], only=FAST).failures
    assert failure.cause == "nonlinear-grad"


def test_forward_mode_of_a_forward_that_draws_is_refused() -> None:
    dropped = opsmith.adopt(Dropped, "function_class::dropped", kind="stochastic")
    x = matrix()
    with pytest.raises(NotImplementedError, match="would run it again with different numbers"):
        torch.func.jvp(dropped, (x,), (x,))
    report = opsmith.check(dropped, samples=[(x,)], only=[*FAST, "forward_mode"])
    assert report.passed
    assert outcome(report, "forward_mode").status == "skipped"


def test_without_samples_it_says_where_a_class_takes_them() -> None:
    operator = opsmith.adopt(Halved, "function_class::without_samples")
    with pytest.raises(opsmith.errors.MissingSamplesError, match=r"adopt\(\.\.\., samples=lambda"):
        opsmith.check(operator)


def test_a_replay_of_a_class_under_check_applies_it() -> None:
    (failure, *_) = opsmith.check(Halved, samples=[(torch.ones(2),)], only=["gradient"]).failures
    assert failure.replay is not None
    assert "from test_function_class import Halved" in failure.replay
    assert "Halved.apply(x)" in failure.replay


class NoBfloat16(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


def test_a_narrow_dtype_that_numpy_lacks_is_left_out() -> None:
    operator = opsmith.adopt(
        NoBfloat16, "function_class::no_bfloat16", opaque=True, reference=lambda x: x * 2
    )
    report = opsmith.check(operator, samples=[(torch.ones(2),)], only=["forward", "gradient"])
    assert report.passed_as_asked
    (note,) = report.outcomes[0].notes
    assert note.startswith("bfloat16 was left out on cpu: the class's forward does not run in this dtype")


class Halved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class ProductOfOne(Product):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, _ = ctx.saved_tensors
        return grad * x, grad * x


@pytest.mark.parametrize(
    "given", [torch.arange(3), torch.tensor([True]), torch.zeros(0)], ids=["whole", "bool", "empty"]
)
def test_a_backward_that_no_sample_reaches_is_not_passed(given: Tensor) -> None:
    report = opsmith.check(ProductOfOne, samples=[(given, given)], effort="quick")
    assert outcome(report, "gradient").status == "skipped"
    assert (
        "no sample has a differentiable input: add a sample with floating tensors"
        in outcome(report, "gradient").reason
        or not given.numel()
    )
    assert not report.passed


@pytest.mark.slow
def test_nan_in_a_sample_is_no_fault_of_the_gradient() -> None:
    some = torch.tensor([1.0, 2.0, 3.0])
    for holds in (torch.full((3,), torch.nan), torch.tensor([1.0, torch.nan, 2.0])):
        report = opsmith.check(Product, samples=[(holds, some), (some, some)], effort="quick")
        assert not report.failures, report
        assert not opsmith.check(
            ProductOfOne, samples=[(holds, some), (some + 1, some)], effort="quick"
        ).passed


class Dropout(Function):
    """It draws from torch's random state, and keeps what it drew."""

    @staticmethod
    def forward(ctx: Any, x: Any, p: float) -> Any:
        kept = (torch.rand_like(x) >= p) / (1 - p)
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.saved_tensors[0], None


class DropoutDrawnAgain(Dropout):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * (torch.rand_like(grad) >= 0.5) * 2, None


@pytest.mark.slow
def test_a_class_may_draw_in_its_forward_and_not_again_in_its_backward() -> None:
    right = opsmith.check(Dropout, samples=[(matrix(), 0.5)], effort="quick")
    assert right.passed, right
    assert 'kind="stochastic"' in " ".join(outcome(right, "randomness").notes)
    wrong = opsmith.check(DropoutDrawnAgain, samples=[(matrix(), 0.5)], effort="quick").failures[0]
    assert (wrong.property, wrong.cause) == ("randomness", "nondeterministic")
    assert "save the numbers that the forward drew" in wrong.message
    assert wrong.where.startswith(__file__)


class SlopeInFewBits(Function):
    """It keeps its derivative in eight bits, rounded at random, and draws only for a backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if x.requires_grad:
            ctx.save_for_backward((127 * (1 + x.cos()) + torch.rand_like(x)).to(torch.uint8))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * (ctx.saved_tensors[0] / 127 - 1)


@pytest.mark.slow
def test_a_forward_that_draws_only_where_a_gradient_is_required_draws() -> None:
    report = opsmith.check(SlopeInFewBits, samples=[(matrix(),)], only=["randomness", "determinism"])
    assert report.passed_as_asked, report
    assert 'kind="stochastic"' in " ".join(outcome(report, "randomness").notes)
    kinds = ("stochastic", "approximate")
    adopted = opsmith.adopt(SlopeInFewBits, "few_bits::sin", kind=kinds, samples=[(matrix(),)])
    again = opsmith.check(adopted, effort="quick")
    assert again.passed, again
    with pytest.raises(AssertionError, match="draws from torch's random state"):
        opsmith.testing.assert_correct(
            opsmith.adopt(SlopeInFewBits, "few_bits::silent", kind="approximate", samples=[(matrix(),)]),
            effort="quick",
        )


class Flipped(Function):
    """Its gradient has the wrong sign for a negative factor."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * abs(ctx.factor), None


@pytest.mark.slow
def test_a_failure_names_the_samples_on_which_there_is_none() -> None:
    report = opsmith.check(Flipped, samples=[(matrix(), 2.0), (matrix(), -2.0)], effort="quick")
    failure = report.failures[0]
    assert (failure.property, failure.cause) == ("gradient", "sign")
    assert failure.evidence["right on"] == "sample 0 (x [3, 4], factor=2.0)"


class Twice(Function):
    """Returns one tensor as two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return 2 * (first + second)


@pytest.mark.slow
def test_one_tensor_may_be_two_results() -> None:
    report = opsmith.check(Twice, samples=[(torch.rand(3),)], only=["gradient", "backward_again"])
    assert report.failures == (), str(report)


class Scaled(Function):
    """A number without an annotation, whose type a call shows."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: Any) -> Any:
        if factor < 0:
            raise ValueError("negative")
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.ones(3), 2.0)],
        lambda make: [make.call(make(3), factor=2.0)],
        [(torch.ones(3), 2), (torch.ones(3), 2.5)],
        ((torch.ones(3), each) for each in (2.0, 3.0)),
        [(torch.ones(3), torch.tensor(2.0)), (torch.ones(3), 2.5)],
        [(torch.ones(3), 2.5), (torch.ones(3), torch.tensor(2.0))],
    ],
    ids=["list", "function", "two types", "iterator", "tensor and number", "number and tensor"],
)
@pytest.mark.parametrize("called", [False, True], ids=["never called", "called with a tensor"])
def test_an_adopted_class_learns_its_types_from_samples(samples: Any, called: bool) -> None:
    operator = opsmith.adopt(Scaled, f"never_called::scaled_{next(_NUMBERS)}")
    if called:
        operator(torch.ones(2), torch.tensor(3.0))
    if not isinstance(samples, list) and not callable(samples):
        samples = ((torch.ones(3), each) for each in (2.0, 3.0))  # another case has read it
    report = opsmith.check(operator, samples=samples, only=["forward", "fake"], effort="quick")
    assert not report.failures, report
    assert report.passed_as_asked, report


class Endless(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: Any) -> Any:
        while True:
            pass


def test_a_class_never_called_that_does_not_return_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FIRST_S", 0.5)
    operator = opsmith.adopt(Endless, f"never_called::endless_{next(_NUMBERS)}")
    report = opsmith.check(operator, samples=[(torch.ones(3), 2.0)], effort="quick")
    (failure,) = report.failures
    assert (failure.property, failure.cause) == ("forward", "raises")
    assert failure.evidence["sample"] == "sample 0 (x [3], factor=2.0)"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(torch.ones(3), object())], "TypeError"),
        ([(torch.ones(3), -2.0)], "ValueError: negative"),
        ([(torch.ones(3), -2.0), (torch.ones(3), 2.0)], "ValueError: negative"),
        ([(torch.ones(3), 2.0), (torch.ones(3), -2.0)], "ValueError: negative"),
    ],
    ids=["object", "raises", "raises first", "raises last"],
)
def test_what_a_class_never_called_raises_on_samples_is_reported(samples: Any, message: str) -> None:
    operator = opsmith.adopt(Scaled, f"never_called::scaled_{next(_NUMBERS)}")
    report = opsmith.check(operator, samples=samples, only=["forward"], effort="quick")
    (failure,) = report.failures
    assert (failure.property, failure.cause) == ("forward", "raises")
    assert message in failure.message
    assert torch.equal(operator(torch.ones(2), 3.0), torch.full((2,), 3.0))


def test_samples_that_no_forward_takes_are_refused() -> None:
    operator = opsmith.adopt(Scaled, f"never_called::scaled_{next(_NUMBERS)}")
    with pytest.raises(errors.SampleError, match="sample 0 does not fit the signature"):
        opsmith.check(operator, samples=[(torch.ones(3),)], effort="quick")


class TakingAnything(Function):
    """It hands on what it is given, as wrappers do; `apply` takes no arguments by name."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        x, weight, shift = args
        ctx.save_for_backward(x, weight)
        return x * weight + shift

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, grads[0] * x, grads[0].sum_to_size(())


def test_a_forward_that_also_takes_arguments_by_name_is_checked() -> None:
    samples = [(torch.rand(3), torch.rand(3), torch.rand(()))]
    report = opsmith.check(TakingAnything, samples=samples, only=["forward", "gradient"], effort="quick")
    assert report.passed, report
