"""Right operators that look odd to a check: their authors would not call any finding a fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SineByNumpy(Function):
    """Its forward is run by torch without grad mode, in which alone `.numpy()` takes such a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Tripled(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 3 * grad


@pytest.mark.slow
def test_a_forward_runs_without_grad_mode() -> None:
    report = opsmith.check(SineByNumpy, samples=[(drawn(3, 4),)], only=["forward", "gradient"])
    assert report.passed, report
    notes = " ".join(str(outcome) for outcome in report.outcomes)
    assert (
        "autograd through the forward was left out, because autograd does not record the forward: "
        "finite differences decide"
    ) in notes


def test_settings_that_may_not_be_assigned_are_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = torch.backends.disable_global_flags  # which importing torch's own test utilities calls
    monkeypatch.setitem(freeze.__globals__, "__allow_nonbracketed_mutation_flag", True)
    freeze()
    assert torch.backends.flags_frozen()
    before = torch.backends.cudnn.benchmark
    report = opsmith.check(Tripled, samples=[(drawn(3, 4),)], only=["effects"], effort="quick")
    assert not report.failures, report
    assert torch.backends.cudnn.benchmark == before


def norm_declared(name: str, *, scaled_reference: bool) -> opsmith.Operator[..., Any]:
    """A division by the norm, whose squares overflow unless they are scaled, or computed in float64."""

    def squared(x: Tensor) -> Tensor:
        return x / (x * x).sum(-1, keepdim=True).sqrt()

    def scaled(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        return x / largest / ((x / largest) ** 2).sum(-1, keepdim=True).sqrt()

    operator = opsmith.operator(name)(scaled if scaled_reference else squared)

    @operator.kernel("cpu")
    def kernel(x: Tensor) -> Tensor:
        return squared(x) if scaled_reference else squared(x.double()).to(x.dtype)

    return operator


@pytest.mark.slow
def test_a_kernel_more_exact_than_the_reference_is_right() -> None:
    operator = norm_declared("alarms::unit_in_double", scaled_reference=False)
    report = opsmith.check(operator, samples=[(drawn(3, 5),)], only=["forward", "values"])
    assert not report.failures, report


@pytest.mark.slow
def test_a_kernel_that_overflows_where_the_reference_does_not_is_found() -> None:
    operator = norm_declared("alarms::unit_overflowing", scaled_reference=True)
    report = opsmith.check(operator, samples=[(drawn(3, 5),)], only=["forward", "values"])
    (failure,) = report.failures
    assert (failure.property, failure.cause) == ("values", "kernel-mismatch")
    assert "8.50706e+37" in failure.message or "4.49423e+307" in failure.message


class SigmoidInPlace(Function):
    """Both passes write into what they are given, as a class that calls `mark_dirty` must."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        (y,) = ctx.saved_tensors
        return tangent.mul_(y * (1 - y))


def test_a_jvp_may_work_in_place() -> None:
    (outcome,) = (
        each
        for each in opsmith.check(SigmoidInPlace, samples=[(drawn(3, 4),)], only=["forward_mode"]).outcomes
        if each.property == "forward_mode"
    )
    assert (outcome.status, outcome.notes) == ("passed", ()), outcome


@pytest.mark.slow
def test_traced_calls_are_compared_on_the_same_numbers_although_each_writes() -> None:
    report = opsmith.check(SigmoidInPlace, samples=[(drawn(3, 4),)], only=["compile", "export", "vmap"])
    assert not report.failures, report


class Scaled(Function):
    """Rows of norm one, by an operation whose backward torch does not differentiate again."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if not x.numel():
            raise ValueError("no rows")
        rows, norms = torch.ops.aten._weight_norm_interface(x, x.new_ones(x.shape[0], 1), 0)
        ctx.save_for_backward(x, norms)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, norms = ctx.saved_tensors
        ones = x.new_ones(x.shape[0], 1)
        return torch.ops.aten._weight_norm_interface_backward(grad.contiguous(), x, ones, norms, 0)[0]


def test_a_second_order_that_torch_lacks_is_a_refusal() -> None:
    report = opsmith.check(
        Scaled, samples=[(drawn(3, 4),)], only=["gradient", "second_order"], effort="quick"
    )
    assert not report.failures, report
    outcome = next(each for each in report.outcomes if each.property == "second_order")
    assert outcome.status == "skipped"
    assert "derivative for aten::_weight_norm_interface_backward is not implemented" in str(outcome.reason)


class MaskedLogSoftmax(Function):
    """Results of -inf, to which no loss sends a gradient: its backward relies on that."""

    @staticmethod
    def forward(ctx: Any, x: Any, mask: Any) -> Any:
        y = torch.log_softmax(x.masked_fill(~mask, -torch.inf), -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad - y.exp() * grad.sum(-1, keepdim=True), None


class MaskedLogSoftmaxWithoutSum(MaskedLogSoftmax):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad - y.exp() * grad, None


MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()


def test_no_gradient_is_sent_to_results_of_minus_infinity() -> None:
    report = opsmith.check(MaskedLogSoftmax, samples=[(drawn(3, 4), MASK)], effort="quick")
    assert report.passed, report
    wrong = opsmith.check(
        MaskedLogSoftmaxWithoutSum, samples=[(drawn(3, 4), MASK)], only=["gradient"], effort="quick"
    )
    assert [(each.property, each.input) for each in wrong.failures] == [("gradient", "x")], wrong


def by_formula(forward: Any, backward: Any) -> type[Function]:
    """A class with a forward of `x`, and a backward of `grad`, `x` and the result `y`."""

    class ByFormula(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = forward(x)
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return ByFormula


def by_softmax_jacobian(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    jacobian = torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)
    return (jacobian @ grad.unsqueeze(-1)).squeeze(-1)


SATURATED = {
    "softmax": by_formula(
        lambda x: torch.softmax(x, -1), lambda grad, x, y: y * (grad - (y * grad).sum(-1, keepdim=True))
    ),
    "softmax by its Jacobian": by_formula(lambda x: torch.softmax(x, -1), by_softmax_jacobian),
    "softplus": by_formula(torch.nn.functional.softplus, lambda grad, x, y: -grad * torch.expm1(-y)),
    "softplus by exp": by_formula(
        torch.nn.functional.softplus, lambda grad, x, y: grad * (1 - torch.exp(-y))
    ),
    "mish": by_formula(
        lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),
        lambda grad, x, y: (
            grad * ((t := torch.tanh(torch.nn.functional.softplus(x))) + x * torch.sigmoid(x) * (1 - t * t))
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.every(6)
@pytest.mark.parametrize("name", SATURATED)
def test_what_cancellation_leaves_near_saturation_is_not_held_to_its_own_digits(name: str) -> None:
    """The gradients are as small as 1e-156, and their terms are of the size of one."""
    samples = [(100 * drawn(3, 4, seed=seed),) for seed in range(3)]
    report = opsmith.check(
        SATURATED[name], samples=samples, only=["gradient", "second_order"], effort="quick"
    )
    assert not report.failures, report


@pytest.mark.parametrize(
    "backward",
    [
        lambda grad, x, y: y * (grad - (y * grad).sum(-1, keepdim=True)) + 1e-5 * grad,
        lambda grad, x, y: 1.001 * y * (grad - (y * grad).sum(-1, keepdim=True)),
    ],
    ids=["a small term", "a factor"],
)
def test_near_saturation_a_wrong_gradient_is_found(backward: Any) -> None:
    wrong = by_formula(lambda x: torch.softmax(x, -1), backward)
    report = opsmith.check(wrong, samples=[(8 * drawn(3, 4),)], only=["gradient"], effort="quick")
    assert [each.input for each in report.failures] == ["x"], report


def test_a_steep_gradient_near_a_pole_is_held_to_its_own_digits() -> None:
    steep = by_formula(lambda x: x**-8, lambda grad, x, y: -8.001 * grad * y / x)
    report = opsmith.check(steep, samples=[(100 + drawn(3, 4).abs(),)], only=["gradient"], effort="quick")
    assert [each.input for each in report.failures] == ["x"], report


class ByLengthOnly(Function):
    """It refuses gradients by `x` in its own words, as kernels of Gaussian processes do."""

    @staticmethod
    def forward(ctx: Any, x: Any, length: Any) -> Any:
        if ctx.needs_input_grad[0]:
            raise RuntimeError("there is no gradient with respect to x")
        y = torch.exp(-x * x / length)
        ctx.save_for_backward(x, length, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, length, y = ctx.saved_tensors
        return None, (grad * y * x * x / length**2).sum()


class ByLengthOnlyLate(ByLengthOnly):
    """It refuses in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, length: Any) -> Any:
        y = torch.exp(-x * x / length)
        ctx.save_for_backward(x, length, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.needs_input_grad[0]:
            raise RuntimeError("there is no gradient with respect to x")
        return ByLengthOnly.backward(ctx, grad)


class ByLengthWrong(ByLengthOnly):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, 2 * ByLengthOnly.backward(ctx, grad)[1]


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("kind", [ByLengthOnly, ByLengthOnlyLate])
def test_a_gradient_that_a_class_refuses_in_its_own_words_is_no_fault(kind: type[Function]) -> None:
    report = opsmith.check(kind, samples=[(drawn(3, 4), torch.tensor(1.5))], effort="quick")
    assert report.passed, report
    notes = next(each for each in report.outcomes if each.property == "gradient").notes
    assert (
        "the operator refuses a gradient of `x`: RuntimeError: there is no gradient with respect to x"
    ) in notes


def test_beside_a_refused_gradient_a_wrong_one_is_found() -> None:
    report = opsmith.check(
        ByLengthWrong, samples=[(drawn(3, 4), torch.tensor(1.5))], only=["gradient"], effort="quick"
    )
    assert [(each.input, each.cause) for each in report.failures] == [("length", "scale")], report


def pools(values: list[float]) -> list[tuple[float, int]]:
    """Mean and size of each block of the nearest falling sequence, by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] < mean:
            other, more = blocks.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        blocks.append((mean, count))
    return blocks


class LeftByIsotonicRegression(Function):
    """Autograd through its forward has a part of the gradient alone; its blocks change near every input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        blocks = pools(x.tolist())
        ctx.counts = [count for _, count in blocks]
        return x - x.new_tensor([mean for mean, count in blocks for _ in range(count)])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        blocks = grad.split(ctx.counts) if ctx.counts else []
        return torch.cat([block - block.mean() for block in blocks]) if blocks else grad


class LeftWithoutMeans(LeftByIsotonicRegression):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_forward_that_leaves_torch_for_a_part_is_no_truth(seed: int) -> None:
    given: dict[str, Any] = {"samples": [(drawn(6, seed=seed),)], "only": ["gradient"], "effort": "quick"}
    right = opsmith.check(LeftByIsotonicRegression, **given)
    assert right.passed_as_asked, right
    wrong = opsmith.check(LeftWithoutMeans, **given)
    assert [each.property for each in wrong.errors] == ["gradient"], wrong


class ShapedByDimension(Function):
    """Its forward does not use `dim`, and takes one for which `scale` has another size, too."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, dim: int) -> Any:
        shape = [1] * x.dim()
        shape[dim] = -1
        ctx.save_for_backward(scale)
        ctx.shape = shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (scale,) = ctx.saved_tensors
        return grad + 0 * scale.reshape(ctx.shape), None, None


def test_a_number_of_another_sample_that_does_not_fit_here_is_a_limit() -> None:
    samples = [(drawn(3, 4, 2), torch.rand(4), 1), (drawn(3, 5), torch.rand(5), -1)]
    report = opsmith.check(ShapedByDimension, samples=samples, only=["gradient"])
    assert report.passed_as_asked, report
    (limit,) = report.limits
    assert limit.cause == "raises"
    assert "`dim=-1` instead of 1" in limit.evidence["sample"]
