"""Whether a kernel in C++ would make a bundled operator faster than its reference, which torch computes.

Each candidate is declared beside the operator and held to its reference before anything is timed; ratios are
of the time through the handle with the kernel to that without, in turns, medians over rounds. A kernel comes
with opsmith where it is at least as fast for every size: at most 1.0 throughout.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from typing import Any

import torch

import opsmith
from opsmith import ops

EXP = """
#include <cmath>
template <class T>
void kernel(Contiguous<const T> x, Contiguous<T> y) {
  const int64_t n = y.numel();
#pragma omp parallel for simd if (n >= 32768)
  for (int64_t i = 0; i < n; i++) y[i] = std::exp(x[i]);
}
"""
BROADCAST = """
template <class T>
void kernel(View<const T> x, View<const T> y, Contiguous<T> z) {{
  int64_t columns = z.dim ? z.size(-1) : 1, rows = columns ? z.numel() / columns : 0;
  int64_t step[2] = {{0, 0}};
  if (x.dim && x.size(-1) > 1) step[0] = x.stride(-1);
  if (y.dim && y.size(-1) > 1) step[1] = y.stride(-1);
#pragma omp parallel for if (rows * columns >= 32768)
  for (int64_t row = 0; row < rows; row++) {{
    const T* from[2] = {{x.data, y.data}};
    int64_t left = row;
    for (int64_t at = z.dim - 2; at >= 0; at--) {{
      int64_t place = left % z.sizes[at], back = z.dim - at;
      left /= z.sizes[at];
      if (x.dim >= back && x.size(-back) > 1) from[0] += place * x.stride(-back);
      if (y.dim >= back && y.size(-back) > 1) from[1] += place * y.stride(-back);
    }}
    T* to = z.data + row * columns;
    if (step[0] == 1 && step[1] == 1) {{
#pragma omp simd
      for (int64_t i = 0; i < columns; i++) to[i] = from[0][i] {sign} from[1][i];
    }} else {{
      for (int64_t i = 0; i < columns; i++) to[i] = from[0][i * step[0]] {sign} from[1][i * step[1]];
    }}
  }}
}}
"""
# The BLAS that torch brings, which is loaded already: found by name, for it is linked with nothing of torch.
LINEAR = """
#include <dlfcn.h>
using Product = void(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                     const int*, const float*, const int*, const float*, float*, const int*);
void kernel(Contiguous<const float, 2> x, Contiguous<const float, 2> weight,
            std::optional<Contiguous<const float, 1>> bias, Contiguous<float, 2> y) {
  static auto* product =
      reinterpret_cast<Product*>(dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), "sgemm_"));
  OPSMITH_CHECK(product, "torch's BLAS has no sgemm_");
  const int rows = int(x.size(0)), inner = int(x.size(1)), columns = int(weight.size(0));
  const float one = 1, beta = bias ? 1 : 0;
  if (bias)
    for (int64_t row = 0; row < rows; row++) std::memcpy(&y(row, 0), bias->data, sizeof(float) * columns);
  product("T", "N", &columns, &rows, &inner, &one, weight.data, &inner, x.data, &inner, &beta, y.data,
          &columns);
}
"""


def random(*shape: int) -> Any:
    return torch.randn(shape)


SIZES: dict[str, list[tuple[Any, ...]]] = {
    "exp": [(random(8),), (random(1000),), (random(256, 256),), (random(2000, 1000),)],
    "mul": [(random(8), random(8)), (random(256, 256), random(256)), (random(2000, 1), random(1000))],
    "add": [(random(8), random(8)), (random(256, 256), random(256)), (random(2000, 1), random(1000))],
    "linear": [
        (random(2, 3), random(4, 3), random(4)),
        (random(64, 256), random(256, 256), random(256)),
        (random(512, 1024), random(1024, 1024), None),
    ],
}
SOURCES = {
    "exp": EXP,
    "mul": BROADCAST.format(sign="*"),
    "add": BROADCAST.format(sign="+"),
    "linear": LINEAR,
}


def candidate(name: str) -> Any:
    """An operator of the bundled one's reference with a kernel."""
    bundled = getattr(ops, name)
    operator = opsmith.operator(f"bundled_kernels::{name}")(bundled.reference)
    return operator.kernel("cpu", cpp=SOURCES[name], entry="kernel", strict=True)


def seconds(operator: Any, arguments: tuple[Any, ...]) -> float:
    timer = timeit.Timer(lambda: operator(*arguments))
    number, took = timer.autorange()
    return min(took, *timer.repeat(3, number)) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{'operator':10} {'sizes':38} {'reference':>12} {'kernel':>12} {'ratio':>7}")
    for name, sizes in SIZES.items():
        kernel, plain = candidate(name), getattr(ops, name)
        for arguments in sizes:
            torch.testing.assert_close(kernel(*arguments), plain(*arguments), rtol=1e-4, atol=1e-4)
            assert "kernel for cpu" in kernel.explain(*arguments).forward
            pairs = [(seconds(plain, arguments), seconds(kernel, arguments)) for _ in range(rounds)]
            before, after = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(with_it / without for without, with_it in pairs)
            shown = ", ".join(str(list(each.shape)) for each in arguments if each is not None)
            print(f"{name:10} {shown:38} {before * 1e6:9.2f} us {after * 1e6:9.2f} us {ratio:7.2f}")


if __name__ == "__main__":
    main()
