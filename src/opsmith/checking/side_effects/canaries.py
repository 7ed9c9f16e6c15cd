"""Canaries: tensors inside of larger buffers, so that reads and writes outside of them are detected."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.property import Findings
from opsmith.checking.run import Run, copies, differing
from opsmith.checking.side_effects.global_settings import FILL, restore_settings, settings
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.judging.compare import describe_write, exact_difference
from opsmith.judging.tensors import is_inexact
from opsmith.kernels.runtime.library import fill_new_memory

MARGIN = 64
"""Number of elements before and after a tensor: a multiple of the alignment of any vector unit."""

PATTERN = 0x5A
"""Byte that fills the margins: it forms ordinary numbers in every dtype, and is rarely written by chance."""


@dataclass(frozen=True)
class GuardedTensor:
    """A tensor in a buffer of its own, with margins.

    Args:
        tensor: The tensor, which is not a view for autograd.
        buffer: All bytes of the buffer.
        before: Copy of the bytes before a call.
        offsets: Offset of each element from the first element, in elements.
    """

    tensor: Tensor
    buffer: Tensor
    before: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, value: Tensor, *, sliced: bool = False) -> GuardedTensor:
        """Copy a tensor into a buffer with margins.

        Args:
            value: The tensor; its strides are kept.
            sliced: True to double the strides, so that there is memory between the elements.
        """
        plain = value.detach().resolve_conj().resolve_neg()
        step, item, device = 2 if sliced else 1, plain.element_size(), plain.device
        reach = sum((n - 1) * stride for n, stride in zip(plain.shape, plain.stride(), strict=True))
        span = 1 + reach if plain.numel() else 0
        offsets = torch.arange(span, device=device).as_strided(plain.shape, plain.stride()).flatten()
        buffer = torch.full(((step * span + 2 * MARGIN) * item,), PATTERN, dtype=torch.uint8, device=device)
        # Copied in memory order, so that expanded and overlapping tensors keep their strides.
        stored = plain.as_strided((span,), (1,), plain.storage_offset())
        if span:
            elements = stored.view(torch.uint8).view(-1, item)  # some dtypes cannot be indexed
            buffer.view(-1, item)[MARGIN + step * offsets] = elements[offsets]
        tensor = torch.empty(0, dtype=plain.dtype, device=device)
        strides = tuple(step * stride for stride in plain.stride())
        tensor.set_(buffer.untyped_storage(), MARGIN, tuple(plain.shape), strides)
        return cls(tensor, buffer, buffer.clone(), step * offsets)

    @cached_property
    def owned(self) -> Tensor:
        """Mask of the bytes that are elements of the tensor."""
        item = self.tensor.element_size()
        owned = torch.zeros(len(self.buffer) // item, dtype=torch.bool, device=self.buffer.device)
        owned[MARGIN + self.offsets] = True
        return owned.repeat_interleave(item)

    def written(self) -> tuple[str, bool] | None:
        """Describe the writes since then, and return True with it if they are outside of the tensor."""
        if torch.equal(self.buffer, self.before):
            return None
        if not bool(((self.buffer != self.before) & self.owned).any()):
            return self.outside() or "", True
        tensor = self.tensor.detach()
        then = self.before.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), MARGIN)
        return describe_write(exact_difference(tensor, then)), False

    def outside(self) -> str | None:
        """Describe writes outside of the tensor by their distance from its elements; None without any."""
        changed = (self.buffer != self.before) & ~self.owned
        if not bool(changed.any()):
            return None
        item = self.tensor.element_size()
        offsets = (changed.nonzero().flatten() // item).unique() - MARGIN
        first, count = int(offsets[0]), len(offsets)
        last = int(self.owned.nonzero()[-1]) // item - MARGIN if bool(self.owned.any()) else -1
        if first < 0:
            where = f"{-first} before its first element"
        elif first > last:
            where = f"{first - last} after its last element"
        else:
            where = "between its own elements"
        return f"{count} element{'s' * (count != 1)}, the first {where}"


def guarded(flat: list[Any], *, sliced: bool = False) -> tuple[list[Any], list[GuardedTensor | None]]:
    """Guard every tensor of flat arguments or gradients; return the new values and their guards.

    Example:
        >>> (x,), (guard,) = guarded([torch.ones(2)])
        >>> x.as_strided((3,), (1,)).zero_()
        tensor([0., 0., 0.])
        >>> guard.written()
        ('at [0] it is 0 where 1 is right; 2 of 2 elements are wrong', False)
    """
    guards = [GuardedTensor.of(each, sliced=sliced) if isinstance(each, Tensor) else None for each in flat]
    return [each if guard is None else guard.tensor for each, guard in zip(flat, guards, strict=True)], guards


def form_of(x: Tensor) -> tuple[Any, ...]:
    """The address of a tensor, its shape, strides and dtype."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


