"""Options of both commands, and the readers of their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose help has the defaults."""
    made = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of all random numbers"
    )
    made.add_argument(
        "--out", type=_folder, default=Path("out/decoder"), metavar="FOLDER", help="where the results are"
    )
    made.add_argument("--threads", type=whole(1), default=1, metavar="N", help="threads to compute with")
    return made


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text}")
    return path


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers in a range."""
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


def real(least: float, *, included: bool) -> Callable[[str], float]:
    """A reader of finite numbers above a limit, or from it on."""
    expected = f"from {least:g} on" if included else f"above {least:g}"

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (value == least and not included):
            raise argparse.ArgumentTypeError(f"expected a number {expected}, got {text!r}")
        return value

    return number
