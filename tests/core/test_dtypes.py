"""Mixed dtypes, complex numbers, broadcasting, and gradients in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_variants import VARIANTS
from matrices import diagonal
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith

Operator = opsmith.Operator[..., Any]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def declared(name: str, way: str) -> Operator:
    operator = opsmith.operator(name)(product)
    if way == "formulas":
        operator.gradients(
            x=lambda grad, weight: grad * weight.conj(), weight=lambda grad, x: grad * x.conj()
        )
    if way == "derived":
        operator.kernel("cpu", product)
    return operator


WAYS = ["ordinary", "formulas", "derived"]


@pytest.mark.every(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("second", [*FLOATS, torch.complex128], ids=short)
@pytest.mark.parametrize("first", FLOATS, ids=short)
def test_mixed_dtypes(first: torch.dtype, second: torch.dtype, way: str, name: str) -> None:
    """As torch does: the result in the wider dtype, each gradient in its input's."""
    operator = declared(name, way)
    x = torch.tensor([1.0, 2.0], dtype=first, requires_grad=True)
    weight = torch.tensor([3.0, 0.5], dtype=second, requires_grad=True)
    result = operator(x, weight)
    assert result.dtype is torch.promote_types(first, second)
    loss = result.real.sum() if result.is_complex() else result.sum()
    of_x, of_weight = grad(loss, (x, weight))
    assert (of_x.dtype, of_weight.dtype) == (first, second)
    assert_close(of_x, torch.tensor([3.0, 0.5], dtype=first))
    assert_close(of_weight, torch.tensor([1.0, 2.0], dtype=second))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=short)
def test_integer_beside_floating(way: str, dtype: torch.dtype, name: str) -> None:
    operator = declared(name, way)
    x = torch.tensor([1.5, -2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1, 0], dtype=dtype)
    assert gradcheck(lambda x: operator(x, mask), (x,), check_forward_ad=True)
    assert gradgradcheck(lambda x: operator(x, mask), (x,))


@pytest.mark.every(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.complex128, torch.complex128),
        (torch.float64, torch.complex128),
        (torch.complex128, torch.float64),
    ],
    ids=["complex-complex", "real-complex", "complex-real"],
)
def test_complex(first: torch.dtype, second: torch.dtype, way: str, name: str) -> None:
    operator = declared(name, way)
    args = opsmith.Make(first)(3).requires_grad_(), opsmith.Make(second)(3).requires_grad_()
    assert gradcheck(operator, args, check_forward_ad=True)
    assert gradgradcheck(operator, args)


@pytest.mark.parametrize("way", WAYS)
def test_real_result_of_a_complex_input(way: str, name: str) -> None:
    def magnitude(x: Tensor) -> Tensor:
        return x.abs() ** 2

    operator = opsmith.operator(name)(magnitude)
    if way == "formulas":
        operator.gradients(x=lambda grad, x: 2 * grad * x)
    if way == "derived":
        operator.kernel("cpu", magnitude)
    x = opsmith.Make(torch.complex128)(3).requires_grad_()
    assert gradcheck(operator, (x,), check_forward_ad=True)
    assert gradgradcheck(operator, (x,))


def test_formula_that_is_real_for_a_complex_input(name: str) -> None:
    """A real gradient of a complex input is a complex one without an imaginary part."""

    def real(x: Tensor) -> Tensor:
        return x.real.clone()

    operator = opsmith.operator(name)(real).gradients(x=lambda grad: grad)
    x = opsmith.Make(torch.complex128)(3).requires_grad_()
    assert gradcheck(operator, (x,), check_forward_ad=True)


SHAPES = [((3, 2), (2,)), ((2,), (3, 2)), ((3, 1), (1, 2)), ((), (3, 2)), ((1,), (1, 1, 2)), ((0, 2), (2,))]


@pytest.mark.every(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("first", "second"), SHAPES, ids=lambda shape: "x".join(map(str, shape)) or "scalar")
def test_broadcast_inputs_are_reduced(first: Any, second: Any, way: str, name: str) -> None:
    operator, make = declared(name, way), opsmith.Make()
    args = make(*first).requires_grad_(), make(*second).requires_grad_()
    result = operator(*args)
    incoming = make(*result.shape)
    found = grad(result, args, incoming, create_graph=True)
    expected = grad(product(*args), args, incoming, create_graph=True)
    assert [gradient.shape for gradient in found] == [value.shape for value in args]
    assert_close(found, expected)
    if result.numel():
        assert gradgradcheck(operator, args, check_fwd_over_rev=True)


