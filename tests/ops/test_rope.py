"""Rotary position embedding turns pairs of numbers in place, in each dtype and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_layouts import contiguous, strided, transposed
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.ops import rope_, rope_table

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = [(5, 2, 8), (2, 3, 2, 7), (4, 6), (0, 2, 4), (3, 0, 4), (70, 3, 64)]
Layout = Callable[[tuple[int, ...], torch.dtype], Tensor]


def by_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Queries as attention keeps them, with the heads outside of the tokens."""
    return contiguous((shape[-2], *shape[:-2], shape[-1]), dtype).movedim(0, -2)


def turned(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding by complex numbers: a pair (a, b) is a + bi, and its angle a factor."""
    cos, sin = cos_sin.double()[positions.flatten()].chunk(2, -1)
    factors = torch.complex(cos, sin).reshape(*positions.shape, 1, cos.shape[-1])
    wide, count = x.double(), cos_sin.shape[-1]
    if interleaved:
        pairs = wide[..., :count].unflatten(-1, (count // 2, 2))
    else:
        pairs = wide[..., :count].unflatten(-1, (2, count // 2)).transpose(-1, -2)
    numbers = torch.view_as_real(torch.complex(*pairs.unbind(-1)) * factors)
    new = numbers if interleaved else numbers.transpose(-1, -2)
    return torch.cat([new.flatten(-2), wide[..., count:]], -1).to(x.dtype)


@pytest.mark.every(8)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", [contiguous, transposed, strided, by_heads])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values(dtype: torch.dtype, shape: tuple[int, ...], layout: Layout, interleaved: bool) -> None:
    table = rope_table(9, shape[-1] // 4 * 2 or 2, dtype=torch.promote_types(dtype, torch.float32))
    positions = torch.randint(9, shape[:-2])
    for _ in range(2):
        x = layout(shape, dtype)
        expected = turned(x, table, positions, interleaved)
        assert rope_(x, table, positions, interleaved) is x
        assert_close(x, expected)


@pytest.mark.parametrize("layout", [contiguous, transposed, strided, by_heads])
def test_the_kernel_takes_any_layout(layout: Layout) -> None:
    x, table, positions = layout((3, 2, 4), torch.bfloat16), rope_table(3, 4), torch.tensor([2, 0, 1])
    said = rope_.explain(x, table, positions)
    assert "kernel for cpu" in said.forward
    assert not any("contiguous" in each for each in said.copies)


def test_a_table_of_16_bits() -> None:
    x, table, positions = torch.randn(3, 2, 4).bfloat16(), rope_table(3, 4).bfloat16(), torch.arange(3)
    expected = turned(x, table, positions, False)
    assert "reference" in rope_.explain(x, table, positions).forward
    rope_(x, table, positions)
    assert_close(x, expected, rtol=0.05, atol=0.05)  # each of its products is rounded to 16 bits


def test_products_depend_on_the_distance_of_positions_alone() -> None:
    query, key = torch.randn(1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 8, dtype=torch.float64)
    table = rope_table(20, 8, dtype=torch.float64)

    def product(at: int, other: int) -> Tensor:
        turned_query: Tensor = rope_.functional(query, table, torch.tensor([at]))
        turned_key: Tensor = rope_.functional(key, table, torch.tensor([other]))
        return (turned_query * turned_key).sum()

    assert_close(product(3, 1), product(17, 15))
    assert not torch.isclose(product(3, 1), product(3, 2))


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    x, table = torch.randn(3, 2, 7, dtype=torch.float64), rope_table(5, 4, dtype=torch.float64)
    positions = torch.tensor([4, 0, 4])
    given = x.requires_grad_(), table.requires_grad_()
    assert torch.autograd.gradcheck(lambda *two: rope_.functional(*two, positions, interleaved), given)
    assert torch.autograd.gradgradcheck(lambda *two: rope_.functional(*two, positions, interleaved), given)


def test_a_backward_saves_no_values_of_x() -> None:
    kept: list[Tensor] = []
    x = torch.randn(3, 2, 4, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda each: each):
        rope_(x, rope_table(5, 4), torch.arange(3))
    assert {each.shape for each in kept} == {(5, 4), (3,)}


def test_gradients_of_a_call_in_place() -> None:
    x, table = torch.randn(3, 2, 4, requires_grad=True), rope_table(3, 4)
    y = x * 2
    rope_(y, table, torch.arange(3))
    cotangent = torch.randn(3, 2, 4)
    y.backward(cotangent)
    back = torch.cat([table[:, :2], -table[:, 2:]], -1)
    assert_close(x.grad, 2 * turned(cotangent, back, torch.arange(3), False))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    def both(qkv: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        query, key, _ = qkv.unbind(1)
        rope_(query, table, positions)
        rope_(key, table, positions)
        return qkv * 1

    qkv, table, positions = torch.randn(3, 3, 2, 4), rope_table(3, 4), torch.arange(3)
    expected = both(qkv.clone(), table, positions)
    torch.compiler.reset()
    with torch.no_grad():
        assert_close(torch.compile(both, backend=backend, fullgraph=True)(qkv, table, positions), expected)
    assert_close(qkv, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)  # the kernel, and the reference
@pytest.mark.parametrize("position", [-1, 3])
def test_a_position_beyond_the_table(position: int, dtype: torch.dtype) -> None:
    x = torch.ones(2, 1, 4, dtype=dtype)
    with pytest.raises(
        (errors.KernelError, IndexError, RuntimeError), match=r"beyond the table|out of range"
    ):
        rope_(x, rope_table(3, 4).to(dtype), torch.tensor([0, position]))
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.parametrize("columns", [3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)  # the kernel, and the reference
def test_a_table_that_does_not_fit(dtype: torch.dtype, columns: int) -> None:
    x = torch.ones(2, 1, 4, dtype=dtype)
    message = f"cos_sin has {columns} columns: an even number is needed, of at most 4"
    with pytest.raises((errors.KernelError, ValueError), match=message):
        rope_(x, torch.ones(3, columns, dtype=dtype), torch.tensor([0, 1]))


def test_refused() -> None:
    with pytest.raises(ValueError, match="rope_table: 3 positions of 3 numbers: an even number is needed"):
        rope_table(3, 3)
    with pytest.raises(ValueError, match="rope_table: -1 positions of 2 numbers"):
        rope_table(-1, 2)
    with pytest.raises(ValueError, match=r"x must be floating, not torch.int64"):
        rope_(torch.ones(2, 1, 4, dtype=torch.int64), rope_table(3, 4), torch.tensor([0, 1]))
    with pytest.raises(errors.ShapeError):
        rope_(torch.ones(2, 1, 4), rope_table(3, 4), torch.tensor([0]))
    with pytest.raises(errors.MutationError, match="several elements"):
        rope_(torch.ones(1, 1, 4).expand(2, 1, 4), rope_table(3, 4), torch.tensor([0, 1]))


@pytest.mark.slow
def test_check_passes() -> None:
    report = opsmith.check(rope_, effort="quick")
    assert report.passed, report
    assert not report.failures
