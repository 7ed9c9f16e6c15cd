"""Cost of a call: bytes that it moves, floating-point operations, and memory."""

from __future__ import annotations

import ctypes
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from opsmith.checking.side_effects.liveness import attribute_tensors, record_saved_tensors
from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library import capabilities

PASSES = {
    "_softmax": 5,  # maximum, subtract, exponential, sum, divide
    "_log_softmax": 5,
    "_softmax_backward_data": 4,  # multiply, sum, multiply, subtract
    "_log_softmax_backward_data": 4,
    "native_layer_norm": 7,  # mean; subtract, square, sum; scale, multiply, add
    "native_layer_norm_backward": 11,
    "native_batch_norm": 7,
    "native_batch_norm_backward": 11,
    "cumsum": 1,
    "cumprod": 1,
    "col2im": 1,
    "index_add": 1,
    "scatter_add": 1,
    "scatter_add_": 1,
    "index_add_": 1,
}
"""Operations per element of the first tensor, for operators that are not elementwise or reductions."""

MOVES = frozenset(
    re.findall(
        r"\w+",
        """
        _local_scalar_dense _to_copy arange cat clone constant_pad_nd contiguous copy copy_ detach
        embedding empty empty_like empty_strided expand_copy fill fill_ fill_Scalar flip full full_like
        gather im2col index index_put index_put_ index_select lift_fresh masked_fill masked_fill_
        new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute_copy repeat
        resize_ roll scalar_tensor scatter scatter_ select_backward set_ slice_backward stack tril triu
        unfold_backward view_copy where zero_ zeros zeros_like
        """,
    )
)
"""Operators without arithmetic, which only copy or create numbers."""


@dataclass
class OperationCount:
    """Counter of floating-point operations that torch does not count.

    Args:
        count: Number of floating-point operations.
        seen: Number of operators that have run.
        uncounted: Names of operators whose operations are unknown.
    """

    count: int = 0
    seen: int = 0
    uncounted: set[str] = field(default_factory=set)

    def see(self, operator: Any, args: Sequence[Any]) -> None:
        """Count an operator that runs with these arguments."""
        self.seen += 1
        packet = getattr(operator, "overloadpacket", operator)
        name = str(packet).rpartition(".")[2]
        tensors = tensors_in(list(args))
        if packet in flop_registry or not tensors or name in MOVES or getattr(operator, "is_view", False):
            return
        if torch.Tag.pointwise in operator.tags:
            self.count += math.prod(torch.broadcast_shapes(*(each.shape for each in tensors)))
        elif torch.Tag.reduction in operator.tags:
            self.count += tensors[0].numel()
        elif name in PASSES:
            self.count += PASSES[name] * tensors[0].numel()
        else:
            self.uncounted.add(str(packet))


def count_operations(run: Callable[[], Any]) -> tuple[Any, int, str]:
    """Return a function's value, the number of its floating-point operations, and how they are counted.

    Example:
        >>> x = torch.ones(4, 3)
        >>> count_operations(lambda: (x @ x.mT + 1).sum())[1]  # 2 x 4 x 3 x 4, and 16 twice
        128
    """
    counter, tally = FlopCounterMode(display=False), OperationCount()
    with counter, capabilities.observe_operators(lambda operator, kwargs: None, tally.see):
        returned = run()
    words = "of the reference: torch.utils.flop_counter, and elementwise operations and reductions"
    if not tally.seen:
        words = (
            "of the reference: torch.utils.flop_counter alone, because the capability `dispatch_mode` is off"
        )
    elif tally.uncounted:
        words += f"; not counted: {', '.join(sorted(tally.uncounted))}"
    return returned, counter.get_total_flops() + tally.count, words


def bytes_of(tensors: Iterable[Tensor | None], beside: Iterable[Tensor | None] = ()) -> int:
    """Return the number of bytes of tensors; each storage counts once.

    Args:
        tensors: The tensors.
        beside: Tensors whose storages do not count.

    Example:
        >>> x = torch.ones(4, 4)
        >>> bytes_of([x, x[1:], x.expand(9, 4, 4)]), bytes_of([x], [x.mT])
        (64, 0)
    """
    known = {_storage(each) for each in beside if each is not None}
    found: dict[int, int] = {}
    views = {
        (_storage(each), each.storage_offset(), each.shape, each.stride()): each
        for each in tensors
        if each is not None
    }
    for (storage, *_), each in views.items():
        if each.numel() and storage not in known:
            size = found.get(storage, 0) + each.element_size() * _distinct(each)
            found[storage] = min(size, each.untyped_storage().nbytes())
    return sum(found.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _distinct(tensor: Tensor) -> int:
    """Count the elements of an expanded tensor in memory."""
    return math.prod(
        length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or length == 1
    )


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
REPEATS = 3
RESOLUTION = 1 << 20
"""Bytes by which resident memory varies without allocations, since threads count pages in batches."""

RESIDENT, ALLOCATOR = "growth of the resident memory", "torch's allocator of the GPU"
FINE = f"under {RESOLUTION >> 20} MiB"


def saved_bytes(run: Callable[[], Sequence[Tensor]], arguments: Sequence[Tensor]) -> tuple[int, int]:
    """Return the number of bytes that a forward keeps for its backward: in total, and without the arguments.

    Args:
        run: Function that runs the forward, and returns its results.
        arguments: Tensors that the caller keeps anyway.

    Example:
        >>> x = torch.ones(8, requires_grad=True)
        >>> saved_bytes(lambda: [x.exp()], [x]), saved_bytes(lambda: [x * x], [x])
        ((32, 32), (32, 0))
    """
    with torch.enable_grad(), record_saved_tensors() as saved:
        results = run()
    every = [*saved, *(tensor for _, tensor in attribute_tensors(results))]
    return bytes_of(every), bytes_of(every, arguments)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> tuple[int | None, str]:
    """Return the peak memory of a call in bytes, and the method of measurement or why it is not measured.

    Args:
        run: Function that makes the call, and returns its value; it has run before.
        device: Device of the call.
    """
    if device.type == "cuda":
        return _on_gpu(run, device), ALLOCATOR
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return None, "only measured on Linux and on CUDA GPUs"
    try:
        found = int(statistics.median(resident_growth(run) for _ in range(REPEATS)))
    except OSError as error:
        return None, f"not measured: {error}"
    return (found, RESIDENT) if found >= RESOLUTION else (None, FINE)


def resident_growth(run: Callable[[], Any]) -> int:
    """Return the largest number of bytes by which this process's resident memory grows in a call.

    Raises:
        OSError: If the process may not reset its peak counter.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only glibc has this function
        trim(0)
    CLEAR.write_text("5", encoding="ascii")
    before = _status("VmRSS")
    result = run()
    grown = _status("VmHWM") - before
    del result
    return max(grown, 0)


def _status(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _on_gpu(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    grown: int = torch.cuda.max_memory_allocated(device) - before
    del result
    return grown
