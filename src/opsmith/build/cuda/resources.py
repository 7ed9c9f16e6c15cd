"""What a compiled kernel takes of the GPU: registers, spills and shared memory, as the assembler says."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: Of each thread.
        spill_stores: Bytes that each thread writes to memory as they fit in no register.
        spill_loads: Bytes that it reads back.
        stack: Bytes of memory that each thread has for arrays that fit in no register, and for spills.
        shared: Bytes of static shared memory of each block.
    """

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0

    @property
    def spills(self) -> int:
        """Bytes that are spilled: written and read."""
        return self.spill_stores + self.spill_loads


_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?P<rest>.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(log: str, name: str) -> Resources | None:
    """What the kernel of this name takes, from the log of `--ptxas-options=-v`; None if it is not there.

    Example:
        >>> resources("Compiling entry function 'k' for 'sm_90'\\nUsed 40 registers, 512 bytes smem", "k")
        Resources(registers=40, spill_stores=0, spill_loads=0, stack=0, shared=512)
    """
    parts = _ENTRY.split(log)
    for function, text in zip(parts[1::2], parts[2::2], strict=True):
        used = _USED.search(text)
        if function != name or used is None:
            continue
        spills = _SPILLS.search(text)
        stack, stores, loads = (int(each) for each in spills.groups()) if spills else (0, 0, 0)
        shared = _SHARED.search(used["rest"])
        return Resources(int(used[1]), stores, loads, stack, int(shared[1]) if shared else 0)
    return None
