"""Faults of a later call are found as well, although calls are fast after the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors

Place = Callable[[Callable[..., Any]], str]
Error = type[errors.OpsmithError]


ROADS: dict[str, Callable[[Any], Any]] = {"handle": lambda op: op, "torch.ops": lambda op: op.torch_operator}
"""Ways to call an operator: each is fast after the first call."""


def warm(operator: Any, *args: Any) -> None:
    """Several right calls, with and without a backward."""
    for _ in range(3):
        operator(torch.ones(2, 3), *args)
        x = torch.ones(2, 3, requires_grad=True)
        operator(x, *args).sum().backward()


def writes(x: Tensor, late: bool = False) -> Tensor:
    if late:
        x.mul_(2)
    return x * 2


def returns_input(x: Tensor, late: bool = False) -> Tensor:
    return x if late else x * 2


def returns_view(x: Tensor, late: bool = False) -> Tensor:
    return x.mT if late else x * 2


def returns_detached(x: Tensor, late: bool = False) -> Tensor:
    return x.detach() if late else x * 2


def returns_number(x: Tensor, late: bool = False) -> Tensor:
    return 2.0 if late else x * 2  # type: ignore[return-value]


def returns_two(x: Tensor, late: bool = False) -> Tensor:
    return (x * 2, x * 3) if late else x * 2  # type: ignore[return-value]


def returns_sparse(x: Tensor, late: bool = False) -> Tensor:
    return x.to_sparse() if late else x * 2


CONTRACT: dict[str, tuple[Any, Error]] = {
    "writes": (writes, errors.MutationError),
    "input": (returns_input, errors.AliasError),
    "view": (returns_view, errors.AliasError),
    "detached": (returns_detached, errors.AliasError),
    "number": (returns_number, errors.ResultTypeError),
    "two": (returns_two, errors.ResultTypeError),
    "sparse": (returns_sparse, errors.LayoutError),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("differentiated", [False, True], ids=["plain", "differentiated"])
@pytest.mark.parametrize("way", ["ordinary", "formula", "kernel"])
@pytest.mark.parametrize("fault", CONTRACT)
def test_reference_that_breaks_its_contract_late(
    fault: str, way: str, differentiated: bool, road: str, name: str
) -> None:
    reference, error = CONTRACT[fault]
    operator = opsmith.operator(name)(reference)
    if way == "formula":
        operator.gradients(x=lambda grad: 2 * grad)
    if way == "kernel":
        operator.kernel("cpu", reference)
    call = ROADS[road](operator)
    warm(call)
    x = torch.ones(2, 3, requires_grad=differentiated) * 1
    with pytest.raises(error):
        call(x, True)


def test_writing_that_depends_on_the_layout(name: str) -> None:
    """`contiguous` copies one tensor and hands on another, so that the same line writes into its input."""

    def doubled(x: Tensor) -> Tensor:
        return x.contiguous().mul_(2) + 0

    operator = opsmith.operator(name)(doubled)
    for _ in range(3):
        operator(torch.ones(2, 3).mT)
    with pytest.raises(errors.MutationError):
        operator(torch.ones(2, 3))


def test_contiguous_on_a_tensor_that_is(name: str) -> None:
    def packed(x: Tensor) -> Tensor:
        return x.contiguous()

    operator = opsmith.operator(name)(packed)
    for _ in range(3):
        operator(torch.ones(2, 3).mT)
    with pytest.raises(errors.AliasError):
        operator(torch.ones(2, 3))


FAULTS: dict[str, tuple[Any, Error]] = {
    "shape": (lambda grad: grad[:1], errors.GradientShapeError),
    "dtype": (lambda grad: grad.double(), errors.GradientDtypeError),
    "device": (lambda grad: torch.ones(2, 3, device="meta"), errors.GradientDeviceError),
    "none": (lambda grad: None, errors.GradientTypeError),
    "number": (lambda grad: 2.0, errors.GradientTypeError),
    "writes": (lambda grad: grad.mul_(2), errors.SavedTensorModifiedError),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("saved", [False, True], ids=["nothing-saved", "saved"])
@pytest.mark.parametrize("fault", FAULTS)
def test_formula_that_goes_wrong_late(fault: str, saved: bool, road: str, name: str) -> None:
    def scaled(x: Tensor, late: bool = False) -> Tensor:
        return x * 2

    wrong, error = FAULTS[fault]
    operator = opsmith.operator(name)(scaled)
    if saved:
        operator.gradients(x=lambda grad, x, late: wrong(grad) if late else grad * (x * 0 + 2))
    else:
        operator.gradients(x=lambda grad, late: wrong(grad) if late else 2 * grad)
    call = ROADS[road](operator)
    warm(call)
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(error):
        call(x, True).backward(torch.ones(2, 3))


def test_formula_that_writes_into_a_saved_tensor_late(name: str) -> None:
    def square(x: Tensor, late: bool = False) -> Tensor:
        return x * x

    operator = opsmith.operator(name)(square).gradients(
        x=lambda grad, x, late: 2 * grad * (x.mul_(1) if late else x)
    )
    warm(operator)
    x = torch.ones(2, 3, requires_grad=True) * 1
    with pytest.raises(errors.SavedTensorModifiedError):
        operator(x, True).sum().backward()


def test_sparse_input_late(name: str) -> None:
    operator = opsmith.operator(name)(writes)
    warm(operator)
    with pytest.raises(errors.LayoutError):
        operator(torch.eye(3).to_sparse())


def test_wrong_arguments_late(name: str) -> None:
    operator: Any = opsmith.operator(name)(writes)
    warm(operator)
    for args, kwargs in (
        ((), {}),
        ((2.0,), {}),
        ((torch.ones(2), "yes"), {}),
        ((torch.ones(2),), {"other": 1}),
    ):
        with pytest.raises(errors.ArgumentError):
            operator(*args, **kwargs)
    with pytest.raises(errors.ArgumentError):
        operator(torch.ones(2), torch.tensor(True))


def test_broadcast_gradient_late(name: str) -> None:
    """A gradient that broadcasting made larger is reduced, in the first backward and in any other."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    operator = opsmith.operator(name)(product).gradients(
        x=lambda grad, weight: grad * weight, weight=lambda grad, x: grad * x
    )
    for shape in ((2, 3), (2, 3), (1, 3), (3,), ()):
        x, weight = torch.ones(shape, requires_grad=True), torch.full((2, 3), 2.0, requires_grad=True)
        operator(x, weight).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
        assert x.grad.sum().item() == 12.0


