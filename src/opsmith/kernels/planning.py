"""How calls of one form are run: what is copied for its layout, and how the results lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opsmith.build.cpp.plan import Copy, Plan
from opsmith.build.form import Form
from opsmith.build.parameter import Parameter
from opsmith.core.calls import tensors_in
from opsmith.core.specification import Specification
from opsmith.kernels.choosing import lies_right, memory_format
from opsmith.kernels.forms import forms_of
from opsmith.kernels.signature import check_written
from opsmith.torch_library.shape_rules import refuse_shapes


def planned(
    specification: Specification,
    values: list[Any],
    candidate: int,
    parameters: Sequence[Parameter],
    where: str,
) -> Plan:
    """The plan for calls of the form of this one.

    Args:
        specification: The operator.
        values: The argument values.
        candidate: Number of the instance that takes them.
        parameters: Its parameters.
        where: `file:line` of the kernel.

    Raises:
        ShapeError: If the tensors have not the shapes that the operator is declared with.
        KernelSignatureError: If the instance writes results of another dtype or number of dimensions.
    """
    refuse_shapes(specification, values)
    forms = forms_of(specification, values)
    written = parameters[len(specification.schema.arguments) :]
    names = [result.name for result in specification.schema.results]
    return Plan(
        candidate,
        _copies(values, parameters),
        tuple(
            (form, _written(specification.name, name, form, parameter, where))
            for name, form, parameter in zip(names, forms, written, strict=True)
        ),
    )


def _copies(values: Sequence[Any], parameters: Sequence[Parameter]) -> tuple[Copy, ...]:
    copies, number = [], 0
    for position, (value, parameter) in enumerate(zip(values, parameters, strict=False)):
        for tensor in tensors_in([value]):
            if not lies_right(tensor, parameter):
                strides = _strides(tensor.shape, memory_format(parameter, tensor.dim()))
                copies.append(Copy(number, position, strides))
            number += 1
    return tuple(copies)


def _written(
    operator: str, name: str, form: Form, parameter: Parameter, where: str
) -> tuple[int, ...] | None:
    """The strides in which a result is written; None for those that it has in the end."""
    check_written(name, form, parameter, "C++", operator, where)
    if parameter.layout == "any":
        return None
    strides = _strides(form.shape, memory_format(parameter, len(form.shape)))
    return None if strides == form.stride else strides


def _strides(shape: Sequence[int], layout: torch.memory_format) -> tuple[int, ...]:
    """The strides of a tensor of this shape in a layout.

    Example:
        >>> _strides((2, 3), torch.contiguous_format)
        (3, 1)
    """
    if layout is torch.contiguous_format:
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(reversed(strides))
    order = [0, *range(2, len(shape)), 1]  # batch, places, channels
    inner = _strides([shape[place] for place in order], torch.contiguous_format)
    return tuple(dict(zip(order, inner, strict=True))[place] for place in range(len(shape)))
