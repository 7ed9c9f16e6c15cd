"""Operators that are right for contiguous tensors alone."""

from typing import Any

import torch
from mutants import square, wrong
from torch import Tensor

import opsmith


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of contiguous memory, as kernels that take a pointer have them in mind."""
    found = [1]
    for size in reversed(shape[1:]):
        found.insert(0, found[0] * max(1, size))
    return tuple(found[len(found) - len(shape) :])


def by_pointer(x: Tensor) -> Tensor:
    """The numbers that lie behind the first one, one after the other."""
    return torch.as_strided(x, x.shape, strides(tuple(x.shape))).clone()


@wrong("layouts", "layout", "x", "`result` by the kernel for cpu is right where `x` is contiguous and wrong")
def kernel_by_pointer() -> Any:
    return square("kernel_by_pointer").kernel("cpu", lambda x: by_pointer(x).square())


@wrong("layouts", "layout", "x", "is sliced with a step: at [")
def kernel_of_rows() -> Any:
    """Right for every order of dimensions, and not for rows that have something between them."""

    def kernel(x: Tensor) -> Tensor:
        dense = x.stride() == x.contiguous().stride() or x.stride() == x.mT.contiguous().mT.stride()
        return x.square() if dense else by_pointer(x).square()

    operator = square("kernel_of_rows", (1, 4))
    operator.samples(lambda make: [(make(1, 1),), (make(4, 1),)])
    return operator.kernel("cpu", kernel)


@wrong(
    "layouts",
    "layout",
    "x",
    "the gradient of `x` is right where `y` is contiguous, and wrong where `y` is",
)
def gradient_by_pointer() -> Any:
    @opsmith.operator("wrong::gradient_by_pointer")
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    product.samples(lambda make: [(make(3, 4), make(3, 4)), (make(2, 5), make(2, 5))])
    return product.gradients(x=lambda grad, y: grad * by_pointer(y), y=lambda grad, x: grad * x)


@wrong("layouts", "layout", "z", "for a grad_output that is expanded from one number")
def second_incoming_gradient() -> Any:
    """Two results, and only what comes in for the second is read by pointer."""

    @opsmith.operator("wrong::second_incoming_gradient", results=("a", "b"))
    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        return z * 2, z * z

    both.samples(lambda make: [(make(3, 4),)])
    return both.gradients(z=lambda grad_a, grad_b, z: 2 * grad_a + 2 * z * by_pointer(grad_b))


@wrong(
    "layouts",
    "layout",
    "x",
    "wrong for a grad_output that is expanded from one number (the backward of `.sum()` returns this layout",
)
def expanded_alone() -> Any:
    """Right for every gradient that is dense in some order, as a check of `is_non_overlapping` lets in."""

    def formula(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * (grad if 0 not in grad.stride() else grad / grad.numel())

    return square("expanded_alone").gradients(x=formula)


@wrong("layouts", "layout", "x", "wrong for a grad_output that is at an offset of one element in its memory")
def offset_forgotten() -> Any:
    def formula(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * torch.as_strided(grad, grad.shape, grad.stride(), 0)

    return square("offset_forgotten").gradients(x=formula)


@wrong("layouts", "layout", "x", "RuntimeError: view size is not compatible")
def kernel_that_views() -> Any:
    return square("kernel_that_views").kernel("cpu", lambda x: x.view(-1).square().view(x.shape))


@wrong("layouts", "layout", "image", "is channels last")
def channels_last() -> Any:
    @opsmith.operator("wrong::channels_last", shapes="image: N C H W, gain: C -> N C H W")
    def scale(image: Tensor, gain: Tensor) -> Tensor:
        return image * gain[:, None, None]

    def formula(grad: Tensor, gain: Tensor) -> Tensor:
        dense = grad.is_contiguous(memory_format=torch.channels_last) and not grad.is_contiguous()
        return (by_pointer(grad) if dense else grad) * gain[:, None, None]

    scale.samples(lambda make: [(make(2, 3, 4, 5), make(3))])
    return scale.gradients(image=formula, gain=lambda grad, image: (grad * image).sum((0, 2, 3)))


@wrong("layouts", "layout", "x", "right where `x` is contiguous, and wrong where `x` is")
def stride_of_one_element() -> Any:
    """The distance between rows is asked for, and there is only one."""

    def kernel(x: Tensor) -> Tensor:
        rows, step = x.shape[0], x.stride(0)
        return x.square() * (step if rows == 1 and step > x.shape[1] else 1)

    operator = square("stride_of_one_element")
    operator.samples(lambda make: [(make(1, 4),), (make(3, 4),)])
    return operator.kernel("cpu", kernel)
