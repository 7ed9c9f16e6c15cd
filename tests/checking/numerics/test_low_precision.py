"""Operators that compute in float16 or float32 for every input are held to that precision and range."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Outcome

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def product(dtype: torch.dtype, made: Callable[[Tensor, Tensor], Tensor] = lambda x, y: x) -> Any:
    """The product of two matrices; `made` is what becomes of it, given the first as it came."""

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return made((x.to(dtype) @ y.to(dtype).mT).to(x.dtype), x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, y = (each.to(dtype) for each in ctx.saved_tensors)
            narrow = grad.to(dtype)
            return (narrow @ y).to(grad.dtype), (narrow.mT @ x).to(grad.dtype)

    return Product


def outcome(checked: Any, check: str, samples: list[Any]) -> Outcome:
    report = opsmith.check(checked, samples=samples, effort="quick", only=[check])
    return next(each for each in report.outcomes if each.property == check)


@pytest.mark.every(8)
@pytest.mark.parametrize("size", [1e-3, 0.02, 1.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_narrow_range_is_not_held_to_a_wide_one(dtype: torch.dtype, size: float) -> None:
    found = outcome(product(dtype), "linearity", [(size * X, size * (X + 1))])
    assert found.status == "passed", found.failures


def spike(name: str, by: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def function(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    operator = opsmith.operator(f"coarse::{name}")(function)
    return operator.surrogate_gradients(x=lambda grad, x: by(grad.half(), x.half()).to(grad.dtype))


def test_a_surrogate_in_float16_is_linear_to_its_digits() -> None:
    found = outcome(spike("smooth", lambda grad, x: grad / (1 + 9 * x.abs()) ** 2), "surrogate", [(X,)])
    assert found.status == "passed", found.failures


def test_a_surrogate_in_float16_that_clips_is_not_linear() -> None:
    found = outcome(spike("clipped", lambda grad, x: grad.clamp(-6, 6)), "surrogate", [(X,)]).failures
    (failure,) = [each for each in found if each.cause == "nonlinear-grad"]
    assert (failure.severity, failure.given) == ("warning", "unpromised")
    assert "for 4 times a grad_output" in failure.message


def test_another_order_of_sums_in_float32_is_no_matter_of_layouts() -> None:
    found = outcome(product(torch.float32), "layouts", [(X, X + 1)])
    assert found.status == "passed", found.failures


def test_what_is_wrong_for_a_layout_in_float32_is_still_found() -> None:
    def off(y: Tensor, x: Tensor) -> Tensor:
        return y if x.is_contiguous() else y * (1 + 2.0**-16)

    (failure,) = outcome(product(torch.float32, off), "layouts", [(X, X + 1)]).failures
    assert (failure.cause, failure.input) == ("layout", "x")


COMPARING = ("linearity", "gradient", "layouts", "values", "forward_mode", "second_order", "vmap")
"""Properties that compare two computations of one thing."""

Reference = Callable[..., Tensor]
ROWS = ((3, 4), (2, 3, 5))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ from call to call, and not from run to run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    """A norm as of Llama: in float32, times a weight in the dtype of the arguments."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos.float() + torch.cat((-b, a), -1) * sin.float()).to(x.dtype)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v.float()).type_as(q)


def lost(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ w).float(), torch.arange(x.shape[0]))


UPCAST: dict[str, tuple[Reference, list[Any]]] = {
    "rms_norm": (normalised, [(drawn(*shape), drawn(shape[-1])) for shape in ROWS]),
    "rms_norm_in_bfloat16": (
        normalised,
        [(drawn(*shape, dtype=torch.bfloat16), drawn(shape[-1], dtype=torch.bfloat16)) for shape in ROWS],
    ),
    "layer_norm": (
        lambda x: torch.nn.functional.layer_norm(x.float(), x.shape[-1:]).type_as(x),
        [(drawn(*shape),) for shape in ROWS],
    ),
    "product": (
        lambda x, w: x.float().mul(w.float()).to(x.dtype),
        [(drawn(*shape), drawn(shape[-1])) for shape in ROWS],
    ),
    "softmax": (
        lambda x, w: x.softmax(-1, dtype=torch.float32) @ w.float(),
        [(drawn(3, 4), drawn(4, 2)), (drawn(2, 5), drawn(5, 3))],
    ),
    "cross_entropy": (lost, [(drawn(3, 4), drawn(4, 5)), (drawn(2, 3), drawn(3, 6))]),
    "softplus": (
        lambda x: torch.nn.functional.softplus(x.float()).to(x.dtype),
        [(drawn(*shape),) for shape in ROWS],
    ),
    "gelu": (
        lambda x: torch.nn.functional.gelu(x.float(), approximate="tanh").type_as(x),
        [(drawn(*shape),) for shape in ROWS],
    ),
    "rotary": (rotated, [(drawn(3, 4), drawn(3, 4), drawn(3, 4)), (drawn(5, 6), drawn(5, 6), drawn(5, 6))]),
    "attention": (attended, [(drawn(2, 3, 4), drawn(2, 5, 4), drawn(2, 5, 4))]),
}


