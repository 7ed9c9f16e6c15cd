"""Signatures of known calls, and calls that must not be taken for one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_calls import record_slow_calls
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith.torch_library.calls.routes import RouteTable

RAN: list[str] = []


def _noted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        RAN.append(name)
        return function(x, w)

    return kernel


@pytest.fixture
def operator(name: str) -> Any:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    made = opsmith.operator(name)(product).gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)
    made(torch.ones(2), torch.ones(2))
    return made


def ways(operator: Any) -> Any:
    """The routes of the known signatures."""
    table = operator._registration._routes
    return {} if table is None else table._routes


def test_each_form_is_met_once(operator: Any) -> None:
    for size in (2, 3, 0):
        operator(torch.ones(size), torch.ones(size))
    assert len(ways(operator)) == 1
    operator(torch.ones(2, 2), torch.ones(2))
    operator(torch.ones(2, requires_grad=True), torch.ones(2))
    operator(torch.ones(2).double(), torch.ones(2))
    operator(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    assert len(ways(operator)) == 5


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators of calls whose route was chosen anew."""
    names: list[str] = []
    route = RouteTable.route

    def recorded(self: RouteTable, *args: Any) -> Any:
        names.append(self.specification.name)
        return route(self, *args)

    monkeypatch.setattr(RouteTable, "route", recorded)
    return names


def test_one_tensor_twice(operator: Any, examined: list[str]) -> None:
    x, w = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(operator(x, x), x)
        assert_close(gradient, torch.tensor([6.0]))
    for _ in range(2):
        assert_close(torch.autograd.grad(operator(x, w), (x, w)), (torch.tensor([5.0]), torch.tensor([3.0])))
    assert len(examined) == 1


