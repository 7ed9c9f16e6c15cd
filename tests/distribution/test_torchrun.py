"""The example for several processes, run as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


@pytest.mark.slow
def test_the_example_runs_on_two_ranks() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, EXAMPLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["DDP", "FSDP2", "DTensor"]
    assert lines[2] == "DTensor: (Shard(dim=0),), (Replicate(),) -> (Shard(dim=0),); grad (Partial(sum),)"
