"""What `shapes=` does: calls are held to them, and an opaque operator gets its fake kernel from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.calls import tensors_in
from opsmith.core.shapes import NO_SIZE, Dims
from opsmith.core.specification import Specification
from opsmith.torch_library.result_flattening import ResultFlattening


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
            hint=f"call it with `{specification.shapes.text}`",
        )


def fake_by_shapes(specification: Specification, values: list[Any]) -> tuple[Tensor, ...] | None:
    """Empty results of the declared shapes, in the dtype that the tensors promote to.

    None where the shapes do not say every size.
    """
    shapes, tensors = specification.shapes, tensors_in(values)
    if shapes is None or len(shapes.results) < len(specification.schema.results) or not tensors:
        return None
    if not specification.schema.always_tensors:
        return None
    sizes, _ = shapes.bind(specification.schema, values)
    found = [dims.evaluate(sizes) for dims in shapes.results]
    for described, shape, dims in zip(specification.schema.results, found, shapes.results, strict=True):
        if any(size is NO_SIZE for size in shape):
            raise errors.ShapeError(
                f"`{described.name}` would have a negative size, or one that divides by zero",
                operator=specification.name,
                argument=described.name,
                expected=f"`{dims.text}`",
                got=", ".join(str(list(tensor.shape)) for tensor in tensors),
                where=specification.where,
                hint=f"call it with `{shapes.text}`",
            )
    if any(size is None for shape in found for size in shape):
        return None
    dtype = _promoted(tensors)
    return tuple(tensors[0].new_empty(shape, dtype=dtype) for shape in found)


def _promoted(tensors: list[Tensor]) -> torch.dtype:
    """The dtype that tensors promote to; those without dimensions yield to others."""
    forms = [torch.empty((1,) * each.dim(), dtype=each.dtype, device="meta") for each in tensors]
    widest = forms[0]
    for form in forms[1:]:
        dtype = torch.result_type(widest, form)
        widest = torch.empty((1,) * max(widest.dim(), form.dim()), dtype=dtype, device="meta")
    return widest.dtype


def refuse_results(specification: Specification, values: list[Any], results: tuple[Any, ...]) -> None:
    """Refuse results that are not what `shapes=` says, or what the fake kernel made of them says.

    Raises:
        ShapeError: Naming the result.
        ResultTypeError: If an opaque operator's result is of another dtype than its fake kernel's.
    """
    shapes = specification.shapes
    if shapes is None:
        return
    sizes, _ = shapes.bind(specification.schema, values)
    for name, dims, result in _each(specification, results):
        wanted = dims.evaluate(sizes)
        same = len(wanted) == result.dim() and all(
            size is None or size == found for size, found in zip(wanted, result.shape, strict=False)
        )
        if not same:
            shown = ", ".join("_" if size is None or size is NO_SIZE else str(size) for size in wanted)
            raise errors.ShapeError(
                f"`{name}` has not the shape that `shapes=` says",
                operator=specification.name,
                argument=name,
                expected=f"`{dims.text}`, that is [{shown}]",
                got=str(list(result.shape)),
                where=specification.where,
                hint="write what the function returns: `_` stands for a size that nothing tells",
            )
    if specification.opaque and specification.fake is None:
        _refuse_dtypes(specification, values, results)


def _each(specification: Specification, results: tuple[Any, ...]) -> Iterator[tuple[str, Dims, Tensor]]:
    """Name, dimensions and tensor of every result that is there; those of a list share their dimensions."""
    assert specification.shapes is not None
    flattening = ResultFlattening.of(specification.schema, results)
    dims = dict(zip(flattening.spans, specification.shapes.results, strict=False))
    for described, label, result in zip(
        flattening.described, flattening.labels, flattening.flatten(results), strict=True
    ):
        if result is not None and described.name in dims:
            yield label, dims[described.name], result


def _refuse_dtypes(specification: Specification, values: list[Any], results: tuple[Any, ...]) -> None:
    for described, fake, result in zip(
        specification.schema.results, fake_by_shapes(specification, values) or (), results, strict=False
    ):
        if fake.dtype != result.dtype:
            raise errors.ResultTypeError(
                f"`{described.name}` has not the dtype of the fake kernel that `shapes=` makes",
                operator=specification.name,
                argument=described.name,
                expected=f"{fake.dtype}, to which its tensors promote",
                got=str(result.dtype),
                where=specification.where,
                hint="write `@op.fake` over a function that returns empty tensors of the right dtype",
            )
