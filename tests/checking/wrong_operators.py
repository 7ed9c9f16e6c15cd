"""Operators that are wrong on purpose: check must reject each by the right property, for the right cause."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import opsmith


@dataclass(frozen=True)
class Wrong:
    operator: Any
    check: str
    cause: str
    input: str | None


WRONG: dict[str, Wrong] = {}


def wrong(check: str, cause: str, input: str | None = None) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def enter(declare: Callable[[], Any]) -> Callable[[], Any]:
        WRONG[declare.__name__] = Wrong(declare(), check, cause, input)
        return declare

    return enter


def linear(name: str) -> Any:
    @opsmith.operator(f"wrong::{name}")
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x @ weight.mT
        return y if bias is None else y + bias

    linear.gradients(
        x=lambda grad, weight: grad @ weight,
        weight=lambda grad, x: grad.mT @ x,
        bias=lambda grad: grad.sum(0),
    )

    @linear.samples
    def _(make: Any) -> Any:
        yield make(3, 3), make(3, 3), make(3)
        yield make(3, 3), make(3, 3)

    return linear


def square(name: str, shape: tuple[int, ...] = (3, 4), **options: Any) -> Any:
    @opsmith.operator(f"wrong::{name}", **options)
    def square(x: Tensor) -> Tensor:
        return x * x

    @square.samples
    def _(make: Any) -> Any:
        yield (make(*shape),)

    return square


# --- gradients -------------------------------------------------------------------------------------------------


@wrong("gradient", "sign", "weight")
def sign() -> Any:
    return linear("sign").gradients(weight=lambda grad, x: -(grad.mT @ x))


@wrong("gradient", "scale", "x")
def factor_two() -> Any:
    return square("factor_two").gradients(x=lambda grad, x: grad * x)


@wrong("gradient", "transposed", "weight")
def transposed() -> Any:
    return linear("transposed").gradients(weight=lambda grad, x: x.mT @ grad)


@wrong("gradient", "missing", "bias")
def zeros() -> Any:
    return linear("zeros").gradients(bias=lambda grad: torch.zeros_like(grad.sum(0)) + 0 * grad.sum(0))


@wrong("gradient", "missing", "x")
def declared_zero() -> Any:
    return square("declared_zero").gradients(x=opsmith.zero)


@wrong("gradient", "scale", "bias")
def mean_over_the_batch() -> Any:
    return linear("mean_over_the_batch").gradients(bias=lambda grad: grad.mean(0))


@wrong("gradient", "unknown", "bias")
def first_row_for_the_batch() -> Any:
    return linear("first_row_for_the_batch").gradients(bias=lambda grad: grad[0])


@wrong("gradient", "ignores-grad", "x")
def ignores_grad() -> Any:
    return square("ignores_grad").gradients(x=lambda grad, x: 2 * x + 0 * grad)


@wrong("gradient", "layout", "x")
def as_strided() -> Any:
    def contiguous_only(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * torch.as_strided(grad, x.shape, (x.shape[1], 1))

    return square("as_strided").gradients(x=contiguous_only)


@wrong("gradient", "layout", "x")
def view_of_grad() -> Any:
    return square("view_of_grad").gradients(x=lambda grad, x: (2 * x.view(-1) * grad.view(-1)).view(x.shape))


@wrong("gradient", "raises", "x")
def in_place_on_saved() -> Any:
    return square("in_place_on_saved").gradients(x=lambda grad, x: x.mul_(2) * grad)


@wrong("gradient", "raises", "x")
def float64_constant() -> Any:
    return square("float64_constant").gradients(
        x=lambda grad, x: grad * x * torch.full((4,), 2.0, dtype=torch.float64)
    )


@wrong("gradient", "raises", "x")
def wrong_shape() -> Any:
    return square("wrong_shape").gradients(x=lambda grad, x: (2 * grad * x)[:, 1:])


@wrong("gradient", "nonfinite", "x")
def nan_at_zero() -> Any:
    @opsmith.operator("wrong::nan_at_zero")
    def magnitude(x: Tensor) -> Tensor:
        return x.abs()

    magnitude.samples(lambda make: [(torch.tensor([-1.5, 0.0, 2.0]),)])
    return magnitude.gradients(x=lambda grad, x: grad * x / x.abs())


@wrong("gradient", "conjugate", "weight")
def not_conjugated() -> Any:
    @opsmith.operator("wrong::not_conjugated")
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @multiply.samples
    def _(make: Any) -> Any:
        yield torch.complex(make(3), make(3)), torch.complex(make(3), make(3))

    # With a real gradient coming in, only the conjugate is missing.
    return multiply.gradients(x=lambda grad, weight: grad * weight.conj(), weight=lambda grad, x: (grad.conj() * x))


@wrong("gradient", "reference-gradient", "x")
def reference_detaches() -> Any:
    @opsmith.operator("wrong::reference_detaches")
    def square(x: Tensor) -> Tensor:
        return x * x.detach()

    square.samples(lambda make: [(make(3),)])
    return square


@wrong("gradient", "reference-gradient", "x")
def formula_is_right_and_the_reference_is_not() -> Any:
    @opsmith.operator("wrong::formula_is_right")
    def square(x: Tensor) -> Tensor:
        return x * x.detach()

    square.samples(lambda make: [(make(3),)])
    return square.gradients(x=lambda grad, x: 2 * grad * x)


@wrong("gradient", "not-exercised", "bias")
def never_exercised() -> Any:
    operator = linear("never_exercised")
    operator.samples(lambda make: [(make(3, 3), make(3, 3))])
    return operator


@wrong("gradient", "unknown", "x")
def one_element_of_many() -> Any:
    def nearly(grad: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        mask[7, 5] = 1.5
        return 2 * x * grad * mask

    return square("one_element_of_many", (12, 12)).gradients(x=nearly)


@wrong("gradient", "missing", "x")
def forgets_a_result() -> Any:
    @opsmith.operator("wrong::forgets_a_result", results=("y", "z"))
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * x

    both.samples(lambda make: [(make(4),)])
    return both.gradients(x=lambda grad_y: 2 * grad_y)


@wrong("gradient", "sign", "x")
def opaque_formula() -> Any:
    @opsmith.operator("wrong::opaque_formula", opaque=True)
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    sine.fake(lambda x: torch.empty_like(x))
    sine.samples(lambda make: [(make(4),)])
    return sine.gradients(x=lambda grad, x: -grad * x.cos())


# --- results ---------------------------------------------------------------------------------------------------


@wrong("forward", "unknown", "result")
def kernel() -> Any:
    return square("kernel").kernel("cpu", lambda x: x * x + 1e-3)


@wrong("forward", "scale", "result")
def kernel_by_two() -> Any:
    return square("kernel_by_two").kernel("cpu", lambda x: 2 * x * x)


@wrong("forward", "precision", "result")
def kernel_in_half_precision() -> Any:
    def half(x: Tensor) -> Tensor:
        return (x.to(torch.float16) * x.to(torch.float16)).to(x.dtype)

    return square("kernel_in_half_precision").kernel("cpu", half, dtypes=[torch.float32])


@wrong("forward", "unknown", "rstd")
def kernel_hidden_result() -> Any:
    @opsmith.operator("wrong::kernel_hidden_result", results=("y", "rstd"), hidden=("rstd",))
    def rms_norm(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = x.square().mean(-1, keepdim=True).rsqrt()
        return x * rstd, rstd

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = x.square().mean(-1, keepdim=True).rsqrt()
        return x * rstd, rstd + 0.25

    rms_norm.samples(lambda make: [(make(3, 4),)])
    return rms_norm.kernel("cpu", kernel)


@wrong("forward", "shape", "result")
def kernel_shape() -> Any:
    return square("kernel_shape").kernel("cpu", lambda x: (x * x).flatten())


@wrong("forward", "dtype", "result")
def kernel_dtype() -> Any:
    return square("kernel_dtype").kernel("cpu", lambda x: (x * x).to(torch.float64))


@wrong("forward", "raises")
def kernel_raises() -> Any:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("out of cheese")

    return square("kernel_raises").kernel("cpu", broken)


@wrong("forward", "not-exercised")
def kernel_that_takes_no_sample() -> Any:
    return square("kernel_that_takes_no_sample").kernel("cpu", lambda x: x * x, dtypes=[torch.int8])


@wrong("forward", "fake-shape", "result")
def fake_shape() -> Any:
    operator = square("fake_shape")
    operator.fake(lambda x: x.new_empty(x.shape[0], x.shape[1] + 1))
    return operator


@wrong("forward", "fake-dtype", "result")
def fake_dtype() -> Any:
    operator = square("fake_dtype")
    operator.fake(lambda x: torch.empty_like(x, dtype=torch.float32))
    return operator


@wrong("forward", "fake-stride", "result")
def fake_stride() -> Any:
    return square("fake_stride").kernel("cpu", lambda x: (x * x).mT.contiguous().mT)


@wrong("forward", "fake-device", "result")
def fake_device() -> Any:
    operator = square("fake_device")
    operator.fake(lambda x: torch.empty_like(x, device="meta"))
    return operator


@wrong("forward", "fake-raises")
def reference_looks_at_numbers() -> Any:
    @opsmith.operator("wrong::reference_looks_at_numbers")
    def shift(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    shift.samples(lambda make: [(make(3),)])
    return shift


@wrong("forward", "unknown", "index")
def kernel_index() -> Any:
    @opsmith.operator(
        "wrong::kernel_index", results={"values": ..., "index": opsmith.non_differentiable}
    )
    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(-1)
        return values, index

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(-1)
        return values, (index + 1) % x.shape[-1]

    largest.samples(lambda make: [(make(3, 4),)])
    return largest.kernel("cpu", kernel)


# --- surrogates ------------------------------------------------------------------------------------------------


def spike(name: str) -> Any:
    @opsmith.operator(f"wrong::{name}")
    def spike(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    spike.samples(lambda make: [(make(3, 4),)])
    return spike


@wrong("surrogate", "not-linear", "x")
def not_linear() -> Any:
    return spike("not_linear").surrogate_gradients(x=lambda grad, x: grad.sign())


@wrong("surrogate", "stand-in", "x")
def not_the_stand_in() -> Any:
    return spike("not_the_stand_in").surrogate_gradients(
        lambda x: torch.sigmoid(x), x=lambda grad, x: grad * torch.sigmoid(x)
    )


@wrong("surrogate", "layout", "x")
def surrogate_layout() -> Any:
    return spike("surrogate_layout").surrogate_gradients(
        x=lambda grad, x: torch.as_strided(grad, x.shape, (x.shape[1], 1)) * (x.abs() < 1)
    )


@wrong("surrogate", "raises", "x")
def surrogate_shape() -> Any:
    return spike("surrogate_shape").surrogate_gradients(x=lambda grad: grad[1:])


@wrong("surrogate", "not-exercised", "x")
def surrogate_never_exercised() -> Any:
    operator = spike("surrogate_never_exercised").surrogate_gradients(x=lambda grad: grad)
    operator.samples(lambda make: [(make.integers(3),)])
    return operator


# --- higher orders ---------------------------------------------------------------------------------------------


@wrong("second_order", "graph-cut", "x")
def graph_cut() -> Any:
    return square("graph_cut").gradients(
        x=lambda grad, x: torch.from_numpy(2 * grad.detach().numpy() * x.detach().numpy())
    )


@wrong("second_order", "unknown", "x")
def detached_in_the_formula() -> Any:
    return square("detached_in_the_formula").gradients(x=lambda grad, x: 2 * grad * x.detach())


@wrong("forward_mode", "sign", "x")
def forward_mode_follows_the_formula() -> Any:
    return square("forward_mode_sign").gradients(x=lambda grad, x: -2 * grad * x)


# --- effects and randomness ------------------------------------------------------------------------------------


@wrong("effects", "mutates", "x")
def kernel_writes_into_its_input() -> Any:
    def kernel(x: Tensor) -> Tensor:
        result = x * x
        x.numpy()[0] = 0  # torch does not see it
        return result

    return square("kernel_writes").kernel("cpu", kernel)


@wrong("effects", "mutates", "grad")
def formula_writes_into_grad() -> Any:
    def formula(grad: Tensor, x: Tensor) -> Tensor:
        answer = 2 * grad * x
        grad.detach().numpy()[...] = 0
        return answer

    return square("formula_writes").gradients(x=formula)


@wrong("effects", "nondeterministic", "result")
def nondeterministic() -> Any:
    calls = itertools.count()

    @opsmith.operator("wrong::nondeterministic", opaque=True)
    def drifting(x: Tensor) -> Tensor:
        return x + next(calls)

    drifting.fake(lambda x: torch.empty_like(x))
    drifting.samples(lambda make: [(make(3),)])
    return drifting.gradients(x=lambda grad: grad.clone())


@wrong("randomness", "undeclared")
def undeclared_randomness() -> Any:
    @opsmith.operator("wrong::undeclared_randomness")
    def noise(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    noise.samples(lambda make: [(make(3),)])
    return noise


@wrong("randomness", "undeclared")
def undeclared_randomness_in_a_kernel() -> Any:
    return square("undeclared_in_a_kernel").kernel("cpu", lambda x: x * x + 0 * torch.rand_like(x))


@wrong("randomness", "never-draws")
def never_draws() -> Any:
    return square("never_draws", random=True)


@wrong("randomness", "foreign-state")
def numpy_randomness() -> Any:
    @opsmith.operator("wrong::numpy_randomness", opaque=True)
    def noise(x: Tensor) -> Tensor:
        return x + float(np.random.rand())  # noqa: NPY002

    noise.fake(lambda x: torch.empty_like(x))
    noise.samples(lambda make: [(make(3),)])
    return noise.gradients(x=lambda grad: grad.clone())


@wrong("randomness", "foreign-state")
def python_randomness() -> Any:
    @opsmith.operator("wrong::python_randomness")
    def noise(x: Tensor) -> Tensor:
        return x + random.random()

    noise.samples(lambda make: [(make(3),)])
    return noise
