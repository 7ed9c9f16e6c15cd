"""How many warps of a kernel a multiprocessor holds at once, from what the kernel takes: an estimate.

The sizes are those of the CUDA C++ programming guide, "Technical Specifications per Compute Capability"
(CUDA 13.0); the arithmetic is that of NVIDIA's `cuda_occupancy.h`, to which a test holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS, SUB_PARTITIONS, REGISTER_UNIT = 64 * 1024, 4, 256
MOST_WARPS_OF_A_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor has.

    Attributes:
        warps: How many are resident at most.
        blocks: How many are resident at most.
        shared: Bytes of shared memory.
        shared_of_block: Bytes of it that one block may have.
        reserved: Bytes of it that the system keeps for each block.
        unit: Shared memory is given out in multiples of so many bytes.
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
"""By compute capability: 90 for 9.0."""


def occupancy(architecture: str, threads: int, registers: int, shared: int) -> float | None:
    """The part of a multiprocessor's warps that are resident; None for one whose sizes are not known.

    Args:
        architecture: As `sm_90`.
        threads: Of a block.
        registers: Of a thread.
        shared: Bytes of shared memory of a block, static and dynamic.

    Example:
        >>> occupancy("sm_90", 256, 64, 0), occupancy("sm_80", 256, 32, 0)
        (0.5, 1.0)
    """
    multiprocessor = MULTIPROCESSORS.get(int(architecture.removeprefix("sm_").rstrip("af")))
    if multiprocessor is None:
        return None
    warps = -(-threads // WARP)
    return blocks_at_once(multiprocessor, warps, registers, shared) * warps / multiprocessor.warps


def blocks_at_once(multiprocessor: Multiprocessor, warps: int, registers: int, shared: int) -> int:
    """How many blocks are resident: as many as the scarcest of what they take allows.

    Args:
        multiprocessor: What there is.
        warps: Of a block.
        registers: Of a thread.
        shared: Bytes of shared memory of a block.
    """
    if warps > MOST_WARPS_OF_A_BLOCK or shared > multiprocessor.shared_of_block:
        return 0
    limits = [multiprocessor.blocks, multiprocessor.warps // warps]
    if registers:
        of_warp = _round_up(registers * WARP, REGISTER_UNIT)
        if of_warp * _round_up(warps, SUB_PARTITIONS) > REGISTERS:
            return 0
        limits.append(REGISTERS // SUB_PARTITIONS // of_warp * SUB_PARTITIONS // warps)
    taken = _round_up(shared + multiprocessor.reserved, multiprocessor.unit)
    if taken:
        limits.append(multiprocessor.shared // taken)
    return min(limits)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
