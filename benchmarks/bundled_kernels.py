"""Speed of bundled operators with a kernel in C++ beside their references, which torch computes.

Each candidate is declared beside the operator and held to its reference before anything is timed; ratios are
of the time through the handle with the kernel to that without, in turns, medians over rounds. A kernel comes
with opsmith where it is at least as fast for every call: at most 1.0 throughout. The last lines are what a
kernel costs before its first result, here that of linear, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
#include <algorithm>
#include <dlfcn.h>
template <class T>
using Product = void(const char*, const char*, const int*, const int*, const int*, const T*, const T*,
                     const int*, const T*, const int*, const T*, T*, const int*);
template <class T>
void kernel(Contiguous<const T> x, View<const T, 2> weight, std::optional<View<const T, 1>> bias,
            Contiguous<T> y) {
  static auto* product = reinterpret_cast<Product<T>*>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), sizeof(T) == 4 ? "sgemm_" : "dgemm_"));
  OPSMITH_CHECK(product, "torch's BLAS has no product of matrices under its usual name");
  const int columns = int(weight.size(0)), inner = int(weight.size(1));
  const int rows = columns ? int(y.numel() / columns) : 0;
  if (!rows) return;
  if (bias)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t j = 0; j < columns; j++) y[row * columns + j] = (*bias)(j);
  const bool across = weight.stride(0) == 1 && weight.stride(1) != 1;
  OPSMITH_CHECK(across || weight.stride(1) == 1, "BLAS takes no such strides of the weight");
  const int lead = std::max(across ? columns : inner, int(weight.stride(across ? 1 : 0)));
  const int step = std::max(1, inner);
  const T one = 1, beta = bias ? 1 : 0;
  product(across ? "N" : "T", "N", &columns, &rows, &inner, &one, weight.data, &lead, x.data, &step, &beta,
          y.data, &columns);
}
"""
SOURCES = {
    "exp": EXP,
    "mul": BROADCAST.format(sign="*"),
    "add": BROADCAST.format(sign="+"),
    "linear": LINEAR,
}
ONCE = """
import json, sys, time, torch
from opsmith import ops
given = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
ops.linear(*given)
begin = time.perf_counter()
ops.linear.kernel("cpu", cpp=sys.argv[1], entry="kernel", strict=True)
declared = time.perf_counter()
ops.linear(*given)
print(json.dumps([declared - begin, time.perf_counter() - declared]))
"""


class Call:
    """A kind of call: its arguments, one set after the other, and whether its gradients are computed too."""

    def __init__(
        self, said: str, *arguments: Sequence[Any], backward: bool = False, once: bool = False
    ) -> None:
        self.said = said
        self.arguments = arguments
        self.backward = backward
        self.once = once

    def seconds(self, operator: Any, number: int) -> float:
        """Seconds of one call, over so many rounds of all sets."""
        begin = time.perf_counter()
        for _ in range(number):
            for given in self.arguments:
                result = operator(*given)
                if self.backward:
                    torch.autograd.grad(result, [each for each in given if each is not None], result.detach())
        return (time.perf_counter() - begin) / number / len(self.arguments)

    def ratio(self, kernel: Any, plain: Any, rounds: int) -> tuple[float, float, float]:
        """The seconds without the kernel and with it, and what the second is of the first."""
        if self.once:
            before, after = self.seconds(plain, 1), self.seconds(kernel, 1)
            return before, after, after / before
        for operator in (plain, kernel):
            self.seconds(operator, 3)
        number = max(1, min(1000, int(0.005 / self.seconds(plain, 3) / len(self.arguments))))
        pairs = [(self.seconds(plain, number), self.seconds(kernel, number)) for _ in range(rounds)]
        before, after = (statistics.median(each) for each in zip(*pairs, strict=True))
        return before, after, statistics.median(with_it / without for without, with_it in pairs)


