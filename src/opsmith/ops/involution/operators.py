"""Operators of involution: a convolution whose kernel differs by pixel and is shared by groups of channels.

It is linear in `input` and in `weight`. Its two gradients are bilinear operators, too. The gradients of each
of these three operators are the other two, so that derivatives of every order exist.

Source: D. Li et al., "Involution: Inverting the Inherence of Convolution for Visual Recognition", CVPR 2021,
arXiv:2103.06255, equation 4. Ho = floor((H + 2 padding - (dilation (Kh - 1) + 1)) / stride + 1), likewise Wo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import opsmith
from opsmith.ops.involution import tiles

Pair = int | tuple[int, int]

FORWARD = "opsmith::involution"
BY_INPUT = "opsmith::involution_input_gradient"
BY_WEIGHT = "opsmith::involution_weight_gradient"


@opsmith.operator(
    FORWARD,
    shapes="input: B C H W, weight: B G Kh Kw Ho Wo -> B C Ho Wo",
    batching="B",
    autocast="lower",
)
def involution(
    input: Tensor, weight: Tensor, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1
) -> Tensor:
    """Weight the neighbourhood of each pixel by a kernel of that pixel, which C/G channels share.

    Args:
        input: [B, C, H, W], floating or complex.
        weight: [B, G, Kh, Kw, Ho, Wo], where G divides C.
        stride: Step from one neighbourhood to the next; one number, or one for each dimension.
        padding: Width of the border of zeros around the input.
        dilation: Step from one pixel of a neighbourhood to the next.

    Returns:
        [B, C, Ho, Wo].

    Raises:
        ShapeError, ValueError: If shapes, dtypes or devices do not fit one another.

    Example:
        >>> import torch
        >>> input, weight = torch.ones(1, 4, 5, 5), torch.ones(1, 2, 3, 3, 2, 2)
        >>> involution(input, weight, stride=2)[0, 0]
        tensor([[9., 9.],
                [9., 9.]])
    """
    _expect_alike(FORWARD, "input", input, "weight", weight)
    (batch, channels), groups, kernel = input.shape[:2], weight.shape[1], weight.shape[2:4]
    output = _output_size(FORWARD, input.shape[2:], kernel, stride, padding, dilation)
    _expect_groups(FORWARD, channels, groups)
    _expect_shape(FORWARD, "weight [B, G, Kh, Kw, Ho, Wo]", weight, (batch, groups, *kernel, *output))
    windows = _windows(input, kernel, stride, padding, dilation).unflatten(1, (groups, channels // groups))
    result = torch.einsum("bgcijuv,bguvij->bgcij", windows, weight).flatten(1, 2)
    return result.contiguous()  # the same layout for all sizes, also if G = 1


@opsmith.operator(
    BY_INPUT,
    shapes="cotangent: B C Ho Wo, weight: B G Kh Kw Ho Wo -> B C _ _",
    batching="B",
    autocast="lower",
)
def involution_input_gradient(
    cotangent: Tensor,
    weight: Tensor,
    size: tuple[int, int],
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> Tensor:
    """Compute the gradient of `involution` by its input.

    Args:
        cotangent: [B, C, Ho, Wo], the gradient of the result.
        weight: [B, G, Kh, Kw, Ho, Wo].
        size: H and W.
        stride, padding, dilation: As in `involution`.

    Returns:
        [B, C, H, W].

    Raises:
        ShapeError, ValueError: If shapes, dtypes or devices do not fit one another.

    Example:
        >>> import torch
        >>> cotangent, weight = torch.ones(1, 4, 2, 2), torch.ones(1, 2, 3, 3, 2, 2)
        >>> involution_input_gradient(cotangent, weight, (4, 4))[0, 0]
        tensor([[1., 2., 2., 1.],
                [2., 4., 4., 2.],
                [2., 4., 4., 2.],
                [1., 2., 2., 1.]])
    """
    _expect_alike(BY_INPUT, "cotangent", cotangent, "weight", weight)
    (batch, channels), groups, kernel = cotangent.shape[:2], weight.shape[1], weight.shape[2:4]
    output = _output_size(BY_INPUT, size, kernel, stride, padding, dilation)
    _expect_groups(BY_INPUT, channels, groups)
    _expect_shape(BY_INPUT, "cotangent [B, C, Ho, Wo]", cotangent, (batch, channels, *output))
    _expect_shape(BY_INPUT, "weight [B, G, Kh, Kw, Ho, Wo]", weight, (batch, groups, *kernel, *output))
    grouped = cotangent.unflatten(1, (groups, channels // groups))
    columns = torch.einsum("bguvij,bgcij->bgcuvij", weight, grouped).flatten(5).flatten(1, 4)
    return F.fold(columns, size, kernel, dilation, padding, stride)


@opsmith.operator(
    BY_WEIGHT,
    shapes="cotangent: B C Ho Wo, input: B C H W -> B groups _ _ Ho Wo",
    batching="B",
    autocast="lower",
)
def involution_weight_gradient(
    cotangent: Tensor,
    input: Tensor,
    groups: int,
    kernel: tuple[int, int],
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> Tensor:
    """Compute the gradient of `involution` by its weight.

    Args:
        cotangent: [B, C, Ho, Wo], the gradient of the result.
        input: [B, C, H, W].
        groups: G.
        kernel: Kh and Kw.
        stride, padding, dilation: As in `involution`.

    Returns:
        [B, G, Kh, Kw, Ho, Wo].

    Raises:
        ShapeError, ValueError: If shapes, dtypes or devices do not fit one another.

    Example:
        >>> import torch
        >>> cotangent, input = torch.ones(1, 4, 1, 1), torch.arange(36.0).reshape(1, 4, 3, 3)
        >>> involution_weight_gradient(cotangent, input, 2, (3, 3))[0, 0, :, :, 0, 0]
        tensor([[ 9., 11., 13.],
                [15., 17., 19.],
                [21., 23., 25.]])
    """
    _expect_alike(BY_WEIGHT, "cotangent", cotangent, "input", input)
    batch, channels = input.shape[:2]
    output = _output_size(BY_WEIGHT, input.shape[2:], kernel, stride, padding, dilation)
    _expect_groups(BY_WEIGHT, channels, groups)
    _expect_shape(BY_WEIGHT, "cotangent [B, C, Ho, Wo]", cotangent, (batch, channels, *output))
    windows = _windows(input, kernel, stride, padding, dilation).unflatten(1, (groups, channels // groups))
    grouped = cotangent.unflatten(1, (groups, channels // groups))
    gradient = torch.einsum("bgcijuv,bgcij->bguvij", windows, grouped)
    return gradient.contiguous()  # the usual layout of `weight`, or autograd copies it


involution.gradients(
    input=lambda grad, weight, input_shape, stride, padding, dilation: involution_input_gradient(
        grad, weight.conj(), input_shape[2:], stride, padding, dilation
    ),
    weight=lambda grad, input, weight_shape, stride, padding, dilation: involution_weight_gradient(
        grad, input.conj(), weight_shape[1], weight_shape[2:4], stride, padding, dilation
    ),
)

involution_input_gradient.gradients(
    cotangent=lambda grad, weight, stride, padding, dilation: involution(
        grad, weight.conj(), stride, padding, dilation
    ),
    weight=lambda grad, cotangent, weight_shape, stride, padding, dilation: involution_weight_gradient(
        cotangent.conj(), grad, weight_shape[1], weight_shape[2:4], stride, padding, dilation
    ),
)

involution_weight_gradient.gradients(
    cotangent=lambda grad, input, stride, padding, dilation: involution(
        input.conj(), grad, stride, padding, dilation
    ),
    input=lambda grad, cotangent, input_shape, stride, padding, dilation: involution_input_gradient(
        cotangent.conj(), grad, input_shape[2:], stride, padding, dilation
    ),
)

# The kernel that is declared last is tried first: float32.
_DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.float32)
for _operator, _file, _problem, _more in (
    (involution, "forward", tiles.forward, ()),
    (involution_input_gradient, "input_gradient", tiles.input_gradient, ()),
    (involution_weight_gradient, "weight_gradient", tiles.weight_gradient, ("IN_PIECES",)),
):
    for _dtype in _DTYPES:  # in C++ one library for each dtype: a process builds only what it uses
        _operator.kernel("cpu", cpp_file=f"cpu/{_file}.cpp", entry=_file, dtypes=[_dtype])
    _launch = tiles.launched(_problem, "K", "S", "D", "SHIFT", "C", *_more)
    _operator.kernel("cuda", cuda_file=f"cuda/{_file}.cu", dtypes=_DTYPES, max_spills=0, **_launch)


_CASES: list[Any] = [  # B, C, G, (H, W), (Kh, Kw), stride, padding, dilation
    (1, 4, 2, (3, 3), (3, 3), 1, 1, 1),
    (1, 3, 1, (4, 5), (3, 3), 2, 1, 1),
    (2, 2, 2, (3, 4), (1, 2), (1, 2), (0, 1), 1),
    (1, 2, 1, (5, 4), (3, 2), (2, 1), (2, 0), (1, 2)),
    (0, 4, 2, (3, 3), (3, 3), 1, 1, 1),
]


def _cases() -> Iterator[Any]:
    """Yield B, C, G, (H, W), (Kh, Kw), (Ho, Wo), and the steps of each case."""
    for B, C, G, size, kernel, *steps in _CASES:
        yield B, C, G, size, kernel, _output_size(FORWARD, size, kernel, *steps), steps


@involution.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for B, C, G, size, kernel, output, steps in _cases():
        yield make(B, C, *size), make(B, G, *kernel, *output), *steps
    yield make(1, 4, 3, 4).movedim(-1, 1), make(1, 2, 3, 3, 1, 2).movedim(-1, 1)


@involution_input_gradient.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for B, C, G, size, kernel, output, steps in _cases():
        yield make(B, C, *output), make(B, G, *kernel, *output), size, *steps


@involution_weight_gradient.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    for B, C, G, size, kernel, output, steps in _cases():
        yield make(B, C, *output), make(B, C, *size), G, kernel, *steps


def _windows(input: Tensor, kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Return the neighbourhood of each pixel of the result, [B, C, Ho, Wo, Kh, Kw], as a view."""
    steps, (rows, columns), gaps = _pair(stride), _pair(padding), _pair(dilation)
    windows = F.pad(input, (columns, columns, rows, rows))
    for i in (0, 1):
        windows = windows.unfold(2 + i, gaps[i] * (kernel[i] - 1) + 1, steps[i])
    return windows[..., :: gaps[0], :: gaps[1]]


