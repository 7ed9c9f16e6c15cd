"""A damaged benchmark is read as it stands there, or refused by one error of ours; nothing else is raised."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from damaged_documents import BRACKETS, damaged, refused_rightly
from planted import planted

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.result import benchmarks_in

FILE = Path("folder/before.json")
SEEDS = range(400)
MADE = planted(3, rounds=5, sizes=(1024, 65536))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["one", "command"])
def test_damaged_benchmarks_are_read_right_or_refused(form: str) -> None:
    verdict = json.loads(json.dumps(MADE.against(planted(2)).to_dict()))
    other = json.loads(planted(4, rounds=3, sizes=(8,), operator="demo::other").to_json())
    documents = {
        "one": json.loads(MADE.to_json()),
        "command": {"schema": 2, "benchmarks": [json.loads(MADE.to_json()), other], "verdicts": [verdict]}
        | {"unmeasured": [{"operator": None, "message": "no samples"}]},
    }
    assert MADE in benchmarks_in(json.dumps(documents[form])).values()
    right = refused = 0
    for seed in SEEDS:
        text = damaged(documents[form], seed)
        try:
            made = benchmarks_in(text, FILE)
        except errors.BenchmarkFormatError as error:
            refused += refused_rightly(error, FILE, "opsmith benchmark")
            continue
        document = json.loads(text)
        entries = document.get("benchmarks", [document])
        for entry in entries:
            read = made[entry["operator"]]
            if sum(each["operator"] == entry["operator"] for each in entries) == 1:
                written = json.loads(read.to_json())
                assert {name: entry[name] for name in written} == written or holds_more(entry, written), seed
            assert str(read), seed
            if read.operator == MADE.operator:
                assert str(read.against(MADE)), seed
                assert str(MADE.against(read)), seed
        right += 1
    sys.stdout.write(f"{len(SEEDS)} damaged: {right} read right, {refused} refused\n")
    assert right > 20
    assert right + refused == len(SEEDS)


def holds_more(read: object, written: object) -> bool:
    """Return True if all that was written stands in what was read, which may have more keys."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(holds_more(read[name], value) for name, value in written.items())
    if isinstance(written, list) and isinstance(read, list):
        return len(written) == len(read) and all(map(holds_more, read, written))
    return read == written


@pytest.mark.parametrize("text", ["[" * BRACKETS, '{"a":' * BRACKETS], ids=["lists", "objects"])
def test_a_hundred_thousand_brackets_are_refused(text: str) -> None:
    with pytest.raises(errors.BenchmarkFormatError) as raised:
        Benchmark.from_json(text)
    assert raised.value.expected == "JSON, not nested too deeply"
