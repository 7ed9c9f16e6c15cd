"""Calls with gradients of operators with several, hidden, random and constant results bypass the dispatcher.

Every call is compared with the reference under ordinary autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import WithoutGradient
from slow_calls import record_slow_calls
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors

Results = tuple[Tensor, ...]


def standardised(x: Tensor, w: Tensor, by: float = 1.0) -> tuple[Tensor, Tensor]:
    """x w / rms(x), and 1 / rms(x).  x, w [..., N]."""
    scale = (x * x).mean(-1, keepdim=True).add(1e-3).rsqrt()
    return x * scale * w * by, scale


def by_x(grad: Tensor, x: Tensor, w: Tensor, scale: Tensor, by: float) -> Tensor:
    inner = (grad * w * x).mean(-1, keepdim=True)
    return by * scale * (grad * w - x * scale * scale * inner)


def by_w(grad: Tensor, x: Tensor, scale: Tensor, by: float) -> Tensor:
    return grad * x * scale * by


def hidden() -> Any:
    made = opsmith.operator("fast_gradients::hidden", hidden=("scale",))(standardised)
    return made.gradients(x=by_x, w=by_w)


def visible() -> Any:
    made = opsmith.operator("fast_gradients::visible", results=("y", "scale"))(standardised)

    def of_both(grad_y: Tensor, grad_scale: Tensor, x: Tensor, w: Tensor, scale: Tensor, by: float) -> Tensor:
        return by_x(grad_y, x, w, scale, by) - (grad_scale * scale**3) * x / x.shape[-1]

    return made.gradients(x=of_both, w=lambda grad_y, x, scale, by: by_w(grad_y, x, scale, by))


def joint() -> Any:
    made = opsmith.operator("fast_gradients::joint", hidden=("scale",))(standardised)

    @made.gradients
    def _(grad: Tensor, x: Tensor, w: Tensor, scale: Tensor, by: float, grads_needed: Any) -> Any:
        found = {"x": by_x(grad, x, w, scale, by)}
        return {**found, "w": by_w(grad, x, scale, by)} if "w" in grads_needed else found

    return made


def with_index(x: Tensor, w: Tensor, by: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """x w, and where and how x is largest."""
    largest = x.amax(-1)
    return x * w * by, x.argmax(-1), largest


def constants() -> Any:
    made = opsmith.operator(
        "fast_gradients::constants",
        results={
            "y": ...,
            "index": opsmith.non_differentiable,
            "largest": opsmith.non_differentiable,
        },
    )(with_index)
    return made.gradients(x=lambda grad_y, w, by: grad_y * w * by, w=lambda grad_y, x, by: grad_y * x * by)


def ordinary() -> Any:
    return opsmith.operator(
        "fast_gradients::ordinary",
        results={"y": ..., "index": ..., "largest": opsmith.non_differentiable},
    )(with_index)


SUBJECTS: dict[str, tuple[Callable[[], Any], Callable[..., Any], int]] = {
    "hidden": (hidden, standardised, 1),
    "visible": (visible, standardised, 2),
    "joint": (joint, standardised, 1),
    "constants": (constants, with_index, 1),
    "ordinary": (ordinary, with_index, 1),
}
"""For each kind of operator how it is made, its reference, and how many results have gradients."""


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Results], int]:
    make, reference, count = SUBJECTS[request.param]
    operator = make()
    for _ in range(3):  # the slow path, the fast path, and a backward that is known to write nothing
        x, w = (torch.randn(3, requires_grad=True) for _ in range(2))
        in_a_tuple(operator(x, w))[0].sum().backward()
    return operator, reference, count


def in_a_tuple(results: Any) -> Results:
    return results if isinstance(results, tuple) else (results,)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls took the slow path."""
    return record_slow_calls(monkeypatch)


