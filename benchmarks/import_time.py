"""Processor time of `import opsmith` beyond `import torch`: fresh processes in turn, medians and spread.

The stated limits are 25 ms, and 40 ms with the bundled operators, on an ordinary machine; this prints figures
and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

ROUNDS = 9
LIMITS_MS = {"import opsmith": 25, "import opsmith.ops": 40}

# The clock starts after `import torch`: the difference of two whole processes would drown in their noise.
TIMED = """
import time
import torch
start = time.thread_time()
{statement}
print((time.thread_time() - start) * 1e3)
"""


def milliseconds(statement: str) -> float:
    """Time one statement in a fresh process that has imported torch."""
    command = [sys.executable, "-W", "ignore", "-c", TIMED.format(statement=statement)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print the medians alone, as JSON")
    given = parser.parse_args()
    statements = [*LIMITS_MS, "pass"]
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(given.rounds):
        for statement in statements:
            times[statement].append(milliseconds(statement))
    if given.json:
        medians = {statement: statistics.median(taken) for statement, taken in times.items()}
        nothing = medians.pop("pass")
        print(json.dumps({statement: taken - nothing for statement, taken in medians.items()}))
        return
    limits = ", ".join(f"`{statement}` {limit}" for statement, limit in LIMITS_MS.items())
    print(f"after `import torch`, {given.rounds} fresh processes each, milliseconds (limits: {limits})")
    for statement, taken in times.items():
        low, middle, high = min(taken), statistics.median(taken), max(taken)
        print(f"  {statement:40s} median {middle:6.1f}   min {low:6.1f}   max {high:6.1f}")


if __name__ == "__main__":
    main()
