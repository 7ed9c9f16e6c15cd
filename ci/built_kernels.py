"""Check that a package serves its kernels in C++: none may be missing, compiled or cached.

    opsmith doctor opsmith --json | python ci/built_kernels.py

Exit status: 0 each kernel in C++ is loaded from the package, 1 another one, or none, is listed.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Read the answer of doctor from stdin, and return the exit status."""
    kernels = [each for each in json.load(sys.stdin)["kernels"] if each["language"] == "C++"]
    others = [each for each in kernels if not each["origin"].startswith("built into the package for ")]
    for each in others:
        print(f"dist-check: {each['operator']}, {each['where']}: {each['origin']}", file=sys.stderr)
    if not kernels:
        print("dist-check: doctor lists no kernel in C++", file=sys.stderr)
    print(f"built kernels: {len(kernels) - len(others)} of {len(kernels)} are loaded")
    return 0 if kernels and not others else 1


if __name__ == "__main__":
    sys.exit(main())
