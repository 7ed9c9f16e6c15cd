"""The options of the command, and what is expected of their values."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from processes import Processes

TRAINING_IMAGES = 1437


@dataclass(frozen=True)
class Configuration:
    """Options that determine the numbers of a run: a checkpoint goes on under the same alone."""

    epochs: int
    batch: int
    seed: int
    lr: float
    images: int
    device: str
    processes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Options:
    """The configuration, the folder of the results, and whether to go on from its last checkpoint."""

    configuration: Configuration
    out: Path
    resume: bool

    @property
    def device(self) -> torch.device:
        """Device of this process: several share the GPUs of their machine in turn."""
        if self.configuration.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def parse(arguments: Sequence[str] | None, processes: Processes) -> Options:
    """Read the options; a value that cannot be ends the process with status 2 and a line that says why."""
    parser = _parser(argparse.ArgumentParser if processes.rank == 0 else _Silent)
    given = parser.parse_args(arguments)
    if given.batch % processes.count or given.batch < 2 * processes.count:
        parser.error(
            f"argument --batch: expected a multiple of the number of processes, {processes.count}, and two "
            f"images or more for each, which batch normalisation needs, got {given.batch}"
        )
    if given.batch > given.images:
        parser.error(
            f"argument --batch: expected no more than the {given.images} training images, got {given.batch}"
        )
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: this torch sees no GPU; use --device cpu")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"argument --out: expected a folder, got the file {given.out}")
    configuration = Configuration(
        given.epochs, given.batch, given.seed, given.lr, given.images, given.device, processes.count
    )
    return Options(configuration, given.out, given.resume)


class _Silent(argparse.ArgumentParser):
    """Ends the process and prints nothing: rank 0 has printed the message."""

    def error(self, message: str) -> NoReturn:
        self.exit(2)

    def print_help(self, file: Any = None) -> None:
        """Print nothing."""


def _parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = kind(
        prog="train.py",
        description="Train a small RedNet on the handwritten digits of scikit-learn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    whole = _whole(1)
    parser.add_argument("--epochs", type=whole, default=15, metavar="N", help="passes over the images")
    parser.add_argument(
        "--batch", type=whole, default=64, metavar="N", help="images in a step, of all processes together"
    )
    parser.add_argument(
        "--seed",
        type=_whole(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of the split and all random numbers",
    )
    parser.add_argument("--lr", type=_rate, default=0.01, metavar="RATE", help="highest learning rate")
    parser.add_argument(
        "--images",
        type=_whole(2, TRAINING_IMAGES),
        default=TRAINING_IMAGES,
        metavar="N",
        help="train on the first N of the training images",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train")
    parser.add_argument(
        "--out", type=Path, default=Path("out/rednet_digits"), metavar="FOLDER", help="for the results"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    expected = f"from {least} on" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {expected}, got {text!r}")
        return value

    return number


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