def compare(subject: Any, x: Tensor, w: Tensor, **more: Any) -> None:
    """Compare results and gradients with those of the reference."""
    operator, reference, count = subject
    inputs = [each for each in (x, w) if each.requires_grad]
    for chosen in ((0,), (count - 1,), tuple(range(count))):
        found, expected = in_a_tuple(operator(x, w, **more)), reference(x, w, **more)
        assert_close(found, expected[: len(found)])
        within = [at for at in chosen if expected[at].requires_grad]
        if not within:
            continue
        grads = [torch.randn_like(found[at]) for at in within]
        assert_close(
            torch.autograd.grad([found[at] for at in within], inputs, grads),
            torch.autograd.grad([expected[at] for at in within], inputs, grads, materialize_grads=True),
        )


def asking(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.every(8)
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=["xw", "x", "w"])
def test_known_calls_take_the_fast_path(subject: Any, slow: list[str], needed: tuple[bool, bool]) -> None:
    for shape in ((4,), (2, 5), (4,), (2, 5), (1, 1)):
        if shape == (1, 1):  # these are known by now
            slow.clear()
        x, w = (asking(*shape).detach().requires_grad_(each) for each in needed)
        compare(subject, x, w)
        compare(subject, x, w, by=2.0)
        compare(subject, x.expand(2, *shape)[1], w)
        compare(subject, x.mT if len(shape) > 1 else x[::2], w.mT if len(shape) > 1 else w[::2])
    assert not slow
    for _ in range(2):
        slow.clear()
        compare(subject, asking(2, 3), asking(3))
        compare(subject, asking(0, 2), asking(0, 2))
    assert not slow


def test_what_is_a_constant_has_no_gradient() -> None:
    for operator in (constants(), ordinary()):
        for _ in range(3):
            y, index, largest = operator(asking(4), asking(4))
            assert y.requires_grad
            assert not index.requires_grad
            assert not largest.requires_grad


def test_hooks_of_tensors_and_nodes(subject: Any) -> None:
    x, w = asking(4), asking(4)
    y = in_a_tuple(subject[0](x, w))[0]
    y.register_hook(lambda grad: grad * 2)
    y.grad_fn.register_prehook(lambda grads: tuple(each if each is None else each * 3 for each in grads))
    y.grad_fn.register_hook(lambda found, grads: tuple(each if each is None else each * 5 for each in found))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(subject[1](x, w)[0].sum(), x)
    assert_close(gradient, 30 * expected)


