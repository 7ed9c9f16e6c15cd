"""Limits of launches on the CPU: those of every GPU, so that what none takes is refused here, too."""

from __future__ import annotations

import re

from opsmith.kernels.common.gpu_resources import MOST_THREADS
from opsmith.kernels.cuda.emulation.compiler import MAX_SHARED, EmulatedLibrary
from opsmith.kernels.cuda.limits import LaunchLimits
from opsmith.kernels.cuda.source import CudaSource

_BOUNDS = re.compile(r"__launch_bounds__\s*\(\s*(\d+)\s*[,)]")


def emulated_limits(source: CudaSource, library: EmulatedLibrary) -> LaunchLimits:
    """Return the limits of the launches of a kernel.

    Static shared memory counts where a library has one instance: of several, it is not known of each.

    Args:
        source: The kernel.
        library: Its library.
    """
    static = sum(each.size for each in library.shared) if len(library.instances) == 1 else 0
    bounds = launch_bounds(source)
    return LaunchLimits(bounds, bounds or MOST_THREADS, 0, static, MAX_SHARED, "any GPU")


def launch_bounds(source: CudaSource) -> int | None:
    """Return the threads that `__launch_bounds__` of a kernel allows; None without it, or if it is no number.

    Args:
        source: The kernel.
    """
    text = "\n".join(source.text.split("\n")[source.at - source.line :])
    head, entry, _ = text.partition(f"{source.entry}(")
    found = _BOUNDS.findall(re.sub(r"//.*", "", re.split(r"[;}]", head)[-1])) if entry else []
    return int(found[-1]) if found else None
