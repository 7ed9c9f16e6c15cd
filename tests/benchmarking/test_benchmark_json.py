"""A benchmark as JSON and back, by the schema in the package; and what is no benchmark."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from benchmarked import gate
from planted import planted

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.benchmarking.result import SCHEMA, benchmarks_in

TEXT = (importlib.resources.files("opsmith.benchmarking") / "benchmark.schema.json").read_text("utf-8")
RUN: dict[str, Any] = json.loads(TEXT)
VALIDATORS = {
    name: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": RUN["$defs"]})
    for name in ("benchmark", "verdict")
}


ADDED = {"spent"}
"""Keys that were added within the version: older documents lack them."""


def pairs(read: Any, schema: dict[str, Any]) -> Iterator[tuple[set[str], set[str]]]:
    """The keys of every object and those that the schema describes, through all of a document."""
    schema = RUN["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(read, list) and "items" in schema:
        for each in read:
            yield from pairs(each, schema["items"])
    elif isinstance(read, dict) and "required" in schema:
        assert set(schema["required"]) == set(schema["properties"]) - ADDED
        yield set(read), set(schema["properties"])
        for name, each in read.items():
            yield from pairs(each, schema["properties"][name])


def test_a_benchmark_comes_back_as_it_was(measure: Callable[..., Benchmark]) -> None:
    for made in (planted(3), measure(gate, memory=True, baselines={"other": lambda x, y: x})):
        again = Benchmark.from_json(made.to_json())
        assert again == made
        assert str(again) == str(made)
        assert again.to_json() == made.to_json()
        assert {again, made} == {made}  # it can be an element of a set, though it holds dictionaries


def test_a_benchmark_without_the_keys_that_were_added_is_read() -> None:
    made = planted(3)
    document = json.loads(made.to_json())
    assert document.pop("spent") == {"check": 2.5, "total": 20.0}
    assert Benchmark.from_json(json.dumps(document)) == replace(made, spent={})


def test_every_key_is_described_and_no_other_is(measure: Callable[..., Benchmark]) -> None:
    made = planted(3)
    verdict = json.loads(json.dumps(made.against(planted(2)).to_dict()))
    for name, read in (
        ("benchmark", json.loads(made.to_json())),
        ("benchmark", json.loads(measure(gate, memory=True).to_json())),
        ("verdict", verdict),
    ):
        VALIDATORS[name].validate(read)
        found = list(pairs(read, RUN["$defs"][name]))
        assert len(found) > 10
        for written, described in found:
            assert written == described


def test_the_schema_is_one_and_has_the_version_of_benchmarks() -> None:
    jsonschema.Draft202012Validator.check_schema(RUN)
    assert RUN["$defs"]["benchmark"]["properties"]["schema"]["const"] == SCHEMA
    assert RUN["$id"].endswith(f":{SCHEMA}")


def test_the_schema_says_something_of_every_key() -> None:
    for name, described in RUN["$defs"].items():
        assert described["description"]
        for key, schema in described["properties"].items():
            assert {"description", "const", "$ref"} & set(schema), f"{name}.{key}"


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str | None]] = {
    "no load": (lambda read: read.pop("load"), "the keys `load`", "$"),
    "no timings": (lambda read: read["cases"][0].pop("timings"), "the keys `timings`", "$.cases[0]"),
    "text for seconds": (
        lambda read: read["cases"][0]["timings"][0].update(seconds=["1"]),
        "a finite number",
        "$.cases[0].timings[0].seconds[0]",
    ),
    "no times": (
        lambda read: read["cases"][0]["timings"][0].update(seconds=[]),
        "minItems 1: For each round, how long a call took.",
        "$.cases[0].timings[0].seconds",
    ),
    "no time at all": (
        lambda read: read["cases"][1]["timings"][2].update(seconds=[1.0, 0.0]),
        "1e-15 or more",
        "$.cases[1].timings[2].seconds[1]",
    ),
    "fewer rounds": (
        lambda read: read["cases"][1]["timings"][2]["seconds"].pop(),
        "the same number of seconds for each contender",
        "$.cases[1].timings",
    ),
    "text for a list": (lambda read: read.update(cases="none"), "a list: What was measured.", "$.cases"),
    "a number for a case": (
        lambda read: read.update(cases=[1]),
        "an object: One size, in one dtype, on one device.",
        "$.cases[0]",
    ),
    "a number for a name": (
        lambda read: read.update(operator=3),
        "a string: The operator's name.",
        "$.operator",
    ),
    "a part of a thread": (
        lambda read: read.update(threads=1.5),
        "a whole number: How many threads torch had.",
        "$.threads",
    ),
    "another version": (lambda read: read.update(schema=SCHEMA + 1), "2: Version of the format.", "$.schema"),
    "infinite": (
        lambda read: read["ceilings"][0].update(rate=float("inf")),
        "JSON, not nested too deeply",
        None,
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_no_benchmark_is_refused_with_its_place(name: str) -> None:
    change, expected, where = BREAKS[name]
    read = json.loads(planted(1).to_json())
    change(read)
    with pytest.raises(errors.BenchmarkFormatError, match="is not a benchmark that this version") as raised:
        Benchmark.from_json(json.dumps(read))
    assert raised.value.expected == expected
    assert raised.value.where == where


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{", "Expecting property name"),
        ("[]", "0 benchmarks"),
        ("{}", "no keys"),
        ("3", "int 3"),
        ('{"schema": 2, "reports": []}', "the keys `schema`, `reports`"),
    ],
)
def test_other_json_and_other_text_are_refused(text: str, got: str) -> None:
    with pytest.raises(errors.BenchmarkFormatError) as raised:
        Benchmark.from_json(text)
    assert (raised.value.got or "").startswith(got)
    assert raised.value.hint


def test_a_case_in_a_list_has_its_path(tmp_path: Path) -> None:
    second = json.loads(planted(2).to_json())
    second["cases"][1]["timings"][2]["seconds"].pop()
    with pytest.raises(errors.BenchmarkFormatError) as raised:
        benchmarks_in(json.dumps([planted(1).to_dict(), second]), tmp_path)
    assert raised.value.where == f"{tmp_path}: $[1].cases[1].timings"


def test_keys_that_a_later_writer_added_are_no_matter() -> None:
    read = planted(1).to_dict() | {"also": 3}
    assert Benchmark.from_json(json.dumps(read)) == planted(1)
