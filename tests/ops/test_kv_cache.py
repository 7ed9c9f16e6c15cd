"""Keys and values are written into the slots of a paged cache, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.ops import write_kv_cache

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int8)
BLOCKS, SIZE, HEADS, DIM = 5, 4, 2, 3


def plainly(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    cache = cache.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row
    return cache


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-9, 9, shape).to(dtype)


def by_heads(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory with the heads outside of the tokens, as many engines keep it."""
    *outer, inner, heads, dim = shape
    return contiguous((*outer, heads, inner, dim), dtype).transpose(-2, -3)


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((*shape[:-1], 2 * shape[-1]), dtype)[..., 1::2]


def of_a_layer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((3, *shape), dtype)[1]


@pytest.mark.every(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [contiguous, by_heads, strided, of_a_layer])
@pytest.mark.parametrize("slots", [[7, 0, 19], [-1, 3], [-1], [2], []], ids=str)
def test_values(
    slots: list[int], layout: Callable[[tuple[int, ...], torch.dtype], Tensor], dtype: torch.dtype
) -> None:
    places = torch.tensor(slots, dtype=torch.int64)
    for _ in range(2):
        caches = [layout((BLOCKS, SIZE, HEADS, dim), dtype) for dim in (DIM, DIM + 1)]
        rows = [layout((len(slots), HEADS, dim), dtype) for dim in (DIM, DIM + 1)]
        right = [plainly(cache, row, places) for cache, row in zip(caches, rows, strict=True)]
        assert write_kv_cache(*caches, *rows, places) is None
        for cache, expected in zip(caches, right, strict=True):
            assert torch.equal(cache, expected)


def test_the_kernel_takes_any_layout() -> None:
    cache, rows = strided((BLOCKS, SIZE, HEADS, DIM), torch.float32), torch.ones(2, HEADS, DIM)
    said = write_kv_cache.explain(cache, cache.clone(), rows, rows, torch.tensor([1, 2]))
    assert "kernel for cpu" in said.forward


def test_gradients() -> None:
    caches = [torch.randn(2, 2, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rows = [torch.randn(3, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    slots = torch.tensor([3, -1, 0])
    assert torch.autograd.gradcheck(lambda *given: write_kv_cache.functional(*given, slots), (*caches, *rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)  # the kernel, and the reference
def test_a_slot_beyond_the_cache(dtype: torch.dtype) -> None:
    caches = [torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=dtype) for _ in range(2)]
    rows = torch.ones(2, HEADS, DIM, dtype=dtype)
    for _ in range(2):
        with pytest.raises((errors.KernelError, IndexError), match=r"beyond the cache|out of range"):
            write_kv_cache(*caches, rows, rows, torch.tensor([0, BLOCKS * SIZE]))
        assert_close(caches[0], torch.zeros_like(caches[0]))


def test_dtypes_that_differ() -> None:
    caches, rows = [torch.zeros(BLOCKS, SIZE, HEADS, DIM) for _ in range(2)], torch.ones(2, HEADS, DIM)
    with pytest.raises(
        ValueError, match=r"keys and values are torch.float32 and torch.float64, but the caches"
    ):
        write_kv_cache(*caches, rows, rows.double(), torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        write_kv_cache(*caches, rows, rows, torch.tensor([0, BLOCKS * SIZE], dtype=torch.int32))
    assert not caches[0].any()


def test_shapes() -> None:
    cache, rows = torch.zeros(BLOCKS, SIZE, HEADS, DIM), torch.ones(2, HEADS, DIM)
    with pytest.raises(errors.ShapeError):
        write_kv_cache(cache, cache.clone(), rows, rows, torch.tensor([0]))
    with pytest.raises(errors.ShapeError):
        write_kv_cache(cache, cache.clone(), rows[:, :1], rows, torch.tensor([0, 1]))
    with pytest.raises(errors.MutationError, match="shares elements"):
        write_kv_cache(cache, cache, rows, rows, torch.tensor([0, 1]))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    def decode(caches: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        write_kv_cache(caches[0], caches[1], rows * 2, rows, slots)
        return caches.sum()

    caches, rows, slots = (
        torch.zeros(2, BLOCKS, SIZE, HEADS, DIM),
        torch.ones(2, HEADS, DIM),
        torch.tensor([4, -1]),
    )
    torch.compiler.reset()
    with torch.no_grad():
        total = torch.compile(decode, backend=backend, fullgraph=True)(caches, rows, slots)
    assert total.item() == 3 * HEADS * DIM
    assert_close(caches[0], plainly(torch.zeros_like(caches[0]), 2 * rows, slots))


@pytest.mark.slow
def test_check_passes() -> None:
    report = opsmith.check(write_kv_cache, effort="quick", skip=["compile", "export", "opcheck"])
    assert report.passed, report
    assert {each.property for each in report.failures} == {"vmap"}  # the sizes of its masks depend on data
