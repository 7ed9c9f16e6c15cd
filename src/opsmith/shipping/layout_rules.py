"""Layouts of arguments for which the reference returns contiguous results, found on the operator's samples.

A kernel without Python writes contiguous results. Compiled code reads these results with the strides that the
reference returns for fake tensors. So a call must be refused if the two layouts may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.samples import Make, samples_of
from opsmith.core.shape_samples import samples_for
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.kernels.runtime.operators import ACCEPTED
from opsmith.torch_library.result_layouts import result_layouts

LayOut = Callable[[Tensor], Tensor]


def _padded(x: Tensor) -> Tensor:
    """Return rows of a wider tensor."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]].copy_(x)


def _stepped(x: Tensor) -> Tensor:
    """Return rows whose elements are every second element in memory."""
    return x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2].copy_(x)


def _spread(x: Tensor) -> Tensor:
    """Return a tensor whose outermost rows are every second row in memory."""
    return x.new_empty((2 * x.shape[0], *x.shape[1:]))[::2].copy_(x)


def _permuted(order: Callable[[int], Sequence[int]]) -> LayOut:
    """Return a function that lays dimensions out in a different order in memory."""

    def lay_out(x: Tensor) -> Tensor:
        dims = list(order(x.dim()))
        return x.permute(dims).contiguous().permute([dims.index(dim) for dim in range(x.dim())])

    return lay_out


def _expanded(dim: int) -> LayOut:
    """Return a function that makes all elements along a dimension share one place in memory."""

    def lay_out(x: Tensor) -> Tensor:
        return x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x)

    return lay_out


NESTED: tuple[LayOut, ...] = (_padded, _stepped, _spread)
"""Layouts with gaps, whose dimensions have the same order in memory as in a contiguous tensor."""
ANY: tuple[LayOut, ...] = (
    *NESTED,
    _permuted(lambda dim: range(dim)[::-1]),
    _permuted(lambda dim: [*range(dim - 2), *range(max(dim - 2, 0), dim)[::-1]]),
    _permuted(lambda dim: [0, *range(2, dim), 1][:dim]),
    _permuted(lambda dim: [*range(1, dim), 0]),
    _expanded(0),
    _expanded(-1),
)
"""Layouts with gaps, with dimensions in other orders, and with expanded dimensions."""
_TRIED = dict(zip(ACCEPTED, (ANY, NESTED, ()), strict=True))


def accepted_layouts(specification: Specification, dtype: torch.dtype) -> tuple[str, ...] | None:
    """Return for each argument the widest of `ACCEPTED` for which all results are contiguous.

    In each sample, each argument gets other layouts, first alone and then together with all others. The
    samples' floating tensors have the dtype.

    Returns:
        None if contiguous arguments do not give contiguous results, or if there are no samples.

    Raises:
        SampleError: If the samples cannot be made.
    """
    schema = specification.schema
    if not schema.results:
        return ("any",) * len(schema.arguments)
    source = samples_for(specification)
    made = (
        []
        if source is None
        else samples_of(source, Make(dtype), schema, specification.name, specification.where)
    )
    calls = [map_tensors(Tensor.contiguous, schema.call_values(call.args, call.kwargs)) for call in made]
    if not calls or not all(_contiguous_results(specification, values) for values in calls):
        return None
    accepted = ["any"] * len(schema.arguments)
    for at, argument in enumerate(schema.arguments):
        if argument.kind.is_tensor:
            accepted[at] = next(
                level
                for level in ACCEPTED
                if all(
                    _contiguous_results(specification, _laid_out(values, {at: lay_out}))
                    for values in calls
                    for lay_out in _TRIED[level]
                )
            )
    if _together(specification, calls, accepted):
        return tuple(accepted)
    return tuple("contiguous" if each.kind.is_tensor else "any" for each in schema.arguments)


def _together(specification: Specification, calls: Sequence[list[Any]], accepted: Sequence[str]) -> bool:
    """Return True if results are contiguous also when all arguments have other layouts at once."""
    for step in range(len(ANY)):
        turned = {
            at: tried[(step + at) % len(tried)]
            for at, level in enumerate(accepted)
            if (tried := _TRIED[level])
        }
        if not all(_contiguous_results(specification, _laid_out(values, turned)) for values in calls):
            return False
    return True


def _laid_out(values: Sequence[Any], how: dict[int, LayOut]) -> list[Any]:
    def changed(lay_out: LayOut) -> LayOut:
        return lambda x: lay_out(x) if x.dim() else x

    return [
        map_tensors(changed(how[at]), [value])[0] if at in how else value for at, value in enumerate(values)
    ]


def _contiguous_results(specification: Specification, values: Sequence[Any]) -> bool:
    """Return True if a call returns contiguous results; False if the reference refuses it."""
    try:
        results = result_layouts(specification, values)
    except Exception:  # raised by the reference, which may need one layout
        return not tensors_in(list(values))
    return all(each.allocate("meta").is_contiguous() for each in results)
