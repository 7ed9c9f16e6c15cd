"""involution: against its definition and against convolution, and what it refuses."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops import involution
from opsmith.ops.involution import involution_input_gradient, involution_weight_gradient

STEPS = [  # stride, padding, dilation
    (1, 0, 1),
    (1, 1, 1),
    (2, 1, 1),
    ((2, 1), (1, 2), (1, 2)),
    ((1, 3), (0, 3), (2, 1)),
]


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - (dilation * (kernel - 1) + 1)) // stride + 1


def by_definition(input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """One multiplication at a time, as in the paper's equation."""
    s, p, d = ((value, value) if isinstance(value, int) else value for value in (stride, padding, dilation))
    (B, C, H, W), (_, G, Kh, Kw, Ho, Wo) = input.shape, weight.shape
    result = input.new_zeros(B, C, Ho, Wo)
    for b, c, i, j, u, v in product(*map(range, (B, C, Ho, Wo, Kh, Kw))):
        row, column = i * s[0] + u * d[0] - p[0], j * s[1] + v * d[1] - p[1]
        if 0 <= row < H and 0 <= column < W:
            result[b, c, i, j] += weight[b, c // (C // G), u, v, i, j] * input[b, c, row, column]
    return result


@pytest.mark.parametrize(("stride", "padding", "dilation"), STEPS, ids=str)
def test_by_definition(stride: Any, padding: Any, dilation: Any) -> None:
    input = torch.rand(1, 4, 6, 7, dtype=torch.float64)
    pairs = [(value, value) if isinstance(value, int) else value for value in (stride, padding, dilation)]
    Ho, Wo = (output_size(size, 3, *(pair[i] for pair in pairs)) for i, size in enumerate((6, 7)))
    weight = torch.rand(1, 2, 3, 3, Ho, Wo, dtype=torch.float64)
    torch.testing.assert_close(
        involution(input, weight, stride, padding, dilation),
        by_definition(input, weight, stride, padding, dilation),
    )


@pytest.mark.parametrize(("stride", "padding", "dilation"), STEPS, ids=str)
def test_same_kernel_everywhere_is_convolution(stride: Any, padding: Any, dilation: Any) -> None:
    input = torch.rand(2, 4, 6, 7, dtype=torch.float64, requires_grad=True)
    kernel = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    depthwise = kernel.repeat_interleave(2, 0).unsqueeze(1)
    expected = F.conv2d(input, depthwise, None, stride, padding, dilation, groups=4)
    weight = kernel[None, ..., None, None].expand(2, -1, -1, -1, *expected.shape[2:])
    result = involution(input, weight, stride, padding, dilation)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result.sin().sum(), (input, kernel)),
        torch.autograd.grad(expected.sin().sum(), (input, kernel)),
    )


REFUSED = {
    "input": (
        (4, 5, 5),
        (2, 2, 3, 3, 3, 3),
        {},
        "opsmith::involution: `input` has the wrong shape\n"
        "  argument: input\n"
        "  expected: `B C H W`: 4 dimensions\n"
        "  got: [4, 5, 5]\n"
        f"  where: {involution.specification.where}\n"
        "  hint: call it with `input: B C H W, weight: B G Kh Kw Ho Wo -> B C Ho Wo`",
    ),
    "weight": (
        (2, 4, 5, 5),
        (2, 2, 9, 3, 3),
        {},
        "opsmith::involution: `weight` has the wrong shape\n"
        "  argument: weight\n"
        "  expected: `B G Kh Kw Ho Wo`: 6 dimensions\n"
        "  got: [2, 2, 9, 3, 3]\n"
        f"  where: {involution.specification.where}\n"
        "  hint: call it with `input: B C H W, weight: B G Kh Kw Ho Wo -> B C Ho Wo`",
    ),
    "groups": (
        (2, 4, 5, 5),
        (2, 3, 3, 3, 3, 3),
        {},
        "opsmith::involution: expected G to divide C, got G = 3 and C = 4; "
        "choose a different number of groups or of channels",
    ),
    "batch": (
        (2, 4, 5, 5),
        (1, 2, 3, 3, 3, 3),
        {},
        "opsmith::involution: `weight` has the wrong shape\n"
        "  argument: weight\n"
        "  expected: `B G Kh Kw Ho Wo` with B = 2\n"
        "  got: [1, 2, 3, 3, 3, 3]\n"
        f"  where: {involution.specification.where}\n"
        "  hint: call it with `input: B C H W, weight: B G Kh Kw Ho Wo -> B C Ho Wo`",
    ),
    "output": (
        (2, 4, 5, 5),
        (2, 2, 3, 3, 5, 5),
        {"stride": 2, "padding": 1},
        "opsmith::involution: expected weight [B, G, Kh, Kw, Ho, Wo] = [2, 2, 3, 3, 3, 3], "
        "got [2, 2, 3, 3, 5, 5]"
        "; this shape follows from the other arguments: change this shape or the other arguments",
    ),
    "stride": (
        (2, 4, 5, 5),
        (2, 2, 3, 3, 3, 3),
        {"stride": (1, 0)},
        "opsmith::involution: expected stride and dilation of at least 1 and padding of at least 0, "
        "got stride (1, 0), dilation (1, 1), padding (0, 0); give valid numbers or pairs of numbers",
    ),
    "padding": (
        (2, 4, 5, 5),
        (2, 2, 3, 3, 3, 3),
        {"padding": -1},
        "opsmith::involution: expected stride and dilation of at least 1 and padding of at least 0, "
        "got stride (1, 1), dilation (1, 1), padding (-1, -1); give valid numbers or pairs of numbers",
    ),
    "kernel": (
        (2, 4, 5, 5),
        (2, 2, 7, 3, 1, 3),
        {},
        "opsmith::involution: expected an image that is, with padding, at least as large as the kernel, "
        "got H, W = [5, 5], "
        "padding (0, 0), Kh, Kw = [7, 3], dilation (1, 1); "
        "use a larger padding, or a smaller kernel or dilation",
    ),
}


