"""An adopted class does in every call what `apply` does, whatever calls came before; errors stay its own."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.testing import assert_close

import opsmith
from opsmith.core.call_arguments import CallArguments


def adopted(function_class: type[Function], **options: Any) -> opsmith.Operator[..., Any]:
    return opsmith.adopt(function_class, f"like_apply::{function_class.__name__.lower()}", **options)


def asking(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def second_order(function: Callable[[Tensor], Tensor], value: float = 2.0) -> float:
    """The derivative of x f(x)'s gradient, in which a lost second order of f shows."""
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x) * x, x, create_graph=True)
    return float(torch.autograd.grad(first, x)[0])


class Freezes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, freeze: bool) -> Tensor:
        y = 3 * x
        if freeze:
            ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad, None


def test_a_result_is_a_constant_in_the_calls_that_mark_it() -> None:
    operator, x = adopted(Freezes), torch.ones(2)
    assert not operator(asking(1), True).requires_grad
    assert operator(asking(1), False).requires_grad
    assert_close(torch.func.grad(lambda x: operator(x, False).sum())(x), 3 * x)
    assert_close(torch.func.grad(lambda x: operator(x, True).sum())(x), 0 * x)
    assert_close(torch.func.jvp(lambda x: operator(x, False), (x,), (x,))[1], 3 * x)


class Drops(Function):
    generator = torch.Generator()

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = (torch.rand(x.shape, generator=cls.generator) > 0.5).double()
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * mask


@pytest.mark.parametrize("kind", ["true", "stochastic"])
def test_a_forward_that_is_another_when_it_runs_again_has_no_second_order(kind: str) -> None:
    operator = adopted(Drops, kind=kind)
    for _ in range(3):
        x = torch.ones(16, dtype=torch.float64, requires_grad=True)
        y = operator(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert_close(gradient.detach(), y.detach())
        with pytest.raises(opsmith.errors.TransformError, match="different results in the second run"):
            gradient.sum().backward()


def cube(keep: Callable[[Tensor], Any]) -> type[Function]:
    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = keep(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            kept = ctx.kept
            return grad * (kept() if callable(kept) else kept.slope)

    return Cube


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: SimpleNamespace(slope=3 * x * x),
        lambda x: lambda: 3 * x * x,
        lambda x: functools.partial(torch.mul, 3 * x, x),
    ],
    ids=["namespace", "closure", "partial"],
)
def test_second_orders_through_what_nobody_sees_into(keep: Callable[[Tensor], Any]) -> None:
    operator = adopted(cube(keep))
    for _ in range(3):
        assert second_order(operator) == pytest.approx(48.0)


