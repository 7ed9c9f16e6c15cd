"""Known calls of an adopted class run its code on torch's context, and do in every call what `apply` does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import WithoutGradient
from slow_calls import record_slow_calls
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities
from opsmith.torch_library.origins.class_routes import ClassRoutes


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w if ctx.needs_input_grad[0] else None, grad * x


class ProductWithSetup(Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class Keeps(Function):
    """Keeps what it computed on its way, which has no graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        scale = x.sigmoid()
        ctx.save_for_backward(scale, w)
        return scale * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale, w = ctx.saved_tensors
        return grad * w * scale * (1 - scale), grad * scale


class Result(Function):
    """Saves its result, and numbers and sizes as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).exp()
        ctx.save_for_backward(x, w, y)
        ctx.by, ctx.sizes, ctx.words = 1.0, x.shape, [("a", 1)]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        assert ctx.sizes == x.shape
        return ctx.by * grad * y * w, grad * y * x


class Attributes(Function):
    """Keeps tensors as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x.exp() * w
        ctx.y, ctx.both = y, {"x": x, "w": w}
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.y, grad * ctx.both["x"].exp()


class TensorAttributes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.scale, ctx.w = x.sigmoid(), w
        ctx.save_for_backward(x)
        return ctx.scale * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert x.shape == ctx.scale.shape
        return grad * ctx.w * ctx.scale * (1 - ctx.scale), grad * ctx.scale


PARAMETER = torch.nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))


class SavesAParameter(Function):
    """Saves a weight that is no argument, and keeps a tensor as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.scale, ctx.w = x.cos(), w
        ctx.save_for_backward(PARAMETER)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        return grad * parameter * ctx.scale, grad * ctx.w


class KeepsAParameter(SavesAParameter):
    """The same, each by the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.parameter, ctx.scale = PARAMETER, x.cos()
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grad * ctx.parameter * ctx.scale, grad * w


class Closure(Function):
    """Keeps a function that holds a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        slope = x.cos()
        ctx.slope = lambda: slope
        ctx.save_for_backward(w)
        return x.sin() * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        slope = ctx.slope()
        return grad * w * slope, None


class Identity(Function):
    """A view of its input, as in a reversal of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x.view_as(x)
        ctx.save_for_backward(y, w)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, w = ctx.saved_tensors
        return grad * w, grad * y


