"""The access model counts sectors of global memory and wavefronts of shared memory, as they are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.kernels.cuda.emulation.access_model import LineAccess, kernel_access
from opsmith.kernels.cuda.kernel import cuda_kernels


@dataclass(frozen=True)
class Known:
    """A kernel whose requests are known.

    Args:
        text: Body of the kernel of `x` and `y`; each line that is asked about ends with `// name`.
        lines: For each name words, requests, lanes, what they take, and the fewest.
        x: The argument.
        shape: Shape of the result.
        block: The block.
        types: Types of the elements of x and y.
    """

    text: str
    lines: dict[str, tuple[str, int, int, int, int]]
    x: Tensor = field(default_factory=lambda: torch.ones(64))
    shape: tuple[int, ...] = (64,)
    block: Any = 64
    types: tuple[str, str] = ("float", "float")


ONES = torch.ones
ITERATED = """
  float sum = 0;
  for (int k = 0; k < 8; k++) {
    if ((k + i) % 2) continue;
    sum += x[k * 64 + i];  // some
  }
  for (int k = 0; k < i % 4; k++) sum += x[512 + k * 64 + i];  // while
  y[i] = sum;  // write
"""
KNOWN = {
    "copied": Known(
        "y[i] = x[i];  // copy",
        {"copy": ("reads x", 2, 64, 8, 8), "copy ": ("writes result", 2, 64, 8, 8)},
    ),
    "strided": Known(
        "y[i] = x[2 * i];  // read",
        {"read": ("reads x", 2, 64, 16, 8)},
        ONES(128),
    ),
    "column": Known(
        "y[i] = x[i * 64];  // read",
        {"read": ("reads x", 2, 64, 64, 8)},
        ONES(64, 64),
    ),
    "one_word": Known(
        "__shared__ float held[64]; held[i] = x[0];  // broadcast\n"
        "__syncthreads();\ny[i] = held[5];  // same",
        {
            "broadcast": ("reads x", 2, 64, 2, 2),
            "same": ("reads shared memory", 2, 64, 2, 2),
            "same ": ("writes result", 2, 64, 8, 8),
        },
    ),
    "in_vectors": Known(
        "const float4 v = reinterpret_cast<const float4*>(x.data)[i];  // vector\n"
        "y[i] = v.x + v.y + v.z + v.w;",
        {"vector": ("reads x", 2, 64, 32, 32)},
        ONES(256),
    ),
    "in_halves": Known(
        "y[i] = x[i];  // half",
        {"half": ("reads x", 2, 64, 4, 4)},
        ONES(64, dtype=torch.float16),
        types=("Half", "float"),
    ),
    "misaligned": Known(
        "y[i] = x[i + 1];  // off",
        {"off": ("reads x", 2, 64, 10, 8)},
        ONES(65),
    ),
    "divergent": Known(
        "if (i % 2) y[i] = x[i];  // odd\nelse y[i] = 0;  // even\nfloat z = x[i + 64];  // all\ny[i] += z;",
        {
            "odd": ("reads x", 2, 32, 8, 4),
            "odd ": ("writes result", 2, 32, 8, 4),
            "even": ("writes result", 2, 32, 8, 4),
            "all": ("reads x", 2, 64, 8, 8),
        },
        ONES(128),
    ),
    # Iteration k is one request of half the lanes; then 24, 16 and 8 lanes of a warp go on.
    "iterated": Known(
        ITERATED,
        {
            "some": ("reads x", 16, 256, 64, 32),
            "while": ("reads x", 6, 96, 24, 12),
            "write": ("writes result", 2, 64, 8, 8),
        },
        ONES(768),
    ),
    # Some lanes leave the warp, others are in a function; in the end they are together again.
    "called": Known(
        "if (i % 4 == 0) { y[i] = 0; return; }\nfloat f = i % 4 == 1 ? far(x, i) : 1;\n"
        "switch (i % 4) { case 2: f *= 2; break; case 3: for (int k = 0; k < i; k++) f += x[k]; }\n"
        "y[i] = f + x[i];  // together",
        {
            "in it": ("reads x", 2, 16, 8, 2),
            "together": ("reads x", 2, 48, 8, 6),
            "together ": ("writes result", 2, 48, 8, 6),
        },
    ),
    # Longer than what is kept of a lane before the others of its warp follow.
    "very_long": Known(
        "float f = 0;\nfor (int k = 0; k < 3000 + i % 2; k++) f += x[(k % 4) * 64 + i];  // each\ny[i] = f;",
        {"each": ("reads x", 6002, 192032, 24008, 24004)},
        ONES(256),
    ),
    "in_triples": Known(
        "const float3 v = reinterpret_cast<const float3*>(x.data)[i];  // triple\ny[i] = v.x + v.y + v.z;",
        {"triple": ("reads x", 6, 192, 72, 24)},
        ONES(192),
    ),
    "one_address": Known(
        "if (i == 0) y[0] = 0;\n__syncthreads();\natomicAdd(&y[0], x[i]);  // all",
        {"all": ("atomics on result", 2, 64, 64, 8), "all ": ("reads x", 2, 64, 8, 8)},
        shape=(1,),
    ),
    "own_address": Known(
        "y[i] = 0;\n__syncthreads();\natomicAdd(&y[i], x[i]);  // own",
        {"own": ("atomics on result", 2, 64, 8, 8)},
    ),
    "shared_atomics": Known(
        "__shared__ int count[64]; count[i] = 0;\n__syncthreads();\n"
        "atomicAdd(&count[i % 4], 1);  // few\n__syncthreads();\ny[i] = float(count[i]) + x[i];",
        {"few": ("atomics on shared memory", 2, 64, 16, 2)},
    ),
    "doubles": Known(
        "__shared__ double held[64]; held[i] = x[i];  // double\n"
        "__syncthreads();\ny[i] = held[2 * (i % 32)];  // apart",
        {
            "double": ("reads x", 2, 64, 16, 16),
            "double ": ("writes shared memory", 2, 64, 4, 4),
            "apart": ("reads shared memory", 2, 64, 8, 4),
        },
        ONES(64, dtype=torch.float64),
        types=("double", "double"),
    ),
    "shared_vectors": Known(
        "__shared__ float4 held[64]; const float f = x[i]; held[i] = {f, f, f, f};  // vector\n"
        "__syncthreads();\nconst float4 v = held[i ^ 1];  // pairs\ny[i] = v.x + v.y + v.z + v.w;",
        {
            "vector": ("writes shared memory", 2, 64, 8, 8),
            "pairs": ("reads shared memory", 2, 64, 8, 8),
        },
    ),
}


def transposed(columns: int) -> Known:
    text = f"""
  __shared__ float tile[32][{columns}];
  const int row = i / 32, column = i % 32;
  tile[row][column] = x[i];  // load
  __syncthreads();
  y[i] = tile[column][row];  // store
