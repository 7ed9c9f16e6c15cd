"""On a GPU, the access model counts what NVIDIA's profiler counts, where that is installed and may count."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_access_model import KNOWN, declared, lines_of

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
METRICS = {
    ("shared", "taken"): "memory_l1_wavefronts_shared",
    ("shared", "fewest"): "memory_l1_wavefronts_shared_ideal",
    ("global", "taken"): "memory_l2_theoretical_sectors_global",
    ("global", "fewest"): "memory_l2_theoretical_sectors_global_ideal",
}
"""Metrics of Nsight Compute by source, which have no caches either."""
PROGRAM = """
import torch
from test_access_model import KNOWN, declared
declared({name!r}, KNOWN[{name!r}])(KNOWN[{name!r}].x.cuda())
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("name", ["copied", "strided", "column", "misaligned", "tile_32", "tile_33"])
def test_the_profiler_counts_the_same(name: str) -> None:
    profiler = shutil.which("ncu")
    if profiler is None:
        pytest.skip("there is no profiler: `ncu` of Nsight Compute is not installed")
    command = [
        profiler,
        "--csv",
        "--page",
        "raw",
        "--kernel-name",
        name,
        "--metrics",
        ",".join(METRICS.values()),
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM.format(name=name)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("the profiler may not read the GPU's counters: ERR_NVGPUCTRPERM")
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    (*_, counted) = csv.DictReader(table)
    lines = lines_of(declared(name, KNOWN[name]), KNOWN[name].x)
    for (memory, what), metric in METRICS.items():
        modelled = sum(getattr(line, what) for line in lines if line.memory == memory)
        assert float(counted[metric].replace(",", "")) == modelled, metric
