"""Arguments that an operator does not take: unsupported kinds of tensors, and wrong shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.schema import Schema
from opsmith.core.shapes import NO_SIZE
from opsmith.core.specification import Specification


@dataclass(frozen=True)
class UnsupportedKind:
    """A kind of tensor that operators do not take, and the conversion to a kind that they take."""

    name: str
    hint: str


def unsupported_kind(tensor: Tensor) -> UnsupportedKind | None:
    """Unsupported kind of a tensor: nested, quantised, sparse or mkldnn; None for a strided dense tensor."""
    if tensor.is_nested:
        return UnsupportedKind("a nested tensor", "torch.nested.to_padded_tensor({}, 0.0)")
    if tensor.is_quantized:
        return UnsupportedKind("a quantised tensor", "{}.dequantize()")
    if tensor.layout is not torch.strided:
        return UnsupportedKind(str(tensor.layout), "{}.to_dense()")
    return None


def refuse_unsupported(specification: Specification, values: list[Any]) -> None:
    """Refuse sparse, nested, quantised and mkldnn inputs.

    Raises:
        LayoutError: With the name of the argument.
    """
    for tensor in tensors_in(values):
        foreign = unsupported_kind(tensor)
        if foreign is not None:
            name = name_of(tensor, specification.schema, values)
            raise specification.error(
                errors.LayoutError,
                "it takes only strided dense tensors",
                argument=name,
                expected="torch.strided",
                got=foreign.name,
                hint=f"call it with `{foreign.hint.format(name)}`",
            )


def refuse_shapes(specification: Specification, values: list[Any]) -> None:
    """Refuse tensors whose shapes differ from the declared shapes of the operator.

    Raises:
        ShapeError: With the name of the argument.
    """
    if specification.shapes is None:
        return
    _, fault = specification.shapes.bind(specification.schema, values)
    if fault is not None:
        argument, expected, got = fault
        raise specification.error(
            errors.ShapeError,
            f"`{argument}` has the wrong shape",
            argument=argument,
            expected=expected,
            got=got,
            hint=f"call it with `{specification.shapes.shown(specification.schema)}`",
        )


def fake_by_shapes(specification: Specification, values: list[Any]) -> tuple[Tensor, ...] | None:
    """Compute empty results of the declared shapes, in the dtype that the tensors promote to.

    Return None if the shapes do not determine every size.
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
            raise specification.error(
                errors.ShapeError,
                f"`{described.name}` would have a negative size, or a size that divides by zero",
                argument=described.name,
                expected=f"`{dims.text}`",
                got=", ".join(str(list(tensor.shape)) for tensor in tensors),
                hint=f"call it with `{shapes.shown(specification.schema)}`",
            )
    if any(size is None for shape in found for size in shape):
        return None
    dtype = _promoted_dtype(tensors)
    return tuple(tensors[0].new_empty(shape, dtype=dtype) for shape in found)


def _promoted_dtype(tensors: list[Tensor]) -> torch.dtype:
    """The dtype that tensors promote to; tensors with dimensions outweigh tensors without."""
    examples = [torch.empty((1,) * each.dim(), dtype=each.dtype, device="meta") for each in tensors]
    widest = examples[0]
    for example in examples[1:]:
        dtype = torch.result_type(widest, example)
        widest = torch.empty((1,) * max(widest.dim(), example.dim()), dtype=dtype, device="meta")
    return widest.dtype


def name_of(tensor: Tensor, schema: Schema, values: Sequence[Any]) -> str:
    """The name of a tensor among the argument values, such as `x` or `xs[0]`."""
    for name, value in zip(schema.names, values, strict=True):
        if value is tensor:
            return name
        if isinstance(value, list | tuple):
            for position, item in enumerate(value):
                if item is tensor:
                    return f"{name}[{position}]"
    return "an input"