"""
    ways = 32 if columns == 32 else 1
    lines = {
        "load": ("reads x", 32, 1024, 128, 128),
        "load ": ("writes shared memory", 32, 1024, 32, 32),
        "store": ("reads shared memory", 32, 1024, 32 * ways, 32),
        "store ": ("writes result", 32, 1024, 128, 128),
    }
    return Known(text, lines, ONES(32, 32), (32, 32), 1024)


KNOWN |= {"tile_32": transposed(32), "tile_33": transposed(33)}


def declared(name: str, known: Known) -> Any:
    dtype = {"float": torch.float32, "double": torch.float64}[known.types[1]]

    def reference(x: Tensor) -> Tensor:
        return x.new_zeros(known.shape, dtype=dtype)

    operator = opsmith.operator(f"access::{name}")(reference)
    of_x, of_y = known.types
    text = f"""
__noinline__ __device__ float far(const Contiguous<const {of_x}>& x, int i) {{
  return x[i] * 3;  // in it
}}
__global__ void {name}(Contiguous<const {of_x}> x, Contiguous<{of_y}> y) {{
  const int i = threadIdx.x;
{known.text}
}}
"""
    operator.kernel("cuda", cuda=text, grid=1, block=known.block)
    operator.samples(lambda: [(known.x,)])
    return operator


def lines_of(operator: Any, x: Tensor) -> tuple[LineAccess, ...]:
    (kernel,) = cuda_kernels(operator.specification)
    (found,) = kernel_access(kernel, lambda dtype: [[x]])
    assert found.calls == 1
    return found.lines


@pytest.mark.every(5)
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_counted(name: str) -> None:
    known = KNOWN[name]
    found = lines_of(declared(name, known), known.x)
    for mark, expected in known.lines.items():
        marked = [each for each in found if each.line.endswith(f"// {mark.strip()}")]
        (line,) = (each for each in marked if each.words == expected[0])
        assert (line.requests, line.lanes, line.taken, line.fewest) == expected[1:], line