@pytest.mark.parametrize(("input", "weight", "steps", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(
    input: tuple[int, ...], weight: tuple[int, ...], steps: dict[str, Any], message: str
) -> None:
    for known in (False, True):
        if known:  # the kernel tells sizes of calls of this kind now, and not the reference
            involution(torch.ones(2, 4, 5, 5), torch.ones(2, 2, 3, 3, 3, 3))
            involution(torch.ones(2, 4, 5, 5), torch.ones(2, 2, 3, 3, 3, 3), stride=2, padding=1)
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n  more: .*)?$"):
            involution(torch.ones(input), torch.ones(weight), **steps)


CALLS: dict[str, tuple[Any, tuple[str, str], tuple[Any, ...]]] = {
    "forward": (involution, ("input", "weight"), ()),
    "input gradient": (involution_input_gradient, ("cotangent", "weight"), ((3, 3),)),
    "weight gradient": (involution_weight_gradient, ("cotangent", "input"), (1, (1, 1))),
}


@pytest.mark.parametrize(("operator", "names", "more"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("change", [torch.float64, torch.device("meta")], ids=str)
def test_tensors_of_two_kinds_are_refused(
    operator: Any, names: tuple[str, str], more: tuple[Any, ...], change: Any
) -> None:
    shapes = {"input": (2, 4, 3, 3), "cotangent": (2, 4, 3, 3), "weight": (2, 1, 1, 1, 3, 3)}
    one, other = (torch.ones(shapes[name]) for name in names)
    operator(one, other, *more)
    other = other.to(change)
    message = (
        f"{operator.name}: expected `{names[0]}` and `{names[1]}` of the same dtype on the same device, "
        f"got torch.float32 on cpu and {other.dtype} on {other.device}; "
        f"convert one of them: `{names[1]}.to({names[0]})`"
    )
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n  more: .*)?$"):
        operator(one, other, *more)


def test_gradients_refuse_a_cotangent_of_another_size() -> None:
    message = (
        "opsmith::involution_weight_gradient: expected cotangent [B, C, Ho, Wo] = [2, 4, 3, 3], "
        "got [2, 4, 5, 5]"
        "; this shape follows from the other arguments: change this shape or the other arguments"
    )
    cotangent, input, weight = torch.ones(2, 4, 5, 5), torch.ones(2, 4, 5, 5), torch.ones(2, 2, 3, 3, 3, 3)
    with pytest.raises(ValueError, match="`B G Kh Kw Ho Wo` with Ho = 5\n  got: \\[2, 2, 3, 3, 3, 3\\]"):
        involution_input_gradient(cotangent, weight, (5, 5))
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n  more: .*)?$"):
        involution_weight_gradient(cotangent, input, 2, (3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_lower_precision_under_autocast(dtype: torch.dtype) -> None:
    input, weight = torch.rand(1, 2, 3, 3, requires_grad=True), torch.rand(1, 1, 3, 3, 3, 3)
    with torch.autocast("cpu", dtype=dtype):
        result = involution(input, weight, padding=1)
    assert result.dtype == dtype
    result.sum().backward()
    assert input.grad is not None
    assert input.grad.dtype == torch.float32


@pytest.mark.parametrize("function", [involution, involution.reference], ids=["operator", "reference"])
def test_results_lie_the_same_for_any_number_of_groups(function: Any) -> None:
    for groups in (2, 1, 3, 16):
        weight = torch.randn(2, groups, 3, 3, 3, 3).mT
        for format in (torch.contiguous_format, torch.channels_last):
            image = torch.randn(2, 48, 3, 3).contiguous(memory_format=format)
            assert function(image, weight, 1, 1).is_contiguous(), (groups, format)


@pytest.mark.parametrize("shape", [(1, 2, 3, 3, 20, 20), (1, 2, 3, 3, 3, 3), (1, 3, 3, 3, 4, 4)], ids=str)
def test_remembered_forms_of_calls_refuse_wrong_weights(shape: tuple[int, ...]) -> None:
    for groups, side in ((1, 5), (2, 6), (1, 4), (2, 9), (4, 5), (2, 5)):
        weight = torch.ones(2, groups, 3, 3, side - 2, side - 2)
        involution(torch.ones(2, 4 * groups, side, side), weight)
    with pytest.raises(ValueError, match="expected"):
        involution(torch.ones(1, 4, 6, 6), torch.ones(shape))
