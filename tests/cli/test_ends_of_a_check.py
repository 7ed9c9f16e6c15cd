"""`opsmith check` comes to an end of its own: operators that leave, output that nobody takes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from opsmith.cli.guard import exit_reported, guarded

Write = Callable[..., Path]
Run = Callable[..., Result]
FAST = ("--only", "forward", "--only", "gradient", "--quick")

FUNCTIONS = """
import ctypes, os, sys
import torch
from torch.autograd import Function

class Fine(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class Leaving(Fine):
    @staticmethod
    def backward(ctx, grad):
        sys.exit(0)

class LeavingAtOnce(Fine):
    @staticmethod
    def forward(ctx, x):
        sys.exit(0)

class Interrupting(Fine):
    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt

class Unbuilt(Fine):
    @staticmethod
    def forward(ctx, x):
        raise RuntimeError("my kernel was not built")

class Huge(Fine):
    @staticmethod
    def forward(ctx, x):
        return x + torch.empty(1 << 45)

class Crashing(Fine):
    @staticmethod
    def backward(ctx, grad):
        ctypes.string_at(0)

class Dropping(Fine):
    @staticmethod
    def forward(ctx, x):
        os._exit(0)

X = [(torch.randn(3, 4),)]
"""


def apart(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, which may die."""
    command = [sys.executable, "-m", "opsmith", "check", *arguments]
    given: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, check=False, **given)  # type: ignore[call-overload, no-any-return]


def line_of(text: str, words: str) -> int:
    return 1 + next(number for number, line in enumerate(text.splitlines()) if words in line)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "options", "words", "says"),
    [
        (
            "Leaving",
            (),
            None,
            "SystemExit: 0; the operator ends the process instead of returning or raising an error",
        ),
        (
            "LeavingAtOnce",
            (),
            None,
            "SystemExit: 0; the operator ends the process instead of returning or raising an error",
        ),
        (
            "Leaving",
            ("--isolate",),
            None,
            "SystemExit: 0; the operator ends the process instead of returning or raising an error",
        ),
        ("Interrupting", ("--isolate",), "raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("Unbuilt", (), "raise RuntimeError", "RuntimeError: my kernel was not built"),
        ("Unbuilt", ("--isolate",), "raise RuntimeError", "RuntimeError: my kernel was not built"),
        ("Huge", (), "torch.empty(1 << 45)", "can't allocate memory"),
    ],
)
def test_what_leaves_or_raises_is_a_finding(
    opsmith: Run, write: Write, name: str, options: tuple[str, ...], words: str | None, says: str
) -> None:
    file = write(FUNCTIONS)
    done = opsmith("check", f"{file}:{name}", "--samples", "X", "--json", *options, *FAST)
    assert done.exit_code == 1, done.output
    (report,) = json.loads(done.stdout)["reports"]
    (failure,) = [each for outcome in report["outcomes"] for each in outcome["failures"]]
    assert failure["cause"] == "raises"
    assert says in failure["message"]
    assert failure["evidence"]["sample"] == "sample 0 (x [3, 4])"
    if words is not None:
        assert failure["where"] == f"{file}:{line_of(FUNCTIONS, words)}"


@pytest.mark.parametrize("name", ["Leaving", "LeavingAtOnce"])
def test_what_leaves_on_guessed_arguments_is_told(opsmith: Run, write: Write, name: str) -> None:
    done = opsmith("check", f"{write(FUNCTIONS)}:{name}", *FAST)
    assert done.exit_code == 2
    assert "SystemExit" in done.stderr


def test_what_leaves_in_every_guessed_call_is_told_by_adopt(opsmith: Run, write: Write) -> None:
    adopted = opsmith("adopt", f"{write(FUNCTIONS)}:LeavingAtOnce")
    assert adopted.exit_code == 1
    assert "SystemExit" in adopted.stdout


def test_what_leaves_elsewhere_is_no_success(opsmith: Run, write: Write) -> None:
    with pytest.raises(typer.Exit) as left, guarded():
        sys.exit(0)
    assert left.value.exit_code == 2


