"""`opsmith compile --access`: the access model of kernels in CUDA C++, by line of the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from opsmith import errors
from opsmith.cli.compile import GpuKernel, RejectedKernel
from opsmith.cli.guard import complain, waiting
from opsmith.kernels.common.memory_access import KernelAccess, LineAccess
from opsmith.kernels.common.sample_values import sample_values

MODEL = "a model of a GPU, from runs on the CPU: without caches and times"
DOUBTFUL = 1.5
"""Ratio from which on a line is shown in red."""
REJECTING = (errors.KernelFaultError, errors.KernelSignatureError, errors.LaunchError)
"""Errors of the kernel itself, when it is compiled or run."""


@dataclass(frozen=True, slots=True)
class AccessAnswer:
    """Result of the access model for some kernels.

    Attributes:
        found: Accesses of each kernel and dtype.
        refused: Kernels whose requests cannot be counted.
        faulty: True if one of the refused kernels was run, and has a fault.
    """

    found: tuple[KernelAccess, ...]
    refused: tuple[RejectedKernel, ...]
    faulty: bool

    def show(self, console: Console) -> None:
        """Print each kernel and dtype by line, the lines with the highest ratios first."""
        for each in self.found:
            name = ", ".join(filter(None, [each.operator, each.dtype]))
            calls = f"{each.calls} call{'' if each.calls == 1 else 's'}"
            console.print(Text.assemble((name, "bold"), (f" ({calls})", "dim")), soft_wrap=True)
            for place, line in dict.fromkeys((line.place, line.line) for line in each.lines):
                console.print(Text.assemble("  ", (place, "cyan"), "  ", line), soft_wrap=True)
                for one in each.lines:
                    if (one.place, one.line) == (place, line):
                        console.print(_figures(one), soft_wrap=True)
            console.print()
        if self.found:
            console.print(
                Text(
                    f"{MODEL}; a sector is 32 bytes of global memory, and wavefronts are of shared memory; "
                    "a ratio divides their number by the smallest possible number",
                    "dim",
                )
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the result in JSON's types."""
        kernels = []
        for each in self.found:
            kernel = asdict(each)
            kernel["lines"] = [{**asdict(line), "ratio": line.ratio} for line in each.lines]
            kernels.append(kernel)
        return {
            "model": MODEL,
            "passed": not self.refused,
            "kernels": kernels,
            "refused": [asdict(each) for each in self.refused],
        }


def _figures(found: LineAccess) -> Text:
    """Return the line of output for one kind of memory access in a line of the source."""
    ratio = Text(f"{f'×{found.ratio:.1f}':<7}", style="red" if found.ratio >= DOUBTFUL else "")
    each = f"{found.taken / found.requests:.1f} {found.unit} each"
    lanes = f"{found.lanes / found.requests:.1f}"
    return Text.assemble(
        "    ", ratio, f"{found.words:<24}{found.requests:>8} requests of {lanes:>4} lanes, {each}"
    )


def access_of(kernels: Sequence[GpuKernel]) -> AccessAnswer:
    """Run kernels on the CPU, with the samples of their operators, and count the requests of warps.

    Raises:
        ToolchainError: If there is no compiler of C++.
    """
    found: list[KernelAccess] = []
    refused: list[RejectedKernel] = []
    faulty = False
    for operator, kernel, usage in kernels:
        with waiting(f"running {escape(operator.name)} on the CPU"):
            try:
                found += usage.accesses(kernel, partial(sample_values, operator))
            except errors.ToolchainError:
                raise
            except errors.OpsmithError as error:
                faulty |= isinstance(error, REJECTING)
                refused.append(RejectedKernel(operator.name, kernel.where, str(error)))
                complain(error)
    return AccessAnswer(tuple(found), tuple(refused), faulty)
