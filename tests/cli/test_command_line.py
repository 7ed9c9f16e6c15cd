"""The command `opsmith` as a whole: help that teaches, version, a missing extra, and real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import Result

from opsmith import __version__
from opsmith.cli import main
from opsmith.cli.app import COMMANDS

Write = Callable[..., Path]
Run = Callable[..., Result]


def test_version(opsmith: Run) -> None:
    done = opsmith("--version")
    assert (done.exit_code, done.stdout) == (0, f"opsmith {__version__}\n")


def test_help_names_the_commands_and_the_exit_statuses(opsmith: Run) -> None:
    done = opsmith("--help")
    assert done.exit_code == 0
    for words in ("check", "doctor", "opsmith check my_operators.py", "Exit status: 0 success"):
        assert words in done.stdout


@pytest.mark.slow
def test_no_argument_is_a_question_for_help(opsmith: Run) -> None:
    assert "Usage: opsmith" in opsmith().output


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_the_help_of_a_command_has_examples_and_exit_statuses(opsmith: Run, command: str) -> None:
    done = opsmith(command, "--help")
    assert opsmith(command, "-h").stdout == done.stdout
    assert done.exit_code == 0
    for words in ("Examples", f"opsmith {command}", "Exit status: 0", "--json"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chek"], "No such command 'chek'"),
        (["check"], "Missing argument 'FILE_OR_MODULE[:NAME]'"),
        (["check", "opsmith.ops", "--seed", "x"], "Invalid value for '--seed'"),
        (["doctor", "--jsno"], "No such option: --jsno"),
    ],
)
def test_usage_errors_have_status_2(opsmith: Run, arguments: list[str], says: str) -> None:
    done = opsmith(*arguments)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.slow
def test_a_command_whose_module_is_not_there_is_not_listed(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "absent", "opsmith.cli.absent")
    assert "absent" not in opsmith("--help").stdout
    assert opsmith("absent").exit_code == 2


def process(*arguments: str, before: str = "") -> subprocess.Popen[str]:
    """The command line as the script `opsmith` runs it, in a process of its own."""
    code = f"import sys; {before or 'pass'}; from opsmith.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", ["typer", pytest.param("rich", marks=pytest.mark.slow)])
def test_without_the_extra_one_line_names_it(package: str) -> None:
    done = process("check", "opsmith.ops", before=f"sys.modules[{package!r}] = None")
    out, err = done.communicate()
    assert (done.returncode, out) == (2, "")
    assert (
        err == f"opsmith: the command line needs `{package}`: pip install '.[cli]' in a checkout of opsmith\n"
    )


def test_without_the_extra_doctor_lists_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = metadata.version

    def without_typer(name: str) -> str:
        if name == "typer":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_typer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.setattr(sys, "argv", ["opsmith", "doctor"])
    monkeypatch.delitem(sys.modules, "opsmith.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    extra = "pip install '.[cli]' in a checkout of opsmith"
    assert (ended.value.code, said.err) == (2, f"opsmith: the command line needs `typer`: {extra}\n")
    assert f"typer is missing, for the command line: {extra}\n" in said.out
    assert "rich is missing" not in said.out


@pytest.mark.slow
def test_a_real_run_prints_json_on_stdout_and_leaves_with_its_status(write: Write, space: str) -> None:
    done = process("check", str(write()), "--json", "--only", "gradient")
    out, err = done.communicate()
    assert done.returncode == 1, err
    assert [report["operator"] for report in json.loads(out)["reports"]] == [
        f"{space}::right",
        f"{space}::wrong",
    ]
    assert err == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_ctrl_c_in_a_real_run_has_status_130_and_no_traceback(write: Write, tmp_path: Path) -> None:
    started = tmp_path / "started"
    file = write(
        "import pathlib, time, torch, opsmith\n"
        '@opsmith.operator("{space}::slow")\ndef slow(x: torch.Tensor) -> torch.Tensor:\n'
        f"    pathlib.Path({str(started)!r}).touch()\n    time.sleep(10**6)\n    return x + 1\n"
        "slow.samples(lambda make: [(make(2),)])\n"
    )
    # What a shell puts in the background ignores SIGINT from its start, and so does what it starts in turn.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    running = process("check", str(file), before=heeds)
    while not started.exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate()
    assert (running.returncode, out, err) == (130, "", "opsmith: interrupted\n")
