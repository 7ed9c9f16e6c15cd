"""Memory accesses of a kernel by source line: the result of an access model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LineAccess:
    """Memory requests of warps from one line to one tensor, or to shared memory.

    Attributes:
        where: `file:line`.
        line: Text of the line; empty if it is unknown.
        use: `reads`, `writes` or `atomics`.
        memory: `global` or `shared`.
        tensor: Name of the argument, result or scratch buffer; None for shared memory and variables.
        requests: Number of requests.
        lanes: Total number of lanes that take part in the requests.
        unit: Unit of the cost of requests: `sectors` of global memory, or `wavefronts` of shared memory.
        taken: Number of units that the requests take.
        fewest: Minimum number of units that requests of as many lanes and bytes can take.
    """

    where: str
    line: str
    use: str
    memory: str
    tensor: str | None
    requests: int
    lanes: int
    unit: str
    taken: int
    fewest: int

    @property
    def ratio(self) -> float:
        """Ratio of the units that the requests take to the minimum number; 1.0 is the best."""
        return self.taken / self.fewest

    @property
    def place(self) -> str:
        """Name of the file, and the line."""
        return Path(self.where).name

    @property
    def words(self) -> str:
        """Use and memory, such as `reads x` or `writes shared memory`."""
        of = "shared memory" if self.memory == "shared" else self.tensor or "a global variable"
        return f"{self.use} {of}" if self.use != "atomics" else f"atomics on {of}"


@dataclass(frozen=True, slots=True)
class KernelAccess:
    """Accesses of a kernel in one dtype, over some calls.

    Attributes:
        operator: Name of the operator.
        where: `file:line` of the kernel.
        kernel: Name of the kernel.
        dtype: The dtype of the template's instance; empty if the kernel is not a template.
        calls: Number of calls that were run.
        lines: Accesses by line, the highest ratio first.
    """

    operator: str
    where: str
    kernel: str
    dtype: str
    calls: int
    lines: tuple[LineAccess, ...]
