"""Adopted operators beyond their values: handle, memory, copies, kinds, rules."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from functions import Square
from torch import Tensor
from torch.autograd import Function

import opsmith

square = opsmith.adopt(Square, "adopted_operators::square")


class KeepsItsResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = x.exp()
        return ctx.result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.result


class ClampInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x, y, y.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_y: Tensor, grad_t: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x > 0), grad_y + grad_t.t()


class MarksItsResults(Function):
    """Writes into what it takes and returns it, beside a result that is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sign = x.sign()
        x.abs_()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return x, sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return grad * ctx.saved_tensors[0]


class NoBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()


class ByNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(grad.numpy() / np.cosh(x.detach().numpy()) ** 2)


class InFloat32(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.float().cos()


class InFloat32ButWrong(InFloat32):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 1.02 * grad * x.float().cos()


class Clip(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-0.1, 0.1)


def x(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def asking(*shape: int) -> Tensor:
    return x(*shape).requires_grad_()


def test_the_handle() -> None:
    assert isinstance(square, opsmith.Operator)
    assert square.function_class is Square  # type: ignore[attr-defined]
    assert square.name == "adopted_operators::square"
    assert opsmith.find_operator("adopted_operators::square") is square
    assert square in opsmith.declared_operators(__name__)
    assert torch.equal(torch.ops.adopted_operators.square(x(3)), x(3) ** 2)
    assert repr(square) == "<opsmith operator adopted_operators::square(Tensor x) -> Tensor>"


def test_it_is_pickled_and_copied_by_name() -> None:
    assert pickle.loads(pickle.dumps(square)) is square
    assert copy.deepcopy({"inside": square})["inside"] is square


def test_adopting_again_replaces_it() -> None:
    first = opsmith.adopt(Square, "adopted_operators::again")
    assert first(x(2)).equal(x(2) ** 2)
    second = opsmith.adopt(Square, "adopted_operators::again", kind="surrogate")
    assert second is first
    assert second.specification.gradients.surrogate


def test_a_module_of_an_adopted_operator() -> None:
    module = torch.nn.Sequential(square.module(name="SquareModule")())
    assert module(x(3)).equal(x(3) ** 2)


def test_a_tensor_on_the_context_makes_no_cycle() -> None:
    """torch's own node keeps its result alive in this class, until the garbage is collected."""
    operator = opsmith.adopt(KeepsItsResult, "adopted_operators::keeps")
    operator(asking(3))  # the first call goes through the dispatcher
    gc.disable()
    try:
        result = operator(asking(3))
        alive = weakref.ref(result)
        del result
        assert alive() is None
        theirs = KeepsItsResult.apply(asking(3))
        cyclic = weakref.ref(theirs)
        del theirs
        assert cyclic() is not None
    finally:
        gc.enable()


def test_results_that_a_class_marks_make_no_cycle() -> None:
    operator = opsmith.adopt(MarksItsResults, "adopted_operators::marks")
    operator(asking(3) * 1)  # the first call goes through the dispatcher
    gc.disable()
    try:
        results = operator(asking(3) * 1)
        alive = [weakref.ref(each) for each in results]
        results[0].sum().backward()
        del results
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_hooks_see_what_a_class_keeps_on_its_context() -> None:
    operator, packed = opsmith.adopt(KeepsItsResult, "adopted_operators::hooked"), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            operator(asking(3))
    assert packed == [(3,), (3,)]


def test_what_is_marked_is_written_and_what_is_returned_is_copied_and_counted() -> None:
    operator = opsmith.adopt(ClampInPlace, "adopted_operators::in_place")
    for _ in range(3):  # the first run copies everything, the others what it has to
        value, other = x(4), x(2, 3)
        clamped, same, transposed = operator(value, other)
        assert clamped is value
        assert clamped.equal(x(4).clamp(min=0))
        assert same.equal(other)
        assert transposed.equal(other.t())
        tensors = (value, other, same, transposed)
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert operator.explain(x(4), x(2, 3)).notes == (
        "`x` is written in place: forward marks it as dirty",
        "`result0` is a copy: it is `y`",
        "`result1` is a copy: it shares memory with `y`",
    )
    assert torch.autograd.gradcheck(lambda x, y: operator(x * 1, y), (asking(4), asking(2, 3)))


def test_a_class_without_a_backward_gets_one() -> None:
    operator = opsmith.adopt(NoBackward, "adopted_operators::no_backward")
    assert torch.autograd.gradcheck(operator, asking(3))
    assert torch.autograd.gradgradcheck(operator, asking(3))


def test_formulas_given_later_take_the_place_of_its_backward() -> None:
    operator = opsmith.adopt(Square, "adopted_operators::replaced")
    operator(asking(3))
    operator.gradients(x=lambda grad: 10 * grad)
    value = asking(3)
    (gradient,) = torch.autograd.grad(operator(value).sum(), value)
    assert gradient.equal(torch.full_like(value, 10))


def test_a_kernel_given_later_computes() -> None:
    operator = opsmith.adopt(Square, "adopted_operators::kernel")
    operator(x(3))
    operator.kernel("cpu")(lambda x: x.square() + 1)
    assert operator(x(3)).equal(x(3).square() + 1)


@pytest.mark.parametrize("reference", [None, torch.tanh], ids=["alone", "with a reference"])
def test_opaque(reference: Any) -> None:
    name = f"adopted_operators::opaque_{'alone' if reference is None else 'with'}"
    operator = opsmith.adopt(ByNumpy, name, reference=reference, opaque=True)
    torch.testing.assert_close(torch.vmap(operator)(x(3, 4)), x(3, 4).tanh())
    assert torch.autograd.gradcheck(operator, asking(3))
    assert operator(torch.empty(3, device="meta")).shape == (3,)
    if reference is not None:
        assert "declared with opaque=True" in str(operator.explain(x(3)))
        torch.testing.assert_close(
            torch.func.hessian(lambda v: operator(v).sum())(x(3)),
            torch.func.hessian(lambda v: v.tanh().sum())(x(3)),
        )


def test_what_the_reference_does_instead_is_told() -> None:
    operator = opsmith.adopt(ByNumpy, "adopted_operators::told", reference=torch.tanh)
    operator(asking(3))
    assert operator.explain(x(3)).notes == ()
    torch.vmap(operator)(x(2, 3))
    (note,) = operator.explain(x(3)).notes
    assert note.startswith("forward under vmap, replaced by the reference: RuntimeError")


def test_what_runs_on_real_tensors_is_told() -> None:
    operator = opsmith.adopt(ByNumpy, "adopted_operators::real")
    operator(asking(3))
    torch.vmap(operator)(x(2, 3))
    (note,) = operator.explain(x(3)).notes
    assert note.startswith("forward under vmap, on the real tensors of each example: RuntimeError")


def test_second_order_by_a_reference_where_the_backward_leaves_torch() -> None:
    operator = opsmith.adopt(ByNumpy, "adopted_operators::second", reference=torch.tanh)
    assert torch.autograd.gradgradcheck(operator, asking(3))


def sampled() -> list[tuple[Tensor]]:
    return [(x(3, 4),), (x(5),)]


@pytest.mark.slow
def test_kinds_and_what_check_holds_them_to() -> None:
    single = opsmith.adopt(InFloat32, "adopted_operators::single", kind="float32")
    assert opsmith.check(single, samples=sampled(), effort="quick").passed
    with_reference = opsmith.adopt(
        InFloat32, "adopted_operators::single_by_reference", kind="float32", reference=torch.sin
    )
    assert opsmith.check(with_reference, samples=sampled(), effort="quick").passed
    wrong = opsmith.adopt(InFloat32ButWrong, "adopted_operators::single_but_wrong", kind="float32")
    assert opsmith.check(wrong, samples=sampled(), effort="quick").failures[0].cause == "scale"
    undeclared = opsmith.adopt(InFloat32, "adopted_operators::undeclared")
    assert not opsmith.check(undeclared, samples=sampled(), effort="quick").passed
    clip = opsmith.adopt(Clip, "adopted_operators::clip", kind="nonlinear")
    assert opsmith.check(clip, samples=sampled(), only=["forward", "gradient", "surrogate"]).passed_as_asked
    linear = opsmith.adopt(Clip, "adopted_operators::clip_linear", kind="surrogate")
    found = opsmith.check(linear, samples=sampled(), only=["surrogate"])
    assert [failure.cause for failure in found.failures] == ["nonlinear-grad"]


def test_the_door_and_the_dispatcher_agree() -> None:
    operator = opsmith.adopt(Square, "adopted_operators::door")
    for value in (x(3, 4), x(4, 3).t(), x(6)[::2], x(1, 3).expand(2, 3), x(0, 3), x()):
        leaf = value.detach().requires_grad_()
        through = torch.ops.adopted_operators.door(leaf)
        direct = operator(leaf)
        assert direct.equal(through)
        assert direct.grad_fn.name() == through.grad_fn.name() == "doorBackward"
        assert torch.autograd.grad(direct.sum(), leaf)[0].equal(torch.autograd.grad(through.sum(), leaf)[0])
    with pytest.raises(opsmith.errors.ArgumentError, match="given twice"):
        operator(x(2), x=x(2))
    with pytest.raises(opsmith.errors.ArgumentError, match="no argument `y`"):
        operator(x(2), y=x(2))
    with pytest.raises(opsmith.errors.ArgumentError, match="missing"):
        operator()
    with pytest.raises(opsmith.errors.LayoutError, match="sparse_coo"):
        operator(x(2).to_sparse())
