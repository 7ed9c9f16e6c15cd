"""Normalisation by the root mean square is right in each dtype and layout, and so are its gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_layouts import contiguous, expanded, of_a_wider_row, strided, transposed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import opsmith
from opsmith import errors, ops
from opsmith.ops import add_rms_norm_, rms_norm
from opsmith.ops.rms_norm import rms_norm_backward

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = [(5, 3), (2, 3, 70), (7,), (0, 3), (1, 1), (2, 2, 3, 64)]
EPS = 1e-5


LAYOUTS = [contiguous, transposed, strided, of_a_wider_row, expanded]
Layout = Callable[[tuple[int, ...], torch.dtype], Tensor]


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


@pytest.mark.every(8)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values_and_gradients(
    dtype: torch.dtype, shape: tuple[int, ...], layout: Layout, weighted: bool
) -> None:
    torch.manual_seed(0)  # of a row of one element nearly all cancels: how many digits are left depends on it
    x, weight = layout(shape, dtype), layout((shape[-1],), dtype) if weighted else None
    cotangent = layout(shape, dtype)
    given = [each for each in (x, weight) if each is not None]
    y = rms_norm(x, weight, EPS)
    wide = [each.detach().double().requires_grad_() for each in given]
    expected = norm(wide[0], wide[1] if weighted else None)
    assert y.dtype == dtype
    assert not y.numel() or y.stride() == rms_norm.reference(x, weight, EPS)[0].stride()
    assert_close(y, expected.to(dtype))
    leaves = [each.detach().requires_grad_() for each in given]
    made = torch.autograd.grad(rms_norm(leaves[0], leaves[1] if weighted else None, EPS), leaves, cotangent)
    for gradient, right in zip(made, torch.autograd.grad(expected, wide, cotangent.double()), strict=True):
        assert gradient.dtype == dtype
        assert_close(gradient, right.to(dtype))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_several_threads_and_many_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # sums of 1000 rows: whether they round alike depends on the numbers
    x, weight, cotangent = (torch.randn(size).to(dtype) for size in [(1000, 65), (65,), (1000, 65)])
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    y, expected = rms_norm(x, weight, EPS), norm(*wide)
    assert_close(y, expected.to(dtype))
    made = torch.autograd.grad(y, leaves, cotangent)
    right = torch.autograd.grad(expected, wide, cotangent.double())
    assert_close(made[0], right[0].to(dtype))
    # A sum over rows is off by no more than rounding of the sum of its terms' magnitudes.
    terms = (cotangent.double() * expected / weight.double()).abs().sum(0)
    off = (made[1].double() - right[1]).abs()
    assert (off <= torch.finfo(made[1].dtype).eps * terms).all()


def test_the_kernels_take_any_layout() -> None:
    x = strided((2, 3, 5), torch.float32)
    said = rms_norm.explain(x, x[0, 0], EPS)
    assert "kernel for cpu" in said.forward
    assert not said.copies
    said = rms_norm_backward.explain(x, x, x[0, 0], torch.ones(2, 3, 1))
    assert "kernel for cpu" in said.forward
    assert not said.copies


def test_a_weight_of_another_dtype() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8)
    y = rms_norm(x, weight, EPS)
    assert_close(y, (norm(x.float(), None) * weight).bfloat16())


def test_second_order() -> None:
    x, weight = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(3, 4), (4,)])
    assert torch.autograd.gradgradcheck(rms_norm, (x, weight))


@pytest.mark.every(8)
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each is not expanded])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_added_and_normalised(dtype: torch.dtype, shape: tuple[int, ...], layout: Layout) -> None:
    weight = layout((shape[-1],), dtype)
    x, residual = layout(shape, dtype), layout(shape, dtype)
    total = residual + x
    expected = rms_norm(total, weight, EPS)
    assert add_rms_norm_(x, residual, weight, EPS) is None
    assert torch.equal(residual, total)
    assert_close(x, expected)


def test_added_in_threads() -> None:
    x, residual = torch.randn(999, 65), torch.randn(999, 65)
    total = residual + x
    add_rms_norm_(x, residual, None, EPS)
    assert torch.equal(residual, total)
    assert_close(x, norm(total, None))


@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_what_is_added(weighted: bool) -> None:
    x, residual, weight = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(3, 4), (3, 4), (4,)]
    )
    given = (x, residual, weight) if weighted else (x, residual)
    assert torch.autograd.gradcheck(add_rms_norm_.functional, given)
    assert torch.autograd.gradgradcheck(add_rms_norm_.functional, given)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        add_rms_norm_(x, residual, weight)
        return rms_norm(x * 2, weight)

    given = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    copies = [each.clone() for each in given]
    torch.compiler.reset()
    y = torch.compile(block, backend=backend, fullgraph=True)(*given)
    assert_close(y, block(*copies))
    assert_close(given, tuple(copies))


def test_the_module_is_as_torch_has_it() -> None:
    mine, theirs = ops.RMSNorm(6, eps=EPS), nn.RMSNorm(6, eps=EPS)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 6)
    assert_close(mine(x), theirs(x))
    assert_close(mine.weight, theirs.weight)


def test_shapes() -> None:
    with pytest.raises(errors.ShapeError):
        rms_norm(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(errors.ShapeError):
        add_rms_norm_(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"x must be floating, not torch.int16"):
        rms_norm(torch.ones(2, 3, dtype=torch.int16))
    numbers = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x must be floating, not torch.int64"):
        add_rms_norm_(numbers.clone(), numbers)
    assert torch.equal(numbers, torch.ones_like(numbers))
    x = torch.ones(2, 3)
    with pytest.raises(errors.MutationError, match="shares elements"):
        add_rms_norm_(x, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [rms_norm, *(pytest.param(each, marks=pytest.mark.slow) for each in (rms_norm_backward, add_rms_norm_))],
    ids=lambda each: each.name,
)
def test_check_passes(operator: opsmith.Operator[..., object]) -> None:
    report = opsmith.check(operator, effort="quick")
    assert report.passed, report
    assert not report.failures
