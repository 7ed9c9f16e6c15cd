"""Memory layouts of tensors, and of results before a kernel writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.functional_form import copies_of_written
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors, on_meta
from opsmith.torch_library import capabilities
from opsmith.torch_library.arguments import fake_by_shapes
from opsmith.torch_library.contract import Contract

LAYOUTS = ("any", "contiguous", "channels-last")
"""Layouts that a kernel may require of a tensor."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats of channels-last tensors, by number of dimensions."""
SMALL = 2**16
"""Maximum number of elements with which the reference may run on the data instead of `meta` tensors. The
first `meta` tensor makes torch import modules for one to two seconds."""
_READS = frozenset(("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage"))
"""Methods that read a tensor's data without a torch operation."""
_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def memory_format(layout: str, dim: int) -> torch.memory_format:
    """Return torch's name for `contiguous` or `channels-last`, for tensors of `dim` dimensions."""
    return torch.contiguous_format if layout == "contiguous" else CHANNELS_LAST[dim]


def extent_of(tensor: Tensor) -> int:
    """Return the number of elements that a tensor spans in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def has_layout(tensor: Tensor, layout: str) -> bool:
    """Return True if a tensor has one of `LAYOUTS`."""
    return layout == "any" or tensor.is_contiguous(memory_format=memory_format(layout, tensor.dim()))


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Shape, strides and dtype of a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, result: Tensor) -> ResultLayout:
        """Return the layout of a tensor."""
        return cls(tuple(result.shape), result.stride(), result.dtype)

    def allocate(self, device: torch.device | str, layout: str = "any") -> Tensor:
        """Allocate a result with these strides, or in the layout in which a kernel writes it."""
        if layout == "any":
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        format = memory_format(layout, len(self.shape))
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=format)

    def restore(self, written: Tensor) -> Tensor:
        """Return a written result with these strides: the tensor itself, or a copy."""
        return written if written.stride() == self.stride else self.allocate(written.device).copy_(written)


def _layout_of(result: Any) -> Any:
    """The layout of a result; a list of layouts for a list of tensors, and None for None."""
    if isinstance(result, list):
        return [ResultLayout.of(each) for each in result]
    return None if result is None else ResultLayout.of(result)


def result_layouts(specification: Specification, values: Sequence[Any]) -> tuple[ResultLayout, ...]:
    """Find the layouts of the results for argument values, by the fake kernel, `shapes=` or the reference.

    A list of tensors has a list of layouts; a result that is None has None.

    The functions run on `meta` tensors, and if that fails, on torch's fake tensors, which have a device but
    take seconds to import. As long as nothing has imported fake tensors, the functions run on the tensors
    themselves, if these are small and their data is not read.

    Written arguments are copied for this run. The reference also runs if there are no results: it refuses
    wrong arguments before a kernel has written anything.

    Raises:
        MissingFakeError: If the layouts depend on the tensors' data.
        Exception: An exception of the reference, for arguments that it refuses.
    """
    returns = bool(specification.schema.results)
    if specification.opaque and specification.fake is None:
        by_shapes = fake_by_shapes(specification, list(values))
        if by_shapes is not None:
            return tuple(map(ResultLayout.of, by_shapes))
        if not returns:
            return ()
    on_data = _on_data(specification, values)
    if on_data is not None:
        return on_data
    try:
        return _run(specification, values, on_meta)
    except errors.OpsmithError:
        raise
    except Exception as error:
        mode = capabilities.fake_mode()
        try:
            with mode:
                return _run(specification, values, mode.from_tensor)
        except errors.OpsmithError:
            raise
        except Exception as again:
            if type(again) is type(error) and str(again) == str(error) and not _is_about_meta(error):
                raise
            if not returns:
                return ()
            raise specification.error(
                errors.MissingFakeError,
                "the layouts of its results are unknown before a native kernel runs: the reference "
                f"needs data for them ({type(error).__name__})",
                hint="write `@op.fake` over a function that returns `x.new_empty(shape)` for each result, of "
                "maximum size: a kernel writes into memory that is allocated before it runs",
            ) from error


def _is_about_meta(error: Exception) -> bool:
    """Return True if torch reports that tensors on `meta` have no data.

    Fake tensors report that differently. If they raise the same message, it is the reference's own.
    """
    return isinstance(error, RuntimeError) and re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None


def _on_data(specification: Specification, values: Sequence[Any]) -> tuple[ResultLayout, ...] | None:
    """Find the layouts by a run on the tensors themselves; None if not allowed, or if their data is read."""
    large = sum(tensor.numel() for tensor in tensors_in(list(values))) > SMALL
    unknown = specification.random or (specification.opaque and specification.fake is None)
    if large or unknown or specification.origin.kind == "class" or capabilities.tracing_imported():
        return None
    reads: list[Any] = []

    def record(operator: Any, _keywords: dict[str, Any]) -> None:
        if any(tag in operator.tags for tag in _DEPENDS):
            reads.append(operator)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with capabilities.observe_operators(record), _DataReads(reads):
            return _implementation(specification)(*args, **kwargs)

    # Without `torch.no_grad()`, since an interrupt at its begin or end would leave gradients off.
    given = map_tensors(Tensor.detach, copies_of_written(specification.schema, values))
    results = Contract(specification).run(watched, given)
    return None if reads else tuple(map(_layout_of, results))


class _DataReads(TorchFunctionMode):
    """Mode that records the methods in `_READS`."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _READS:
            self._seen.append(function)
        return function(*args, **(kwargs or {}))


def _run(
    specification: Specification, values: Sequence[Any], stand_in: Callable[[Tensor], Tensor]
) -> tuple[ResultLayout, ...]:
    given = map_tensors(lambda each: stand_in(each).detach(), values)
    return tuple(map(_layout_of, Contract(specification).run(_implementation(specification), given)))


def _implementation(specification: Specification) -> Callable[..., Any]:
    return specification.fake or specification.computed_by