def incoming_layouts() -> dict[str, Any]:
    make = opsmith.Make()
    return {
        "contiguous": make(4, 3),
        "transposed": make(3, 4).mT,
        "expanded-rows": make(1, 3).expand(4, 3),
        "expanded-columns": make(4, 1).expand(4, 3),
        "expanded-scalar": make().expand(4, 3),
        "sliced": make(8, 6)[::2, 1::2],
        "offset": make(30)[7:19].view(4, 3),
        "negative": torch.complex(make(4, 3), make(4, 3)).conj().imag,
        "flipped": make(4, 3).flip(0),
    }


@pytest.mark.parametrize(
    ("variant", "layout"), diagonal(VARIANTS, incoming_layouts(), every=4), indirect=["variant"]
)
def test_incoming_gradient_in_any_layout(layout: str, variant: Operator, reference: Any) -> None:
    make = opsmith.Make()
    args = make(4, 3).requires_grad_(), make(3).requires_grad_()
    incoming = incoming_layouts()[layout]
    before = incoming.clone()
    assert_close(grad(variant(*args), args, incoming), grad(reference(*args), args, incoming))
    assert_close(incoming, before)


def test_negative_layout_is_what_it_says() -> None:
    assert incoming_layouts()["negative"].is_neg()
    assert incoming_layouts()["expanded-scalar"].stride() == (0, 0)


def test_conjugate_incoming_gradient(name: str) -> None:
    operator, make = declared(name, "formulas"), opsmith.Make(torch.complex128)
    args = make(3).requires_grad_(), make(3).requires_grad_()
    incoming = make(3).conj()
    assert incoming.is_conj()
    assert_close(grad(operator(*args), args, incoming), grad(product(*args), args, incoming))


@pytest.mark.parametrize(
    ("variant", "layout"),
    diagonal(VARIANTS, ["transposed", "sliced", "expanded-rows", "negative", "offset"], every=3),
    indirect=["variant"],
)
def test_inputs_in_any_layout(layout: str, variant: Operator, reference: Any) -> None:
    x = incoming_layouts()[layout].detach()
    weight = opsmith.Make()(6)[::2]
    args = x.requires_grad_(), weight.requires_grad_()
    assert_close(variant(*args), reference(*args))
    assert_close(grad(variant(*args).sum(), args), grad(reference(*args).sum(), args))


@pytest.mark.parametrize(
    ("variant", "shape"),
    diagonal(VARIANTS, [(), (0,), (1,), (0, 3), (3, 0)], every=3),
    indirect=["variant"],
)
def test_small_and_empty_shapes(shape: tuple[int, ...], variant: Operator, reference: Any) -> None:
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(shape[-1:], dtype=torch.float64, requires_grad=True)
    assert_close(variant(x, weight), reference(x, weight))
    found = grad(variant(x, weight).sum(), (x, weight))
    assert_close(found, grad(reference(x, weight).sum(), (x, weight)))


def test_undefined_gradients_reach_formulas_as_zeros(name: str) -> None:
    """torch.autograd hands on None for what nobody used; formulas need not know."""

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    operator = opsmith.operator(name)(split).gradients(
        x=lambda grad_result0, grad_result1: 2 * grad_result0 + 3 * grad_result1
    )
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for used, factor in ((0, 2.0), (1, 3.0)):
        assert_close(grad(operator(x)[used].sum(), x)[0], torch.full_like(x, factor))
    assert gradcheck(operator, (x,), check_undefined_grad=True)


def test_zero_answer_returned_by_a_formula(name: str) -> None:
    """A joint formula may say `opsmith.zero` for one of its inputs, to any order."""

    def scaled(x: Tensor, noise: Tensor) -> Tensor:
        return x**2 + 0 * noise

    operator = opsmith.operator(name)(scaled).gradients(
        lambda grad, x: {"x": 2 * grad * x, "noise": opsmith.zero}
    )
    make = opsmith.Make()
    args = make(3).requires_grad_(), make(3).requires_grad_()
    assert gradcheck(operator, args, check_forward_ad=True)
    assert gradgradcheck(operator, args)
    first = grad(operator(*args).sum(), args, create_graph=True)
    assert_close(first[1], torch.zeros(3, dtype=torch.float64))


def test_sparse_gradient_of_a_formula_is_made_dense(name: str) -> None:
    def rows(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    def formula(grad: Tensor, x: Tensor, index: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(index.unsqueeze(0), grad, x.shape, check_invariants=True)

    operator = opsmith.operator(name)(rows).gradients(x=formula)
    x = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    (found,) = grad(operator(x, torch.tensor([1, 1, 3])).sum(), x)
    assert_close(found, torch.tensor([0.0, 2.0, 0.0, 1.0], dtype=torch.float64)[:, None].expand(4, 2))
