"""Tensors of odd kinds: what cannot be compared is refused by name, and what can be is no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith import Report, errors
from opsmith.judging.tensors import dense

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5


def function(forward: Callable[..., Any], backward: Callable[..., Any], **more: Any) -> Any:
    methods = {"forward": forward, "backward": backward, **more}
    return type("Odd", (Function,), {name: staticmethod(each) for name, each in methods.items()})


def twice(ctx: Any, x: Tensor) -> Tensor:
    return 2 * x


def twice_back(ctx: Any, grad: Tensor) -> Tensor:
    return 2 * grad


def checked(kind: Any, x: Tensor = X) -> Report:
    return opsmith.check(kind, samples=[(x,)], effort="quick", skip=["compile", "export", "opcheck"])


RESULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda y: y.to_sparse(), "torch.sparse_coo"),
    "nested": (lambda y: torch.nested.nested_tensor([y[0], y[1, :2]]), "a nested tensor"),
    "quantised": (lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.quint8), "a quantised tensor"),
    "meta": (lambda y: y.to("meta"), "a tensor on the device `meta`, which holds no numbers"),
    "float8": (lambda y: y.to(torch.float8_e5m2), "a tensor of torch.float8_e5m2"),
    "complex32": (lambda y: y.to(torch.complex32), "a tensor of torch.complex32"),
}


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested", "ignore:torch.quantize")
@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_cannot_be_compared_is_refused(name: str, isolate: bool) -> None:
    made, got = RESULTS[name]
    kind = function(lambda ctx, x: made(2 * x), twice_back)
    with pytest.raises((errors.SampleError, errors.LayoutError)) as raised:
        opsmith.check(kind, samples=[(X,)], effort="quick", only=["forward"], isolate=isolate)
    said = "returns a tensor that is not strided and dense", "a result for sample 0 cannot be checked"
    assert said[isinstance(raised.value, errors.SampleError)] in str(raised.value)
    assert f"got: {got}" in str(raised.value)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32, torch.uint16], ids=str)
def test_a_sample_that_torch_does_not_compute_with_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        errors.SampleError, match=f"got: a tensor of {dtype}, a dtype that few operations of torch support"
    ):
        checked(function(twice, twice_back), X.to(dtype))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize")
def test_a_quantised_gradient_is_refused_by_name() -> None:
    with pytest.raises(errors.LayoutError) as raised:
        dense([None, torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)])
    assert raised.value.message().splitlines() == [
        "a gradient must be a strided dense tensor",
        "  expected: torch.strided",
        "  got: a quantised tensor",
        "  hint: return `gradient.dequantize()`",
    ]


class Sine(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class ComplexTangent(Sine):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 1j * ctx.saved_tensors[0].cos()


def test_a_complex_tangent_of_a_real_result_is_told() -> None:
    (failure,) = checked(ComplexTangent).failures
    assert (failure.property, failure.input, failure.cause) == ("forward_mode", "x", "dtype")
    words = "is torch.complex128, and `result` is torch.float64: return the real part of the tangent"
    assert failure.message == f"the tangent of `result` by `x` {words}"


class SparseBatch(Sine):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x.sin().to_sparse(), in_dims[0]


@pytest.mark.slow
def test_a_sparse_batch_is_told() -> None:
    (failure,) = checked(SparseBatch).failures
    assert failure.property == "vmap"
    assert "torch.sparse_coo" in failure.message


class SameTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = 2 * x
        return y, y

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return 2 * (one + other)


class Counted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (9 * x).to(torch.uint16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


RIGHT: dict[str, Any] = {
    "conjugate": function(lambda ctx, x: torch.complex(x, x).conj(), lambda ctx, grad: grad.real - grad.imag),
    "negative": function(lambda ctx, x: torch.complex(x, x).conj().imag, lambda ctx, grad: -grad),
    "uint16": Counted,
    "same twice": SameTwice,
}


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("name", RIGHT)
def test_a_result_of_an_odd_kind_is_no_fault(name: str) -> None:
    report = checked(RIGHT[name])
    assert not report.failures, report


def test_what_torch_itself_cannot_store_is_a_note() -> None:
    report = checked(RIGHT["uint16"])
    stored = next(each for each in report.outcomes if each.property == "serialization")
    assert any("torch raises this error for any tensor of torch.uint16" in note for note in stored.notes)


def test_a_product_with_its_own_conjugate_is_no_write() -> None:
    """torch's `opcheck` takes that of any tensor that requires a gradient for one."""

    @opsmith.operator("odd_tensors::squared_length")
    def squared_length(x: Tensor) -> Tensor:
        return x * x.conj()

    report = opsmith.check(
        squared_length, samples=[(torch.view_as_complex(X.view(3, 2, 2)),)], only=["opcheck"], effort="quick"
    )
    assert not report.failures, str(report)
    (notes,) = [outcome.notes for outcome in report.outcomes if outcome.property == "opcheck"]
    assert any(
        "reports a call inside of the operator as a write into `input`, but no bit of an argument "
        "changed" in each
        for each in notes
    )
