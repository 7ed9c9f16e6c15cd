"""Faults as people make them in involution's CUDA kernels, each a change of the text, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from involution_cases import BEYOND, KERNELS, OPERATORS, PLAIN, STRIDED, UNEVEN, Case

import opsmith
from opsmith.ops.involution import tiles

PROBLEMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "forward": (tiles.forward, ()),
    "input gradient": (tiles.input_gradient, ()),
    "weight gradient": (tiles.weight_gradient, ("IN_PIECES",)),
}
HEADER = "involution.cuh"
VALUES = "kernel-mismatch"
"""Cause of results other than the reference's; all others are findings of the emulation."""


@dataclass(frozen=True)
class Fault:
    """A fault in one of the kernels.

    Args:
        name: The fault, in words.
        kernel: The kernel: a key of `OPERATORS`.
        old: Text that stands once in the kernel, or in its header.
        new: Text in its place.
        shown: Cause by which it is found; empty for one that is not found.
        case: Sizes of the call.
        dtype: dtype of the call.
        why: Why it is not found.
    """

    name: str
    kernel: str
    old: str
    new: str
    shown: str
    case: Case = PLAIN
    dtype: torch.dtype = torch.float32
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def texts(self) -> tuple[str, str]:
        """The texts of the faulty kernel, and of its header."""
        source = KERNELS[self.kernel].source
        assert source.folder is not None
        kernel, header = source.text, (Path(source.folder) / HEADER).read_text()
        assert kernel.count(self.old) + header.count(self.old) == 1, f"{self}: the text has changed"
        return kernel.replace(self.old, self.new), header.replace(self.old, self.new)

    def operator(self, number: int) -> opsmith.Operator[..., Any]:
        """The operator with the faulty kernel."""
        text, header = self.texts()
        problem, constants = PROBLEMS[self.kernel]
        operator = opsmith.operator(f"involution_faults::number_{number}")(OPERATORS[self.kernel].reference)
        return operator.kernel(
            "cuda",
            cuda=text.replace(f'#include "{HEADER}"', header.replace("#pragma once", "")),
            entry=KERNELS[self.kernel].source.entry,
            dtypes=[self.dtype],
            **tiles.launched(problem, "K", "S", "D", "SHIFT", "C", *constants),
        )

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the call that shows it."""
        return self.case.calls(*self.case.tensors(torch.float64))[self.kernel]


WIDER = replace(UNEVEN, dilation=(2, 2), stride=(1, 2), padding=(2, 2))
PIECES = replace(STRIDED, channels=19)
"""The channels of a group are two pieces, of 10 and of 9."""
RAGGED = replace(PLAIN, size=(9, 11))
"""Rows are no vectors."""
TALL = replace(PLAIN, batch=1, channels=4, size=(40, 12), kernel=(3, 3), padding=(1, 1))
"""Several tiles above one another."""
TALL_STRIDED = replace(STRIDED, size=(40, 16))
PARTIAL = replace(PLAIN, batch=1, channels=19, size=(20, 20))
"""The last tile is not full, and the channels of a group are two pieces."""
MANY_TAPS = replace(PLAIN, batch=1, channels=4, size=(30, 30), kernel=(11, 3), padding=(5, 1))
"""The rows of taps are two rounds, the second not full."""
APART = replace(BEYOND, size=(4, 40), stride=(2, 12))
"""Steps that no tile is for, in the gradient by the input either."""
EDGE = replace(BEYOND, size=(4, 25), padding=(0, 5))
"""Steps that no tile is for; a tap meets the first column behind the image."""

FORWARD = [
    Fault(
        "no barrier between staging and use",
        "forward",
        "    __syncthreads();\n    if (i >= P || j >= Q) return;",
        "    if (i >= P || j >= Q) return;",
        "race",
    ),
    Fault(
        "a row of the halo too few",
        "forward",
        "const int staged = (rows - 1) * step + (U - 1) * gap + 1;",
        "const int staged = (rows - 1) * step + (U - 1) * gap;",
        "uninitialized",
    ),
    Fault(
        "dilation is left out between rows of taps",
        "forward",
        "line += gap * lies.row * N)",
        "line += lies.row * N)",
        VALUES,
        UNEVEN,
    ),
    Fault(
        "stride is left out between rows",
        "forward",
        "threadIdx.z * step * lies.row",
        "threadIdx.z * lies.row",
        VALUES,
        STRIDED,
    ),
    Fault(
        "padding of columns in the place of that of rows",
        "forward",
        "top * step - int(padding[0]), staged",
        "top * step - int(padding[1]), staged",
        VALUES,
        UNEVEN,
    ),
    Fault(
        "the first group's channels for every group",
        "forward",
        "stage<S>(input, at.batch, at.group * int64_t(channels) + first, lanes * C",
        "stage<S>(input, at.batch, first, lanes * C",
        VALUES,
    ),
    Fault(
        "no mask for the channels behind the last",
        "forward",
        "if (c * lanes < mine) store_strip<N>(to",
        "store_strip<N>(to",
        "out-of-bounds",
        STRIDED,
    ),
    Fault(
        "no mask for the columns behind the last, in a store",
        "forward",
        "if (unsigned(column + p) < unsigned(width)) at[p * apart] = T(numbers[p]);",
        "at[p * apart] = T(numbers[p]);",
        "race",
        RAGGED,
    ),
    Fault("sums that begin with anything", "forward", "A sums[C][N] = {};", "A sums[C][N];", VALUES),
    Fault(
        "sums of float64 in float",
        "forward",
        "sums[c][p] += by[v][p] * window.of(v, p);",
        "sums[c][p] = float(sums[c][p] + by[v][p] * window.of(v, p));",
        "precision",
        dtype=torch.float64,
    ),
    Fault(
        "sums that are rounded to 16 bits each time",
        "forward",
        "sums[c][p] += by[v][p] * window.of(v, p);",
        "sums[c][p] = A(T(sums[c][p] + by[v][p] * window.of(v, p)));",
        "",
        dtype=torch.bfloat16,
        why="results are off by 1.5 units in the last place of the largest: a check allows sums in 16 bits",
    ),
    Fault(
        "vectors from rows that are no multiples of one",
        "forward",
        "  return all % N == 0;",
        "  return true;",
        "misaligned",
        RAGGED,
    ),
    Fault(
        "each thread of a strip writes the same channels",
        "forward",
        "const int64_t channel = at.group * int64_t(channels) + first + lane;",
        "const int64_t channel = at.group * int64_t(channels) + first;",
        "race",
    ),
    Fault(
        "the index of a channel in 32 bits",
        "forward",
        "const int64_t channel = at.group * int64_t(channels) + first + lane;",
        "const int channel = at.group * channels + first + lane;",
        "",
        why="harmless: tiles are for fewer than 2^30 channels",
    ),
    Fault(
        "no mask for the columns behind the last, in a load",
        "forward",
        "to[p] = unsigned(column + p) < unsigned(width) ? A(*at) : A(0);",
        "to[p] = A(*at);",
        "out-of-bounds",
        RAGGED,
    ),
    Fault(
        "strides of taps swapped",
        "forward",
        "for (int v = 0; v < K; v++, tap += weight.stride(3)) load_strip<0>",
        "for (int v = 0; v < K; v++, tap += weight.stride(2)) load_strip<0>",
        "out-of-bounds",
    ),
    Fault(
        "a column one too far to the right where there is no tile",
        "forward",
        "const bool inside = y >= 0 && y < input.size(2) && x >= 0 && x < input.size(3);\n#pragma",
        "const bool inside = y >= 0 && y < input.size(2) && x >= 0 && x <= input.size(3);\n#pragma",
        "out-of-bounds",
        EDGE,
    ),
]
INPUT_GRADIENT = [
    Fault(
        "no barrier between staging and use",
        "input gradient",
        "    __syncthreads();\n    if (y >= H || x >= W) return;",
        "    if (y >= H || x >= W) return;",
        "race",
    ),
    Fault(
        "rows above the image are rounded towards zero",
        "input gradient",
        "row = lowest < 0 ? -(-lowest / step) : over(lowest, step);",
        "row = over(lowest, step);",
        "",
        STRIDED,
        why="harmless: what it does not stage are rows above the first, which are skipped",
    ),
    Fault(
        "rows above the image are rounded down",
        "input gradient",
        "row = lowest < 0 ? -(-lowest / step) : over(lowest, step);",
        "row = lowest / step;",
        "uninitialized",
        TALL_STRIDED,
    ),
    Fault(
        "taps that are not turned round",
        "input gradient",
        "window.of(REACH - v * D / S, p)",
        "window.of(v * D / S, p)",
        VALUES,
    ),
    Fault(
        "a row of the halo too few",
        "input gradient",
        "const int staged = (rows - 1 + (U - 1) * gap) / step + 1;",
        "const int staged = (rows - 1 + (U - 1) * gap) / step;",
        "uninitialized",
        TALL,
    ),
    Fault(
        "dilation is left out of the phase",
        "input gradient",
        "sums[c][p * S + v * D % S]",
        "sums[c][p * S + v % S]",
        VALUES,
        WIDER,
    ),
    Fault(
        "rows that no pixel of the result meets are read",
        "input gradient",
        "      if (unsigned(i) >= unsigned(P)) continue;\n",
        "",
        "",
        why="weights of other rows, inside of the tensor, are multiplied by zeros that are staged: results "
        "differ only where such a weight is infinite",
    ),
    Fault(
        "no mask for the channels behind the last",
        "input gradient",
        "if (c * lanes < mine) store_strip<N * S>(to",
        "store_strip<N * S>(to",
        "out-of-bounds",
        STRIDED,
    ),
    Fault(
        "a column of the result in the kernel's own count",
        "input gradient",
        "            x * result.stride(3);",
        "            t * result.stride(3);",
        "misaligned",
    ),
    Fault(
        "from one row of taps to the next, as if all met the same row",
        "input gradient",
        "const int64_t next = apart * weight.stride(2) - back * weight.stride(4);",
        "const int64_t next = apart * weight.stride(2);",
        "out-of-bounds",
    ),
    Fault(
        "strides are not looked at where there is no tile",
        "input gradient",
        "if (above < 0 || i * stride[0] != above || i >= weight.size(4)) continue;",
        "if (above < 0 || i >= weight.size(4)) continue;",
        VALUES,
        APART,
    ),
    Fault(
        "weights of the first group for every group",
        "input gradient",
        "weight.data + at.batch * weight.stride(0) + at.group * weight.stride(1);",
        "weight.data + at.batch * weight.stride(0);",
        VALUES,
    ),
    Fault(
        "pairs are read at odd columns",
        "input gradient",
        "else load_strip<1>(tap - past",
        "else load_strip<2>(tap - past",
        "misaligned",
    ),
    Fault(
        "more shared memory than the launch asks for",
        "input gradient",
        "plane + (apart + 8 - plane % 8) % 8 : plane}",
        "plane + apart + 8 : plane}",
        "out-of-bounds",
    ),
]
WEIGHT_GRADIENT = [
    Fault(
        "no barrier before the next piece is staged",
        "weight gradient",
        "        if (round > 0 || first > 0) __syncthreads();\n",
        "",
        "race",
        PIECES,
    ),
    Fault(
        "no barrier between staging and use",
        "weight gradient",
        "came_tile);\n      __syncthreads();\n    };",
        "came_tile);\n    };",
        "race",
    ),
    Fault(
        "a barrier to which threads beyond the edge do not come",
        "weight gradient",
        "came_tile);\n      __syncthreads();\n    };",
        "came_tile);\n      if (i < P && j < Q) __syncthreads();\n    };",
        "divergent-barrier",
        PARTIAL,
    ),
    Fault(
        "two tiles in shared memory overlap",
        "weight gradient",
        "image_tile + C * lies.plane * N;",
        "image_tile + C * lies.plane;",
        "race",
    ),
    Fault(
        "the last piece of channels as long as the others",
        "weight gradient",
        "const int some = AGAIN ? min(C, channels - first) : C;",
        "const int some = C;",
        "out-of-bounds",
        PIECES,
    ),
    Fault("sums that begin with anything", "weight gradient", "A sums[K][N] = {};", "A sums[K][N];", VALUES),
    Fault(
        "stride is left out of the first row",
        "weight gradient",
        "const int row = top * step - int(padding[0])",
        "const int row = top - int(padding[0])",
        VALUES,
        replace(STRIDED, size=(40, 40)),
    ),
    Fault(
        "the columns before the first tap are left out of the phase",
        "weight gradient",
        "numbers[(SHIFT + v * D) % S][(SHIFT + v * D) / S + p]",
        "numbers[(v * D) % S][(SHIFT + v * D) / S + p]",
        VALUES,
        STRIDED,
    ),
    Fault(
        "rows of taps behind the last",
        "weight gradient",
        "const bool is_there = i < P && j < Q && u < U;",
        "const bool is_there = i < P && j < Q;",
        "out-of-bounds",
        MANY_TAPS,
    ),
    Fault(
        "columns beyond the image are read where there is no tile",
        "weight gradient",
        "sum += A(cotangent(b, c, i, j)) * (inside ? A(input(b, c, y, x)) : A(0));",
        "sum += A(cotangent(b, c, i, j)) * A(input(b, c, y, x));",
        "out-of-bounds",
        BEYOND,
    ),
    Fault(
        "threads without a line of their own copy another's",
        "weight gradient",
        "  if (line >= lines) return;\n",
        "",
        "race",
    ),
    Fault(
        "a carry one line too late",
        "weight gradient",
        "if (m >= middle.count) m -= middle.count",
        "if (m > middle.count) m -= middle.count",
        "out-of-bounds",
    ),
    Fault(
        "rows beyond the image are read",
        "weight gradient",
        "if (inside && middle.holds(m) && high.holds(h))",
        "if (inside && high.holds(h))",
        "out-of-bounds",
    ),
    Fault(
        "the stride of columns for the taps across",
        "weight gradient",
        "store_strip<N>(to + v * result.stride(3), j",
        "store_strip<N>(to + v * result.stride(2), j",
        "race",
    ),
]
FAULTS = [*FORWARD, *INPUT_GRADIENT, *WEIGHT_GRADIENT]
