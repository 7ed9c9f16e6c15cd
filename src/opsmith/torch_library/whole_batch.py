"""`vmap` by one call: the whole batch goes to the operator at once, where its author says that it may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.batching import ELEMENTWISE, leads
from opsmith.core.shapes import LEADING
from opsmith.core.specification import Specification
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.random_state import generators_in
from opsmith.torch_library.result_flattening import Flat

Dims = Sequence[int | None]


@dataclass(frozen=True)
class WholeBatch:
    """A call that computes every example.

    Args:
        flat: Its flat arguments.
        restore: Makes of its results, flat and with their labels, those of the batch, whose dimension comes
            first.
    """

    flat: list[Any]
    restore: Callable[[Sequence[Any], Sequence[str]], Flat]


def whole_batch(
    specification: Specification,
    flattening: Flattening,
    flat: Sequence[Any],
    dims: Dims,
    size: int,
    randomness: str,
) -> WholeBatch | None:
    """The call that serves this batch; None where the examples have to be computed operation by operation.

    Args:
        specification: The operator.
        flattening: How its arguments lie in flat form.
        flat: The arguments, batched ones with one dimension more.
        dims: Batch dimension of each, or None.
        size: How many examples there are.
        randomness: What `vmap` was told about random operations.
    """
    draws = generators_in(flat) or (specification.random and randomness != "different")
    if specification.batching is None or draws:
        return None
    if specification.batching == ELEMENTWISE:
        return _elementwise(specification, flat, dims, size)
    names = [name for name in specification.schema.names for _ in flattening.labels(name)]
    return _led(specification, names, flat, dims, size)


def _elementwise(
    specification: Specification, flat: Sequence[Any], dims: Dims, size: int
) -> WholeBatch | None:
    """Put the batch's dimension first, and ones behind it, so that examples broadcast as they did alone."""
    ranks = [
        value.dim() - (dim is not None)
        for value, dim in zip(flat, dims, strict=True)
        if isinstance(value, Tensor)
    ]
    dtypes = {value.dtype for value in flat if isinstance(value, Tensor)}
    if len(dtypes) > 1 and min(ranks) == 0:
        return None  # a tensor without dimensions yields to others in the dtype; one of a batch would not
    rank = max(ranks)

    def lifted(value: Tensor, dim: int) -> Tensor:
        first = value.movedim(dim, 0)
        return first.reshape(size, *(1,) * (rank - first.dim() + 1), *first.shape[1:])

    arguments = [value if dim is None else lifted(value, dim) for value, dim in zip(flat, dims, strict=True)]
    shape = torch.broadcast_shapes(*(value.shape for value in arguments if isinstance(value, Tensor)))

    def restore(results: Sequence[Any], labels: Sequence[str]) -> Flat:
        for label, result in zip(labels, results, strict=True):
            if result is not None and result.shape != shape:
                raise _broken(specification, label, shape, result)
        return tuple(results)

    return WholeBatch(arguments, restore)


def _led(
    specification: Specification, names: Sequence[str], flat: Sequence[Any], dims: Dims, size: int
) -> WholeBatch | None:
    """Make one dimension of the batch's and the one that the operator has for independent examples."""
    shapes, batching = specification.shapes, specification.batching
    assert shapes is not None
    assert batching is not None
    arguments: list[Any] = []
    lead: int | None = None
    mixed = len({value.dtype for value in flat if isinstance(value, Tensor)}) > 1
    for name, value, dim in zip(names, flat, dims, strict=True):
        if not isinstance(value, Tensor) or not leads(batching, shapes, name):
            if dim is not None:
                return None  # an argument that all examples share in one call, and here they do not
            arguments.append(value)
            continue
        first = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        if mixed and first.dim() == 1 and batching == LEADING:
            return (
                None  # an example without dimensions yields to others in the dtype; a batch of them does not
            )
        if batching != LEADING:
            if first.dim() < 2:
                return None  # the operator refuses it in words of its own
            lead = first.shape[1]
            first = first.reshape(size * lead, *first.shape[2:])
        arguments.append(first)

    def restore(results: Sequence[Any], labels: Sequence[str]) -> Flat:
        wanted = size if lead is None else size * lead
        for label, result in zip(labels, results, strict=True):
            if result is not None and (result.dim() == 0 or result.shape[0] != wanted):
                raise _broken(specification, label, (wanted, ...), result)
        if lead is None:
            return tuple(results)
        return tuple(
            None if result is None else result.reshape(size, lead, *result.shape[1:]) for result in results
        )

    return WholeBatch(arguments, restore)


def _broken(
    specification: Specification, name: str, shape: Sequence[Any], result: Tensor
) -> errors.ShapeError:
    sizes = ", ".join("..." if each is ... else str(each) for each in shape)
    return errors.ShapeError(
        f"`{name}` has no dimension for the batch, although `batching={specification.batching!r}` says so",
        operator=specification.name,
        argument=name,
        expected=f"[{sizes}]",
        got=str(list(result.shape)),
        where=specification.where,
        hint="leave `batching=` out: then each example is computed as it would be alone",
    )
