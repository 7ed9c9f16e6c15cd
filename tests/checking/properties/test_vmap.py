"""The property `vmap`: a batch beside a loop, for rules of every origin."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from functions import Doubled
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome
from opsmith.checking.effort import EFFORTS
from opsmith.checking.properties.torch.vmap import BatchDims, MappedSample
from opsmith.checking.run import Coverage, Run
from opsmith.checking.subject_kinds import subject_of

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5
Y = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) + 0.5
names = itertools.count()


def vmap(checked: Any, *samples: Any, **options: Any) -> Outcome:
    report = opsmith.check(checked, samples=list(samples) or None, only=["vmap"], **options)
    return next(outcome for outcome in report.outcomes if outcome.property == "vmap")


class Product(Function):
    """x * y, with a rule for `vmap` of its own, which is right."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.unsqueeze(0)
        y = y.movedim(in_dims[1], 0) if in_dims[1] is not None else y.unsqueeze(0)
        return Product.apply(x, y), 0


class CountsOnTheFirst(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        x = x if in_dims[0] is not None else x.unsqueeze(0)
        y = y if in_dims[1] is not None else y.unsqueeze(0)
        return Product.apply(x, y), 0


class CountsOnBoth(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return Product.apply(x.movedim(in_dims[0], 0), y.movedim(in_dims[1], 0)), 0


class FirstExampleAlone(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        given = zip((x, y), in_dims, strict=True)
        x, y = (value if dim is None else value.movedim(dim, 0)[0] for value, dim in given)
        return Product.apply(x, y), None


class ToTheLast(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return Product.vmap(info, in_dims, x, y)[0], -1


class ToFloat32(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return Product.vmap(info, in_dims, x, y)[0].float(), 0


class RoundsOnTheWay(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return Product.vmap(info, in_dims, x.float().to(x), y)


class DetachesTheBatch(Product):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return Product.vmap(info, in_dims, x.detach(), y)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("wrong", "cause", "input", "says"),
    [
        (CountsOnTheFirst, "shape", "result", "it has the shape"),
        (CountsOnBoth, "raises", None, "its own rule for `vmap` raises, but calls for each example do not"),
        (FirstExampleAlone, "kernel-mismatch", "result", "`result` is not what a loop over the examples"),
        (ToTheLast, "shape", "result", "it has the shape [4, 3, 3], where [3, 3, 4] is right"),
        (ToFloat32, "dtype", "result", "it has the dtype torch.float32, where torch.float64 is right"),
        (RoundsOnTheWay, "kernel-mismatch", "result", "its own rule for `vmap` is wrong: `result`"),
        (
            DetachesTheBatch,
            "kernel-mismatch",
            "x",
            "the gradient of `x` is not what a loop over the examples",
        ),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_a_wrong_rule_of_a_class_is_found(wrong: Any, cause: str, input: str | None, says: str) -> None:
    found = vmap(wrong, (X, Y))
    assert found.status == "failed", found
    failure = found.failures[0]
    assert (failure.cause, failure.input) == (cause, input), failure
    assert says in failure.message
    line = wrong.vmap.__code__.co_firstlineno + 1  # `def`, under `@staticmethod`
    assert failure.where == f"{__file__}:{line}"


def test_a_right_rule_of_a_class_passes() -> None:
    found = vmap(Product, (X, Y), (X[0], Y[0]))
    assert (found.status, found.notes) == ("passed", ())


class NoRule(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Generated(NoRule):
    generate_vmap_rule = True


class GeneratedAndAsking(Generated):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > -9 else x


class GeneratedAndLeavingTorch(Generated):
    """The forward can be mapped, and the backward cannot."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(np.cos(x.detach().numpy()))


class RuleThatRefuses(NoRule):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        raise NotImplementedError("not for a batch")


class RuleOfOldStyle(Doubled):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x * 2, in_dims[0]


@pytest.mark.parametrize(
    ("promising", "by", "says"),
    [
        (GeneratedAndAsking, "`generate_vmap_rule = True`", "vmap: It looks like you're calling .item()"),
        (GeneratedAndLeavingTorch, "`generate_vmap_rule = True`", "Cannot access data pointer"),
        (RuleOfOldStyle, "its own `vmap`", "it must override the setup_context staticmethod"),
    ],
)
def test_a_class_that_says_it_can_be_mapped_and_cannot_is_found(promising: Any, by: str, says: str) -> None:
    (failure,) = vmap(promising, (X,)).failures
    begins = f"the class declares by {by} that it can be mapped, but torch cannot map it: RuntimeError: "
    assert failure.message.startswith(begins)
    assert says in failure.message
    assert failure.cause == "raises"


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (Doubled, "In order to use an autograd.Function with functorch transforms"),
        (NoRule, "does not have vmap support"),
        (RuleThatRefuses, "not for a batch"),
    ],
)
def test_a_class_that_torch_cannot_map_is_skipped_with_the_reason(refused: Any, says: str) -> None:
    found = vmap(refused, (X,))
    assert found.status == "skipped", found
    assert says in found.reason


def test_a_generated_rule_passes() -> None:
    found = vmap(Generated, (X,), (X[0, 0],))
    assert (found.status, found.notes) == ("passed", ())


def declare(reference: Any, **options: Any) -> Any:
    return opsmith.operator(f"test_vmap::op{next(names)}", **options)(reference)


def test_a_batching_claim_that_mixes_examples_is_found() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    def kernel(x: Tensor) -> Tensor:
        return x * 2 + (x.sum() if x.dim() > 2 else 0)

    operator = declare(double, shapes="x: ... M -> ... M", batching="...").kernel("cpu", kernel)
    found = vmap(operator, (X,))
    assert found.status == "failed"
    failure = found.failures[0]
    assert (failure.cause, failure.input) == ("kernel-mismatch", "result")
    assert failure.message.startswith("the rule for `vmap` that batching='...' makes is wrong")


def test_a_formula_that_sums_over_the_batch_is_no_fault_of_vmap() -> None:
    """A wrong gradient is wrong in the loop as well: it is for `gradient` to find."""

    def twice(x: Tensor) -> Tensor:
        return x * 2

    assert vmap(declare(twice).gradients(x=lambda grad: grad * 3), (X,)).status == "passed"


def test_a_kernel_that_rounds_in_another_way_than_the_reference_is_no_fault_of_vmap() -> None:
    def variance(x: Tensor) -> Tensor:
        return x.square().mean(-1) - x.mean(-1).square()

    operator = declare(variance).kernel("cpu", lambda x: x.var(-1, correction=0))
    assert vmap(operator, (X + 9,)).status == "passed"


def test_what_draws_is_held_to_randomness() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    found = vmap(declare(noisy, random=True), (X,))
    assert (found.status, found.notes) == ("passed", ())


def test_equal_examples_that_round_otherwise_draw_nothing() -> None:
    """In a longer batch other elements fill a vector of the processor; here rounding is put in by hand."""

    class Rounded(Product):
        @staticmethod
        def forward(x: Tensor, y: Tensor) -> Tensor:
            torch.rand(1)
            return x * y

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
            torch.rand(1)
            both = x.movedim(in_dims[0], 0) * y.movedim(in_dims[1], 0)
            return torch.cat([both[:-1], both[-1:] * (1 + torch.finfo(both.dtype).eps)]), 0

    assert vmap(Rounded, (X, Y)).status == "passed"


class DrawsAnew(Product):
    """Its rule draws for each example, whatever `randomness` says."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * torch.rand_like(y)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return x.movedim(in_dims[0], 0) * torch.rand_like(y.movedim(in_dims[1], 0)), 0


def test_a_rule_that_forgets_the_randomness_is_found() -> None:
    (failure, *_) = vmap(DrawsAnew, (X, Y)).failures
    assert (failure.cause, failure.input) == ("kernel-mismatch", "result")
    assert "with randomness='same', `result`" in failure.message


def test_a_rule_of_torch_library_is_compared() -> None:
    for wrong in (False, True):
        name = f"test_vmap::op{next(names)}"

        def double(x: Tensor) -> Tensor:
            return x * 2

        operator = torch.library.custom_op(name, mutates_args=())(double)

        def rule(info: Any, in_dims: Any, x: Tensor, operator: Any = operator, wrong: bool = wrong) -> Any:
            return operator(x), 0 if wrong else in_dims[0]

        operator.register_vmap(rule)
        found = vmap(operator, (X,))
        assert found.status == ("failed" if wrong else "passed"), found
        if wrong:
            assert found.failures[0].cause in ("shape", "kernel-mismatch")
            assert found.failures[0].message.startswith("its own rule for `vmap` is wrong")


def test_a_sample_with_a_generator_is_noted() -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.empty_like(x).uniform_(generator=generator)

    found = vmap(declare(noisy), (X, torch.Generator()))
    assert found.status == "skipped"
    assert found.notes == (
        "a sample with a generator was left out: torch does not define how it serves a batch",
    )


def test_without_tensors_there_is_nothing_to_map() -> None:
    def ones(count: int) -> Tensor:
        return torch.ones(count)

    found = vmap(declare(ones), (3,))
    assert (found.status, found.reason) == ("skipped", "no sample has a tensor to batch")


def test_what_is_wrong_for_slices_without_vmap_is_left_to_layouts() -> None:
    class Flat(Generated):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.as_strided(x.shape, (x.shape[-1], 1)) * 2

    found = vmap(Flat, (X,))
    assert not found.failures
    assert any(
        "a call for one example is also wrong if its arguments are slices of larger tensors" in n
        for n in found.notes
    )


def test_an_index_is_drawn_from_what_the_sample_has() -> None:
    def rows(table: Tensor, index: Tensor) -> Tensor:
        return table[index]

    assert vmap(declare(rows), (X, torch.tensor([2, 0]))).status == "passed"


def test_what_takes_positive_matrices_alone_is_scaled() -> None:
    def root(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x)

    assert vmap(declare(root), (X @ X.mT + torch.eye(3),)).status == "passed"


class RefusesBatches(Function):
    """The gradients of x * y, with a rule for `vmap` that raises."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, y: Tensor) -> Any:
        return grad * y, grad * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Tensor) -> Any:
        raise IndexError("no batches")


class RaisesAndDetaches(Function):
    """One derivative under `vmap` raises, and the other is wrong by an input called `raises`."""

    @staticmethod
    def forward(raises: Tensor, y: Tensor) -> Tensor:
        return raises * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return RefusesBatches.apply(grad, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, raises: Tensor, y: Tensor) -> Any:
        return Product.vmap(info, in_dims, raises.detach(), y)


def test_an_input_may_be_called_raises() -> None:
    found = vmap(RaisesAndDetaches, (X, Y))
    assert {(failure.input, failure.cause) for failure in found.failures} == {
        (None, "raises"),
        ("raises", "kernel-mismatch"),
    }


def test_a_reference_that_refuses_an_empty_batch_is_not_called_again() -> None:
    subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
    sample = subject.samples[0]
    mapped = MappedSample(Run(subject, sample, "vmap"), Coverage())
    called: list[int] = []

    def refusing(flat: Any) -> list[Tensor]:
        called.append(1)
        raise RuntimeError("no empty batches")

    mapped.__dict__["reference"] = refusing
    assert not mapped._torch_loses_form(BatchDims({0: 0}, ("x",), size=0), sample.at())
    assert len(called) == 1


def test_a_reference_must_return_as_many_results_under_vmap() -> None:
    subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
    sample = subject.samples[0]
    mapped = MappedSample(Run(subject, sample, "vmap"), Coverage())
    counts = iter((2, 1))
    mapped.__dict__["reference"] = lambda flat: [flat[0]] * next(counts)
    with pytest.raises(ValueError, match="zip"):
        mapped._torch_loses_form(BatchDims({0: 0}, ("x",), size=0), sample.at())


class Positive(Function):
    """The positive numbers: how many there are depends on the numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        at = (x > 0.8).nonzero(as_tuple=True)
        ctx.save_for_backward(*at)
        ctx.shape = x.shape
        return x[at]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.new_zeros(ctx.shape).index_put(ctx.saved_tensors, grad)


def positive(x: Tensor) -> Tensor:
    return x[x > 0.8]


@pytest.mark.parametrize("kind", ["operator", "adopted"])
def test_what_cannot_be_mapped_is_a_limit_with_the_reason(kind: str) -> None:
    name = f"mapped::positive_{kind}"
    made: Any = opsmith.operator(name)(positive) if kind == "operator" else opsmith.adopt(Positive, name)
    found = vmap(made, (X,), effort="quick")
    (failure,) = found.failures
    assert found.status == "skipped"
    assert (failure.cause, failure.severity) == ("raises", "limit")
    assert failure.message == f"the operator cannot be mapped: {found.reason}"


def test_a_class_by_apply_need_not_be_mapped() -> None:
    found = vmap(Positive, (X,), effort="quick")
    assert found.status == "skipped"
    assert not found.failures


def rows_above_the_mean(x: Tensor, score: Tensor) -> Tensor:
    return x[score > score.mean()]


def test_examples_may_have_results_of_other_sizes() -> None:
    made = opsmith.operator("mapped::rows_above_the_mean")(rows_above_the_mean)
    found = vmap(made, (X, X[:, 0]), (X.mT.contiguous(), X[0]))
    assert found.status == "passed"
    assert "gradients of sample 0 were left out: its results vary in size" in found.notes