def calls(name: str) -> Iterator[Call]:
    """Calls of an operator to time."""
    random = torch.randn
    if name == "exp":
        for shape in [(8,), (1000,), (256, 256), (2000, 1000)]:
            yield Call(str(list(shape)), [random(shape)])
    elif name in ("mul", "add"):
        for shapes in [((8,), (8,)), ((256, 256), (256,)), ((2000, 1), (1000,))]:
            yield Call(" ".join(str(list(shape)) for shape in shapes), [random(shape) for shape in shapes])
    else:
        weight, bias = random(64, 64), random(64)
        learnt = [each.clone().requires_grad_() for each in (weight, bias)]
        yield Call("[2, 3] by [4, 3]", [random(2, 3), random(4, 3), random(4)])
        yield Call("[32, 64] by [64, 64]", [random(32, 64), weight, bias])
        yield Call("no bias", [random(32, 64), weight, None])
        yield Call("recorded for gradients", [random(32, 64), *learnt])
        yield Call("with its gradients", [random(32, 64, requires_grad=True), *learnt], backward=True)
        yield Call("64 sizes in turn", *([random(1 + each, 64), weight, bias] for each in range(64)))
        yield Call("x transposed", [random(64, 32).mT, weight, bias])
        turned = [random(1 + each % 20, 1 + each // 20, 64).transpose(0, 1) for each in range(200)]
        yield Call("sizes never seen", *([random(each.shape), weight, bias] for each in turned), once=True)
        yield Call("and x transposed", *([each, weight, bias] for each in turned), once=True)
        large = [random(256, 256), random(256)]
        yield Call("[64, 256] by [256, 256]", [random(64, 256), *large])
        larger = [random(1024, 1024), random(1024)]
        yield Call("[512, 1024] by [1024, 1024]", [random(512, 1024), *larger])
        yield Call("no bias", [random(512, 1024), larger[0], None])


def candidate(name: str) -> Any:
    """An operator as the bundled one is, with a kernel."""
    reference = getattr(ops, name).reference
    if name != "linear":
        operator = opsmith.operator(f"bundled_kernels::{name}")(reference)
    else:
        shapes = "x: ... M, weight: N M, bias: N -> ... N"
        operator = opsmith.operator("bundled_kernels::linear", shapes=shapes, autocast="lower")(reference)
        operator.gradients(
            x=lambda grad, weight: grad @ weight.conj(),
            weight=lambda grad, x: torch.tensordot(grad, x.conj(), [list(range(x.ndim - 1))] * 2),
            bias=lambda grad: grad,
        )
    return operator.kernel("cpu", cpp=SOURCES[name], entry="kernel", strict=True)


def held(kernel: Any, plain: Any, given: Sequence[Any]) -> None:
    """The kernel is the one that runs, and gives what the reference gives."""
    torch.testing.assert_close(kernel(*given), plain(*given), rtol=1e-4, atol=1e-4)
    assert "kernel for cpu" in kernel.explain(*given).forward


def once() -> None:
    """Costs of a kernel before its first result."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OPSMITH_CACHE": cache}

        def process() -> tuple[float, float]:
            command = [sys.executable, "-c", ONCE, LINEAR]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            declared, called = json.loads(done.stdout)
            return declared, called

        first, later = process(), [process() for _ in range(5)]
    declared, called = (statistics.median(each) for each in zip(*later, strict=True))
    print(f"first call on a machine, which compiles: {first[1]:.1f} s")
    print(f"in each process: {declared * 1e3:.0f} ms to declare it, {called * 1e3:.0f} ms for its first call")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", choices=SOURCES, action="append")
    asked = parser.parse_args()
    print(f"{'operator':10} {'call':30} {'reference':>12} {'kernel':>12} {'ratio':>7}")
    for name in asked.only or SOURCES:
        kernel, plain = candidate(name), getattr(ops, name)
        for call in calls(name):
            held(kernel, plain, [each if each is None else each.detach() for each in call.arguments[0]])
            before, after, ratio = call.ratio(kernel, plain, asked.rounds)
            print(
                f"{name:10} {call.said:30} {before * 1e6:9.2f} us {after * 1e6:9.2f} us {ratio:7.2f}",
                flush=True,
            )
    once()


if __name__ == "__main__":
    main()