COPIES = 4
"""Number of freed buffers of each size, since a call may allocate several."""


@contextmanager
def poison_new_memory() -> Iterator[None]:
    """Fill all new memory within the context with nan, or with the largest integer."""
    before, filled = settings(), fill_new_memory(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that have no deterministic algorithm
        torch.set_deterministic_debug_mode("warn")  # its longer name imports the compiler, for seconds
        setattr(torch.utils.deterministic, FILL, True)
        try:
            yield
        finally:
            restore_settings(before)
            fill_new_memory(filled)


BYTES = (0xFF, 0x41)
"""Bytes to leave in used memory: one forms nan in every floating dtype, the other a number."""


def fill_freed_memory(tensors: Iterable[Any], byte: int) -> None:
    """Allocate memory of the tensors' sizes, fill it and free it, by torch and by NumPy."""
    sizes = {
        (each.numel() * each.element_size(), each.device) for each in tensors if isinstance(each, Tensor)
    }
    for size, device in sizes:
        used = [torch.full((size,), byte, dtype=torch.uint8, device=device) for _ in range(COPIES)]
        del used
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            arrays = [numpy.full(size, byte, dtype="uint8") for _ in range(COPIES)]
            del arrays


GRAD_OUTPUT, SAVED = "grad_output", "a saved tensor"
AGAIN = 3
"""Runs that must agree with each of two runs, since an operator that varies may agree by chance."""


def with_margins(flat: Sequence[Any], labels: Sequence[str], other: Collection[str] = ()) -> list[Any]:
    """The arguments between margins, which contain the second kind of numbers for some labels.

    Example:
        >>> (x,) = with_margins([torch.tensor([1, 4])], ["x"], ["x"])
        >>> x.as_strided((4,), (1,))
        tensor([1, 4, 4, 4])
    """
    return [_with_margins(value, label in other) for value, label in zip(flat, labels, strict=True)]


def _with_margins(value: Any, other: bool) -> Any:
    if type(value) is not Tensor or value.layout != torch.strided:
        return value
    guard, item = GuardedTensor.of(value), value.element_size()
    number = torch.tensor([_number(value, other)], dtype=torch.float64).to(value.dtype)
    guard.buffer.view(-1, item)[~guard.owned[::item]] = number.view(torch.uint8).to(value.device)
    return guard.tensor


def _number(tensor: Tensor, other: bool) -> float:
    """One of two numbers larger than a tensor's; for integers, which may be indices, a number like them."""
    numbers, inexact = tensor.detach().to(torch.complex128), is_inexact(tensor)
    numbers = numbers.abs() if inexact else numbers.real
    largest = float(numbers[numbers.isfinite()].amax()) if numbers.isfinite().any() else 0.0
    return (1 + largest) * (3 if other else -2) if inexact else other * max(largest, 1.0)


def read_outside(run: Run) -> Findings:
    """Yield a failure if a call or its backward depends on memory outside of its arguments."""
    labels = [*run.sample.labels, *([GRAD_OUTPUT, SAVED] if run.argnums else [])]
    one, other = _values(run, ()), _values(run, labels)
    at = differing(one, other)
    again = [(one, ()), (other, labels)] * AGAIN if at else []
    # Runs that differ in any case prove nothing.
    if not at or any(differing(each, _values(run, named)) for each, named in again):
        return
    named = [label for label in labels if differing(one, _values(run, [label]))] or labels
    words = " or ".join(label if label == SAVED else f"`{label}`" for label in named)
    name, input = run.names()[at[0]], None if named[0] == SAVED else named[0]
    message = (
        f"{name} depends on memory outside of {words}: it changes with the numbers before and after "
        "the tensor. Compare each index with the sizes; `opsmith check --sanitize`, or `check(..., "
        "sanitize=True)`, names the line of a kernel in C++"
    )
    yield run.failure(input, "out-of-bounds", message, name.where)


def _values(run: Run, other: Collection[str]) -> Sequence[Tensor | None]:
    """The results and gradients of a call, up to an exception."""
    run.subject.restore_outside()
    found: list[Tensor | None] = []
    flat = with_margins(run.flat(), run.sample.labels, other)
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(flat)}

    def pack(tensor: Tensor) -> Tensor:
        own = tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in memory
        return tensor.detach() if own else _with_margins(tensor.detach(), SAVED in other)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with Overlooking(), torch.set_grad_enabled(bool(run.argnums)), hooks:  # its exceptions are reported
        call = run.call(flat)
        found += copies(call.results)
        if run.argnums:
            found += copies(call.backward([_with_margins(g, GRAD_OUTPUT in other) for g in call.grads()]))
    return found
