"""Errors of commands name options, and not the arguments of the functions behind them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
Write = Callable[..., Path]

SOURCE = """
import torch, opsmith
from torch import Tensor

@opsmith.operator("{space}::twice")
def twice(x: Tensor) -> Tensor:
    return x + x

twice.samples(lambda make: [(make(3),)])

@opsmith.operator("{space}::bare")
def bare(x: Tensor) -> Tensor:
    return x + x

class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.sigmoid(x)

def model():
    return torch.nn.Linear(3, 3)
"""


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("command", "name", "more", "shown", "hidden"),
    [
        ("export", "twice", ("{}/a.onnx", "--body", "inlined"), ("--body", "`--body inline`"), "body="),
        ("export", "twice", ("{}/a.onnx", "--dynamic", "y:0=b"), ("argument: --dynamic",), "input_names"),
        ("benchmark", "twice", ("--quick", "--size", "Q=3"), ("--size", "`--samples [FILE"), "sizes="),
        ("benchmark", "bare", ("--quick",), ("or give `--samples [FILE_OR_MODULE:]NAME`",), "samples="),
        ("check", "bare", ("--quick",), ("or give `--samples [FILE_OR_MODULE:]NAME`",), "samples="),
        (
            "draw",
            "Swish",
            ("-o", "{}/a.svg"),
            ("is an autograd.Function, and is not adopted",),
            "has no operator",
        ),
        ("export", "Swish", ("{}/a.onnx",), ("adopt it first: `opsmith adopt ",), "has no operator"),
        (
            "draw",
            "model",
            ("-o", "{}/a.svg"),
            ("and its arguments are missing", "return model(), ("),
            "inputs=",
        ),
        ("export", "model", ("{}/a.onnx",), ("and its arguments are missing", "return model(), ("), "`args`"),
        ("page", "twice", ("-o", "{}/a.html", "--checked", "{}/no"), ("argument: --checked",), "checked="),
        ("page", "twice", ("-o", "{}/a.html", "--benchmarked", "{}/no"), ("argument: --benchmarked",), "="),
        ("benchmark", "twice", ("--against", "{}/no"), ("argument: --against",), "against="),
    ],
)
def test_options_are_named(
    opsmith: Run, write: Write, tmp_path: Path, command: str, name: str, more: tuple[str, ...],
    shown: tuple[str, ...], hidden: str,
) -> None:  # fmt: skip
    done = opsmith(command, f"{write(SOURCE)}:{name}", *(each.format(tmp_path) for each in more))
    assert done.exit_code == 2, done.output
    for each in shown:
        assert each in done.stderr
    assert hidden not in done.stderr


@pytest.mark.slow
def test_remarks_of_a_benchmark_name_options(opsmith: Run, write: Write) -> None:
    done = opsmith(
        "benchmark", f"{write(SOURCE)}:twice", "--quick", "--no-compiled", "--direction", "forward"
    )
    assert "give others with `--size` or `--samples`" in " ".join(done.stdout.split()), done.output
