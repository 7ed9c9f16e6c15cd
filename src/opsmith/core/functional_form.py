"""Functional form of an in-place operator: it writes into no argument, and returns the new values first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.origins.declared import DECLARED
from opsmith.core.schema import Schema, functional_schema
from opsmith.core.specification import FUNCTIONAL_SUFFIX, Specification
from opsmith.core.tensors import map_tensors

Run = Callable[[Callable[..., Any], list[Any]], tuple[Any, ...]]
"""A function that calls a given function with argument values, and returns a tuple of all results."""


def functional_form(specification: Specification, run: Run) -> Specification:
    """Return the specification of the functional form of an in-place operator.

    Args:
        specification: The in-place operator.
        run: Runs the reference or a kernel, and checks it by the contract.
    """
    schema, fake = specification.schema, specification.fake
    changes: dict[str, Any] = {
        "name": functional_name(specification.name),
        "schema": functional_schema(schema),
        "reference": on_copies(specification.reference, schema, run=run),
        "kernels": tuple(_kernel_on_copies(each, specification, run) for each in specification.kernels),
        "fake": None if fake is None else on_copies(fake, schema, specification.reference),
        "origin": DECLARED,
        # `shapes=` does not describe the new values: it is checked in calls of the in-place operator.
        "shapes": None,
        "batching": None,
    }
    brought = specification.origin.functional(schema, specification.reference, faked=fake is not None)
    return replace(specification, **changes | brought)


def functional_name(name: str) -> str:
    """Return the name of the functional form of an in-place operator.

    Example:
        >>> functional_name("vendor::scale.out")
        'vendor::scale_out_functional'
    """
    return name.replace(".", "_") + FUNCTIONAL_SUFFIX


def _kernel_on_copies(kernel: Kernel, specification: Specification, run: Run) -> Kernel:
    if isinstance(kernel.function, BuiltKernel):
        function = on_copies(kernel.function, specification.schema, specification.reference)
    else:
        function = on_copies(kernel.function, specification.schema, run=run)
    return Kernel(kernel.device, function, kernel.dtypes, kernel)


def on_copies(
    function: Callable[..., Any],
    schema: Schema,
    wrapped: Callable[..., Any] | None = None,
    copied: Callable[[Tensor], Tensor] = Tensor.clone,
    run: Run | None = None,
) -> Callable[..., Any]:
    """Return a function that writes into copies, and returns the new values before the results.

    Args:
        function: Writes into its arguments.
        schema: Schema of the in-place operator.
        wrapped: The function whose name and signature it takes; by default `function`.
        copied: Copies a tensor.
        run: Calls the function and checks the contract; None to call it unchecked.
    """

    @functools.wraps(wrapped or function)
    def functional(*args: Any, **kwargs: Any) -> Any:
        values = copies_of_written(schema, schema.call_values(args, kwargs), copied)
        if run is None:
            positional, named = schema.split(values)
            results = all_results(schema, values, function(*positional, **named))
        else:
            results = (*_new_values(schema, values), *run(function, values))
        return results[0] if len(results) == 1 else results

    return functional


def copied_back(function: Callable[..., Any], schema: Schema) -> Callable[..., Any]:
    """Return a function that computes new values, copies them into the arguments and returns the results.

    Args:
        function: Returns the new values and then the results, as a functional form does.
        schema: Schema of the in-place operator.
    """

    @functools.wraps(function)
    def writes(*args: Any, **kwargs: Any) -> Any:
        values = schema.call_values(args, kwargs)
        positional, named = schema.split(values)
        returned = function(*positional, **named)
        return write_results(schema, values, returned if isinstance(returned, tuple | list) else (returned,))

    return writes


def write_results(schema: Schema, values: Sequence[Any], results: Sequence[Any]) -> Any:
    """Copy new values from a functional form into arguments; return the in-place operator's results."""
    new = iter(results)
    for argument, value in zip(schema.arguments, values, strict=True):
        if argument.alias:
            written = next(new)
            for target, source in zip(tensors_in([value]), tensors_in([written]), strict=True):
                target.copy_(source)
    return returned_results(schema, values, tuple(new))


def returned_results(schema: Schema, values: Sequence[Any], results: tuple[Any, ...]) -> Any:
    """Return an in-place operator's results: the argument that it writes and returns, or other results."""
    if schema.returns is not None:
        return values[schema.names.index(schema.returns)]
    return (results[0] if schema.single else results) if results else None


def all_results(schema: Schema, values: Sequence[Any], returned: Any) -> tuple[Any, ...]:
    """Return the results of the functional form: the new values, then an in-place operator's results."""
    new = _new_values(schema, values)
    if not schema.results or schema.returns is not None:
        return new
    return (*new, *(returned if isinstance(returned, tuple) else (returned,)))


def _new_values(schema: Schema, values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value for argument, value in zip(schema.arguments, values, strict=True) if argument.alias)


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Copy a tensor and keep its strides, which a kernel that writes into it takes."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def copies_of_written(
    schema: Schema, values: Sequence[Any], copied: Callable[[Tensor], Tensor] = Tensor.clone
) -> list[Any]:
    """Return argument values, with copies of those that an in-place operator writes into."""
    pairs = zip(schema.arguments, values, strict=True)
    return [map_tensors(copied, [value])[0] if argument.alias else value for argument, value in pairs]