@pytest.mark.slow
def test_a_crash_shows_its_line_and_an_exit_names_isolate(write: Write) -> None:
    file = write(FUNCTIONS)
    died = apart(f"{file}:Crashing", "--samples", "X", "--only", "gradient", "--quick")
    assert died.returncode == -signal.SIGSEGV
    assert f'File "{file}", line {line_of(FUNCTIONS, "ctypes.string_at")} in backward' in died.stderr
    assert died.stderr.endswith(
        "opsmith: the process ended while `Crashing` ran, and nothing more is reported; if a kernel in C++ "
        "writes out of bounds, `--sanitize` names the line; with `--isolate` this crash is a finding, "
        "and the check goes on\n"
    )
    dropped = apart(f"{file}:Dropping", "--samples", "X", *FAST)
    assert (dropped.returncode, dropped.stdout) == (2, "")
    assert dropped.stderr == (
        "opsmith: `Dropping` called `os._exit(0)`, and nothing more is reported; with `--isolate` this "
        "exit is a finding, and the check goes on\n"
    )
    fine = apart(f"{file}:Fine", "--samples", "X", *FAST)
    assert (fine.returncode, fine.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no child processes")
def test_a_child_of_what_is_checked_ends_as_it_likes() -> None:
    before = os._exit
    with exit_reported("`Forking`"):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert os._exit is before


def test_under_isolation_a_dry_run_names_its_sample(opsmith: Run, write: Write) -> None:
    done = opsmith("check", f"{write(FUNCTIONS)}:Dropping", "--samples", "X", "--isolate", "--json", *FAST)
    (failure,) = json.loads(done.stdout)["reports"][0]["outcomes"][0]["failures"]
    assert failure["message"] == (
        "the operator ends the process with status 0, instead of returning, on sample 0 (x [3, 4])"
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_stdout_that_is_full_is_told_and_the_report_goes_to_stderr(write: Write) -> None:
    file = f"{write(FUNCTIONS)}:Fine"
    for options in ((), ("--json",)):
        with Path("/dev/full").open("w") as full:
            done = apart(file, "--samples", "X", *FAST, *options, stdout=full)
        assert done.returncode == 2
        assert "opsmith: the report cannot be written to stdout" in done.stderr
        assert "  got: No space left on device" in done.stderr
        assert ('"operator": "Fine"' if options else "Fine: passed") in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


def test_a_stdout_that_is_closed_is_told_before_anything_is_checked() -> None:
    from opsmith import errors
    from opsmith.cli.output import Output

    with pytest.raises(errors.UsageError, match="there is no stdout to print the report on"):
        Output(None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_page_that_cannot_be_written_loses_no_report(opsmith: Run, write: Write) -> None:
    file = f"{write(FUNCTIONS)}:Fine"
    done = opsmith("check", file, "--samples", "X", *FAST, "--json", "--html", "/dev/full")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["passed"] is True
    assert done.stderr == (
        "opsmith: no file can be written to `/dev/full`\n"
        "  argument: path\n"
        "  expected: a file in an existing folder that can be written to\n"
        "  got: No space left on device\n"
        "  hint: name another file\n"
        "  more: opsmith rule UsageError\n"
    )


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no file")
def test_a_page_that_can_never_be_written_is_told_before_anything_is_checked(
    opsmith: Run, write: Write, tmp_path: Path
) -> None:
    file = f"{write(FUNCTIONS)}:Fine"
    done = opsmith("check", file, "--html", "/proc/x.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no file can be written to `/proc/x.html`" in done.stderr
    opsmith("check", f"{file}x", "--html", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


# What a shell puts in the background ignores SIGINT from its start, and so does what it starts in turn.
SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from opsmith_command import main
main()
"""


def test_ctrl_c_ends_it_at_once_before_anything_is_imported(tmp_path: Path) -> None:
    torch = tmp_path / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.write_text("import time\nprint('importing', flush=True)\ntime.sleep(10**6)\n")
    package = Path(__file__).parents[2] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "check", "x.py"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "opsmith: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_sees_a_sign_of_life_before_torch_is_imported(tmp_path: Path) -> None:
    torch = tmp_path / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.write_text("import time\nprint('importing', flush=True)\ntime.sleep(10**6)\n")
    package = Path(__file__).parents[2] / "src"
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "check", "x.py"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    said = ""
    while not said.endswith("interrupted\r\n"):  # the system may hand a terminal's text on in pieces
        said += os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    assert said.startswith("opsmith: loading torch\r ")
    assert said.endswith("\ropsmith: interrupted\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["heard", "lost-in-a-finaliser"])
def test_ctrl_c_in_a_check_prints_what_is_finished(write: Write, lost: bool) -> None:
    interrupt = "os.kill(os.getpid(), 2)"
    text = FUNCTIONS.replace("sys.exit(0)", f"{interrupt}; return grad * 2", 1)
    if lost:
        text = text.replace(interrupt, "del_ = Dying(); del del_")
        text += f"\nclass Dying:\n    def __del__(self):\n        {interrupt}\n"
    file = write(text.partition("class LeavingAtOnce")[0] + text[text.index("X = ") :])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "check", str(file), "--json", *FAST],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    read = json.loads(done.stdout)
    assert [report["operator"] for report in read["reports"]] == ["Fine"]
    assert [entry["operator"] for entry in read["unchecked"]] == ["Leaving"]
    assert done.stderr.splitlines()[-1] == "opsmith: interrupted"
