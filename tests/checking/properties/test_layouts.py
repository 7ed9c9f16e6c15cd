"""Layouts are what their names say, `layouts` finds what depends on them, and nothing else."""

import re
from typing import Any

import pytest
import torch
from right_operators import RIGHT
from torch import Tensor

import opsmith
from opsmith.checking.samples.grad_outputs import random_grad_output
from opsmith.checking.samples.memory_layouts import Layout, layouts_for, plain
from opsmith.checking.samples.sample import Sample
from opsmith.core.call_arguments import CallArguments
from opsmith.core.schema import schema_of
from opsmith.judging.tensors import replica

SHAPES = [(3, 4), (5,), (), (2, 3, 4), (1,), (0, 3), (1, 4), (2, 3, 2, 3), (2, 1, 2, 3, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    count = int(torch.tensor(list(shape)).prod()) if shape else 1
    return torch.arange(1, count + 1).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layout_keeps_shape_dtype_and_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(shape, dtype)
    names = [layout.name for layout in layouts_for(x)]
    assert names
    assert len(set(names)) == len(names)
    for layout in layouts_for(x):
        made = layout.of(x)
        assert (made.shape, made.dtype) == (x.shape, dtype)
        assert layout.repeats or torch.equal(made, x)
        assert made.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
        twin = plain(made)
        assert torch.equal(twin, made)
        assert twin.is_contiguous()
        assert (twin.is_conj(), twin.is_neg()) == (False, False)


def named(x: Tensor, name: str) -> Layout:
    return next(layout for layout in layouts_for(x) if layout.name == name)


@pytest.mark.parametrize(
    ("name", "shape", "strides", "offset"),
    [
        ("expanded from one number", (3, 4), (0, 0), 0),
        ("expanded along the first dimension", (3, 4), (0, 1), 0),
        ("expanded along the last dimension", (3, 4), (4, 0), 0),
        ("transposed", (3, 4), (1, 3), 0),
        ("transposed", (2, 3, 4), (12, 1, 3), 0),
        ("transposed in dimensions 0 and 1", (2, 3, 4), (4, 8, 1), 0),
        ("with reversed dimensions", (2, 3, 4), (1, 2, 6), 0),
        ("sliced with a step", (5,), (2,), 1),
        ("every other row", (3, 4), (8, 1), 4),
        ("a chunk of a larger tensor", (3, 4), (8, 1), 4),
        ("at an offset of one element in its memory", (3, 4), (4, 1), 1),
        ("channels last", (2, 3, 2, 3), (18, 1, 9, 3), 0),
        ("channels last", (2, 3, 2, 2, 2), (24, 1, 12, 6, 3), 0),
        ("with an odd stride in a dimension of size 1", (1, 4), (7, 1), 0),
        ("a negated view", (3,), (2,), 1),
    ],
)
def test_a_layout_is_what_its_name_says(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    x = numbers(shape)
    made = named(x, name).of(x)
    assert (made.stride(), made.storage_offset()) == (strides, offset)
    assert made.is_neg() == (name == "a negated view")


def test_complex_tensors_become_conjugate_views() -> None:
    z = numbers((2, 2), torch.complex128) * (1 + 2j)
    made = named(z, "a conjugate view").of(z)
    assert made.is_conj()
    assert torch.equal(made, z)


def test_what_lies_between_the_numbers_is_not_a_number() -> None:
    x = numbers((3, 4))
    made = named(x, "sliced with a step").of(x)
    around = torch.empty(0, dtype=x.dtype).set_(made.untyped_storage())
    assert int(around.isnan().sum()) == x.numel()
    index = torch.tensor([2, 0, 1])
    made = named(index, "sliced with a step").of(index)
    around = torch.empty(0, dtype=index.dtype).set_(made.untyped_storage())
    assert around.sort().values.tolist() == [0, 0, 1, 1, 2, 2]


def test_an_incoming_gradient_has_the_form_of_its_result() -> None:
    made = random_grad_output(torch.empty(2, 3, dtype=torch.complex64).mT, torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 2), torch.complex64, True)


def found(operator: Any, samples: Any = None, effort: Any = "default") -> Any:
    report = opsmith.check(operator, samples=samples, only=["layouts"], effort=effort)
    return next(outcome for outcome in report.outcomes if outcome.property == "layouts")


@pytest.mark.every(9)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_operator_is_right_in_every_layout(name: str) -> None:
    outcome = found(RIGHT[name])
    assert outcome.status == "passed", [str(failure) for failure in outcome.failures]


def test_ties_do_not_make_a_right_operator_wrong() -> None:
    """Of equal numbers each is the largest, and which one is picked may depend on the layout."""

    class Peak(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            # As kernels do: the first of the largest if rows are dense, the last if they are not.
            values = x if x.stride(-1) == 1 else x.flip(-1)
            at = values.argmax(-1, keepdim=True)
            at = at if x.stride(-1) == 1 else x.shape[-1] - 1 - at
            ctx.save_for_backward(at)
            ctx.shape = x.shape
            return x.gather(-1, at).squeeze(-1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (at,) = ctx.saved_tensors
            return grad.new_zeros(ctx.shape).scatter(-1, at, grad.unsqueeze(-1))

    outcome = found(Peak, [(torch.rand(3, 4),), (torch.rand(2, 5),)])
    assert outcome.status == "passed", [str(failure) for failure in outcome.failures]


@pytest.mark.slow
def test_a_sum_in_another_order_is_no_fault() -> None:
    @opsmith.operator("layouts::summed")
    def summed(x: Tensor) -> Tensor:
        order = range(x.shape[-1]) if x.is_contiguous() else reversed(range(x.shape[-1]))
        total = torch.zeros_like(x[..., 0])
        for at in order:
            total = total + x[..., at]
        return total

    assert found(summed, [(torch.randn(4, 60),)]).status == "passed"


def picky(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    return 2 * x


@pytest.mark.slow
def test_an_input_that_is_refused_in_words_of_its_own_is_listed() -> None:

    @opsmith.operator("layouts::doubled")
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    doubled.kernel("cpu", picky)
    outcome = found(doubled, [(torch.randn(3, 4),)])
    assert outcome.status == "passed"
    (note,) = [each for each in outcome.notes if "refuses `x` (transposed, sliced with a step" in each]
    assert ": ValueError: x must be contiguous" in note


def test_what_some_operation_says_is_no_answer_of_its_own() -> None:
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x.view(-1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * grad.reshape(3, 4)

    (failure,) = found(Flat, [(torch.randn(3, 4),)]).failures
    assert (failure.cause, failure.input) == ("layout", "x")
    assert "RuntimeError: view size is not compatible" in failure.message


def test_what_the_reference_refuses_is_outside_of_the_domain() -> None:
    @opsmith.operator("layouts::flat")
    def flat(x: Tensor) -> Tensor:
        return 2 * x.view(-1)

    outcome = found(flat, [(torch.randn(3, 4),)])
    assert outcome.failures == ()
    assert any("refuses `x` (transposed" in note for note in outcome.notes)


def test_an_incoming_gradient_that_is_refused_is_a_fault_in_any_words() -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            if not grad.is_contiguous():
                raise ValueError("grad must be contiguous")
            return 2 * grad

    (failure,) = found(Refusing, [(torch.randn(3, 4),)]).failures
    assert (failure.cause, failure.input) == ("layout", "x")
    assert "ValueError: grad must be contiguous" in failure.message
    assert "at an offset of one element in its memory" in failure.evidence["right for"]
    assert {"transposed", "every other row"} <= set(failure.evidence["wrong for"].split(", "))


def test_a_backward_that_fails_for_an_input_that_the_call_took_is_a_fault() -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return 2 * (x.view(-1) * grad.reshape(-1)).view(x.shape)

    (failure,) = found(Late, [(torch.randn(3, 4),)]).failures
    assert (failure.cause, failure.input) == ("layout", "x")
    assert "the gradient of `x` is right where `x` is contiguous" in failure.message


def test_an_operator_that_draws_is_tried_with_gradients_alone() -> None:
    outcome = found(RIGHT["dropout"])
    assert any("layouts of inputs were left out" in note for note in outcome.notes)


@pytest.mark.slow
def test_several_are_tried_together() -> None:
    @opsmith.operator("layouts::pair")
    def pair(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        both = not (x.is_contiguous() or y.is_contiguous())
        return x * y * (2 if both else 1)

    pair.samples(lambda make: [(make(3, 4), make(3, 4))])
    pair.kernel("cpu", kernel)
    (failure,) = found(pair, effort="thorough").failures
    assert failure.cause == "layout"
    assert re.search(r"\(with `y` (transposed|every|a chunk|sliced|a negated)", failure.message)


def test_a_forgotten_conjugation_is_found() -> None:
    class Imaginary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            bare = z.conj() if z.is_conj() else z  # as a kernel sees it that reads memory alone
            return bare.imag.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 1j * grad

    z = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    (failure,) = found(Imaginary, [(z,)]).failures
    assert "wrong where `z` is a conjugate view" in failure.message


@pytest.mark.slow
def test_what_changes_from_call_to_call_is_not_blamed_on_a_layout() -> None:
    calls: list[int] = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            calls.append(1)
            return x * len(calls)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * len(calls)

    assert found(Counting, [(torch.randn(3, 4),)]).failures == ()


def test_a_backward_that_writes_into_what_comes_in_is_called_that() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad.mul_(2)

    (failure,) = found(Doubled, [(torch.randn(3, 4),)]).failures
    assert failure.cause == "mutates-grad-output"


def test_what_numpy_does_not_know_is_listed() -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return torch.from_numpy(grad.numpy() * x.cos().numpy())

    outcome = found(Sine, [(torch.randn(3, 4),)])
    assert outcome.failures == ()
    assert any("refuses a grad_output (a negated view" in note for note in outcome.notes)


class ByNew(torch.autograd.Function):
    """`Tensor.new` takes no view whose negation is pending."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_what_new_does_not_know_is_listed() -> None:
    outcome = found(ByNew, [(torch.randn(3, 4),)])
    assert outcome.failures == ()
    assert any("refuses `x` (a negated view" in note for note in outcome.notes)


class ViewedAndWritten(torch.autograd.Function):
    """It writes into `x`, and takes a view of `mask`: two faults, of two inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        x -= 1
        return x * mask.view(-1).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


def test_a_view_beside_a_write_is_a_fault_of_its_own() -> None:
    failures = found(ViewedAndWritten, [(torch.randn(3, 4), torch.randint(0, 2, (3, 4)))]).failures
    assert ("mask", "layout") in [(each.input, each.cause) for each in failures]
    assert not [each for each in failures if each.input == "mask" and each.cause == "mutates-input"]


def test_quick_tries_a_few_of_each_tensor() -> None:
    from wrong_layouts import gradient_by_pointer

    assert found(gradient_by_pointer(), effort="quick").failures


X = torch.arange(24.0).view(4, 6)
Z = torch.view_as_complex(X.view(4, 3, 2))


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.mT,
        X[:, ::2],
        X[1:],
        X[0].expand(3, 6),
        X[0].unfold(0, 3, 1),
        torch.view_as_complex(X.view(4, 3, 2)).conj(),
    ],
    ids=["contiguous", "transposed", "sliced", "offset", "expanded", "overlapping", "conjugate"],
)
def test_a_copy_has_the_same_numbers_and_strides_and_its_own_memory(tensor: torch.Tensor) -> None:
    copy = replica(tensor, torch.float64)
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor.to(copy.dtype).resolve_conj())
    copy.untyped_storage().fill_(0)
    assert tensor.any()


def test_other_values_and_integers_stay_as_they_are() -> None:
    assert replica("same", torch.float64) == "same"
    assert replica(torch.tensor([1, 2]), torch.float64).dtype is torch.int64
    assert replica(torch.tensor([1j]), torch.float32).dtype is torch.complex64


def test_a_generator_is_copied_in_its_state() -> None:
    generator = torch.Generator().manual_seed(5)
    copy = replica(generator)
    assert torch.equal(torch.rand(3, generator=copy), torch.rand(3, generator=generator))


def weighted(xs: list[torch.Tensor], weight: torch.Tensor | None = None, *, power: int = 2) -> torch.Tensor:
    return xs[0]


def test_a_sample_names_every_tensor() -> None:
    schema = schema_of(weighted, "demo::weighted")
    sample = Sample.of(3, CallArguments(([torch.ones(2), torch.ones(1, 3)],), {"power": 5}), schema)
    assert sample.labels == ("xs[0]", "xs[1]", "weight", "power")
    assert sample.names == ("xs", "xs", "weight", "power")
    assert sample.inexact == (0, 1)
    assert str(sample) == "sample 3 (xs[0] [2], xs[1] [1, 3], weight=None, power=5)"
    args, kwargs = sample.arguments(sample.at(torch.float64))
    assert [tensor.dtype for tensor in args[0]] == [torch.float64] * 2
    assert (args[1], kwargs) == (None, {"power": 5})


@pytest.mark.parametrize("way", ["contiguous", "clone"])
def test_the_hint_for_an_offset_is_a_copy(way: str) -> None:
    @opsmith.operator(f"layouts_hint::{way}")
    def pairs(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)

    def formula(grad: Tensor) -> Tensor:
        copied = grad.clone(memory_format=torch.contiguous_format)
        both = torch.view_as_complex(grad.contiguous() if way == "contiguous" else copied)
        return both.real + both.imag

    pairs.gradients(x=formula)
    report = opsmith.check(pairs, samples=[(torch.randn(3, 4),)], only=["layouts"])
    assert bool(report.failures) is (way == "contiguous")
    assert all(
        "or use `grad.clone(memory_format=torch.contiguous_format)`" in each.message
        for each in report.failures
    )


def test_the_derivative_by_torch_is_no_fault_of_a_reference() -> None:
    """A rotary embedding in the usual form: torch refuses the gradient of its last view at an odd offset."""

    @opsmith.operator("layouts_hint::rotary")
    def rotary(x: Tensor, angles: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.view_as_real(turned).flatten(-2)

    samples = [(torch.randn(2, 3, 8), torch.randn(3, 4)), (torch.randn(5, 4), torch.randn(5, 2))]
    report = opsmith.check(rotary, samples=samples, only=["layouts"])
    assert not report.failures
    assert "refuses a grad_output" in str(report)


class OneStride(torch.autograd.Function):
    """A class of an author's, in a reference: its backward takes grad_output by `view`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad.view(-1) * 2).view(grad.shape)


class ByEinsum(OneStride):
    """Its error comes through a function of torch's in Python."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert grad.is_contiguous() or torch.functional.norm("no number")
        return grad * 2


@pytest.mark.parametrize("function", [OneStride, ByEinsum])
def test_a_class_of_the_author_s_in_a_reference_is_no_derivative_by_torch(function: Any) -> None:
    @opsmith.operator(f"layouts_hint::of_{function.__name__.lower()}")
    def doubled(x: Tensor) -> Tensor:
        return function.apply(x)

    report = opsmith.check(doubled, samples=[(torch.randn(3, 4),)], only=["layouts"])
    assert [each.cause for each in report.failures] == ["layout"]


class FlattenedInBoth(torch.autograd.Function):
    """Takes contiguous memory for granted, and has a wrong gradient as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.view(-1) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.reshape(ctx.shape) * 3


def test_a_wrong_gradient_hides_no_result_that_is_wrong_in_a_layout() -> None:
    x = torch.linspace(0.5, 2, 12).view(3, 4).requires_grad_()
    report = opsmith.check(FlattenedInBoth, samples=[(x,)], only=["gradient", "layouts"], effort="quick")
    assert {(each.property, each.follows) for each in report.failures} == {
        ("gradient", None),
        ("layouts", None),
    }
