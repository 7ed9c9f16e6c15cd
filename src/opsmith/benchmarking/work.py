"""What a call has to do: the bytes that it moves at least, and its floating-point operations.

Bytes are those of arguments, results and gradients, each storage once. Forward reads the arguments and writes
the results. Backward reads what comes back for each result and what the operator saved, and writes a gradient
for each input that has one.

Operations are counted of the reference, as it runs. Products of matrices, convolutions and attention are
counted by `torch.utils.flop_counter`, two for a multiplication with its addition. It counts nothing else, so
the rest is counted here: one for each element of the result of an elementwise operation, one for each element
that a reduction reads, and for softmax and layers that normalise as many as `PASSES` says. Copies, views and
whatever only moves numbers are none. What is neither is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from opsmith.core.calls import tensors_in
from opsmith.torch_library import capabilities

PASSES = {
    "_softmax": 5,  # the largest, subtract, exponential, sum, divide
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
"""Operations for each element of the first tensor, of what is neither elementwise nor a plain reduction."""

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
"""What only moves or makes numbers."""


@dataclass
class Tally:
    """Operations that were seen, beside what torch counts.

    Args:
        count: How many floating-point operations.
        seen: How many operators ran.
        uncounted: Names of those of which nothing is known.
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


def counted(run: Callable[[], Any]) -> tuple[Any, int, str]:
    """What a function returns, how many floating-point operations it takes, and how they were counted.

    Example:
        >>> x = torch.ones(4, 3)
        >>> counted(lambda: (x @ x.mT + 1).sum())[1]  # 2 x 4 x 3 x 4, and 16 twice
        128
    """
    counter, tally = FlopCounterMode(display=False), Tally()
    with counter, capabilities.watching(lambda operator, kwargs: None, tally.see):
        returned = run()
    words = "of the reference: torch.utils.flop_counter, and elementwise operations and reductions"
    if not tally.seen:
        words = "of the reference: torch.utils.flop_counter alone, since the capability `watching` is off"
    elif tally.uncounted:
        words += f"; nothing for {', '.join(sorted(tally.uncounted))}"
    return returned, counter.get_total_flops() + tally.count, words


def bytes_of(tensors: Iterable[Tensor | None], beside: Iterable[Tensor | None] = ()) -> int:
    """How many bytes tensors have, each storage once, at most what each storage holds.

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
    for (place, *_), each in views.items():
        if each.numel() and place not in known:
            own = found.get(place, 0) + each.element_size() * _distinct(each)
            found[place] = min(own, each.untyped_storage().nbytes())
    return sum(found.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _distinct(tensor: Tensor) -> int:
    """How many elements an expanded tensor has in memory."""
    return math.prod(
        length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or length == 1
    )
