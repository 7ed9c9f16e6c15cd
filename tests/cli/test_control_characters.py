"""Control characters of checked code reach no terminal: they could hide lines, or set its title."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import Result

from opsmith import errors
from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.output.html import page
from opsmith.cli.console import PrintableConsole

WORDS = "gone \x1b[2J\x1b]0;title\x07 \x9b31m \u202egnp.exe\x7f"
SHOWN = "gone ␛[2J␛]0;title␇ \ufffd31m \ufffdgnp.exe␡"

HOSTILE = f"""
import torch

class Hostile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise RuntimeError({WORDS!r})

    @staticmethod
    def backward(ctx, grad):
        return grad

X = [(torch.ones(3),)]
"""


def test_in_errors_and_reports() -> None:
    assert errors.UsageError("no", got=WORDS).message() == f"no\n  got: {SHOWN}"
    failure = Failure("forward", None, "raises", WORDS, evidence={"stderr": WORDS})
    report = Report("demo::op", (Outcome("forward", "failed", failures=(failure,)),), seed=0)
    assert str(report).count(SHOWN) == str(failure).count(SHOWN) == 2
    assert "\x1b" not in str(report)
    assert SHOWN in page([report])


def test_half_a_surrogate_pair_can_be_written() -> None:
    failure = Failure("forward", None, "raises", "half \ud83d")
    report = Report("demo::op", (Outcome("forward", "failed", failures=(failure,)),), seed=0)
    for text in (str(errors.UsageError("half \ud83d")), str(report), page([report])):
        assert "half \ufffd".encode() in text.encode()


def test_styles_stay(capsys: pytest.CaptureFixture[str]) -> None:
    PrintableConsole(force_terminal=True, color_system="standard").print(Text("\x1b[2J\x9b", style="red"))
    assert capsys.readouterr().out == "\x1b[31m␛[2J\ufffd\x1b[0m\n"


@pytest.mark.parametrize("command", ["check", "adopt"])
def test_in_commands(opsmith: Callable[..., Result], write: Callable[..., Path], command: str) -> None:
    file = write(HOSTILE)
    done = opsmith(
        command, f"{file}:Hostile", *(["--samples", "X", "--only", "forward"] * (command == "check"))
    )
    assert "␛[2J" in done.output
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*done.output}
