"""Time of a kernel in C++ from its text to its first result, beside torch's own `load_inline`.

Each figure is of a process of its own, from the text of the kernel to its first result; imports of torch,
of opsmith and of modules that declare kernels are not counted, and modules are compiled already, as where
opsmith is installed. "edited" is another text in a process that has run one already. Run it with nothing
else running: `python benchmarks/build.py [--rounds 3] [--without-load-inline]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OPSMITH = """
import json, sys, time
import torch, opsmith, opsmith.kernels.declaration, opsmith.kernels.cpp.language
from torch import Tensor

@opsmith.operator("build_time::affine")
def affine(x: Tensor, by: float, shift: float) -> Tensor:
    return x * by + shift

TEXT = '''
template <class T>
void affine(Contiguous<const T> x, double by, double shift, Contiguous<T> y) {
  const int64_t n = x.numel();
#pragma omp parallel for simd if (n >= 32768)
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * T(by) + T(shift) + T(NUMBER);
}
'''
x = torch.ones(8)

def first(number):
    start = time.perf_counter()
    affine.kernel("cpu", cpp=TEXT.replace("NUMBER", str(number)), strict=True)
    y = affine(x, 2.0, 1.0)
    took = time.perf_counter() - start
    assert y.tolist() == [3.0 + number] * 8, y
    return took

print(json.dumps([first(0), first(int(sys.argv[1]))]))
"""
LOAD_INLINE = """
import json, sys, time
import torch
from torch.utils.cpp_extension import load_inline

x = torch.ones(8)
start = time.perf_counter()
module = load_inline(
    "affine",
    '''
at::Tensor affine(const at::Tensor& x, double by, double shift) {
  at::Tensor given = x.contiguous(), y = at::empty_like(given);
  const float* from = given.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (int64_t i = 0; i < given.numel(); i++) to[i] = from[i] * float(by) + float(shift);
  return y;
}
''',
    functions=["affine"],
    extra_cflags=["-O3", "-march=native"],
    build_directory=sys.argv[2],
)
y = module.affine(x, 2.0, 1.0)
took = time.perf_counter() - start
assert y.tolist() == [3.0] * 8, y
print(json.dumps([took]))
"""


def run(program: str, *words: str, **variables: str) -> list[float]:
    """The figures that a program prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-load-inline", action="store_true", help="it takes half a minute")
    asked = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        compiled = str(Path(scratch) / "bytecode")
        run(OPSMITH, "1", OPSMITH_CACHE=str(Path(scratch) / "before"), PYTHONPYCACHEPREFIX=compiled)
        for number in range(asked.rounds):
            cache = str(Path(scratch) / f"cache-{number}")
            cold, edited = run(OPSMITH, "1", OPSMITH_CACHE=cache, PYTHONPYCACHEPREFIX=compiled)
            warm, _ = run(OPSMITH, "1", OPSMITH_CACHE=cache, PYTHONPYCACHEPREFIX=compiled)
            known, edited_again = run(
                OPSMITH, str(number + 2), OPSMITH_CACHE=cache, PYTHONPYCACHEPREFIX=compiled
            )
            rows.setdefault("opsmith, the first kernel on a machine", []).append(cold)
            rows.setdefault("opsmith, edited", []).extend([edited, edited_again])
            rows.setdefault("opsmith, from the disk, in a new process", []).extend([warm, known])
        if not asked.without_load_inline:
            (Path(scratch) / "inline").mkdir()
            for name in ("load_inline, cold", "load_inline, from the disk, in a new process"):
                rows[name] = run(LOAD_INLINE, "", str(Path(scratch) / "inline"))
    unit = statistics.median(rows["opsmith, edited"])
    print(f"{'from text to first result':48} {'median':>9} {'least':>9} {'of edited':>10}")
    for name, figures in rows.items():
        median = statistics.median(figures)
        print(f"{name:48} {median * 1000:6.0f} ms {min(figures) * 1000:6.0f} ms {median / unit:9.2f}x")


if __name__ == "__main__":
    main()
