"""Commands whose stdout takes nothing: they say so, and what they found is not lost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from opsmith.build.cache import Cache
from opsmith.cli import cache as of_cache
from opsmith.cli.adopt import adopt
from opsmith.cli.cache import cache
from opsmith.cli.doctor import doctor
from opsmith.cli.output import answering

FUNCTIONS = """
from torch.autograd import Function


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions_of_stdout.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_cache, "cache_on_disk", lambda: Cache(tmp_path / "cache"))


COMMANDS: dict[str, tuple[Callable[[str], None], str]] = {
    "adopt": (lambda functions: adopt(functions), "Twice: works"),
    "adopt --json": (lambda functions: adopt(functions, as_json=True), '"name": "Twice"'),
    "doctor": (lambda functions: doctor(), "works here"),
    "doctor --json": (lambda functions: doctor(as_json=True), '"works": true'),
    "cache": (lambda functions: cache(), "0 entries"),
    "cache --json": (lambda functions: cache(as_json=True), '"directory": '),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_what_a_full_stdout_does_not_take_stands_on_stderr(
    command: str, functions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shown = COMMANDS[command]
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(typer.Exit) as ended:
            run(functions)
    said = capsys.readouterr().err
    assert ended.value.exit_code == 2
    assert "the report cannot be written to stdout" in said
    assert "got: No space left on device" in said
    assert shown in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout_is_told_before_anything_is_done(
    command: str, functions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(typer.Exit) as ended:
        COMMANDS[command][0](functions)
    assert ended.value.exit_code == 2
    assert "there is no stdout to print the report on" in capsys.readouterr().err


def test_a_reader_that_closes_the_pipe_has_read_enough(
    functions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `opsmith cache | head`: no message, and the status of the command."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(typer.Exit) as ended:
            adopt(functions)
    assert (ended.value.exit_code, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("stderr", ["open", "closed"])
def test_what_is_printed_below_python_is_no_part_of_the_answer(
    stderr: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by `printf` in a kernel, whose text stays in C's buffer, and by the processes that it starts."""
    libc = ctypes.CDLL(None)
    with open(1, "w", closefd=False) as stdout, open(2, "w", closefd=False) as opened:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", opened if stderr == "open" else None)
        with answering(as_json=True) as output:
            libc.printf(b"of C\n")
            stdout.write("of Python\n")
            subprocess.run(["echo", "of a process"], check=True)
            output.write("answer\n")
        libc.printf(b"afterwards\n")
        libc.fflush(None)
    said = capfd.readouterr()
    assert said.out == "answer\nafterwards\n"
    printed = ["of Python", "of C", "of a process"] if stderr == "open" else []
    assert sorted(said.err.splitlines()) == sorted(printed)