def product_of_both(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def test_without_any_gradient_of_a_result_there_is_none_of_an_input(slow: list[str]) -> None:
    @opsmith.operator("fast_gradients::product_and_sum")
    def product_and_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    product_and_sum.gradients(
        x=lambda grad_result0, grad_result1, y: grad_result0 * y + grad_result1,
        y=lambda grad_result0, grad_result1, x: grad_result0 * x + grad_result1,
    )
    for _ in range(4):
        slow.clear()
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        WithoutGradient.apply(product_and_sum(x, y)[0]).sum().backward()
        assert x.grad is y.grad is None
    assert not slow


def test_so_it_is_with_one_result(slow: list[str]) -> None:
    product = opsmith.operator("fast_gradients::product_alone")(product_of_both)
    product.gradients(x=lambda grad, y: grad * y, y=lambda grad, x: grad * x)
    for _ in range(4):
        slow.clear()
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        WithoutGradient.apply(product(x, y)).sum().backward()
        assert x.grad is y.grad is None
    assert not slow


def test_a_saved_tensor_that_is_changed_is_noticed(subject: Any) -> None:
    x, w = asking(4).exp(), asking(4).exp()
    y = in_a_tuple(subject[0](x, w))[0]
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_memory_ends_with_the_backward(subject: Any) -> None:
    x, w = asking(4), asking(4)
    y = in_a_tuple(subject[0](x, w))[0]
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_threads(subject: Any) -> None:
    failures: list[BaseException] = []

    def work(dtype: torch.dtype) -> None:
        try:
            for size in range(1, 10):
                compare(subject, asking(size, dtype=dtype), asking(size, dtype=dtype))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (torch.float64, torch.float32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_result_that_is_no_new_tensor() -> None:
    def split(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
        if form == "input":
            return x * 2, x
        if form == "same":
            y = x * 2
            return y, y.view(-1)
        if form == "part":
            whole = torch.cat([x, x])
            return whole[: len(x)], whole[len(x) :]
        return (x * 2, x * 3) if form == "right" else [x * 2, x * 3]  # type: ignore[return-value]

    operator = opsmith.operator("fast_gradients::split")(split)
    operator.gradients(x=lambda grad_result0, grad_result1: 2 * grad_result0 + 3 * grad_result1)
    for x in (asking(3), torch.randn(3)):
        for _ in range(3):
            assert_close(operator(x, "right"), (x * 2, x * 3))
            assert_close(operator(x, "list"), (x * 2, x * 3))
            for form in ("input", "same", "part"):
                with pytest.raises(errors.AliasError):
                    operator(x, form)


def test_a_formula_that_writes_into_a_hidden_result() -> None:
    operator = opsmith.operator("fast_gradients::spoiling", hidden=("scale",))(standardised)
    operator.gradients(x=lambda grad, scale: grad * scale.mul_(2), w=lambda grad, x: grad * x)
    y = operator(asking(3), asking(3))
    with pytest.raises(errors.SavedTensorModifiedError, match="`scale`"):
        y.sum().backward()


def test_a_zero_gradient_beside_a_formula(slow: list[str]) -> None:
    def floored(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * w.floor(), w.floor()

    operator = opsmith.operator("fast_gradients::floored", hidden=("low",))(floored)
    operator.gradients(x=lambda grad, low: grad * low, w=opsmith.zero)
    for _ in range(3):
        slow.clear()
        x, w = asking(2, 3), asking(3)
        y = operator(x, w)
        assert_close(torch.autograd.grad(y.sum(), (x, w)), (w.floor().expand(2, 3), torch.zeros_like(w)))
    assert not slow


def test_a_random_operator(slow: list[str]) -> None:
    def dropped(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand_like(x) > 0.5
        return x * mask, mask

    operator = opsmith.operator(
        "fast_gradients::dropped",
        random=True,
        results={"y": ..., "mask": opsmith.non_differentiable},
        hidden=("mask",),
    )(dropped)
    operator.gradients(x=lambda grad_y, mask: grad_y * mask)
    x = asking(64)
    operator(x)
    slow.clear()
    drawn = set()
    for _ in range(4):
        y = operator(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert_close(gradient * x.detach(), y.detach())
        drawn.add(tuple(gradient.tolist()))
    assert len(drawn) == 4
    assert not slow
    assert_close(torch.func.vmap(operator, randomness="different")(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_a_second_order_of_a_random_operator_draws_the_same_numbers() -> None:
    def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
        slope = x * torch.rand_like(x)
        return x * slope, slope

    operator = opsmith.operator("fast_gradients::noisy", random=True, hidden=("slope",))(noisy)
    operator.gradients(x=lambda grad, slope: 2 * grad * slope)
    for _ in range(3):
        x = asking(5)
        (first,) = torch.autograd.grad(operator(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert_close(second * x, first)


def test_an_integer_result_whose_gradient_a_formula_uses() -> None:
    def rounded(x: Tensor, w: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        return x * w, (w.round().long() if whole else w.round())

    operator = opsmith.operator("fast_gradients::rounded")(rounded)
    operator.gradients(x=lambda grad_result0, grad_result1, w: grad_result0 * w + 0 * grad_result1)
    for _ in range(3):
        x = asking(3)
        (gradient,) = torch.autograd.grad(operator(x, torch.ones(3), False)[0].sum(), x)
        assert_close(gradient, torch.ones_like(x))
        with pytest.raises(errors.IntegerResultError, match="`result1`"):
            operator(x, torch.ones(3), True)


def test_a_joint_formula_that_answers_for_too_few() -> None:
    operator = opsmith.operator("fast_gradients::few", hidden=("scale",))(standardised)
    operator.gradients(lambda grad, scale: {"x": grad * scale})
    for _ in range(3):
        y = operator(asking(3), asking(3))
        with pytest.raises(errors.GradientCountError):
            y.sum().backward()
