"""Kernels in C++ with one fault each, and right ones that look like them: what a sanitised check has to tell.

A fault stands in a line that ends in `// fault`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import opsmith


@dataclass(frozen=True)
class Fault:
    """A faulty kernel, and what is to be told of it."""

    operator: Any
    cause: str
    input: str | None
    message: str
    deadly: bool = False


FAULTS: dict[str, Fault] = {}
WITHOUT_LINE = ("recurses",)
"""It dies where it is entered."""
RIGHT: dict[str, Any] = {}


def declared(name: str, reference: Callable[..., Any], cpp: str, samples: Any) -> Any:
    reference.__name__ = reference.__qualname__ = name
    operator = opsmith.operator(f"faulty::{name}")(reference)
    operator.kernel("cpu", cpp=cpp)
    operator.samples(samples)
    return operator


def fault(name: str, cause: str, input: str | None, message: str, *, body: str, deadly: bool = False) -> None:
    """A kernel that gives twice its argument, by this body and a fault."""

    def twice(x: Tensor) -> Tensor:
        return x * 2

    cpp = BEGIN.format(name=name) + body + END
    operator = declared(name, twice, cpp, lambda make: [(make(5),), (make(3, 4),)])
    FAULTS[name] = Fault(operator, cause, input, message, deadly)


BEGIN = """
#include <cstdlib>

