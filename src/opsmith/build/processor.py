"""Features of this processor, and the levels of processors for which libraries are built."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_FIRST_BYTES = 1 << 14
"""Number of bytes that describe the first processor: to read those of all processors may take long."""

_X86_64_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_X86_64_V3 = (*_X86_64_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_X86_64_V4 = (*_X86_64_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_ARMV8 = ("asimd", "fp")
_ARMV8_2 = (*_ARMV8, "asimdrdm", "atomics", "crc32", "dcpop")
_ARMV9 = (*_ARMV8_2, "asimddp", "fcma", "flagm", "ilrcpc", "jscvt", "lrcpc", "sb", "sve", "sve2", "uscat")

LEVELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {"x86-64-v2": _X86_64_V2, "x86-64-v3": _X86_64_V3, "x86-64-v4": _X86_64_V4},
    "aarch64": {"armv8-a": _ARMV8, "armv8.2-a": _ARMV8_2, "armv9-a": _ARMV9},
}
"""Features of each level of a machine, as Linux names them, by the level's name for `-march=`.

The levels of x86-64 are from its psABI; the levels of Arm have the features that the architecture requires.
"""


def machine() -> str:
    """Return the machine on which libraries run, such as `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine()}"


def levels() -> Mapping[str, tuple[str, ...]]:
    """Return the features of each level of this machine; empty if libraries are not built ahead for it."""
    return LEVELS.get(platform.machine(), {}) if sys.platform == "linux" else {}


@functools.cache
def cpu_info() -> Mapping[str, str]:
    """Return the system's description of the first processor, by Linux's keys; empty if there is none."""
    try:
        with CPU_INFO.open("rb") as described:
            text = described.read(_FIRST_BYTES).decode(errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): " ".join(value.split()) for name, _, value in fields}


def cpu_features() -> frozenset[str]:
    """Return the features of this processor that the system allows; empty if they are unknown."""
    known = cpu_info()
    return frozenset(known.get("flags", known.get("Features", "")).split())


def best_level() -> str:
    """Return the highest level that this processor supports; empty if there is none, or it is unknown."""
    found = [name for name, needed in levels().items() if cpu_features().issuperset(needed)]
    return found[-1] if found else ""
