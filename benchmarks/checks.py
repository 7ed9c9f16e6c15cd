"""Seconds that `opsmith.check` takes: ten small operators, attention, and the command from the shell.

The checks run in one process, in which each effort has run once before: what torch loads at its first use and
the first compile of a process are not counted. `from the shell` is `opsmith check FILE` with one small
operator, each in a process of its own. `torch's own tools` are `torch.library.opcheck`, `torch.export` and
`torch.compile` (with static and with dynamic sizes, forward and backward, without Inductor), called
directly on the first sample of each of the ten: a default check runs them on all of their samples. Bars are
what opsmith aims at, at most, on two cores at full speed. `machine` says how long 20 million additions in
Python take here: about a second on such cores. Run it with nothing else running:
`python benchmarks/checks.py [--rounds 3] [--quick] [--json]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import opsmith
from opsmith import ops

BARS = {"quick": 0.2, "default": 0.8}
ATTENTION_BAR = 8.0
SHELL_BARS = {"quick": 4.0, "default": 12.0}

SMALL = """
import opsmith
from torch import Tensor

@opsmith.operator("checked::scaled")
def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by

scaled.gradients(x=lambda grad, by: grad * by)

@scaled.samples
def _(make: opsmith.Make):
    yield make(3, 4), 2.0
"""


@opsmith.operator("checks::softplus")
def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


softplus.gradients(x=lambda grad, x: grad * x.sigmoid())


@opsmith.operator("checks::swish", hidden=("gate",))
def swish(x: Tensor, slope: float = 1.0) -> tuple[Tensor, Tensor]:
    gate = (x * slope).sigmoid()
    return x * gate, gate


swish.gradients(x=lambda grad, x, gate, slope: grad * (gate + x * slope * gate * (1 - gate)))


@opsmith.operator("checks::row_norm")
def row_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


@opsmith.operator("checks::both")
def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y, x + y


both.gradients(
    x=lambda grad_result0, grad_result1, y: grad_result0 * y + grad_result1,
    y=lambda grad_result0, grad_result1, x: grad_result0 * x + grad_result1,
)


@opsmith.operator("checks::weighted")
def weighted(xs: list[Tensor], weights: Tensor) -> Tensor:
    return torch.stack([x * weight for x, weight in zip(xs, weights, strict=True)]).sum(0)


@opsmith.operator("checks::add_", mutates=["x"])
def add_(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@opsmith.operator("checks::attention")
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@softplus.samples
@swish.samples
@row_norm.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield (make(3, 4),)


@both.samples
@add_.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(3, 4), make(3, 4)


@weighted.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield [make(3), make(3)], make(2)


@attention.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    yield make(2, 4, 16, 8), make(2, 4, 16, 8), make(2, 4, 16, 8), mask


OPERATORS = (ops.exp, ops.mul, ops.add, ops.linear, softplus, swish, row_norm, both, weighted, add_)


def seconds(operator: Any, effort: str) -> float:
    """The time of one check, which finds no error; a limit is none."""
    begun = time.perf_counter()
    report = opsmith.check(operator, effort=effort)
    taken = time.perf_counter() - begun
    if not report.passed:
        raise SystemExit(f"nothing is timed that is wrong: {report}")
    return taken


class Model(torch.nn.Module):
    """A model that calls an operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, *args: Any) -> Any:
        return self.operator(*args)


def seconds_of_torch(operator: Any) -> float:
    """The time of torch's own tools on the first sample, which a default check runs, too."""
    from opsmith.checking.effort import EFFORTS
    from opsmith.checking.subject_kinds import subject_of
    from opsmith.core.call_arguments import tensors_in

    sample = subject_of(operator, None, 0, EFFORTS["default"]).samples[0]
    in_place = bool(operator.specification.schema.written)

    def arguments() -> tuple[Any, ...]:
        flat = sample.at()
        for argnum in () if in_place else sample.inexact:
            flat[argnum].requires_grad_()
        return tuple(sample.arguments(flat)[0])

    def dimensions(value: Any) -> Any:
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO) if isinstance(value, Tensor) else None

    any_sizes = tree_map(dimensions, arguments())
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(operator.torch_operator, arguments())
        for dynamic in (False, True):
            torch.compiler.reset()
            returned = torch.compile(Model(operator), backend="aot_eager", dynamic=dynamic)(*arguments())
            results = [each for each in tensors_in([returned]) if each.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        for sizes in (None, (any_sizes,)):
            with torch.no_grad():
                torch.export.export(Model(operator), arguments(), dynamic_shapes=sizes, strict=False)
    return time.perf_counter() - begun


def from_shell(effort: str) -> float:
    """The time of `opsmith check FILE` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.py"
        file.write_text(SMALL)
        command = [
            sys.executable,
            "-m",
            "opsmith",
            "check",
            str(file),
            *(["--quick"] if effort == "quick" else []),
        ]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - begun


def speed() -> float:
    """Seconds that 20 million additions in Python take."""
    begun, total = time.perf_counter(), 0
    for number in range(20_000_000):
        total += number
    return time.perf_counter() - begun


def measure(rounds: int, efforts: list[str]) -> dict[str, float]:
    """Median seconds by what they are of; of the ten operators the median and each one."""
    found: dict[str, float] = {}
    for effort in efforts:
        seconds(softplus, effort)
        every = {
            operator.name: statistics.median(seconds(operator, effort) for _ in range(rounds))
            for operator in OPERATORS
        }
        found |= {f"{effort}: {name}": taken for name, taken in every.items()}
        found[f"{effort}: median of ten"] = statistics.median(every.values())
        found[f"{effort}: from the shell"] = statistics.median(from_shell(effort) for _ in range(rounds))
    if "default" in efforts:
        for operator in OPERATORS[:2]:
            seconds_of_torch(operator)
        found["default: torch's own tools"] = statistics.median(map(seconds_of_torch, OPERATORS))
        found["default: attention"] = statistics.median(seconds(attention, "default") for _ in range(rounds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="leave the default effort out")
    parser.add_argument("--json", action="store_true", help="print the figures alone, as JSON")
    given = parser.parse_args()
    efforts = ["quick"] if given.quick else ["quick", "default"]
    found = measure(given.rounds, efforts)
    if given.json:
        print(json.dumps(found))
        return
    bars = {f"{effort}: median of ten": bar for effort, bar in BARS.items()}
    bars |= {f"{effort}: from the shell": bar for effort, bar in SHELL_BARS.items()}
    bars["default: attention"] = ATTENTION_BAR
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; machine {speed():.1f} s; seconds")
    for name, taken in found.items():
        print(f"  {name:34s}{taken:8.2f}" + (f"   bar {bars[name]:4.1f}" if name in bars else ""))


if __name__ == "__main__":
    main()
