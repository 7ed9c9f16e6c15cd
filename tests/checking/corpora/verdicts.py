"""What `check` says of every entry of the corpora, kept as data, so that a change shows each difference.

    python tests/checking/corpora/verdicts.py                 # prints what differs from verdicts.json
    python tests/checking/corpora/verdicts.py --update        # and writes it
    python tests/checking/corpora/verdicts.py --only sigmoid_twice

A verdict is the set of its findings: property, input, cause, severity. Each entry is checked at seed 0 and
`quick`, without what compiles. Exit status: 0 as before, 1 something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parent
DATA = HERE / "verdicts.json"
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

Verdict = list[list[str | None]]


def verdict_on(name: str) -> Verdict:
    """The findings on an entry, sorted; an exception of the checker is one of them."""
    import torch
    from corpora import COMPILED, corpora
    from entries import PLANTED, SOUND

    import opsmith

    corpora()
    deterministic, threads = torch.backends.cudnn.deterministic, torch.get_num_threads()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            operator, samples = (PLANTED.get(name) or SOUND[name]).build()
            report = opsmith.check(operator, samples=samples, seed=0, effort="quick", skip=COMPILED)
    except Exception as error:  # a verdict must say so, and the others follow
        return [["check", None, type(error).__name__, "broken"]]
    finally:
        torch.backends.cudnn.deterministic = deterministic
        torch.set_num_threads(threads)
    return sorted(
        ([each.property, each.input, each.cause, each.severity] for each in report.failures),
        key=lambda row: [str(part) for part in row],
    )


def verdicts(names: Sequence[str]) -> dict[str, Verdict]:
    """The verdict on each entry; two processes share the work, and each starts anew after fifty entries."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with get_context("spawn").Pool(2, maxtasksperchild=50) as pool:
        return dict(zip(names, pool.imap(verdict_on, names), strict=True))


def shown(verdict: Verdict | None) -> list[str]:
    """The findings in words."""
    if verdict is None:
        return ["(no such entry)"]
    return [f"{severity}: {property}/{input}/{cause}" for property, input, cause, severity in verdict]


def main() -> int:
    """Compare the verdicts with those that were kept."""
    from corpora import corpora
    from entries import PLANTED, SOUND

    parser = argparse.ArgumentParser(description="Compare what check says of the corpora with what it said.")
    parser.add_argument("--update", action="store_true", help="keep what it says now")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries to check")
    options = parser.parse_args()
    corpora()
    names = [name for name in (*PLANTED, *SOUND) if not options.only or name in options.only]
    kept: dict[str, Verdict] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    now = verdicts(names)
    differing = [name for name in names if kept.get(name) != now[name]]
    for name in differing:
        before, after = shown(kept.get(name)), shown(now[name])
        print(name, *(f"  - {line}" for line in before if line not in after), sep="\n")  # noqa: T201
        print(*(f"  + {line}" for line in after if line not in before), sep="\n")  # noqa: T201
    print(f"{len(differing)} of {len(names)} verdicts differ")  # noqa: T201
    if options.update:
        rows = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(verdict)}" for name, verdict in {**kept, **now}.items()
        )
        DATA.write_text("{\n" + rows + "\n}\n", encoding="utf-8")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