def declared(name: str, reference: Reference) -> opsmith.Operator[..., Any]:
    """An operator of a function whose arguments are tensors."""
    count = reference.__code__.co_argcount
    reference.__annotations__ = dict.fromkeys([*reference.__code__.co_varnames[:count], "return"], Tensor)
    return opsmith.operator(f"low_precision::{name}")(reference)


@pytest.mark.slow
@pytest.mark.every(12)
@pytest.mark.parametrize("name", UPCAST)
def test_a_reference_that_computes_in_float32_is_right(name: str) -> None:
    reference, samples = UPCAST[name]
    operator = declared(name, types.FunctionType(reference.__code__, globals(), name))
    for seed in range(2):
        report = opsmith.check(operator, samples=samples, only=["forward", *COMPARING], seed=seed)
        assert not report.failures, report
        notes = [note for outcome in report.outcomes for note in outcome.notes]
        assert any(
            note.startswith("the operator computes in float32, also for arguments in float64")
            for note in notes
        )


def gradients_of_norm(change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Gradients of `normalised` in float32; `change` makes another of that by `x`, given grad_output."""

    def by_x(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        g, h = grad.float() * weight.float(), h * r
        return change(r * (g - h * (g * h).mean(-1, keepdim=True)), grad).to(x.dtype)

    def by_weight(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (grad.float() * h * r).flatten(0, -2).sum(0).to(weight.dtype)

    return {"x": by_x, "weight": by_weight}


CHANGES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str]] = {
    "right": (lambda found, grad: found, "", ""),
    "scaled": (lambda found, grad: found * 1.5, "gradient", "scale"),
    "not_linear": (
        lambda found, grad: found * (1 + 1e-2 * grad.float().abs().sum()),
        "linearity",
        "nonlinear-grad",
    ),
    "blind_to_strides": (
        lambda found, grad: found if grad.is_contiguous() else found * 1.0001,
        "layouts",
        "layout",
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_in_float32_are_held_to_its_digits(name: str) -> None:
    change, property, cause = CHANGES[name]
    operator = declared(f"norm_{name}", types.FunctionType(normalised.__code__, globals(), name))
    operator.gradients(**gradients_of_norm(change))
    samples, only = UPCAST["rms_norm"][1], ["linearity", "gradient", "layouts"]
    for seed in (2, 5):  # in which the gradient for rows of one element is rounding alone
        report = opsmith.check(operator, samples=samples, only=only, seed=seed)
        found = {(each.property, each.input, each.cause) for each in report.failures}
        assert (property, "x", cause) in found if property else not found, report


class Gated(Function):
    """A gate in float32, with a rule for `vmap` that may be off."""

    off = 0.0

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x.float() * y.float().sigmoid()).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = (each.float() for each in ctx.saved_tensors)
        s, g = y.sigmoid(), grad.float()
        return (g * s).to(grad.dtype), (g * x * s * (1 - s)).to(grad.dtype)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        x, y = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip((x, y), in_dims, strict=True)
        )
        return cls.apply(x * (1 + cls.off), y), 0


class GatedOff(Gated):
    off = 2.0**-12


@pytest.mark.parametrize("kind", [Gated, GatedOff])
def test_a_rule_for_batches_in_float32_is_held_to_its_digits(kind: type[Gated]) -> None:
    operator = opsmith.adopt(kind, f"low_precision::{kind.__name__}")
    report = opsmith.check(kind, samples=[(drawn(3, 4), drawn(4, 3).mT)], only=["vmap"])
    adopted = opsmith.check(operator, samples=[(drawn(3, 4), drawn(4, 3).mT)], only=["vmap"])
    for found in (report, adopted):
        assert [each.cause for each in found.failures] == ["kernel-mismatch"] * bool(kind.off), found


DOT = """
template <class T>
void dot_{name}(View<const T, 2> x, View<const T, 1> w, View<T, 1> y) {{
  for (int64_t i = 0; i < x.size(0); i++) {{
    float sum = 0;
    for (int64_t j = 0; j < x.size(1); j++) sum += float({read}) * float(w(j));
    y(i) = sum;
  }}
}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "read"), [("right", "x(i, j)"), ("wrong", "(&x(0, 0))[i * x.size(1) + j]")])
def test_a_kernel_that_sums_in_float_is_imprecise_and_no_more(name: str, read: str) -> None:
    def dot(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    operator = opsmith.operator(f"low_precision::dot_{name}", shapes="x: B N, w: N -> B")(dot)
    operator.kernel("cpu", cpp=DOT.format(name=name, read=read))
    report = opsmith.check(operator, only=["forward", "layouts", "values"])
    found = {(each.property, each.cause, each.severity) for each in report.failures}
    wrong = {("layouts", "layout", "error")} if name == "wrong" else set()
    assert found == {("forward", "precision", "warning")} | wrong, report
