"""Kernels in Triton on the CPU, in Triton's interpreter, with a check of every memory access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from opsmith import errors
from opsmith.kernels.on_cpu import CpuCall, CpuRun, OnCpu
from opsmith.kernels.triton.interpreted_launches import interpreted_launches
from opsmith.kernels.triton.interpreter import missing_interpreter


class Interpreted(OnCpu):
    """A kernel in Triton, in Triton's interpreter."""

    promise = (
        "kernels in Triton, interpreted on the CPU, return the reference's results in every dtype and layout"
    )
    manner, given_up, parts = "interpreted on the CPU", "not interpreted", "programs"
    in_bfloat16 = ", bfloat16 computed in float32"
    launches_ran = "kernels in Triton ran in Triton's interpreter on the CPU, not on a GPU"
    trials = 3

    def build(self, calls: Sequence[CpuCall]) -> None:
        """Raise an error if the interpreter cannot run."""
        missing = missing_interpreter()
        if missing is not None:
            raise errors.ToolchainError(missing)

    def prepare(self, call: CpuCall) -> int | str:
        """Count the programs of a call."""
        refused: str | None = self.kernel.value_refusal(call.values)
        return refused or int(self.kernel.programs(call.values))

    def launch(self, calls: Sequence[CpuCall]) -> list[list[CpuRun]]:
        """Return a run for each call, which the comparison executes later."""
        return [[CpuRun("the kernel in Triton, interpreted,", self.kernel.interpreted)] for _ in calls]

    def notes(self) -> Iterator[str]:
        """Yield a note if only one of several configurations was interpreted."""
        if self.kernel.source.configs[1:]:
            yield "only the first configuration of `triton.autotune` was interpreted"

    @classmethod
    def launches(cls, record: Callable[[str], None]) -> AbstractContextManager[None] | None:
        """Return a context in which Triton's launches are interpreted, if Triton has been imported."""
        return interpreted_launches(record)
