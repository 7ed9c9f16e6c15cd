"""Fake, meta and traced tensors: shapes, dtypes and strides without data, from the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_variants import VARIANTS
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import opsmith
from opsmith import errors

Operator = opsmith.Operator[..., Any]


def test_meta(variant: Operator) -> None:
    result = variant(torch.empty(3, 2, device="meta"), torch.empty(2, device="meta", dtype=torch.float64))
    assert (result.device.type, result.shape, result.dtype) == ("meta", (3, 2), torch.float64)


def test_gradients_on_meta(variant: Operator) -> None:
    x = torch.empty(3, 2, device="meta", requires_grad=True)
    weight = torch.empty(2, device="meta", requires_grad=True)
    found = torch.autograd.grad(variant(x, weight).sum(), (x, weight))
    assert [(gradient.shape, gradient.device.type) for gradient in found] == [
        ((3, 2), "meta"),
        ((2,), "meta"),
    ]


def writing(x: Tensor, y: Tensor) -> Tensor:
    y.view(-1)[0] = 5
    return x * y


def writing_by_out(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, 1, out=y).clone()


def writing_past_autograd(x: Tensor, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return x * y


def working_on_a_copy(x: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[0] = 5
    return torch.add(x, 1, out=torch.empty_like(y)).mul_(y)


@pytest.mark.parametrize("reference", [writing, writing_by_out, writing_past_autograd])
def test_a_write_into_an_argument_is_refused_in_the_trace(reference: Any) -> None:
    """Version counters of fake tensors do not count, so that compiled code would write."""
    operator = opsmith.operator(f"fake_writes::{reference.__name__}")(reference)
    with FakeTensorMode() as mode, pytest.raises(errors.MutationError) as caught:
        operator(mode.from_tensor(torch.ones(3)), mode.from_tensor(torch.ones(3)))
    assert caught.value.argument == "y"


def test_a_write_into_a_copy_is_traced() -> None:
    operator = opsmith.operator("fake_writes::working_on_a_copy")(working_on_a_copy)
    with FakeTensorMode() as mode:
        assert operator(mode.from_tensor(torch.ones(3)), mode.from_tensor(torch.ones(3))).shape == (3,)


@pytest.mark.compile
def test_compiled_code_does_not_write_into_an_argument() -> None:
    operator = opsmith.operator("fake_writes::compiled")(writing)
    x, y = torch.ones(3), torch.ones(3)
    with pytest.raises(
        RuntimeError, match="an operator must not write into an input that it does not declare"
    ):
        torch.compile(lambda x, y: operator(x, y), backend="aot_eager")(x, y)
    assert y.tolist() == [1, 1, 1]


@pytest.mark.parametrize("requires", [False, True])
def test_fake(variant: Operator, requires: bool) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(3, 2)).requires_grad_(requires)
        weight = mode.from_tensor(torch.ones(2)).requires_grad_(requires)
        result = variant(x, weight)
        assert result.shape == (3, 2)
        if requires:
            found = torch.autograd.grad(result.sum(), (x, weight))
            assert [gradient.shape for gradient in found] == [(3, 2), (2,)]


def test_strides_are_those_of_the_reference(name: str) -> None:
    def turned(x: Tensor) -> Tensor:
        return x.mT.clone(memory_format=torch.preserve_format)

    operator = opsmith.operator(name)(turned)
    with FakeTensorMode() as mode:
        fake = operator(mode.from_tensor(torch.ones(3, 2)))
    assert fake.stride() == operator(torch.ones(3, 2)).stride() == (1, 2)


@pytest.mark.every(8)
@pytest.mark.parametrize("tracing", ["real", "symbolic"])
def test_make_fx(variant: Operator, reference: Any, inputs: tuple[Tensor, Tensor], tracing: str) -> None:
    values = [value.detach() for value in inputs]
    graph = make_fx(lambda x, weight: variant(x, weight), tracing_mode=tracing)(*values)
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert targets == {str(variant.torch_operator)}
    assert_close(graph(*values), reference(*values))


@pytest.mark.every(8)
def test_make_fx_of_gradients(variant: Operator, reference: Any, inputs: tuple[Tensor, Tensor]) -> None:
    def gradients(function: Any) -> Any:
        def of(x: Tensor, weight: Tensor) -> Any:
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(function(x, weight).pow(2).sum(), (x, weight))

        return of

    values = [value.detach() for value in inputs]
    graph = make_fx(gradients(variant), tracing_mode="symbolic")(*values)
    assert_close(graph(*values), gradients(reference)(*values))


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            name, marks=() if name in ("formulas", "hidden-in-one", "derived-kernel") else pytest.mark.slow
        )
        for name in VARIANTS
    ],
    indirect=True,
)
def test_opcheck(variant: Operator, inputs: tuple[Tensor, Tensor]) -> None:
    passed = dict.fromkeys(
        ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
        "SUCCESS",
    )
    assert torch.library.opcheck(variant.torch_operator, inputs) == passed


@pytest.mark.slow
def test_opcheck_of_every_kind_of_argument(name: str) -> None:
    def reference(
        xs: list[Tensor],
        maybe: Tensor | None,
        size: int | tuple[int, int] = 1,
        *,
        mode: str = "sum",
        weights: list[float] | None = None,
        dtype: torch.dtype = torch.float64,
        other: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total = torch.stack(xs).sum(0) * size[0] * other  # type: ignore[index]
        return (total if maybe is None else total + maybe).to(dtype), other * 2

    operator = opsmith.operator(name, results=("total", "double"))(reference).gradients(
        xs=lambda grad_total, xs, size, other: [grad_total * size[0] * other] * len(xs),
        maybe=lambda grad_total: grad_total,
    )
    make = opsmith.Make()
    x, y, other = make(3).requires_grad_(), make(3), make(3).requires_grad_()
    torch.library.opcheck(operator.torch_operator, ([x, y], None), {"other": other})
    torch.library.opcheck(
        operator.torch_operator,
        ([x, x], y, [2, 3]),
        {"mode": "mean", "weights": [0.5], "dtype": torch.float32, "other": other},
    )


def test_opcheck_of_an_opaque_operator(name: str) -> None:
    def cumulated(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().cumsum())

    operator = opsmith.operator(name, opaque=True)(cumulated)
    operator.fake(torch.empty_like)
    operator.gradients(x=lambda grad: grad.flip(0).cumsum(0).flip(0))
    x = opsmith.Make()(4).requires_grad_()
    torch.library.opcheck(operator.torch_operator, (x,))


def test_opcheck_rejects_a_wrong_fake_kernel(name: str) -> None:
    """opcheck looks: a fake kernel of the wrong shape does not pass."""

    def doubled(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    operator = opsmith.operator(name, opaque=True)(doubled)
    operator.fake(lambda x: x.new_empty(x.shape[0] + 1))
    from torch.testing._internal.optests.generate_tests import OpCheckError

    with pytest.raises(OpCheckError):
        torch.library.opcheck(operator.torch_operator, (torch.ones(4),))
