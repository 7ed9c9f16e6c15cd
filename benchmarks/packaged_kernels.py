"""First call of a kernel from a package beside one from the cache, and times and sizes of a build.

Each first call is made in a process of its own. The clock starts once the operators are declared, and stops
at the first result. The package has a kernel in C++ for three levels of processors. Processes with and
without libraries in the package take turns. The build is that of involution with its gradients, for three
levels and two GPUs. Run it with nothing else running: `python benchmarks/packaged_kernels.py [--rounds 15]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "tests" / "shipping" / "scaled_package"
LEVELS, GPUS = "x86-64-v2,x86-64-v3,x86-64-v4", "sm_80,sm_90"

FIRST_CALL = """
import sys, time
import torch, scaled_package
from scaled_package import scaled

x = torch.ones(8)
start = time.perf_counter()
result = scaled(x)
took = time.perf_counter() - start
assert result.tolist() == [2.0] * 8, result
found = str(scaled.explain(x))
assert ("built into the package" in found) == (sys.argv[1] == "package"), found
print(took)
"""


def opsmith_build(*words: str) -> float:
    """Seconds of `opsmith build`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "opsmith", "build", *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def first_calls(rounds: int, scratch: Path) -> dict[str, list[float]]:
    """Seconds of first calls: from the package, and from the cache."""
    took: dict[str, list[float]] = {"package": [], "cache": []}
    for name in took:
        shutil.copytree(PACKAGE, scratch / name / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    opsmith_build(str(scratch / "package" / PACKAGE.name), "--cpu", LEVELS, "--cuda", GPUS)
    for number in range(rounds + 1):
        for name, figures in took.items():
            variables = {
                "PYTHONPATH": os.pathsep.join([str(scratch / name), os.environ.get("PYTHONPATH", "")]),
                "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
                "PYTHONDONTWRITEBYTECODE": "",
                "OPSMITH_CACHE": str(scratch / f"cache-{name}"),
            }
            done = subprocess.run(
                [sys.executable, "-c", FIRST_CALL, name],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            if number:  # the first one compiles, or writes bytecode
                figures.append(float(done.stdout))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        took = first_calls(asked.rounds, Path(scratch))
        medians = {name: statistics.median(figures) * 1e3 for name, figures in took.items()}
        print(f"{'first call of a process':32} {'median':>8} {'least':>8}")
        for name, figures in took.items():
            print(f"{'from the ' + name:32} {medians[name]:5.1f} ms {min(figures) * 1e3:5.1f} ms")
        print(f"the package over the cache: {medians['package'] - medians['cache']:+.1f} ms\n")
        folder = Path(scratch) / "built"
        seconds = opsmith_build("opsmith.ops.involution", "--cpu", LEVELS, "--cuda", GPUS, "-o", str(folder))
        print(f"involution for {LEVELS} and {GPUS}: {seconds:.0f} s")
        sizes: dict[str, list[int]] = {}
        for each in sorted(folder.iterdir()):
            level = next((one for one in (*LEVELS.split(","), *GPUS.split(",")) if one in each.name), "other")
            sizes.setdefault(level, []).append(each.stat().st_size)
        for level, files in sizes.items():
            print(f"  {level:10} {len(files):3} files {sum(files) / 1e3:8.0f} kB")


if __name__ == "__main__":
    main()