def test_inference(operator: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        for _ in range(2):
            assert operator(x, torch.ones(2)).is_inference()
        made = torch.ones(2)
    assert_close(operator(made, torch.ones(2)), torch.ones(2))
    assert operator(x.detach().clone().requires_grad_(), torch.ones(2)).requires_grad
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        operator(x, made)


def test_alias_of_an_inference_tensor(name: str) -> None:
    def perhaps(x: Tensor, by: float) -> Tensor:
        return x.view(-1) if by == 1 else x * by

    operator = opsmith.operator(name)(perhaps)
    with torch.inference_mode():
        x = torch.ones(2)
        for _ in range(2):
            operator(x, 2.0)
        with pytest.raises(opsmith.errors.AliasError):
            operator(x, 1.0)


def test_a_subclass_is_asked_nothing(operator: Any) -> None:
    asked: list[str] = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    operator(torch.ones(2).as_subclass(Watching), torch.ones(2))
    assert asked == [str(operator.torch_operator)]


def test_kernels_are_chosen_by_form(name: str) -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    operator = opsmith.operator(name)(product)
    operator.kernel("cpu", _noted("single", product), dtypes=[torch.float32])
    operator.kernel("cpu", _noted("double", product), dtypes=[torch.float64])
    RAN.clear()
    for _ in range(3):
        operator(torch.ones(2), torch.ones(2))
        operator(torch.ones(2).double(), torch.ones(2).double())
        operator(torch.ones(2).half(), torch.ones(2).half())
    assert RAN == ["single", "double"] * 3
    assert len(ways(operator)) == 3


def test_a_kernel_gets_memory_as_it_lies_there(name: str) -> None:
    seen: list[bool] = []

    def product(x: Tensor, w: Tensor) -> Tensor:
        seen.append(x.is_conj() or x.is_neg())
        return x * w

    operator = opsmith.operator(name)(plain_product).kernel("cpu", product)
    x = torch.randn(2, dtype=torch.complex64)
    for _ in range(2):
        assert_close(operator(x, x.clone()), x * x)
        assert_close(operator(x.conj(), x.clone()), x.conj() * x)
        assert_close(operator(x.conj().imag, x.real.clone()), -x.imag * x.real)
    assert not any(seen)


def plain_product(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def test_an_input_that_is_a_constant(name: str) -> None:
    def gather(x: Tensor, index: Tensor) -> Tensor:
        return x * index

    operator = opsmith.operator(name)(gather)
    operator.gradients(x=lambda grad, index: grad * index, index=opsmith.non_differentiable)
    x, index = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    for _ in range(3):
        gradients = torch.autograd.grad(operator(x, index).sum(), (x, index), allow_unused=True)
        assert_close(gradients[0], torch.full((2,), 3.0))
        assert gradients[1] is None
        assert not operator(x.detach(), index).requires_grad


def test_many_tensors_that_may_be_left_out(name: str, examined: list[str]) -> None:
    def total(
        x: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        c: Tensor | None = None,
        d: Tensor | None = None,
        e: Tensor | None = None,
    ) -> Tensor:
        return sum((each for each in (a, b, c, d, e) if each is not None), x * 2)

    operator = opsmith.operator(name)(total).gradients(
        x=lambda grad: 2 * grad, **dict.fromkeys("abcde", lambda grad: grad.clone())
    )
    operator(torch.ones(2))
    for _ in range(2):
        examined.clear()
        for left_out in itertools.product((False, True), repeat=5):
            x, *rest = (torch.randn(2, requires_grad=True) for _ in range(6))
            given = [None if out else each for out, each in zip(left_out, rest, strict=True)]
            needed = [x, *(each for each in given if each is not None)]
            assert_close(operator(x, *given), total(x, *given))
            assert_close(
                torch.autograd.grad(operator(x, *given).sum(), needed),
                torch.autograd.grad(total(x, *given).sum(), needed),
            )
    assert not examined


def test_a_reference_without_formula_needs_no_dispatcher(name: str) -> None:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return x * w.tanh()

    operator = opsmith.operator(name)(plain)
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for _ in range(3):
        result = operator(x, w)
        assert result.grad_fn.name() == "MulBackward0"  # type: ignore[union-attr]
        assert_close(
            torch.autograd.grad(result.sum(), (x, w)), torch.autograd.grad(plain(x, w).sum(), (x, w))
        )


def test_gradients_of_changing_shape(operator: Any) -> None:
    for sizes in ((2, 2), (3, 3), (2, 2), (3, 1), (1, 3), (0, 0)):
        x, w = (torch.full((size,), 2.0, requires_grad=True) for size in sizes)
        gradients = torch.autograd.grad(operator(x, w).sum(), (x, w))
        assert_close(gradients, torch.autograd.grad((x * w).sum(), (x, w)))


def test_profiles_show_the_name(operator: Any) -> None:
    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    operator(x, w)
    with torch.profiler.profile() as profile:
        operator(x, w)
    assert operator.name in {event.key for event in profile.key_averages()}


def test_nothing_grows_with_calls(operator: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    operator(x, x)
    nodes = {type(operator(x, x).grad_fn) for _ in range(20)}
    assert len(nodes) == 1


def test_a_second_order_goes_through_no_constant(name: str) -> None:
    operator = opsmith.operator(name)(plain_product)
    operator.gradients(x=lambda grad, w: grad * w, w=opsmith.non_differentiable)
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad((operator(x, w) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), w, allow_unused=True)
        assert second is None


def test_a_wrapped_formula_gets_its_parameters_by_name(name: str) -> None:
    import functools

    def written(grad: Tensor, w: Tensor) -> Tensor:
        return grad * w

    @functools.wraps(written)
    def swapped(w: Tensor, grad: Tensor) -> Tensor:
        return written(grad, w**1)

    operator = opsmith.operator(name)(plain_product).gradients(x=swapped, w=lambda grad, x: grad * x)
    x, w = torch.full((2,), 2.0, requires_grad=True), torch.full((2,), 5.0)
    for _ in range(4):
        (gradient,) = torch.autograd.grad(operator(x, w), x, torch.full((2,), 7.0))
        assert_close(gradient, torch.full((2,), 35.0))


def test_a_gradient_made_in_inference_mode(name: str) -> None:
    table = [1.0]  # a formula that is not seen to write nowhere
    operator = opsmith.operator(name)(plain_product)
    operator.gradients(x=lambda grad, w: grad * w * table[0], w=lambda grad, x: grad * x * table[0])
    with torch.inference_mode():
        grad = torch.ones(2)
    for _ in range(4):
        x = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(operator(x, torch.ones(2)), x, grad)
        assert_close(gradient, torch.ones(2))


def test_a_helper_that_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def helped(x: Tensor) -> Tensor:
        return doubled(x) * 2

    operator = opsmith.operator(name)(helped)
    for _ in range(3):
        operator(torch.ones(2))
    monkeypatch.setitem(globals(), "doubled", lambda x: x.mul_(2))
    with pytest.raises(opsmith.errors.MutationError):
        operator(torch.ones(2))


def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_whole_numbers_for_floats(name: str) -> None:
    seen: list[type] = []

    def scaled(x: Tensor, by: float = 1) -> Tensor:
        seen.append(type(by))
        return x * by

    operator = opsmith.operator(name)(scaled)
    for _ in range(3):
        assert operator(torch.ones(2, dtype=torch.int64)).dtype == torch.float32
        assert operator(torch.ones(2, dtype=torch.int64), 2).dtype == torch.float32
    assert set(seen) == {float}


class Holder:
    weight = torch.nn.Parameter(torch.ones(2))


def test_a_kernel_has_no_graph(name: str) -> None:
    operator = opsmith.operator(name)(doubled)
    operator.kernel("cpu", lambda x: torch.from_numpy((x * Holder.weight * 2).numpy().copy()))
    for _ in range(3):
        assert_close(operator(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("hint", "value", "given"),
    [
        (int | tuple[int, int], (2, 1), (2, 1)),
        (int | tuple[int, int], [2, 1], (2, 1)),
        (int | tuple[int, int], 2, (2, 2)),
        (tuple[int, int], torch.Size([2, 1]), (2, 1)),
        (tuple[int, ...], (2, 1, 1), (2, 1, 1)),
        (tuple[int, ...] | None, None, None),
        (list[int], (2, 1), [2, 1]),
        (list[int], [], []),
    ],
)
def test_sizes_and_strides_are_known(
    hint: Any, value: Any, given: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def kernel(x: Tensor, sizes: Any) -> Tensor:
        seen.append(sizes)
        return x * 2

    def doubled(x: Tensor, sizes: Any) -> Tensor:
        return x * 2

    doubled.__annotations__["sizes"] = hint
    operator = opsmith.operator(name)(doubled).gradients(
        x=lambda grad, sizes: grad * (2 + 0 * len(sizes or ()))
    )
    operator.kernel("cpu", kernel)
    operator(torch.ones(2), value)
    x = torch.ones(2, requires_grad=True)
    operator(x, value).sum().backward()
    past = record_slow_calls(monkeypatch)
    seen.clear()
    assert_close(operator(torch.ones(2), value), torch.full((2,), 2.0))
    operator(x, value).sum().backward()
    assert not past
    assert_close(x.grad, torch.full((2,), 4.0))
    assert seen == [given, given]
    assert all(type(each) is type(given) for each in seen)


@pytest.mark.parametrize("value", [(1, 2, 3), (1, 2.0), "ab", 1.0])
def test_what_is_no_pair_is_refused(value: Any, name: str) -> None:
    @opsmith.operator(name)
    def doubled(x: Tensor, sizes: int | tuple[int, int]) -> Tensor:
        return x * 2

    doubled(torch.ones(2), (1, 2))
    doubled(torch.ones(2), (1, 2))
    with pytest.raises(opsmith.errors.ArgumentError, match="`sizes`"):
        doubled(torch.ones(2), value)
