"""GPU resources that a compiled kernel uses, and the occupancy that they allow.

The sizes of multiprocessors come from the CUDA C++ programming guide, "Technical Specifications per Compute
Capability" (CUDA 13.0). The formulas come from NVIDIA's `cuda_occupancy.h`; a test compares the results.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from opsmith.core.kernels import KernelSource

ARCHITECTURES = ("sm_80", "sm_90")
"""Default architectures of reports."""
WARP = 32
REGISTERS, SUB_PARTITIONS, REGISTER_UNIT = 64 * 1024, 4, 256
MAX_WARPS_OF_BLOCK = 32
MOST_GRID = (2**31 - 1, 65535, 65535)
MOST_BLOCK = (1024, 1024, 64)
MOST_THREADS = MAX_WARPS_OF_BLOCK * WARP
"""Limits of a launch, the same for all compute capabilities: CUDA programming guide, specifications."""

_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?P<rest>.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that a kernel uses.

    Attributes:
        registers: Registers of each thread.
        spill_stores: Bytes of register spills that each thread writes to memory.
        spill_loads: Bytes of register spills that each thread reads back.
        stack: Bytes of memory of each thread for spills, and for arrays that do not fit in registers.
        shared: Bytes of static shared memory of each block.
    """

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0

    @property
    def spills(self) -> int:
        """Bytes of register spills, written and read."""
        return self.spill_stores + self.spill_loads


def read_resources(log: str, name: str) -> Resources | None:
    """Read the resources of a kernel from the log of `--ptxas-options=-v`; None if the log lacks the kernel.

    Example:
        >>> log = "Compiling entry function 'k' for 'sm_90'\\nUsed 40 registers, 512 bytes smem"
        >>> read_resources(log, "k")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUsage(Resources):
    """Resources that an instance of a kernel uses on one architecture.

    Attributes:
        operator: Name of the operator.
        where: `file:line` of the kernel.
        kernel: Name of the function.
        instance: dtype and constants, as text; empty if the kernel is not a template.
        architecture: For example `sm_90`.
        dynamic_shared: Maximum bytes of dynamic shared memory per block in the samples' calls.
        threads: Maximum threads per block in the samples' calls; None if no sample runs the instance.
        occupancy: Fraction of a multiprocessor's warps that are resident; None if it is unknown.
        faults: Limits stated by the author that the instance exceeds.
    """

    operator: str
    where: str
    kernel: str
    instance: str
    architecture: str
    dynamic_shared: int
    threads: int | None
    occupancy: float | None
    faults: tuple[str, ...]

    @classmethod
    def of(cls, operator: str, source: KernelSource, resources: Resources, **others: Any) -> KernelUsage:
        """Return the usage of an instance of a kernel, with the other fields by name."""
        named: dict[str, Any] = {"operator": operator, "where": source.where, "kernel": source.entry}
        return cls(**asdict(resources), **named, **others)


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Resources of one multiprocessor.

    Attributes:
        warps: Maximum number of resident warps.
        blocks: Maximum number of resident blocks.
        shared: Bytes of shared memory.
        shared_of_block: Bytes of shared memory that one block may use.
        reserved: Bytes of shared memory that the system reserves for each block.
        unit: Allocation unit of shared memory, in bytes.
    """

    warps: int
    blocks: int
    shared: int
    shared_of_block: int
    reserved: int = 1024
    unit: int = 128


def _of(warps: int, blocks: int, shared: int, of_block: int) -> Multiprocessor:
    return Multiprocessor(warps, blocks, shared * 1024, of_block * 1024)


MULTIPROCESSORS = {
    75: Multiprocessor(32, 16, 64 * 1024, 64 * 1024, reserved=0, unit=256),
    80: _of(64, 32, 164, 163),
    86: _of(48, 16, 100, 99),
    87: _of(48, 16, 164, 163),
    89: _of(48, 24, 100, 99),
    90: _of(64, 32, 228, 227),
    100: _of(64, 32, 228, 227),
    103: _of(64, 32, 228, 227),
    110: _of(48, 24, 228, 227),
    120: _of(48, 24, 100, 99),
    121: _of(48, 24, 100, 99),
}
"""Multiprocessors by compute capability; the key of 9.0 is 90."""


def multiprocessor_of(architecture: str) -> Multiprocessor | None:
    """Return the multiprocessor of an architecture, such as `sm_90`; None for an unknown architecture."""
    return MULTIPROCESSORS.get(int(architecture.removeprefix("sm_").rstrip("af")))


def most_threads(registers: int) -> int:
    """Return the maximum threads per block for which the registers suffice, in whole warps.

    Args:
        registers: Registers of a thread.

    Example:
        >>> most_threads(32), most_threads(128), most_threads(255)
        (1024, 512, 256)
    """
    warps = REGISTERS // SUB_PARTITIONS // _round_up(registers * WARP, REGISTER_UNIT) * SUB_PARTITIONS
    return min(warps, MAX_WARPS_OF_BLOCK) * WARP


def occupancy(architecture: str, threads: int, registers: int, shared: int) -> float | None:
    """Estimate the fraction of a multiprocessor's warps that are resident; None for an unknown architecture.

    Args:
        architecture: For example `sm_90`.
        threads: Threads of a block.
        registers: Registers of a thread.
        shared: Bytes of shared memory of a block, static and dynamic.

    Example:
        >>> occupancy("sm_90", 256, 64, 0), occupancy("sm_80", 256, 32, 0)
        (0.5, 1.0)
    """
    multiprocessor = multiprocessor_of(architecture)
    if multiprocessor is None:
        return None
    warps = -(-threads // WARP)
    return resident_blocks(multiprocessor, warps, registers, shared) * warps / multiprocessor.warps


def resident_blocks(multiprocessor: Multiprocessor, warps: int, registers: int, shared: int) -> int:
    """Return the number of resident blocks: as many as the scarcest resource allows.

    Args:
        multiprocessor: The multiprocessor.
        warps: Warps of a block.
        registers: Registers of a thread.
        shared: Bytes of shared memory of a block.
    """
    if warps > MAX_WARPS_OF_BLOCK or shared > multiprocessor.shared_of_block:
        return 0
    limits = [multiprocessor.blocks, multiprocessor.warps // warps]
    if registers:
        of_warp = _round_up(registers * WARP, REGISTER_UNIT)
        if of_warp * _round_up(warps, SUB_PARTITIONS) > REGISTERS:
            return 0
        limits.append(REGISTERS // SUB_PARTITIONS // of_warp * SUB_PARTITIONS // warps)
    used = _round_up(shared + multiprocessor.reserved, multiprocessor.unit)
    if used:
        limits.append(multiprocessor.shared // used)
    return min(limits)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
