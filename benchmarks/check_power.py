"""Faults of the corpus in tests/checking/corpora that opsmith's `check`, gradcheck and opcheck find.

    python benchmarks/check_power.py
    python benchmarks/check_power.py --effort quick --only linear_transposed swish

A fault counts as found where a tool says that anything is wrong, or raises; of opsmith also whether the first
cause that it names is the right one. Of the right operators, each that a tool complains of is a false alarm.
gradcheck is given the samples in float64, and every floating tensor requires its gradient. opcheck takes
operators alone, so that a class is registered as the composite implementation of one; where no schema can say
what it takes, opcheck does not apply. `all of torch` is gradcheck with batched gradients, forward mode for
classes that have it, gradgradcheck, and opcheck. opsmith's own runs leave its compile checks out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import opsmith

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "checking" / "corpora"))
from corpora import COMPILED, corpora, corpus_of, message, rightly_named
from entries import PLANTED, SOUND, Planted, Sound
from torch_tools import Verdict, by_gradcheck, by_gradgradcheck, by_opcheck

TOOLS = ("opsmith", "gradcheck", "gradcheck fast", "gradcheck + opcheck", "all of torch")


@dataclass(frozen=True)
class Row:
    """Outcome of one entry: the tools that complain, and whether opsmith names the cause."""

    entry: Planted | Sound
    complains: dict[str, bool]
    named: bool
    said: str
    without_opcheck: bool


def measured(entry: Planted | Sound, effort: str, seed: int) -> Row:
    """Run every tool on an entry, each on a fresh build of it and in a process of its own."""
    complaint, named, said = apart(lambda: _by_us(entry, effort, seed)) or (
        DIED,
        False,
        f"{entry.name}: {DIED}",
    )
    torchs = {
        name: _died_or(apart(lambda tool=tool: (tool(*entry.build()),)))
        for name, tool in (
            ("slow", by_gradcheck),
            ("fast", partial(by_gradcheck, fast=True)),
            ("twice", by_gradgradcheck),
            ("opcheck", by_opcheck),
        )
    }
    slow, fast, twice, opcheck = torchs.values()
    complains = {
        "opsmith": bool(complaint) and complaint != DIED,
        "gradcheck": bool(slow),
        "gradcheck fast": bool(fast),
        "gradcheck + opcheck": bool(slow or opcheck),
        "all of torch": bool(slow or twice or opcheck),
    }
    if isinstance(entry, Sound):
        complains["opsmith"] = bool(complaint)
        said = f"{said}; torch {next(filter(None, (slow, twice, opcheck)), 'nothing')}"
    return Row(entry, complains, named, said, opcheck is None)


DIED = "the process died"


def apart(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a forked child, where side effects stay; None if it dies."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sender.send(function())

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _died_or(answer: tuple[Verdict] | None) -> Verdict:
    return DIED if answer is None else answer[0]


def _by_us(entry: Planted | Sound, effort: str, seed: int) -> tuple[str, bool, str]:
    """Complaint of check, whether it names the cause, and the message."""
    operator, samples = entry.build()
    report = opsmith.check(operator, samples=samples, seed=seed, effort=effort, skip=COMPILED)  # type: ignore[arg-type]
    if isinstance(entry, Planted):
        complaint = report.verdict() if report.failures else ""
        return complaint, rightly_named(entry, report), message(entry, report)
    ours = [f"{each.property}/{each.input}/{each.cause}" for each in report.failures] or [report.verdict()]
    return "" if report.passed else report.verdict(), False, f"{entry.name}: opsmith {', '.join(ours)}"


def table(title: str, rows: Sequence[Row]) -> list[str]:
    """Lines that say how many faults each tool finds, by cause and in all, and its false alarms."""
    planted = [row for row in rows if isinstance(row.entry, Planted)]
    sound = [row for row in rows if isinstance(row.entry, Sound)]
    lines = [f"## {title}: {len(planted)} faults, {len(sound)} right operators", ""]
    lines += [_line("cause", "faults", "named", TOOLS), _line(":--", "--:", "--:", ["--:"] * len(TOOLS))]
    causes = Counter(row.entry.cause for row in planted if isinstance(row.entry, Planted))
    for cause in sorted(causes):
        lines.append(_counted(cause, [row for row in planted if _cause(row) == cause]))
    lines.append(_counted("all", planted))
    alarms = [str(sum(row.complains[tool] for row in sound)) for tool in TOOLS]
    lines.append(_line("false alarms", str(len(sound)), "", alarms))
    return lines


def _cause(row: Row) -> str:
    return row.entry.cause if isinstance(row.entry, Planted) else ""


def _counted(title: str, rows: Sequence[Row]) -> str:
    found = [str(sum(row.complains[tool] for row in rows)) for tool in TOOLS]
    return _line(title, str(len(rows)), str(sum(row.named for row in rows)), found)


def _line(first: str, second: str, third: str, rest: Iterable[str]) -> str:
    return "| " + " | ".join((first, second, third, *rest)) + " |"


def listed(title: str, rows: Iterable[Row]) -> list[str]:
    """Lines that name entries and what was said of them."""
    lines = [f"- {row.said}" for row in rows]
    return ["", f"{title}: {len(lines)}", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--effort", default="default", choices=["quick", "default", "thorough"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", help="`beside` (the checker) or `heldout`; both by default")
    parser.add_argument("--only", nargs="*", help="names of entries")
    wanted = parser.parse_args()
    groups = [group for group in corpora() if wanted.corpus in (None, str(group))]
    names = {name for group in groups for name in (*group.planted, *group.sound)}
    names &= {*(wanted.only or names)}
    torch.set_num_threads(1)  # a forked child must not wait for threads that it does not have
    rows = []
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_opcheck(*SOUND["swish"].build())  # what it loads is there for all children
    for entry in (*PLANTED.values(), *SOUND.values()):
        if entry.name in names:
            rows.append(measured(entry, wanted.effort, wanted.seed))
            print(f"\r{len(rows)} of {len(names)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for group in groups:
        mine = [row for row in rows if corpus_of(row.entry) == str(group)]
        if mine:
            print("\n".join([*table(f"corpus `{group}`", mine), ""]))
    planted = [row for row in rows if isinstance(row.entry, Planted)]
    sound = [row for row in rows if isinstance(row.entry, Sound)]
    lines = table("both", rows) if len(groups) > 1 else []
    lines += listed("faults that opsmith misses", [row for row in planted if not row.complains["opsmith"]])
    misnamed = [row for row in planted if row.complains["opsmith"] and not row.named]
    lines += listed("faults that opsmith finds and calls something else", misnamed)
    lines += listed("false alarms of opsmith", [row for row in sound if row.complains["opsmith"]])
    torchs = [row for row in sound if row.complains["all of torch"]]
    lines += listed("false alarms of torch's tools", torchs)
    without = sum(row.without_opcheck for row in rows)
    took = time.perf_counter() - start
    lines += [
        "",
        f"opcheck does not apply to {without} of {len(rows)}; torch {torch.__version__}; {took:.0f} s",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
