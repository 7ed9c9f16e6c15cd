"""Access model: the memory requests that a kernel would make on a GPU, by line, from its run on the CPU.

The model has no caches and no time. Global memory is read and written in sectors of 32 bytes, shared memory
in wavefronts that take a word from each of 32 banks. runtime/requests.h finds the requests of warps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.tensors import resolved
from opsmith.kernels.common.dtypes import CPP_TYPES, dtype_name
from opsmith.kernels.common.memory_access import KernelAccess, LineAccess
from opsmith.kernels.common.sample_values import SampleValues
from opsmith.kernels.cuda.emulation.call import EmulatedCall, KernelEmulation, fault_error
from opsmith.kernels.cuda.emulation.launch import IN_SHARED, EmulatedLaunch, EmulatedRun, LaunchResult, Order
from opsmith.kernels.cuda.emulation.places import SourceLine, SourceLines
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.on_cpu import NOTE

USES = {1: "reads", 2: "writes", 3: "atomics"}
"""Uses of memory, in the order of launch_record.h."""
SECTORS, WAVEFRONTS = "sectors", "wavefronts"


def kernel_access(
    kernel: CudaKernel, calls: SampleValues, dtypes: Sequence[torch.dtype] = ()
) -> list[KernelAccess]:
    """Run calls of a kernel on the CPU, and count the requests that its warps would make on a GPU.

    Args:
        calls: Function that returns argument values in a dtype.
        dtypes: The dtypes; by default, all dtypes that the kernel takes.

    Raises:
        NotEmulatedError: If the CPU cannot run the kernel.
        KernelFaultError: If the kernel has a fault, which makes the counts meaningless.
        MissingSamplesError: If the kernel takes none of the calls.
        CompileError, ToolchainError, KernelSignatureError, LaunchError: See `opsmith.emulate`.

    Example:
        >>> from functools import partial
        >>> from opsmith.kernels.common.sample_values import sample_values
        >>> from opsmith.kernels.cuda.kernel import cuda_kernels
        >>> from opsmith.ops import involution
        >>> (kernel,) = cuda_kernels(involution.specification)
        >>> (found,) = kernel_access(kernel, partial(sample_values, involution), [torch.float32])
        >>> found.dtype, found.lines[0].ratio >= found.lines[-1].ratio >= 1
        ('float32', True)
    """
    emulation = KernelEmulation(kernel)
    given = _distinct(
        resolved(values) for dtype in dtypes or kernel.dtypes or CPP_TYPES for values in calls(dtype)
    )
    runs: dict[str, list[EmulatedRun]] = {}
    refused: dict[str, None] = {}
    with torch.no_grad():
        emulation.build(given)
        for values in given:
            call = emulation.prepare(values)
            if not isinstance(call, EmulatedCall):
                refused[call] = None
                continue
            run = call.new_run(Order("forward"))
            if run:
                dtypes_of = (launch.instance.dtype for launch in call.plan.launches)
                name = next((dtype_name(dtype) for dtype in dtypes_of if dtype is not None), "")
                runs.setdefault(name, []).append(run)
    if not runs:
        name = kernel.operator.specification.short_name
        raise kernel.error(
            errors.MissingSamplesError,
            "its kernel in CUDA C++ takes none of the samples, so nothing is run",
            got="; ".join(refused) or "no samples",
            hint=f"in `@{name}.samples`, yield arguments that the kernel takes",
        )
    return [
        KernelAccess(
            kernel.operator.name,
            kernel.where,
            kernel.source.entry,
            dtype,
            len(every),
            _lines_of(emulation, every),
        )
        for dtype, every in runs.items()
    ]


def _distinct(calls: Iterable[list[Any]]) -> list[list[Any]]:
    """Return the calls, with one of each group whose calls differ only in the numbers of their tensors."""

    def form(value: Any) -> Any:
        tensors = tensors_in([value])
        return [(each.dtype, each.shape, each.stride()) for each in tensors] if tensors else value

    return list({repr([form(value) for value in values]): values for values in calls}.values())


def _lines_of(emulation: KernelEmulation, runs: Sequence[EmulatedRun]) -> tuple[LineAccess, ...]:
    """Run calls, and return their accesses by line, the highest ratio first."""
    counted: list[tuple[EmulatedLaunch, LaunchResult]] = []
    for run, results in zip(runs, emulation.results(runs, counted=True), strict=True):
        faults = [each for each in emulation.findings(run, results) if each.cause != NOTE]
        if faults:
            raise fault_error(emulation.kernel, faults)
        counted += zip(run, results, strict=True)
    counters: dict[Path, set[int]] = {}
    for launch, result in counted:
        counters.setdefault(launch.library.path, set()).update(each.pc for each in result.requests)
    source = emulation.kernel.source
    lines_of = {path: SourceLines(source, path, every) for path, every in counters.items()}
    found: dict[tuple[SourceLine, str, int | str], list[int]] = {}
    for launch, result in counted:
        for each in result.requests:
            line = lines_of[launch.library.path].at(each.pc)
            of = launch.tensors[each.region].label if each.region >= 0 else int(each.region)
            counts = found.setdefault((line, USES[each.use], of), [0, 0, 0, 0])
            for at, number in enumerate((each.count, each.lanes, each.parts, each.fewest)):
                counts[at] += number
    lines = (
        LineAccess(
            line.where,
            line.text,
            use,
            "shared" if of == IN_SHARED else "global",
            of if isinstance(of, str) else None,
            requests,
            lanes,
            WAVEFRONTS if of == IN_SHARED else SECTORS,
            taken,
            fewest,
        )
        for (line, use, of), (requests, lanes, taken, fewest) in found.items()
    )
    return tuple(sorted(lines, key=lambda each: (-each.ratio, -each.taken, each.where, each.words)))