template <class T>
void {name}(Contiguous<const T> x, Contiguous<T> y) {{
  const int64_t n = x.numel();
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * 2;
"""
END = "}\n"

fault(
    "reads_after",
    "out-of-bounds",
    "x",
    r"the kernel reads (4|8) bytes outside of `x`, which has \d+ bytes: just after its end",
    body="  if (n && x[n] == T(3.25)) y[0] = 0;  // fault\n",
)
fault(
    "reads_before",
    "out-of-bounds",
    "x",
    r"the kernel reads (4|8) bytes outside of `x`, which has \d+ bytes: (4|8) bytes before it",
    body="  if (n && x[-1] == T(3.25)) y[0] = 0;  // fault\n",
)
fault(
    "writes_after",
    "out-of-bounds",
    "result",
    r"it writes (4|8) bytes outside of `result`, which has \d+ bytes: just after its end",
    body="  if (n) y[n] = 0;  // fault\n",
)
fault(
    "reads_far_after",
    "out-of-bounds",
    "x",
    r"outside of `x`, which has \d+ bytes: (400|800) bytes after its end",
    body="  if (n && x[n + 100] == T(3.25)) y[0] = 0;  // fault\n",
)
fault(
    "overflows",
    "undefined",
    None,
    r"signed integer overflow: \d+ \+ 2147483647",
    body="  int count = 2147483647;\n  count += int(n);  // fault\n  if (count == 7) y[0] = 0;\n",
)
fault(
    "misaligned",
    "undefined",
    None,
    "load of misaligned address",
    body="  const char* bytes = reinterpret_cast<const char*>(x.data);\n"
    "  if (n > 1 && *reinterpret_cast<const T*>(bytes + 1) == T(3.25)) y[0] = 0;  // fault\n",
)
fault(
    "past_an_array",
    "out-of-bounds",
    None,
    "it writes (4|8) bytes outside of the variable `buffer`",
    body="  T buffer[4];\n"
    "  for (int64_t i = 0; i < n && i < 5; i++) buffer[i] = x[i];  // fault\n"
    "  if (n && buffer[0] == T(3.25)) y[0] = 0;\n",
)
fault(
    "after_its_scope",
    "out-of-bounds",
    None,
    "the kernel reads (4|8) bytes of a variable whose scope has ended: `gone`",
    body="  const T* held = nullptr;\n  if (n) {\n    T gone = x[0];\n    held = &gone;\n  }\n"
    "  if (n && *held == T(3.25)) y[0] = 0;  // fault\n",
)
fault(
    "given_back",
    "out-of-bounds",
    None,
    "the kernel reads (4|8) bytes of memory that was freed",
    body="  T* mine = new T[n + 1]();\n  delete[] mine;\n"
    "  if (n && mine[0] == T(3.25)) y[0] = 0;  // fault\n",
)
fault(
    "never_set",
    "uninitialized",
    "result",
    "`result` depends on a variable that the kernel reads before the first write",
    body="  T sum;\n  for (int64_t i = 0; i < n; i++) sum += x[i];  // fault\n"
    "  if (n) y[0] += sum * T(1e-30);\n",
)
fault(
    "null",
    "out-of-bounds",
    None,
    "the kernel reads through a null pointer",
    body="  const T* none = n > 2 ? nullptr : x.data;\n  if (n && *none == T(3.25)) y[0] = 0;  // fault\n",
    deadly=True,
)
fault(
    "divides_by_zero",
    "undefined",
    None,
    "the kernel's behaviour is undefined in C\\+\\+: division by zero",
    body="  volatile int zero = 0;\n  if (n) y[0] += T(int(n) / zero);  // fault\n",
    deadly=True,
)
fault(
    "recurses",
    "raises",
    None,
    "the kernel needs more stack than is available",
    body="  volatile char room[100000000];  // fault\n  room[n] = 1;\n  if (n && room[n] == 2) y[0] = 0;\n",
    deadly=True,
)
fault(
    "aborts",
    "raises",
    None,
    "the kernel calls `abort`",
    body="  if (n) __builtin_abort();  // fault\n",
    deadly=True,
)
fault(
    "leaves",
    "raises",
    None,
    "the operator ends the process with status 0, instead of returning",
    body="  if (n) std::exit(0);  // fault\n",
    deadly=True,
)
fault(
    "never_ends",
    "raises",
    None,
    "a call did not finish within",
    body="  volatile bool on = n > 0;\n  while (on) {}  // fault\n",
    deadly=True,
)


def columns(x: Tensor) -> Tensor:
    return x.sum(1)


COLUMNS = """
template <class T>
void {name}(View<const T, 2> x, View<T, 1> y) {{
  for (int64_t i = 0; i < x.size(0); i++) {{
    T sum = 0;
    for (int64_t j = 0; j < x.size(1); j++) {sum}
    y(i) = sum;
  }}
}}
"""
ROWS = [(3, 4), (2, 7), (5, 1)]

FAULTS["counts_on_rows"] = Fault(
    declared(
        "counts_on_rows",
        columns,
        # Right for contiguous tensors; of a view that begins in the last column it reads what lies behind.
        COLUMNS.format(name="counts_on_rows", sum="sum += x.data[i * x.stride(0) + j];  // fault"),
        lambda make: [(make(*shape),) for shape in ROWS] + [(make(6, 4).mT[:, 5:],)],
    ),
    "out-of-bounds",
    "x",
    r"the kernel reads (4|8) bytes outside of `x`",
)


def right(name: str, reference: Callable[..., Any], cpp: str, samples: Any) -> None:
    RIGHT[name] = declared(name, reference, cpp, samples)


def scaled(x: Tensor, others: list[Tensor], by: float, shift: Tensor | None = None) -> Tensor:
    y = x * by
    for other in others:
        y = y + other.sum()
    return y if shift is None else y + shift[0]


right(
    "scaled",
    scaled,
    """
#include <vector>

template <class T>
void scaled(Contiguous<const T> x, List<View<const T, 1>> others, double by,
            std::optional<View<const T, 1>> shift, Contiguous<T> y) {
  const int64_t n = x.numel();
  std::vector<T> copy(x.data, x.data + n);
  T sum = 0;
  for (const auto& other : others)
    for (int64_t i = 0; i < other.size(0); i++) sum += other(i);
#pragma omp parallel for
  for (int64_t i = 0; i < n; i++) y[i] = copy[i] * T(by) + sum + (shift ? (*shift)(0) : T(0));
}
""",
    lambda make: [
        (make(3, 5), [make(2), make(4)], 2.0, make(3)),
        (make(7), [], -0.5, None),
        (make(5, 2).mT, [make(3)], 1.0, make(6)[4:]),
    ],
)
right(
    "columns",
    columns,
    COLUMNS.format(name="columns", sum="sum += x(i, j);"),
    lambda make: [(make(*shape),) for shape in ROWS],
)


def refusing(x: Tensor) -> Tensor:
    return x + 1


right(
    "refusing",
    refusing,
    """
#include <cstring>

void refusing(Contiguous<const float> x, Contiguous<float> y) {
  OPSMITH_CHECK(x.dim < 3, "no more than 2 dimensions, and not %d", int(x.dim));
  std::memcpy(y.data, x.data, x.numel() * sizeof(float));
  for (int64_t i = 0; i < x.numel(); i++) y[i] += 1;
}
""",
    lambda make: [(make(3).float(),), (make(2, 2).float(),), (make(1, 2, 3).float(),)],
)
