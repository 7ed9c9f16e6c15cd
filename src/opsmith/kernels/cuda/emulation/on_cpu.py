"""Kernels in CUDA C++ on the CPU, with a check of every memory access, and threads in several orders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opsmith.core.call_arguments import tensors_in
from opsmith.core.functional_form import copies_of_written, copy_with_strides
from opsmith.kernels.on_cpu import CpuCall, CpuRun, OnCpu

if TYPE_CHECKING:
    from opsmith.kernels.cuda.emulation.call import EmulatedCall
    from opsmith.kernels.cuda.emulation.launch import EmulatedRun


class Emulated(OnCpu):
    """A kernel in CUDA C++, emulated."""

    promise = (
        "kernels in CUDA C++ return the reference's results on the CPU, without races and within their memory"
    )
    together, compiles = 24, True

    def __init__(self, kernel: Any, *, exhaustive: bool, seed: int) -> None:
        from opsmith.kernels.cuda.emulation.call import KernelEmulation  # few operators need it
        from opsmith.kernels.cuda.emulation.launch import ORDERS, Order

        super().__init__(kernel, exhaustive=exhaustive, seed=seed)
        self.schema = kernel.operator.specification.schema
        self.emulation = KernelEmulation(kernel)
        self.orders = [Order(each, seed) for each in (ORDERS if exhaustive else ORDERS[:2])]

    def build(self, calls: Sequence[CpuCall]) -> None:
        """Compile the instances that the calls need."""
        self.emulation.build([call.values for call in calls])

    def prepare(self, call: CpuCall) -> int | str:
        """Prepare a call with copies of the tensors into which the kernel writes."""
        values = copies_of_written(self.schema, call.values, copy_with_strides)
        prepared = self.emulation.prepare(values)
        if isinstance(prepared, str):
            return prepared
        call.prepared = values, prepared
        return prepared.threads * len(self.orders)

    def launch(self, calls: Sequence[CpuCall]) -> list[list[CpuRun]]:
        """Run the launches of all calls in one child process."""
        pairs = [(call, order) for call in calls for order in self.orders]
        runs = [call.prepared[1].new_run(order) for call, order in pairs]
        made: dict[int, list[CpuRun]] = {id(call): [] for call in calls}
        for (call, order), run, found in zip(pairs, runs, self.emulation.run(runs), strict=True):
            if run or not made[id(call)]:
                what = f"the kernel in CUDA C++, run on the CPU with its threads in {order.name} order,"
                compute = functools.partial(self._computed, *call.prepared, run)
                made[id(call)].append(CpuRun(what, compute, order.name, found, launched=bool(run)))
        return [*made.values()]

    def _computed(
        self, values: list[Any], call: EmulatedCall, run: EmulatedRun, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the results of a run, and copy its writes into the arguments."""
        returned = call.finish(self.kernel, run)
        given = self.schema.call_values(args, kwargs)
        for argument, value, new in zip(self.schema.arguments, given, values, strict=True):
            if argument.alias:
                for tensor, written in zip(tensors_in([value]), tensors_in([new]), strict=True):
                    tensor.copy_(written)
        return returned

    def unseen(self) -> str | None:
        """Return the faults that this compiler hides."""
        from opsmith.kernels.cuda.emulation.unseen import unseen_faults

        return unseen_faults(self.kernel.source)
