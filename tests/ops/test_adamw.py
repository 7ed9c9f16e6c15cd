"""A step of AdamW does what torch's optimizer does, in each dtype and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_layouts import contiguous, strided, transposed
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.ops import adamw_

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = [(3,), (2, 5), (), (0, 2), (4, 3, 2)]
Layout = Callable[[tuple[int, ...], torch.dtype], Tensor]


def of_a_larger_one(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((2, *shape), dtype)[1]


Four = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
LAYOUTS = [contiguous, transposed, strided, of_a_larger_one]


def state(shapes: list[tuple[int, ...]], layout: Layout, dtype: torch.dtype) -> Four:
    """Parameters, their gradients, means and squares."""
    parameters, gradients, means, squares = ([layout(shape, dtype) for shape in shapes] for _ in range(4))
    for square in squares:
        square.copy_(square.square())
    return parameters, gradients, means, squares


OPTIONS = (0.1, 0.8, 0.95, 1e-6, 0.05)
"""Learning rate, beta1, beta2, eps and weight decay."""


def expected_step(four: Four, step: Tensor) -> list[list[Tensor]]:
    """The same step in float64, by the formulas of the paper."""
    wide = [[each.double() for each in tensors] for tensors in four]
    rate, beta1, beta2, eps, decay = OPTIONS
    count = step.double() + 1
    for parameter, gradient, mean, square in zip(*wide, strict=True):
        mean.copy_(beta1 * mean + (1 - beta1) * gradient)
        square.copy_(beta2 * square + (1 - beta2) * gradient**2)
        corrected_mean, corrected_square = mean / (1 - beta1**count), square / (1 - beta2**count)
        decayed = parameter * (1 - rate * decay)
        parameter.copy_(decayed - rate * corrected_mean / (corrected_square.sqrt() + eps))
    return wide


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values(dtype: torch.dtype, layout: Layout) -> None:
    four = state(SHAPES, layout, dtype)
    step = torch.tensor(2.0, dtype=torch.promote_types(dtype, torch.float32))
    assert "kernel for cpu" in adamw_.explain(*four, step).forward
    for count in (3, 4):
        right = expected_step(four, step)
        gradients = [each.clone() for each in four[1]]
        assert adamw_(*four, step, *OPTIONS) is None
        for made, wide in zip(four, right, strict=True):
            for tensor, truth in zip(made, wide, strict=True):
                assert_close(tensor, truth.to(dtype))
        assert_close(four[1], gradients, rtol=0, atol=0)
        assert step.item() == count


@pytest.mark.parametrize("layout", [contiguous, strided])
def test_many_pieces(layout: Layout) -> None:
    four, step = state([(70_001,), (300, 200), (1,)], layout, torch.float32), torch.tensor(0.0)
    right = expected_step(four, step)
    adamw_(*four, step, *OPTIONS)
    for made, wide in zip(four, right, strict=True):
        assert_close(made, [each.float() for each in wide])


def test_layouts_that_differ_from_tensor_to_tensor() -> None:
    makers = [contiguous, transposed, strided, of_a_larger_one]
    parameters, gradients, means, squares = ([make((5, 4), torch.float32)] for make in makers)
    squares[0].copy_(squares[0].square())
    four = parameters, gradients, means, squares
    step = torch.tensor(0.0)
    right = expected_step(four, step)
    adamw_(*four, step, *OPTIONS)
    for made, wide in zip(four, right, strict=True):
        assert_close(made, [each.float() for each in wide])


def test_as_torch_does_it() -> None:
    parameters = [torch.randn(5, 3), torch.randn(7)]
    theirs = [each.clone().requires_grad_() for each in parameters]
    optimizer = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    means, squares = ([torch.zeros_like(each) for each in parameters] for _ in range(2))
    step = torch.tensor(0.0)
    for _ in range(10):
        gradients = [torch.randn_like(each) for each in parameters]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        adamw_(
            parameters,
            gradients,
            means,
            squares,
            step,
            learning_rate=0.01,
            beta1=0.8,
            beta2=0.95,
            weight_decay=0.1,
        )
    assert_close(parameters, [each.detach() for each in theirs])


def test_leaves_are_written_without_gradients_alone() -> None:
    parameter = torch.ones(2, requires_grad=True)
    rest = [torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)], torch.tensor(0.0)
    with pytest.raises(errors.MutationError, match="is a leaf that requires a gradient"):
        adamw_([parameter], *rest)
    before = parameter._version
    with torch.no_grad():
        adamw_([parameter], *rest)
    assert parameter._version > before
    assert parameter.requires_grad


def test_nothing_to_update() -> None:
    step = torch.tensor(0.0)
    adamw_([], [], [], [], step)
    assert step.item() == 1


def test_gradients_through_a_step() -> None:
    wide = torch.float64
    given = [torch.randn(3, dtype=wide, requires_grad=True) for _ in range(3)]
    square = torch.rand(3, dtype=wide) + 0.5

    def stepped(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        step = torch.tensor(1.0, dtype=wide)
        new: Tensor = adamw_.functional([parameter], [gradient], [mean], [square], step, 0.1)[0][0]
        return new

    assert torch.autograd.gradcheck(stepped, (*given, square.requires_grad_()))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    four, step = state([(3,), (2, 4)], contiguous, torch.float32), torch.tensor(0.0)
    right = expected_step(four, step)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(adamw_, backend=backend, fullgraph=True)(*four, step, *OPTIONS)
    for made, wide in zip(four, right, strict=True):
        assert_close(made, [each.float() for each in wide])
    assert step.item() == 1


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    two, step = [torch.ones(2), torch.ones(3)], torch.tensor(0.0)
    gradients, means, squares = ([each.clone() for each in two] for _ in range(3))
    adamw_(two, gradients, means, squares, step)  # the kernel looks at calls whose signature is known
    for each in (*two, *means, *squares):
        each.fill_(1)
    step.zero_()
    error = errors.KernelError, ValueError
    for call in (adamw_, adamw_.reference):
        with pytest.raises(error, match="derivatives has 1 tensors for 2 parameters"):
            call(two, gradients[:1], means, squares, step)
        shapes = r"squares\[1\] has (the shape \[2\], but parameters\[1\] has \[3\]|another shape)"
        with pytest.raises(error, match=shapes):
            call(two, gradients, means, [torch.ones(2), torch.ones(2)], step)
    with pytest.raises(ValueError, match=r"parameters\[0\] must be floating, not torch.int64"):
        adamw_([torch.ones(2, dtype=torch.int64)], gradients[:1], means[:1], squares[:1], step)
    with pytest.raises(
        ValueError, match=r"step is torch.float32 of shape \[1\]: a floating number is needed"
    ):
        adamw_(two, gradients, means, squares, torch.zeros(1))
    with pytest.raises(errors.MutationError, match="shares elements"):
        adamw_(two, gradients, means, means, step)
    assert step.item() == 0
    for tensors in (two, means, squares):
        assert_close(tensors, [torch.ones(2), torch.ones(3)])


@pytest.mark.slow
def test_check_passes() -> None:
    report = opsmith.check(adamw_, effort="quick")
    assert report.passed, report
    assert not report.failures
