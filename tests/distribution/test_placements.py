"""Operators on two ranks: whatever the placements, results and gradients are those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faults_of_torch import marked
from sharded_subjects import SUBJECTS
from written_subjects import WRITTEN

from opsmith import config

HERE = Path(__file__).parent
WRAPPERS = [
    "DDP",
    "DDP, unused parameters",
    "DDP, static graph",
    "FSDP2",
    "FSDP2, bfloat16",
    "DDP, generated modules",
    "FSDP2, generated modules",
]


def ranks(folder: Path) -> dict[str, Any]:
    """The report of the first of two ranks, or the error."""
    programs = [
        subprocess.Popen(
            [sys.executable, HERE / "sharding_rank.py", str(rank), folder / "rendezvous"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        told = [program.communicate() for program in programs]
    finally:
        for program in programs:
            program.kill()
    if any(program.returncode for program in programs):
        return {"error": "".join(error for _, error in told)}
    report: dict[str, Any] = json.loads(told[0][0])
    return report


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The report of two ranks, which run once, also where several processes run the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    done = shared / "two_ranks.json"
    try:
        (shared / "two_ranks.started").touch(exist_ok=False)
    except FileExistsError:
        while not done.exists():  # another process of the suite writes it
            time.sleep(0.2)
    else:
        partial = shared / "two_ranks.partial"
        partial.write_text(json.dumps(ranks(shared)))
        partial.rename(done)
    told: dict[str, Any] = json.loads(done.read_text())
    assert "error" not in told, told["error"]
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(SUBJECTS))
def test_results_and_gradients(name: str, report: dict[str, Any]) -> None:
    told = report[name]
    assert told["tried"] > 0
    assert told["faults"] == {}, "\n".join(f"{way}:\n{fault}" for way, fault in told["faults"].items())


@pytest.mark.slow
def test_every_placement_is_tried(report: dict[str, Any]) -> None:
    assert {name: report[name]["tried"] for name in ("exp", "marked", "opaque")} == {
        "exp": 4,
        "marked": 12,
        "opaque": 1,
    }


@pytest.mark.slow
def test_a_kernel_runs_on_shards_where_that_is_right(report: dict[str, Any]) -> None:
    """On whole tensors, on rows, and on columns where weights are split alike, for parts of a sum."""
    runs = [report[name]["kernel"] for name in ("kernel", "sized-kernel", "list")]
    if config.conservative():  # then nothing is proved of shards, and the reference serves
        assert runs == [[[5, 3]]] * 3
    else:
        assert runs == [[[3, 3], [5, 2], [5, 3]], [[5, 2], [5, 3]], [[3, 3], [5, 2], [5, 3]]]


@pytest.mark.slow
def test_only_what_torch_derives_nothing_for_is_gathered(report: dict[str, Any]) -> None:
    warned = {name: report[name]["warned"] for name in SUBJECTS if report[name]["warned"]}
    assert set(warned) == {"involution", "mask"}
    assert warned["involution"][0] == (
        "opsmith: opsmith::involution gathers its DTensors on every rank, because torch cannot derive "
        "placements for it: Operator aten.unfold.default does not have a sharding strategy registered."
    )
    assert all(
        each.endswith(": DynamicOutputShapeException: aten.nonzero.default") for each in warned["mask"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_module_under(name: str, report: dict[str, Any]) -> None:
    assert report["modules"][name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_writes(name: str, report: dict[str, Any]) -> None:
    """What is written keeps its memory and placements, or is refused before; gradients are right."""
    told = report["writes"][name]
    assert told["tried"] == len(WRITTEN[name].ways())
    assert told["faults"] == {}, "\n".join(f"{way}:\n{fault}" for way, fault in told["faults"].items())


@pytest.mark.slow
def test_a_kernel_writes_into_shards_where_that_is_right(report: dict[str, Any]) -> None:
    runs = [report["writes"][name]["kernel"] for name in ("kernel-and-formula", "hidden-and-result")]
    if config.conservative():  # then nothing is proved
        assert runs == [[[5, 3]], [[5, 3]]]
    else:
        assert runs == [[[3, 3], [5, 2], [5, 3]], [[3, 3], [5, 3]]]
