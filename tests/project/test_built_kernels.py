"""`ci/built_kernels.py`: `make dist-check` fails where a kernel of the wheel is not loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "built_kernels.py"


def kernel(origin: str, language: str = "C++") -> dict[str, str]:
    return {"operator": "demo::twice", "language": language, "where": "twice.py:7", "origin": origin}


BUILT = kernel("built into the package for x86-64-v3")
CUDA = kernel("compiled when it is first called", "CUDA")


@pytest.mark.parametrize(
    ("kernels", "status", "said"),
    [
        ([BUILT, CUDA, BUILT], 0, ""),
        ([BUILT, kernel("compiled now")], 1, "dist-check: demo::twice, twice.py:7: compiled now\n"),
        ([CUDA], 1, "dist-check: doctor lists no kernel in C++\n"),
    ],
    ids=["all", "not-all", "none"],
)
def test_each_kernel_in_cpp_is_built(kernels: list[dict[str, str]], status: int, said: str) -> None:
    answer = json.dumps({"kernels": kernels})
    done = subprocess.run([sys.executable, SCRIPT], input=answer, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, said)
