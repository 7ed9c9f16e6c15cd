"""`opsmith cache` shows what was built and is kept, and removes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opsmith.build.cache import Cache
from opsmith.cli import cache as command
from opsmith.cli.app import app


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    kept = Cache(tmp_path / "cache")
    monkeypatch.setattr(command, "cache_on_disk", lambda: kept)
    monkeypatch.setenv("COLUMNS", "200")
    return kept


def fill(disk: Cache) -> None:
    for parts in ({"kind": "cpp", "operator": "demo::scaled"}, {"kind": "runtime"}):
        disk.obtain(parts, lambda directory: (directory / "kernel.so").write_bytes(bytes(20_000)) and None)


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["cache", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_an_empty_cache(disk: Cache) -> None:
    assert run().splitlines() == ["0 entries, 0.0 MB", str(disk.directory)]
    assert run("--clear").splitlines()[0] == "removed 0 entries, 0.0 MB"


def test_what_is_kept_is_listed_and_removed(disk: Cache) -> None:
    fill(disk)
    said = run()
    assert "kernel in C++" in said
    assert "demo::scaled" in said
    assert "opsmith's own library" in said
    assert said.splitlines()[-2:] == ["2 entries, 0.0 MB", str(disk.directory)]
    assert len(disk.entries()) == 2
    assert run("--clear").splitlines() == ["removed 2 entries, 0.0 MB", str(disk.directory)]
    assert disk.entries() == []


def test_json(disk: Cache) -> None:
    fill(disk)
    answer = json.loads(run("--json"))
    assert (answer["schema"], answer["directory"], answer["cleared"]) == (1, str(disk.directory), False)
    assert {(each["kind"], each["operator"]) for each in answer["entries"]} == {
        ("kernel in C++", "demo::scaled"),
        ("opsmith's own library", ""),
    }
    assert all(each["bytes"] > 20_000 and each["built"] for each in answer["entries"])


KIND = r'(?:"kind": |KIND = |kind=|part=|_parts\(|\.obtain\()"([a-z ]+)"'


def test_whatever_is_built_has_a_name() -> None:
    texts = [path.read_text() for path in Path(command.__file__).parents[1].glob("kernels/**/*.py")]
    kinds = {kind for text in texts for kind in re.findall(KIND, text)}
    programs = {name for text in texts for name in re.findall(r'program="(.+)"', text)}
    assert len(programs) == 2
    linked = {f"{kind} for {program}" for kind in ("library", "library part") for program in programs}
    assert kinds | linked == {*command.KINDS}


def test_a_directory_that_others_can_write_into(disk: Cache) -> None:
    fill(disk)
    disk.directory.chmod(0o777)
    done = CliRunner().invoke(app, ["cache", "--clear"])
    assert done.exit_code == 2
    disk.directory.chmod(0o700)
    assert len(disk.entries()) == 2