def _pair(value: Pair) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _output_size(
    operator: str, size: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> tuple[int, int]:
    """Return Ho and Wo."""
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise ValueError(
            f"{operator}: expected stride and dilation of at least 1 and padding of at least 0, "
            f"got stride {stride}, dilation {dilation}, padding {padding}; "
            "give valid numbers or pairs of numbers"
        )
    height, width = (
        (size[i] + 2 * padding[i] - (dilation[i] * (kernel[i] - 1) + 1)) // stride[i] + 1 for i in (0, 1)
    )
    if any(side < 1 for side in (*size, *kernel, height, width)):  # `min` would fix dynamic sizes
        raise ValueError(
            f"{operator}: expected an image that is, with padding, at least as large as the kernel, got "
            f"H, W = {list(size)}, padding {padding}, Kh, Kw = {list(kernel)}, dilation {dilation}; "
            "use a larger padding, or a smaller kernel or dilation"
        )
    return height, width


def _expect_alike(operator: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if (tensor.dtype, tensor.device) != (other.dtype, other.device):
        raise ValueError(
            f"{operator}: expected `{name}` and `{other_name}` of the same dtype on the same device, "
            f"got {tensor.dtype} on {tensor.device} and {other.dtype} on {other.device}; "
            f"convert one of them: `{other_name}.to({name})`"
        )


def _expect_groups(operator: str, channels: int, groups: int) -> None:
    if groups < 1 or channels < 1 or channels % groups:
        raise ValueError(
            f"{operator}: expected G to divide C, got G = {groups} and C = {channels}; "
            "choose a different number of groups or of channels"
        )


def _expect_shape(operator: str, layout: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tensor.shape != tuple(shape):
        raise ValueError(
            f"{operator}: expected {layout} = {list(shape)}, got {list(tensor.shape)}; "
            "this shape follows from the other arguments: change this shape or the other arguments"
        )
