"""Memory: what is kept for the backward, and how much a call holds at most.

What is kept is what autograd saves and what a Function keeps on its context, each storage once.

The peak on a GPU is its allocator's. On Linux it is how far the resident memory of this process grows: what
was freed before is given back to the system first, or it would be used again without growing, and the
system's high-water mark is set anew. It holds whatever a kernel allocates, through torch or not, and is
exact to the pages of a few threads. Elsewhere it is not measured.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith.benchmarking.work import bytes_of
from opsmith.checking.side_effects.liveness import attribute_tensors, saving

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
REPEATS = 3
RESOLUTION = 1 << 20
"""Bytes that the resident memory moves by though nothing was allocated: threads count their pages in lots."""

RESIDENT, ALLOCATOR = "growth of the resident memory", "torch's allocator of the GPU"
FINE = f"under {RESOLUTION >> 20} MiB"


def saved(run: Callable[[], Sequence[Tensor]], arguments: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes that a forward keeps for its backward: all, and those that are no argument.

    Args:
        run: The forward; returns its results.
        arguments: What the caller keeps anyway.

    Example:
        >>> x = torch.ones(8, requires_grad=True)
        >>> saved(lambda: [x.exp()], [x]), saved(lambda: [x * x], [x])
        ((32, 32), (32, 0))
    """
    with torch.enable_grad(), saving() as kept:
        results = run()
    every = [*kept, *(tensor for _, tensor in attribute_tensors(results))]
    return bytes_of(every), bytes_of(every, arguments)


def peak(run: Callable[[], Any], device: torch.device) -> tuple[int | None, str]:
    """Bytes that a call holds at most, beyond those before it; and how that was measured, or why not.

    Args:
        run: Makes the call, and returns what it returns; it has run before.
        device: Where it runs.
    """
    if device.type == "cuda":
        return _on_gpu(run, device), ALLOCATOR
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return None, "not measured: it is on Linux, and on GPUs of CUDA"
    gc.collect()
    try:
        found = int(statistics.median(resident_growth(run) for _ in range(REPEATS)))
    except OSError as error:
        return None, f"not measured: {error}"
    return (found, RESIDENT) if found >= RESOLUTION else (None, FINE)


def resident_growth(run: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of this process grows at most in a call.

    Raises:
        OSError: If the system does not let the process clear its high-water mark.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library, or allocator, gives back what it wants to
        trim(0)
    CLEAR.write_text("5", encoding="ascii")
    before = _status("VmRSS")
    kept = run()
    grown = _status("VmHWM") - before
    del kept
    return max(grown, 0)


def _status(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _on_gpu(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = run()
    torch.cuda.synchronize(device)
    grown: int = torch.cuda.max_memory_allocated(device) - before
    del kept
    return grown