class Demands(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.shape[-1] != 3:
            raise ValueError("the last dimension must be 3")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def keeps_saved(ctx: Any, x: Tensor, w: Tensor) -> None:
    ctx.save_for_backward(x, w)


def keeps_attributes(ctx: Any, x: Tensor, w: Tensor) -> None:
    ctx.kept = x, w


def keeps_one_attribute(ctx: Any, x: Tensor, w: Tensor) -> None:
    ctx.x = x
    ctx.save_for_backward(w)


@pytest.mark.parametrize("result", ["itself", "view", "both"])
@pytest.mark.parametrize("keep", [keeps_saved, keeps_attributes, keeps_one_attribute])
def test_an_argument_that_is_returned_and_kept_is_kept_as_the_argument(
    keep: Callable[..., None], result: str
) -> None:
    """The result is a copy. Were that kept, the second order would go through the backward once more."""

    class Scales(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
            keep(ctx, x, w)
            return {"itself": x, "view": x.view_as(x), "both": (x, x * w)}[result]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (x, w) = {
                keeps_saved: lambda: ctx.saved_tensors,
                keeps_attributes: lambda: ctx.kept,
                keeps_one_attribute: lambda: (ctx.x, *ctx.saved_tensors),
            }[keep]()
            grad = sum(grads)
            return grad * x * w, grad * x * x

    def orders(function: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, ...]:
        x, w = asking(2, -3), asking(4, 5)
        results = function(x, w)
        total = sum((each * x).sum() for each in (results if isinstance(results, tuple) else (results,)))
        first = torch.autograd.grad(total, (x, w), create_graph=True)
        return *first, *torch.autograd.grad(sum(each.sum() for each in first), (x, w))

    operator = opsmith.adopt(Scales, f"like_apply::scales_{keep.__name__}_{result}", kind="surrogate")
    for _ in range(3):  # the first calls learn, later ones are known
        assert_close(orders(operator), orders(Scales.apply), rtol=0, atol=0)


def test_errors_of_the_class_reach_the_caller_and_change_nothing() -> None:
    operator = adopted(Demands, reference=lambda x: x.sin() + 1000)  # which tells who answers
    for _ in range(2):
        with pytest.raises(ValueError, match="the last dimension must be 3"):
            torch.vmap(operator)(torch.ones(2, 2))
        assert_close(torch.vmap(operator)(torch.ones(2, 3)), torch.ones(2, 3).sin())


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT.to(grad.dtype), x.mT.to(grad.dtype) @ grad


class CastProduct(Product):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return Product.forward(ctx, x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Product.backward(ctx, grad)


@pytest.mark.parametrize("function_class", [Product, CastProduct])
@pytest.mark.parametrize("requires", [True, False])
def test_under_autocast(function_class: type[Function], requires: bool) -> None:
    operator = adopted(function_class, signature="(x: Tensor, weight: Tensor) -> Tensor")
    for _ in range(2):
        mine, theirs = (torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) for _ in range(2))
        mine.requires_grad_(requires)
        theirs.requires_grad_(requires)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = operator(mine, mine), function_class.apply(theirs, theirs)
        assert_close(found, expected, rtol=0, atol=0)
        if requires:
            found.float().sum().backward()
            expected.float().sum().backward()
            assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def halved(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def other(ctx: Any, grad: Tensor) -> Any:
        return backward(ctx, grad) / 2

    return other


class MarkedOutside(Demands):
    @staticmethod
    @once_differentiable
    @halved
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].cos()


class MarkedInside(Demands):
    @staticmethod
    @halved
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("function_class", [MarkedOutside, MarkedInside])
def test_a_mark_among_decorators(function_class: type[Function]) -> None:
    operator, x = adopted(function_class), asking(1, 2, 3)
    (gradient,) = torch.autograd.grad(operator(x).sum(), x, create_graph=True)
    assert_close(gradient.detach(), x.detach().cos() / 2)
    with pytest.raises(opsmith.errors.TransformError, match="once_differentiable"):
        gradient.sum().backward()


class RunsLayer(Function):
    modes: list[bool] = []  # noqa: RUF012  # what its runs see

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, layer: Any) -> Tensor:  # type: ignore[override]
        cls.modes.append(torch.is_grad_enabled())
        return layer(x) * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_forward_runs_without_grad_mode_in_every_call() -> None:
    operator, layer = (
        adopted(RunsLayer, signature="(x: Tensor, layer: object) -> Tensor"),
        torch.nn.Linear(2, 2),
    )
    RunsLayer.modes.clear()
    for _ in range(3):
        assert not operator(torch.ones(1, 2), layer).requires_grad
    assert RunsLayer.modes == [False] * len(RunsLayer.modes)


class Views(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        x += 1
        return x, y.expand(3, *y.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, wide: Tensor) -> Any:
        return grad, wide.sum(0)


def test_every_call_returns_one_form() -> None:
    operator = adopted(Views, signature="(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]")
    forms = [operator(torch.ones(2), torch.ones(4))[1].stride() for _ in range(3)]
    assert forms == [(4, 1)] * 3


class WritesBoth(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return y.mul_(2).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad


def test_one_tensor_given_twice_is_copied_once() -> None:
    operator, x = adopted(WritesBoth), torch.ones(2)
    for _ in range(2):
        assert_close(operator(x, x), torch.full((2,), 4.0))
        assert_close(x, torch.ones(2))


def written_elsewhere(x: Tensor) -> None:
    x.mul_(2)


class WritesOutOfSight(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        written_elsewhere(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


def test_a_write_out_of_sight_is_put_back_and_kept_from_the_inputs_then() -> None:
    operator, x = adopted(WritesOutOfSight), torch.ones(2)
    for _ in range(3):
        assert_close(operator(x), torch.full((2,), 2.0))
        assert_close(x, torch.ones(2))
    assert operator.explain(x).notes == ("`x` is copied first: forward writes into it",)


class WithDefaults(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stride=(1, 1), function=torch.relu, *, scale=2.0, **others: Any
    ) -> Tensor:  # type: ignore[no-untyped-def]
        return function(x) * stride[0] * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def test_defaults_of_any_kind() -> None:
    operator, x = adopted(WithDefaults), torch.tensor([-1.0, 2.0])
    for _ in range(2):
        assert_close(operator(x), WithDefaults.apply(x))
        assert_close(operator(x, (3, 1)), WithDefaults.apply(x, (3, 1)))
        assert_close(operator(x, function=torch.abs), WithDefaults.apply(x, (1, 1), torch.abs))


class Rest(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None = None, *rest: Tensor) -> Tensor:
        ctx.count = len(rest)
        return x * 2 + (0 if y is None else y) + sum(rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, grad, *[grad] * ctx.count


class Permutes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *dims: int) -> Tensor:
        ctx.dims = dims
        return x.permute(*dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.permute(*torch.tensor(ctx.dims).argsort().tolist()), *[None] * len(ctx.dims)


def test_any_number_of_arguments() -> None:
    operator, one = adopted(Rest), torch.ones(2)
    for _ in range(2):
        for call in ((one,), (one, one), (one, None, one), (one, one, one, one)):
            assert_close(operator(*call), Rest.apply(*call))
        assert_close(operator(one, y=one), Rest.apply(one, one))
    permutes, x = adopted(Permutes), torch.randn(2, 3, 4)
    assert_close(permutes(x, 2, 0, 1), x.permute(2, 0, 1))
    assert_close(torch.func.grad(lambda x: (permutes(x, 2, 0, 1) ** 2).sum())(x), 2 * x)


class Subtracts(Function):
    @staticmethod
    def forward(ctx, x, a, b):  # type: ignore[no-untyped-def]
        return x + a - b


def test_samples_by_keyword_and_as_a_list() -> None:
    sample = CallArguments((torch.ones(2),), {"b": 2, "a": torch.ones(2)})
    operator = opsmith.adopt(Subtracts, "like_apply::subtracts", samples=[sample])
    assert (
        repr(operator) == "<opsmith operator like_apply::subtracts(Tensor x, Tensor a, Scalar b) -> Tensor>"
    )


REFUSED = {
    "(x: Tensro, a: float, b: float) -> Tensor": (opsmith.errors.UsageError, "name 'Tensro' is not defined"),
    "(x: Tensor, a: float, b: float) -> int": (
        opsmith.errors.UnsupportedTypeError,
        "declares a type of result",
    ),
    "(x: Tensor, a: float, b: float) -> list[Tensor]": (
        opsmith.errors.UnsupportedTypeError,
        "declares a type of result",
    ),
}


@pytest.mark.parametrize("signature", REFUSED)
def test_signatures_that_say_nothing_are_refused(signature: str) -> None:
    kind, words = REFUSED[signature]
    with pytest.raises(kind, match=words):
        opsmith.adopt(Subtracts, "like_apply::refused", signature=signature)


def test_other_words_that_say_nothing_are_refused() -> None:
    with pytest.raises(opsmith.errors.UsageError, match="unknown kind of Function"):
        opsmith.adopt(Subtracts, "like_apply::refused", kind=3)  # type: ignore[arg-type]
    opsmith.operator("like_apply::taken")(Taken)
    with pytest.raises(opsmith.errors.NameTakenError):
        opsmith.adopt(Subtracts, "like_apply::taken")


def Taken(x: Tensor) -> Tensor:  # noqa: N802  # as a class is called
    return x * 2


class Box:
    """An object of an author."""

    result: Any = None


class BoxesIt(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.box = Box()
        ctx.box.result = y
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.box.result


class ListsBoxes(BoxesIt):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = BoxesIt.forward(ctx, x)
        ctx.boxes, ctx.box = [ctx.box], None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.boxes[0].result


class BoxesNow(BoxesIt):
    """Only later calls hide a result."""

    hides = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if BoxesNow.hides:
            return BoxesIt.forward(ctx, x)
        y = x.exp()
        ctx.box, ctx.y = None, y.clone()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.y if ctx.box is None else ctx.box.result)


@pytest.mark.parametrize("function_class", [BoxesIt, ListsBoxes, BoxesNow])
def test_a_result_that_hides_on_the_context_is_collected(function_class: type[Function]) -> None:
    operator = adopted(function_class)
    for _ in range(4):
        operator(asking(1)).backward()
    BoxesNow.hides = True
    results = []
    for call in range(6):
        x = asking(1)
        y = operator(x)
        y.mark = Box()
        results.append(weakref.ref(y.mark))
        (gradient,) = torch.autograd.grad(y, x)
        assert_close(gradient, y.detach())
        del x, y, gradient
        gc.collect()
        if call == 0 and function_class is BoxesNow:  # a node in C++ has it before the class is known to hide
            results.clear()
    assert [result() for result in results] == [None] * len(results)


class Masks(Function):
    """Its backward looks at the gradients of results that have none."""

    seen: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        return x * 2, mask[:1].clone().to(torch.int32), mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_count: Tensor, of_mask: Tensor) -> Tensor:
        Masks.seen = [(each.shape, each.dtype) for each in (of_count, of_mask)]
        return grad * 2 + of_mask.reshape(4)


def test_results_without_a_gradient_have_zeros_of_their_form() -> None:
    operator = adopted(Masks)
    for function in (Masks.apply, *[operator] * 5):
        x = asking(-1, 1, 2, -2)
        (gradient,) = torch.autograd.grad(function(x)[0].sum(), x)
        assert gradient.tolist() == [2.0] * 4
        assert Masks.seen[1] == ((4,), torch.float64)
        assert Masks.seen[0][0] == (1,)


class Triples(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3.0
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.factor


def test_a_node_without_saved_tensors_goes_back_twice() -> None:
    @opsmith.operator("like_apply::tripled")
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    tripled.gradients(x=lambda grad: grad * 3)
    for function in (Triples.apply, *[adopted(Triples)] * 4, *[tripled] * 4):
        x = asking(1, 2)
        y = function(x).sum()
        assert [torch.autograd.grad(y, x)[0].tolist() for _ in range(2)] == [[3.0, 3.0]] * 2


class Turns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 + 3j)


class TurnsBack(Turns):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Turns.backward(ctx, grad).real


def test_a_complex_gradient_of_a_real_input_is_refused() -> None:
    with pytest.raises(RuntimeError):
        Turns.apply(asking(1)).backward()
    operator, followed, x = adopted(Turns), adopted(TurnsBack), asking(1)
    for _ in range(4):
        with pytest.raises(opsmith.errors.GradientDtypeError) as caught:
            operator(x).backward()
        assert (caught.value.argument, caught.value.got) == ("x", "torch.complex128")
        assert caught.value.hint == "the input is real: return the real part, `.real`"
        assert torch.autograd.grad(followed(x), x)[0].item() == 2.0


def test_two_threads_go_back_through_one_node() -> None:
    """A hook of the first lets the second release the saved tensors."""

    @opsmith.operator("like_apply::product_of_two")
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    product.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)
    for _ in range(4):
        product(asking(1), asking(2)).backward()
    first_unpacks, second_is_back = threading.Event(), threading.Event()
    first = threading.Thread(target=lambda: gradients.append(torch.autograd.grad(y, (x, w))))

    def unpack(tensor: Tensor) -> Tensor:
        if threading.current_thread() is first and not first_unpacks.is_set():
            first_unpacks.set()
            second_is_back.wait()
        return tensor

    gradients: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        x, w = asking(2), asking(3)
        y = product(x, w)
    if type(y.grad_fn).__name__ != "CppFunction":
        pytest.skip("torch's own nodes crash here")
    first.start()
    first_unpacks.wait()
    torch.autograd.grad(y, (x, w))
    second_is_back.set()
    first.join()
    assert [each.tolist() for each in gradients[0]] == [[3.0], [2.0]]