class Two(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor, grad_sum: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad_product * w + grad_sum, grad_product * x + grad_sum


class Unmaterialized(Two):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return Two.forward(ctx, x, w)

    @staticmethod
    def backward(ctx: Any, grad_product: Any, grad_sum: Any) -> Any:
        filled = [torch.zeros(()) if grad is None else grad for grad in (grad_product, grad_sum)]
        return Two.backward(ctx, *filled)


class Broadcasts(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (grad * w).sum_to_size(x.shape), (grad * x).sum_to_size(w.shape), None


CLASSES = [
    *(Product, ProductWithSetup, Keeps, Result, Attributes, TensorAttributes, Closure, Identity),
    *(Two, Unmaterialized, Broadcasts),
]


def asking(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls were validated in full, or ran with all checks of a class."""
    calls = record_slow_calls(monkeypatch)
    own = ClassRoutes._computed

    def recorded(self: ClassRoutes, values: Any) -> Any:
        calls.append(self._specification.name)
        return own(self, values)

    monkeypatch.setattr(ClassRoutes, "_computed", recorded)
    return calls


def known(function_class: type[Function], *args: Any, **options: Any) -> Any:
    """An adopted class that has had some calls, and a backward."""
    name = f"fast_adopted::{function_class.__name__.lower()}"
    operator = opsmith.adopt(function_class, name, **options)
    for _ in range(3):
        args = args or (asking(3), asking(3))
        results = in_a_tuple(operator(*args))
        if results[0].requires_grad:
            sum(each.sum() for each in results).backward()
    return operator


def in_a_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def compare(operator: Any, function: Callable[..., Any], *args: Any) -> None:
    """Compare the results and gradients with those of `apply`."""
    inputs = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
    found, expected = in_a_tuple(operator(*args)), in_a_tuple(function(*args))
    assert_close(found, expected)
    for at in range(len(found)):
        found, expected = in_a_tuple(operator(*args)), in_a_tuple(function(*args))
        assert found[at].requires_grad == expected[at].requires_grad
        if inputs and expected[at].requires_grad:
            grad = torch.randn_like(expected[at])
            assert_close(
                torch.autograd.grad(found[at], inputs, grad, allow_unused=True),
                torch.autograd.grad(expected[at], inputs, grad, allow_unused=True),
            )


@pytest.mark.parametrize("function_class", CLASSES)
def test_known_calls(function_class: type[Function], slow: list[str]) -> None:
    operator = known(function_class)
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
        if dtype is torch.float64:
            slow.clear()
        x, w = asking(2, 5, dtype=dtype), asking(2, 5, dtype=dtype)
        compare(operator, function_class.apply, x, w)
        compare(operator, function_class.apply, x.mT, w.mT)
        compare(operator, function_class.apply, x[:, ::2], w[:, ::2])
        compare(operator, function_class.apply, x.detach(), w)
        compare(operator, function_class.apply, x.detach(), w.detach())
        compare(operator, function_class.apply, torch.nn.Parameter(x.detach()), w)
        compare(operator, function_class.apply, asking(0, 2), asking(0, 2))
        with torch.no_grad():  # in which `apply` returns a view of `x` that requires a gradient
            compare(
                operator, function_class.apply, *((x, w) if function_class is not Identity else (x.data, w))
            )
    assert not slow


@pytest.mark.parametrize("function_class", [SavesAParameter, KeepsAParameter])
def test_a_weight_that_is_no_argument(function_class: type[Function]) -> None:
    operator = known(function_class)
    for _ in range(3):
        compare(operator, function_class.apply, asking(3), asking(3))


@pytest.mark.parametrize("function_class", [Product, Two, Unmaterialized])
def test_without_a_gradient_of_any_result(function_class: type[Function]) -> None:
    """`apply` hands zeros to the backward, or None where the class wants it so."""
    operator = opsmith.adopt(function_class, f"fast_adopted::nothing_{function_class.__name__.lower()}")
    for _ in range(4):
        found = []
        for function in (operator, function_class.apply):
            x, w = asking(3), asking(3)
            try:
                WithoutGradient.apply(in_a_tuple(function(x, w))[0]).sum().backward()
            except TypeError as error:
                found.append(str(error))
            else:
                found.append([None if each.grad is None else each.grad.tolist() for each in (x, w)])
        assert found[0] == found[1]


def test_a_gradient_is_summed_to_its_input(slow: list[str]) -> None:
    operator = known(Broadcasts)
    for _ in range(2):
        slow.clear()
        compare(operator, Broadcasts.apply, asking(2, 3), asking(3))
    operator = known(ProductWithSetup)
    for _ in range(2):
        slow.clear()
        compare(operator, lambda x, w: x * w, asking(2, 3), asking(3))
    assert not slow


@pytest.mark.parametrize("function_class", [each for each in CLASSES if each not in (Closure, Identity)])
def test_second_orders(function_class: type[Function]) -> None:
    operator = known(function_class)
    for _ in range(2):
        assert torch.autograd.gradgradcheck(operator, (asking(3), asking(3)))


def test_flags_and_numbers(slow: list[str]) -> None:
    class Scaled(Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, by: float, w: Tensor | None = None, negative: bool = False
        ) -> Tensor:
            ctx.save_for_backward(w)
            ctx.by = -by if negative else by
            y: Tensor = x * ctx.by
            return y if w is None else y.mul_(w)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (w,) = ctx.saved_tensors
            gradient = (grad if w is None else grad * w) * ctx.by
            return gradient, *[None] * (len(ctx.needs_input_grad) - 1)

    operator = known(Scaled, asking(3), 2.0)
    for given in ((2.0,), (3.0, torch.ones(3)), (1.0, None, True), (2, torch.ones(3), True)):
        for _ in range(3):
            compare(operator, Scaled.apply, asking(3), *given)
    slow.clear()
    compare(operator, Scaled.apply, asking(3), 4.0, torch.ones(3), True)
    assert not slow
    assert_close(operator(torch.ones(2), negative=True, by=2.0), torch.full((2,), -2.0))


def test_a_flag_that_makes_it_write() -> None:
    class Perhaps(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, write: bool) -> Tensor:
            if write:
                x.mul_(2)
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 3 * grad, None

    operator = known(Perhaps, torch.ones(3), False)
    x = torch.ones(3)
    for _ in range(3):
        assert_close(operator(x, True), torch.full((3,), 6.0))
        assert_close(operator(x, False), torch.full((3,), 3.0))
        assert_close(x, torch.ones(3))


def test_a_write_that_no_earlier_run_has_done() -> None:
    writes: list[bool] = []

    class Late(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if writes:
                x.mul_(2)
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 3 * grad

    operator = known(Late, torch.ones(3))
    writes.append(True)
    with pytest.raises(errors.MutationError, match="argument: x"):
        operator(torch.ones(3))
    x = torch.ones(3)
    for _ in range(2):  # it has learnt
        assert_close(operator(x), torch.full((3,), 6.0))
    assert_close(x, torch.ones(3))


def test_results_that_are_no_new_tensors() -> None:
    forms: list[str] = ["new"]

    class Forms(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            if forms[-1] == "input":
                return x, y
            return (y, y.view(-1)) if forms[-1] == "view" else (y, x + 1)

        @staticmethod
        def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
            by = {"new": 1, "input": 2, "view": 2}[forms[-1]]
            return (1 if forms[-1] == "input" else 2) * first + by * second

    operator = known(Forms, asking(3))
    for form in ("new", "input", "view", "new"):
        forms.append(form)
        for _ in range(3):
            x = asking(3)
            first, second = operator(x)
            assert first.data_ptr() not in (x.data_ptr(), second.data_ptr())
            assert_close(first.detach(), x.detach() if form == "input" else 2 * x.detach())
            (gradient,) = torch.autograd.grad((first.sum(), second.sum()), x)
            assert_close(gradient, torch.full_like(x, {"new": 3.0, "input": 3.0, "view": 4.0}[form]))


def test_results_of_another_structure() -> None:
    several: list[bool] = []

    class Changes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * 2, x * 3 if several else None

        @staticmethod
        def backward(ctx: Any, first: Tensor, second: Any) -> Any:
            return 2 * first + (3 * second if several else 0)

    several.append(True)
    operator = known(Changes, asking(3))
    several.clear()
    for _ in range(3):
        x = asking(3)
        first, second = operator(x)
        assert second is None
        assert_close(torch.autograd.grad(first.sum(), x)[0], torch.full_like(x, 2.0))


def test_a_backward_that_writes_into_its_gradient() -> None:
    class Writes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad.mul_(2)

    operator = known(Writes, asking(3))
    grad = torch.ones(3, dtype=torch.float64)
    for _ in range(3):
        x = asking(3)
        assert_close(torch.autograd.grad(operator(x), x, grad)[0], 2 * torch.ones_like(x))
        assert_close(grad, torch.ones_like(grad))


class Answers(Function):
    answer: Any = staticmethod(lambda grad: (grad, None))

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        return x * n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Answers.answer(grad)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda grad: (grad, grad), errors.GradientCountError),
        (lambda grad: (grad, None, grad), errors.GradientCountError),
        (lambda grad: (), errors.GradientCountError),
        (lambda grad: (grad[:1].expand(7), None), errors.GradientShapeError),
        (lambda grad: (3, None), errors.GradientTypeError),
        (lambda grad: (grad.to("meta"), None), errors.GradientDeviceError),
        (lambda grad: (grad, None, None), None),
        (lambda grad: [grad], None),
        (lambda grad: grad, None),
        (lambda grad: (grad.float(), None), None),
        (lambda grad: (grad.expand(2, 3), None), "twice"),
        (lambda grad: None, "none"),
    ],
)
def test_answers_of_a_backward(answer: Any, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = known(Answers, asking(3), 2)
    monkeypatch.setattr(Answers, "answer", staticmethod(answer))
    for _ in range(2):
        x = asking(3)
        y = operator(x, 2).sum()
        if isinstance(error, type):
            with pytest.raises(error):
                y.backward()
            continue
        y.backward()
        if error == "none":
            assert x.grad is None
        else:
            assert_close(x.grad, torch.full_like(x, 2.0 if error == "twice" else 1.0))


def test_a_class_that_is_differentiable_once() -> None:
    class Once(Product):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Any:
            return Product.backward(ctx, grad)

    operator = known(Once)
    for _ in range(2):
        x, w = asking(3), asking(3)
        compare(operator, Once.apply, x, w)
        (gradient,) = torch.autograd.grad(operator(x, w).sum(), x, create_graph=True)
        with pytest.raises(errors.TransformError, match="once_differentiable"):
            gradient.sum().backward()


def test_it_keeps_what_apply_keeps() -> None:
    for function_class in (Product, ProductWithSetup, Result):
        operator = known(function_class)
        counts: list[list[int]] = []
        for function in (operator, function_class.apply):
            kept: list[int] = []

            def note(each: Tensor, kept: list[int] = kept) -> Tensor:
                kept.append(each.numel())
                return each

            with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
                function(asking(3), asking(3))
            counts.append(sorted(kept))
        assert counts[0] == counts[1]


def test_second_orders_of_what_is_wrong_on_purpose() -> None:
    for function_class in (Closure, Identity):
        operator = known(function_class)
        for _ in range(2):
            x, w = asking(3), asking(3)
            (gradient,) = torch.autograd.grad(operator(x, w).sum(), x, create_graph=True)
            slope, by = (x.cos(), w) if function_class is Closure else (torch.ones_like(x), w)
            assert_close(torch.autograd.grad(gradient.sum(), w)[0], slope.detach())
            assert_close(gradient, slope * by)


@pytest.mark.parametrize("function_class", [Product, Keeps, Result, Attributes, TensorAttributes, Identity])
def test_nothing_outlives_a_result(function_class: type[Function]) -> None:
    operator = known(function_class)
    gc.collect()
    gc.disable()
    try:
        result = operator(asking(3).exp(), asking(3))
        seen = weakref.ref(result)
        del result
        assert seen() is None
    finally:
        gc.enable()


def test_a_saved_tensor_that_is_changed_is_noticed() -> None:
    for function_class in (Product, Keeps, Attributes, TensorAttributes):
        operator = known(function_class)
        x, w = asking(3), asking(3).exp()
        y = operator(x, w)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_autograd_cannot_save() -> None:
    class Numbers(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, 3)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, by = ctx.saved_tensors
            return by * grad * x * x

    operator = known(Numbers, asking(3))
    for _ in range(2):
        x = asking(3)
        assert_close(torch.autograd.grad(operator(x).sum(), x)[0], 3 * x * x)
        assert torch.autograd.gradgradcheck(operator, (x,))


def test_threads() -> None:
    operators = {each: known(each) for each in (Product, Keeps, Attributes, TensorAttributes)}
    failures: list[BaseException] = []

    def work(dtype: torch.dtype) -> None:
        try:
            for size in range(1, 8):
                for function_class, operator in operators.items():
                    compare(
                        operator, function_class.apply, asking(size, dtype=dtype), asking(size, dtype=dtype)
                    )
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (torch.float64, torch.float32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_known_backwards_go_back_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    if not capabilities.on("calls_in_cpp") or capabilities.calls_in_cpp() is None:
        pytest.skip("calls in C++ are not built, or turned off")

    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, by: float) -> Tensor:
            ctx.scale, ctx.by = w.exp(), by
            ctx.save_for_backward(x)
            return x * ctx.scale * by

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad * ctx.scale * ctx.by, grad * x * ctx.scale * ctx.by, None

    operator = opsmith.adopt(Scaled, "fast_adopted::in_cpp")
    x, w = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for _ in range(3):
        operator(x, w, 2.0).sum().backward()

    def refuse(*_: Any) -> None:
        raise AssertionError("the backward runs in Python")

    result = operator(x, w, 2.0)
    monkeypatch.setattr(result.grad_fn._forward_cls, "backward", refuse)  # type: ignore[union-attr]
    expected = torch.autograd.grad(Scaled.apply(x, w, 2.0).sum(), (x, w))
    assert_close(torch.autograd.grad(result.sum(), (x, w), retain_graph=True), expected)
    with pytest.raises(AssertionError, match="in Python"):  # with a graph it must
        torch.autograd.grad(result.sum(), x, create_graph=True)
