"""Operators whose CUDA kernels a library serves: every kind of argument, buffer and launch expression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import opsmith

SCALED = r"""
template <class T>
__global__ void scaled(Contiguous<const T> x, double by, Optional<View<const T, 1>> shift, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) {
    float added = shift ? float((*shift)(i % x.size(-1))) : 0.0f;
    y[i] = T(float(x[i]) * float(by) + added);
  }
}
"""

ROW_SUMS = r"""
template <class T, int WIDE>
__global__ void partial(View<const T, 2> x, Contiguous<T, 2> parts, Contiguous<int64_t, 1> counts) {
  T* held = opsmith::shared_memory<T>();
  const int64_t row = blockIdx.x;
  T sum = 0;
  for (int64_t at = threadIdx.x; at < x.size(1); at += WIDE) sum += x(row, at);
  held[threadIdx.x] = sum;
  parts[row * WIDE + threadIdx.x] = held[threadIdx.x];
  if (threadIdx.x == 0) counts[row] += x.size(1);
}

template <class T, int WIDE, int BYTES>
__global__ void fold(Contiguous<const T, 2> parts, Contiguous<T, 1> sums) {
  OPSMITH_EACH(row, sums.numel()) {
    T sum = 0;
    for (int at = 0; at < WIDE; at++) sum += parts[row * WIDE + at];
    sums[row] = sum;
  }
}
"""

TOLD = r"""
__global__ void told(View<const float, 1> x, List<View<const float>, 3> xs, List<int64_t, 4> sizes,
                     List<double, 2> weights, List<bool, 2> flags, int64_t count, int small, float half,
                     bool yes, Optional<int64_t> maybe, Optional<double> part, Contiguous<float, 1> told) {
  if (blockIdx.x) return;
  float* out = told.data;
  out[0] = x(0);
  out[1] = float(xs.size);
  out[2] = 0;
  for (int64_t at = 0; at < xs.size; at++) out[2] += xs[at].data[0] * float(1 + xs[at].dim);
  out[3] = float(sizes.size * 100 + (sizes.size > 1 ? sizes[1] : 0));
  out[4] = float(weights[0] - weights[1]);
  out[5] = float(flags[0] * 2 + flags[1]);
  out[6] = float(count);
  out[7] = float(small);
  out[8] = half;
  out[9] = yes;
  out[10] = maybe ? float(*maybe) : -1.0f;
  out[11] = part ? float(*part) : -1.0f;
}
"""

INCREASE = r"""
__global__ void increase_(Contiguous<float> x, double by) { OPSMITH_EACH(i, x.numel()) x[i] += float(by); }
"""

LIMITED = r"""
__global__ void limited(Contiguous<const float> x, int64_t, Contiguous<float> y, View<int64_t, 1> held) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.z == 0)
    for (int64_t i = 0; i < x.numel(); i++)
      y[i] = 2 * x[i] + float(held(0) % 9007199254740993);  // 0 unless it was rounded
}
"""

PAIRED = r"""
__global__ void paired(View<const float> x, View<float> y) {
  if (blockIdx.x == 0 && threadIdx.x == 0)
    for (int64_t i = 0; i < y.numel(); i++) y.data[i] = x.data[i / 2];
}
"""

DOUBLED = r"""
__global__ void doubled(ChannelsLast<const float> x, ChannelsLast<float> y) {
  OPSMITH_EACH(i, x.numel()) y.data[i] = 2 * x.data[i];
}
"""


def declare(namespace: str) -> dict[str, Any]:
    """The operators, by their names."""

    @opsmith.operator(f"{namespace}::scaled", shapes="x: ... N, shift: N -> ... N")
    def scaled(x: Tensor, by: float = 2.0, shift: Tensor | None = None) -> Tensor:
        return (x * by if shift is None else x * by + shift).contiguous()

    scaled.kernel(
        "cuda",
        cuda=SCALED,
        dtypes=[torch.float32, torch.float16],
        grid="ceil(result.numel / (8 if shift is None else 2))",
        block=8,
    )

    @scaled.samples
    def _(make: opsmith.Make):  # type: ignore[no-untyped-def]
        yield make(3, 4), 0.5, make(4)
        yield (make(2, 3, 5),)

    @opsmith.operator(f"{namespace}::row_sums", shapes="x: N M -> N, N", results=("sums", "counts"))
    def row_sums(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(1).contiguous(), torch.full(x.shape[:1], x.shape[1] + 7, dtype=torch.int64)

    wide = "min(x.shape[1], 4)"
    row_sums.kernel(
        "cuda",
        cuda=ROW_SUMS,
        scratch={"parts": ("x.shape[0]", wide, "x")},
        initial={"counts": 7, "parts": float("-inf")},
        launches=[
            opsmith.Launch(
                "partial(x, parts, counts)",
                grid="len(x)",
                block=wide,
                shared=f"{wide} * x.itemsize",
                constants={"WIDE": wide},
            ),
            opsmith.Launch(
                "fold(parts, sums)",
                grid="1 + sums.numel // 32",
                block=32,
                constants={"WIDE": wide, "BYTES": "x.itemsize"},
            ),
        ],
    )

    @row_sums.samples
    def _(make: opsmith.Make):  # type: ignore[no-untyped-def]
        yield (make(3, 5),)
        yield (make(2, 2),)

    @opsmith.operator(f"{namespace}::told", shapes="x: N -> 12")
    def told(
        x: Tensor,
        xs: list[Tensor],
        sizes: list[int],
        weights: list[float],
        flags: list[bool],
        count: int,
        small: int = 3,
        half: float = 0.5,
        yes: bool = True,
        maybe: int | None = None,
        part: float | None = None,
    ) -> Tensor:
        total = sum((each.flatten()[0] * (1 + each.dim()) for each in xs), start=x.new_zeros(()))
        numbers = [
            sizes[1] + 100 * len(sizes) if len(sizes) > 1 else 100 * len(sizes),
            weights[0] - weights[1],
            flags[0] * 2 + flags[1],
            count,
            small,
            half,
            yes,
            -1.0 if maybe is None else maybe,
            -1.0 if part is None else part,
        ]
        rest = [x.new_full((), float(each)) for each in numbers]
        return torch.stack([x[0].clone(), x.new_full((), float(len(xs))), total, *rest])

    told.kernel("cuda", cuda=TOLD, grid="1 if len(xs) else 2", block=1)

    @told.samples
    def _(make: opsmith.Make):  # type: ignore[no-untyped-def]
        yield make(3), [make(2), make(2, 2)], [5, 6], [0.5, 2.0], [True, False], 9

    @opsmith.operator(f"{namespace}::increase_", mutates=["x"], returns="x", shapes="x: ... -> ...")
    def increase_(x: Tensor, by: float = 1.0) -> Tensor:
        return x.add_(by)

    increase_.kernel("cuda", cuda=INCREASE, grid="ceil(x.numel / 4)", block=4, copies="allowed")

    @opsmith.operator(f"{namespace}::doubled", shapes="x: N C H W -> N C H W")
    def doubled(x: Tensor) -> Tensor:
        return (x * 2).contiguous()

    doubled.kernel("cuda", cuda=DOUBLED, grid="max(1, x.numel / 8)", block=(2, 2))

    @opsmith.operator(f"{namespace}::limited", shapes="x: N -> N")
    def limited(x: Tensor, n: int = 1) -> Tensor:
        return (x * 2).contiguous()

    limited.kernel(
        "cuda",
        cuda=LIMITED,
        grid="n",
        block=("n", 1, "1 + n // 4"),
        scratch={"held": ("n + 3", torch.int64)},
        initial={"held": f"n / 2 if n == 77 else n * {2**53 + 1}"},
    )
    limited.samples(lambda make: [(make(3),)])

    @opsmith.operator(f"{namespace}::paired", shapes="x: ... N -> ... N 2")
    def paired(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1).contiguous()

    paired.kernel("cuda", cuda=PAIRED, grid=1, block=1)
    paired.samples(lambda make: [(make(3),)])
    every = (paired, limited, scaled, row_sums, told, increase_, doubled)
    return {each.name.partition("::")[2]: each for each in every}