def test_second_order_late(name: str) -> None:
    def cube(x: Tensor) -> Tensor:
        return x**3

    operator = opsmith.operator(name)(cube).gradients(x=lambda grad, x: (3 * grad * x**2).detach())
    warm(operator)
    x = torch.ones(2, 3, requires_grad=True)
    (first,) = torch.autograd.grad(operator(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(errors.GraphCutError):
        first.sum().backward()


def test_inference_tensor_beside_one_that_needs_a_gradient(name: str) -> None:
    """An inference tensor counts no writes; it can be added to, also in later calls."""

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    operator = opsmith.operator(name)(added).gradients(x=lambda grad: grad, y=lambda grad: grad)
    with torch.inference_mode():
        constant = torch.ones(2)
    for _ in range(4):
        x = torch.ones(2, requires_grad=True)
        operator(constant, x).sum().backward()
        assert x.grad is not None


def test_part_of_the_input_in_inference_mode(name: str) -> None:
    def part(x: Tensor, some: bool = False) -> Tensor:
        return x.narrow(0, 1, 2) if some else x * 1

    operator = opsmith.operator(name)(part)
    with torch.inference_mode():
        x = torch.zeros(3)
        operator(x)
        with pytest.raises(errors.AliasError):
            operator(x, True)


@pytest.mark.parametrize("argument", ["type", "dict", "float", "RuntimeError", "Exception", "list"])
def test_arguments_called_as_builtins_are(name: str, argument: str) -> None:
    source = f"def scaled(x: Tensor, {argument}: float = 2.0) -> Tensor:\n    return x * {argument}"
    names: dict[str, Any] = {"Tensor": Tensor, "float": float, "__name__": __name__}
    exec(source, names)
    operator = opsmith.operator(name)(names["scaled"])
    operator.gradients(x=eval(f"lambda grad, {argument}: grad * {argument}"))
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        operator(x, **{argument: 3.0}).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 3.0))


def test_a_default_list_is_new_in_each_call(name: str) -> None:
    def counted(x: Tensor, dims: list[int] = [0]) -> Tensor:  # noqa: B006
        dims.append(1)
        return x * len(dims)

    operator = opsmith.operator(name)(counted)
    assert [operator(torch.ones(())).item() for _ in range(4)] == [2.0] * 4


def test_a_result_without_gradient_has_none_in_later_calls(name: str) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator(name, results={"y": opsmith.non_differentiable})(doubled)
    assert [operator(torch.ones(2, requires_grad=True)).requires_grad for _ in range(4)] == [False] * 4
