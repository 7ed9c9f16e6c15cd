"""Classes and operators of torch's own test databases: errors for faults that they have, and no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "opinfo.py"

FAULTY = {
    "autograd_function_db": {
        "NumpySortAutogradFunction": "gradient",  # it does not sort
        "CubeGenVmapAutogradFunction": "linearity",  # its backward lacks a factor of grad
    },
    "custom_op_db": {  # fake kernels with other strides, and one that views what is not contiguous
        "NumpyMulCustomOp": "fake",
        "NumpySortCustomOp": "fake",
        "NumpyViewCopyCustomOp": "fake",
        "NumpyCatCustomOp": "fake",
    },
}
"""The property by which each is found, as docs/found.md says."""


def rows(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that a sweep writes; it runs in a process, since torch's test utilities change settings."""
    file = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, str(BENCHMARK), *options, "--json", str(file)], check=True)
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("database", FAULTY)
def test_errors_are_faults(database: str, tmp_path: Path) -> None:
    found = rows(tmp_path, "--database", database)
    errors = {
        row["name"]: next(each["property"] for each in row["findings"] if each["severity"] == "error")
        for row in found
        if row["verdict"] == "errors"
    }
    assert errors == FAULTY[database]
    assert {row["verdict"] for row in found} <= {"errors", "warnings", "limits", "passed", "unfit"}


@pytest.mark.slow
def test_an_operator_that_ends_the_process_is_a_finding(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "--only", "linalg.eigvals")
    assert row["verdict"] == "errors"
    signals = ("SIGSEGV", "SIGABRT")  # the heap is overwritten, which is seen earlier or later
    assert any(each in row["findings"][0]["message"] for each in signals)
