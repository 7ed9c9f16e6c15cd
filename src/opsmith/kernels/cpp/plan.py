"""Plan of a C++ kernel's call: its instance, its results, and arguments copied into other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.common.parameters import Parameter, check_written
from opsmith.kernels.runtime.plan import Plan, copies_in, strides_in
from opsmith.kernels.runtime.recipe import contiguous_recipe
from opsmith.torch_library.arguments import refuse_shapes
from opsmith.torch_library.contract import refuse_result_shapes
from opsmith.torch_library.result_layouts import ResultLayout, result_layouts


def plan_call(
    kernel: BuiltKernel[Any],
    values: Sequence[Any],
    instance: int,
    parameters: Sequence[Parameter],
    *,
    sizes: bool,
) -> Plan:
    """Plan the calls that have the signature of these values.

    Args:
        kernel: The kernel.
        values: Argument values.
        instance: Address of the kernel's instance for these values.
        parameters: Parameters of the instance.
        sizes: True if the instance computes the sizes of its results.

    Raises:
        ShapeError: If the tensors, or the results of the reference, do not have the declared shapes.
        KernelSignatureError: If the instance writes results of a wrong dtype or number of dimensions.
    """
    specification = kernel.operator.specification
    refuse_shapes(specification, list(values))
    results: list[tuple[ResultLayout, tuple[int, ...] | None]] = []
    views = parameters[len(specification.schema.arguments) :]
    layouts = result_layouts(specification, values)
    refuse_result_shapes(specification, list(values), layouts)
    for described, result, view in zip(specification.schema.results, layouts, views, strict=True):
        check_written(kernel, described.name, result, view, values)
        written = result.stride if view.layout == "any" else strides_in(result.shape, view.layout)
        results.append((result, None if written == result.stride else written))
    plain = not sizes and all(each.layout != "channels-last" for each in parameters)
    recipe = contiguous_recipe(specification, values, layouts) if plain else None
    copies = copies_in(values, dict(enumerate(parameters)))
    return Plan(instance, copies, tuple(results), recipe=recipe)
