"""Calls of the operators of a language model, by dtype and layout, for their CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from random_layouts import contiguous, of_a_wider_row, strided, transposed
from torch import Tensor

import opsmith
from opsmith.core.call_arguments import tensors_in
from opsmith.core.tensors import map_tensors
from opsmith.ops import adamw_, add_rms_norm_, rms_norm, rope_, rope_table, write_kv_cache
from opsmith.ops.rms_norm import rms_norm_backward

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EPS = 1e-5
Make = Callable[..., Tensor]
Layout = Callable[[tuple[int, ...], torch.dtype], Tensor]


def of_a_layer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return contiguous((3, *shape), dtype)[1]


LAYOUTS: tuple[Layout, ...] = (contiguous, transposed, strided, of_a_wider_row, of_a_layer)

# Rows of a warp and of a block, read in pieces of 16 bytes and number by number; many rows.
ROWS = [(5, 3), (2, 3, 72), (7,), (1, 1), (2, 2, 3, 64), (2, 136), (3, 133), (1, 1040), (300, 8), (0, 3)]


def of_rms_norm(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in ROWS:
        yield make(*shape), make(shape[-1]), EPS
    yield make(3, 4), None, EPS
    yield make(3, 0), None, EPS


def of_rms_norm_backward(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in (*ROWS, (8200, 2)):  # the last has more rows than threads that share them take at once
        x = make(*shape)
        rstd = rms_norm.reference(x, None, EPS)[1]
        yield make(*shape), x, make(shape[-1]), rstd


def of_add_rms_norm_(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in ROWS:
        yield make(*shape), make(*shape), make(shape[-1]), EPS
    yield make(3, 4), make(3, 4), None, EPS


def of_write_kv_cache(make: Make) -> Iterator[tuple[Any, ...]]:
    for heads, dim, slots in (2, 3, [7, 0, 19]), (11, 40, [-1, 3]), (1, 1, [-1]), (2, 3, []), (0, 3, [1]):
        caches = make(5, 4, heads, dim), make(5, 4, heads, dim + 1)
        tokens = len(slots)
        places = torch.tensor([slots, slots], dtype=torch.int64).T[:, 1]
        yield *caches, make(tokens, heads, dim), make(tokens, heads, dim + 1), places


def of_rope_(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in (5, 2, 8), (2, 3, 2, 7), (4, 6), (0, 2, 4), (3, 0, 4), (2, 11, 136), (3, 2, 64):
        for interleaved in (False, True):
            x = make(*shape)
            table = rope_table(9, shape[-1] // 4 * 2, dtype=torch.promote_types(x.dtype, torch.float32))
            positions = torch.randint(9, (*shape[:-2], 2))[..., 1]
            yield x, table if shape[-1] == 64 else table.T.contiguous().T, positions, interleaved


def of_adamw_(make: Make) -> Iterator[tuple[Any, ...]]:
    for shapes in [(3,), (2, 5), (0, 2), (4, 3, 2), (1200,)], [(1, 1)], []:
        four = [[make(*shape) for shape in shapes] for _ in range(4)]
        for square in four[3]:
            square.copy_(square.square())
        step = torch.tensor(2.0, dtype=torch.promote_types(make(1).dtype, torch.float32))
        yield *four, step, 0.1, 0.8, 0.95, 1e-6, 0.05


CALLS: dict[opsmith.Operator[..., Any], Callable[[Make], Iterator[tuple[Any, ...]]]] = {
    rms_norm: of_rms_norm,
    rms_norm_backward: of_rms_norm_backward,
    add_rms_norm_: of_add_rms_norm_,
    write_kv_cache: of_write_kv_cache,
    rope_: of_rope_,
    adamw_: of_adamw_,
}


def calls(operator: opsmith.Operator[..., Any], dtype: torch.dtype, layout: Layout) -> list[tuple[Any, ...]]:
    return [*CALLS[operator](lambda *shape: layout(shape, dtype))]


def results(operator: opsmith.Operator[..., Any], returned: Any, given: tuple[Any, ...]) -> list[Tensor]:
    """What a call writes, or else returns."""
    named = dict(zip(operator.specification.schema.names, given, strict=False))
    return tensors_in([named[name] for name in operator.specification.schema.written] or [*returned])


def expected(operator: opsmith.Operator[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """What the reference writes or returns; its arguments are copies."""
    # The reference of AdamW rounds numbers of 16 bits after each operation.
    wide = torch.float64 if operator is adamw_ else None
    copies = map_tensors(lambda tensor: tensor.to(wide or tensor.dtype, copy=True), given)
    found = results(operator, operator.reference(*copies), tuple(copies))
    return [each.to(like.dtype) for each, like in zip(found, results(operator, found, given), strict=True)]
