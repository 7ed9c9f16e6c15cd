"""Operators that are right, and unusual: check must pass each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import opsmith

RIGHT: dict[str, Any] = {}


def right(declare: Callable[[], Any]) -> Callable[[], Any]:
    RIGHT[declare.__name__] = declare()
    return declare


@right
def optional_tensor() -> Any:
    @opsmith.operator("right::optional_tensor")
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x @ weight.mT
        return y if bias is None else y + bias

    @linear.samples
    def _(make: Any) -> Any:
        yield make.call(make(4, 3), make(2, 3), bias=make(2))
        yield make(1, 5), make(3, 5)

    return linear.gradients(
        x=lambda grad, weight: grad @ weight,
        weight=lambda grad, x: grad.mT @ x,
        bias=lambda grad: grad.sum(0),
    )


@right
def hidden_result() -> Any:
    @opsmith.operator("right::hidden_result", results=("y", "rstd"), hidden=("rstd",))
    def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * rstd * weight, rstd

    def by_x(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
        scaled = grad_y * weight
        return rstd * (scaled - x * rstd.square() * (scaled * x).mean(-1, keepdim=True))

    @rms_norm.samples
    def _(make: Any) -> Any:
        yield make(3, 4), make(4)
        yield make(2, 3, 5), make(5)

    return rms_norm.gradients(x=by_x, weight=lambda grad_y, x, rstd: grad_y * x * rstd)


@right
def list_of_tensors() -> Any:
    @opsmith.operator("right::list_of_tensors")
    def weighted(tensors: list[Tensor], weight: Tensor) -> Tensor:
        return torch.stack([tensor * w for tensor, w in zip(tensors, weight.unbind(), strict=True)]).sum(0)

    @weighted.samples
    def _(make: Any) -> Any:
        yield [make(2, 3), make(2, 3)], make(2)
        yield [make(3)], make(1)

    return weighted.gradients(
        tensors=lambda grad, weight: [grad * w for w in weight.unbind()],
        weight=lambda grad, tensors: torch.stack([(grad * tensor).sum() for tensor in tensors]),
    )


@right
def non_differentiable_result() -> Any:
    @opsmith.operator(
        "right::non_differentiable_result", results={"values": ..., "index": opsmith.non_differentiable}
    )
    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(-1)
        return values, index

    largest.samples(lambda make: [(make(3, 4),), (make(5),)])
    return largest.gradients(
        x=lambda grad_values, x, index: torch.zeros_like(x).scatter(
            -1, index.unsqueeze(-1), grad_values.unsqueeze(-1)
        )
    )


@right
def dropout() -> Any:
    roles = {"y": ..., "mask": opsmith.non_differentiable}

    @opsmith.operator("right::dropout", results=roles, hidden=("mask",), random=True)
    def dropout(x: Tensor, p: float = 0.5) -> tuple[Tensor, Tensor]:
        mask = (torch.rand_like(x) > p).to(x.dtype) / (1 - p)
        return x * mask, mask

    dropout.samples(lambda make: [(make(4, 5),), (make(3), 0.1)])
    return dropout.gradients(x=lambda grad_y, mask: grad_y * mask)


@right
def random_and_derived() -> Any:
    @opsmith.operator("right::random_and_derived", random=True)
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    noisy.samples(lambda make: [(make(4, 5),)])
    return noisy


@right
def generator_argument() -> Any:
    @opsmith.operator("right::generator_argument")
    def noisy(x: Tensor, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        return x * torch.empty_like(x).uniform_(generator=generator)

    noisy.samples(lambda make: [(make(4), 7)])
    return noisy


@right
def generator_object() -> Any:
    @opsmith.operator("right::generator_object")
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.empty_like(x).uniform_(generator=generator)

    noisy.samples(lambda make: [(make(4), torch.Generator().manual_seed(7))])
    return noisy


@right
def complex_numbers() -> Any:
    @opsmith.operator("right::complex_numbers")
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @multiply.samples
    def _(make: Any) -> Any:
        yield torch.complex(make(2, 3), make(2, 3)), torch.complex(make(3), make(3))
        yield torch.complex(make(3), make(3)), make(3)

    return multiply.gradients(
        x=lambda grad, weight: grad * weight.conj(), weight=lambda grad, x: grad * x.conj()
    )


@right
def opaque() -> Any:
    @opsmith.operator("right::opaque", opaque=True)
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(
            np.sin(x.detach().float().numpy() if x.dtype.itemsize < 4 else np.sin(0) + x.detach().numpy())
        ).to(x.dtype)

    sine.fake(lambda x: torch.empty_like(x))
    sine.samples(lambda make: [(make(3, 4),), (make(5),)])
    return sine.gradients(x=lambda grad, x: grad * x.cos())


@right
def surrogate_with_stand_in() -> Any:
    @opsmith.operator("right::surrogate_with_stand_in")
    def spike(x: Tensor, slope: float = 4.0) -> Tensor:
        return (x > 0).to(x.dtype)

    def stand_in(x: Tensor, slope: float = 4.0) -> Tensor:
        return torch.sigmoid(slope * x)

    def formula(grad: Tensor, x: Tensor, slope: float) -> Tensor:
        s = torch.sigmoid(slope * x)
        return grad * slope * s * (1 - s)

    spike.samples(lambda make: [(make(3, 4),), (make(5), 1.0)])
    return spike.surrogate_gradients(stand_in, x=formula)


@right
def straight_through() -> Any:
    @opsmith.operator("right::straight_through")
    def rounded(x: Tensor) -> Tensor:
        return x.round()

    rounded.samples(lambda make: [(make(3, 4),)])
    return rounded.surrogate_gradients(x=lambda grad: grad.clone())


@right
def integers() -> Any:
    @opsmith.operator("right::integers")
    def shifted(x: Tensor, by: int) -> Tensor:
        return x << by

    shifted.samples(lambda make: [(make.integers(3, 4), 2)])
    return shifted


@right
def comparison() -> Any:
    @opsmith.operator("right::comparison")
    def positive(x: Tensor) -> Tensor:
        return x > 0

    positive.samples(lambda make: [(make(3, 4),)])
    return positive


@right
def derived() -> Any:
    @opsmith.operator("right::derived")
    def soft(x: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.softmax(x / temperature, -1)

    soft.samples(lambda make: [(make(3, 4),), (make(2, 5), 0.5)])
    return soft


@right
def kernel_and_derived_gradient() -> Any:
    @opsmith.operator("right::kernel_and_derived_gradient")
    def logsumexp(x: Tensor) -> Tensor:
        return x.exp().sum(-1).log()

    logsumexp.samples(lambda make: [(make(3, 40),), (make(5),)])
    return logsumexp.kernel("cpu", lambda x: torch.logsumexp(x, -1), dtypes=[torch.float32, torch.float64])


@right
def joint_formula() -> Any:
    @opsmith.operator("right::joint_formula")
    def multiply(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    multiply.samples(lambda make: [(make(3, 4), make(4)), (make(2), make(2))])
    return multiply.gradients(lambda grad, x, y: {"x": grad * y, "y": grad * x})


@right
def cancellation() -> Any:
    """Its reference loses digits in narrow dtypes, which its kernel may do as well."""

    @opsmith.operator("right::cancellation")
    def variance(x: Tensor) -> Tensor:
        return x.square().mean(-1) - x.mean(-1).square()

    variance.samples(lambda make: [(make(3, 50, low=9.0, high=11.0),)])
    return variance.kernel("cpu", lambda x: x.var(-1, correction=0))


@right
def empty_and_scalar() -> Any:
    @opsmith.operator("right::empty_and_scalar")
    def square(x: Tensor) -> Tensor:
        return x * x

    square.samples(lambda make: [(make(),), (make(0, 3),), (make(1),)])
    return square.gradients(x=lambda grad, x: 2 * grad * x)


@right
def odd_layouts() -> Any:
    @opsmith.operator("right::odd_layouts")
    def double(x: Tensor) -> Tensor:
        return x + x

    double.samples(
        lambda make: [(make(4, 3).mT,), (make(3).expand(2, 3),), (make(8)[::2],), (make(5).unfold(0, 3, 1),)]
    )
    return double.gradients(x=lambda grad: grad + grad)


@right
def constant_input() -> Any:
    @opsmith.operator("right::constant_input")
    def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
        return -torch.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def by_x(grad: Tensor, x: Tensor, target: Tensor) -> Tensor:
        hot = torch.nn.functional.one_hot(target, x.shape[-1]).to(x.dtype)
        return grad.unsqueeze(-1) * (torch.softmax(x, -1) - hot)

    cross_entropy.samples(lambda make: [(make(3, 4), make.integers(3, high=4))])
    return cross_entropy.gradients(x=by_x, target=opsmith.non_differentiable)


@right
def partly_not_implemented() -> Any:
    @opsmith.operator("right::partly_not_implemented")
    def power(x: Tensor, exponent: Tensor) -> Tensor:
        return x.abs() ** exponent

    power.samples(lambda make: [(make(3, low=0.5), make(3))])
    return power.gradients(
        x=lambda grad, x, exponent: grad * exponent * x.abs() ** (exponent - 1) * x.sign(),
        exponent=opsmith.not_implemented("nobody needed it"),
    )


@right
def two_results() -> Any:
    @opsmith.operator("right::two_results", results=("sine", "cosine"))
    def circle(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    circle.samples(lambda make: [(make(3, 4),)])
    return circle.gradients(
        x=lambda grad_sine, grad_cosine, sine, cosine: grad_sine * cosine - grad_cosine * sine
    )


@right
def dtype_argument() -> Any:
    @opsmith.operator("right::dtype_argument")
    def total(x: Tensor, *, dtype: torch.dtype = torch.float64, keep: bool = False) -> Tensor:
        return x.sum(-1, keepdim=keep, dtype=dtype)

    @total.samples
    def _(make: Any) -> Any:
        yield (make(3, 40),)
        yield make.call(make(3, 4), dtype=torch.float64, keep=True)

    return total


@right
def batches_by_a_letter() -> Any:
    @opsmith.operator(
        "right::batches_by_a_letter",
        hidden=("scale",),
        shapes="x: B M, weight: M, index: B -> B M, B",
        batching="B",
    )
    def norm(x: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.square().mean(-1).rsqrt() * index
        return x * scale.unsqueeze(-1) * weight, scale

    norm.samples(lambda make: [(make(3, 4), make(4), make.integers(3, low=1, high=4))])
    return norm


@right
def tangent_formula() -> Any:
    @opsmith.operator("right::tangent_formula")
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    product.samples(lambda make: [(make(3, 4), make(4))])
    return product.tangents(result=lambda x, y, tangent_x, tangent_y: tangent_x * y + x * tangent_y)
