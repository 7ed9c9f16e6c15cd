"""What `shapes=` does: calls are held to them, and an opaque operator gets its fake kernel from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.calls import tensors_in
from opsmith.core.specification import Specification


def refuse_shapes(specification: Specification, values: list[Any]) -> None:
    """Refuse tensors whose shapes are not those that the operator was declared with.

    Raises:
        ShapeError: Naming the argument.
    """
    if specification.shapes is None:
        return
    _, fault = specification.shapes.bind(specification.schema, values)
    if fault is not None:
        argument, expected, got = fault
        raise errors.ShapeError(
            f"`{argument}` has the wrong shape",
            operator=specification.name,
            argument=argument,
            expected=expected,
            got=got,
            where=specification.where,
            mend=f"call it with `{specification.shapes.text}`",
        )


def fake_by_shapes(specification: Specification, values: list[Any]) -> tuple[Tensor, ...] | None:
    """Empty results of the declared shapes, in the dtype that the tensors promote to.

    None where the shapes do not say every size.
    """
    shapes, tensors = specification.shapes, tensors_in(values)
    if shapes is None or len(shapes.results) < len(specification.schema.results) or not tensors:
        return None
    sizes, _ = shapes.bind(specification.schema, values)
    found = [dims.evaluate(sizes) for dims in shapes.results]
    if any(size is None for shape in found for size in shape):
        return None
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensors[0].new_empty(shape, dtype=dtype) for shape in found)
