"""Structures and numbers that C++ and Python share are the same on both sides."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from opsmith.kernels.cuda.emulation import launch

HEADER = Path(launch.__file__).with_name("launch_record.h")
STRUCTURES = {
    "Index": launch.Index,
    "Report": launch.Report,
    "Requests": launch.Requests,
    "Region": launch._Region,
    "Options": launch._Options,
    "Outcome": launch._Outcome,
}


def compiled(tmp_path: Path, *assertions: str) -> subprocess.CompletedProcess[str]:
    lines = [f'static_assert({each}, "{each}");' for each in assertions]
    source = tmp_path / "same.cpp"
    source.write_text("\n".join([f'#include "{HEADER}"', "using namespace emulated;", *lines]))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", str(source)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_same_fields(tmp_path: Path, name: str) -> None:
    structure = STRUCTURES[name]
    fields = [each[0] for each in structure._fields_]
    assertions = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
    for field in fields:
        place = getattr(structure, field)
        assertions.append(f"offsetof({name}, {field}) == {place.offset}")
        assertions.append(f"sizeof({name}::{field}) == {place.size}")
    done = compiled(tmp_path, *assertions)
    assert done.returncode == 0, done.stderr


def test_kinds_of_reports_have_the_same_numbers(tmp_path: Path) -> None:
    kinds = [f"{each.name} == {each.value}" for each in launch.Kind]
    regions = [
        f"{name} == {getattr(launch, name)}" for name in ("IN_SHARED", "NOWHERE", "IN_GLOBAL_VARIABLE")
    ]
    done = compiled(tmp_path, *kinds, *regions)
    assert done.returncode == 0, done.stderr


def test_a_difference_is_an_error(tmp_path: Path) -> None:
    assert "static assertion failed" in compiled(tmp_path, "sizeof(Report) == 1").stderr
