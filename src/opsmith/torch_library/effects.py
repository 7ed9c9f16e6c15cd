"""What a reference or kernel may not do: write into its inputs, or return them or views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.calls import shown, tensors_in
from opsmith.core.location import where
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.distributed import replicating
from opsmith.torch_library.result_flattening import ResultFlattening


def run_pure(
    specification: Specification, function: Callable[..., Any], values: list[Any]
) -> tuple[Any, ...]:
    """Run a reference or kernel, hold it to its contract, and return its results as a tuple, lists as lists.

    Raises:
        MutationError, AliasError, ResultCountError, ResultTypeError: As their names say.
    """
    schema = specification.schema
    inputs = tensors_in(values)
    before = [capabilities.version(tensor) for tensor in inputs]
    args, kwargs = schema.split(values)
    with replicating(inputs):
        results = _as_tuple(specification, function, function(*args, **kwargs))
    if function is not specification.forward:  # which puts back what an adopted class wrote
        _check_unwritten(specification, function, before, inputs, values)
    _check_fresh(specification, function, results, inputs, values)
    return results


def _check_unwritten(
    specification: Specification,
    function: Callable[..., Any],
    before: Sequence[int | None],
    inputs: list[Tensor],
    values: list[Any],
) -> None:
    for tensor, count in zip(inputs, before, strict=True):
        if count is not None and capabilities.version(tensor) != count:
            raise errors.MutationError(
                "an operator must not write into its inputs",
                operator=specification.name,
                argument=_name_of(tensor, specification.schema, values),
                where=where(function),
                hint="work on a copy: `x = x.clone()` before the first in-place operation",
            )


def settle(specification: Specification, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """What is done with a call that does not look right at first sight: the whole contract is checked.

    Returns:
        A function of the result, the argument values, and the versions that the tensors among them had.
    """

    def settled(result: Any, values: list[Any], before: Sequence[int | None] | None) -> Tensor:
        inputs = tensors_in(values)
        results = _as_tuple(specification, function, result)
        if before is not None:
            counts = [count for count in before if count is not None]
            _check_unwritten(specification, function, counts, inputs, values)
        _check_fresh(specification, function, results, inputs, values)
        only: Tensor = results[0]
        return only

    return settled


def _as_tuple(specification: Specification, function: Callable[..., Any], returned: Any) -> tuple[Any, ...]:
    schema = specification.schema
    results = (returned,) if schema.single else returned
    if not isinstance(results, tuple | list) or len(results) != len(schema.results):
        count = len(results) if isinstance(results, tuple | list) else 1
        raise errors.ResultCountError(
            "it returned another number of results than declared",
            operator=specification.name,
            expected=f"a tuple of {len(schema.results)} tensors",
            got=f"{count}" if count != 1 else shown(returned),
            where=where(function),
            hint="return what the type hint says, or change the type hint",
        )
    if not schema.always_tensors:
        return _as_forms(specification, function, results)
    for result, described in zip(results, schema.results, strict=True):
        _check_tensor(specification, function, result, described.name, described.annotation())
    return tuple(results)


def _as_forms(
    specification: Specification, function: Callable[..., Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Results some of which may be lists, or None."""
    for result, described in zip(results, specification.schema.results, strict=True):
        if described.sequence and not isinstance(result, list | tuple):
            raise errors.ResultTypeError(
                f"`{described.name}` is not a list",
                operator=specification.name,
                argument=described.name,
                expected=described.annotation(),
                got=shown(result),
                where=where(function),
                hint="return a list of tensors, `[result]` for a single one",
            )
    lying = ResultFlattening.of(specification.schema, results)
    for result, label, described in zip(lying.flatten(results), lying.labels, lying.described, strict=True):
        if result is not None or not described.optional:
            expected = "Tensor | None" if described.optional else "Tensor"
            _check_tensor(specification, function, result, label, expected)
    return tuple(list(result) if isinstance(result, list | tuple) else result for result in results)


def _check_tensor(
    specification: Specification, function: Callable[..., Any], result: Any, label: str, expected: str
) -> None:
    if not isinstance(result, Tensor):
        raise errors.ResultTypeError(
            f"`{label}` is not a tensor",
            operator=specification.name,
            argument=label,
            expected=expected,
            got=shown(result),
            where=where(function),
            hint="annotate it as `Tensor | None`"
            if result is None
            else "convert it, for example with `torch.as_tensor(...)` or `torch.from_numpy(...)`",
        )
    foreign = foreign_kind(result)
    if foreign is not None:
        raise errors.LayoutError(
            f"`{label}` is not a strided dense tensor",
            operator=specification.name,
            argument=label,
            expected="torch.strided",
            got=foreign.name,
            where=where(function),
            hint=f"return `{foreign.hint.format('result')}`",
        )


def _check_fresh(
    specification: Specification,
    function: Callable[..., Any],
    results: tuple[Any, ...],
    inputs: list[Tensor],
    values: list[Any],
) -> None:
    names: Sequence[str] = [result.name for result in specification.schema.results]
    if not specification.schema.always_tensors:
        flattening = ResultFlattening.of(specification.schema, results)
        pairs = zip(flattening.flatten(results), flattening.labels, strict=True)
        there = [(result, label) for result, label in pairs if result is not None]
        results, names = tuple(result for result, _ in there), [label for _, label in there]
    for position, result in enumerate(results):
        for tensor in inputs:
            if result is tensor or capabilities.shares_memory(result, tensor):
                name = _name_of(tensor, specification.schema, values)
                what = "is its input" if result is tensor else "shares memory with its input"
                raise errors.AliasError(
                    f"`{names[position]}` {what} `{name}`",
                    operator=specification.name,
                    argument=name,
                    expected="a new tensor",
                    where=where(function),
                    hint="return a copy: `.clone()`",
                )
        for other in range(position):
            if capabilities.shares_memory(result, results[other]):
                raise errors.AliasError(
                    f"`{names[position]}` shares memory with `{names[other]}`",
                    operator=specification.name,
                    argument=names[position],
                    expected="a new tensor",
                    where=where(function),
                    hint="return a copy of one of them: `.clone()`",
                )


def _name_of(tensor: Tensor, schema: Schema, values: Sequence[Any]) -> str:
    for name, value in zip(schema.names, values, strict=True):
        if value is tensor:
            return name
        if isinstance(value, list | tuple):
            for position, item in enumerate(value):
                if item is tensor:
                    return f"{name}[{position}]"
    return "an input"


@dataclass(frozen=True)
class Foreign:
    """A kind of tensor that operators do not take, and how one becomes a kind that they do."""

    name: str
    hint: str


def foreign_kind(tensor: Tensor) -> Foreign | None:
    """What is foreign about a tensor: nested, quantised, sparse or mkldnn; None for a strided dense one."""
    if tensor.is_nested:
        return Foreign("a nested tensor", "torch.nested.to_padded_tensor({}, 0.0)")
    if tensor.is_quantized:
        return Foreign("a quantised tensor", "{}.dequantize()")
    if tensor.layout is not torch.strided:
        return Foreign(str(tensor.layout), "{}.to_dense()")
    return None


def refuse_foreign(specification: Specification, values: list[Any]) -> None:
    """Refuse sparse, nested, quantised and mkldnn inputs by name.

    Raises:
        LayoutError: Naming the argument.
    """
    for tensor in tensors_in(values):
        foreign = foreign_kind(tensor)
        if foreign is not None:
            raise errors.LayoutError(
                "it takes strided dense tensors only",
                operator=specification.name,
                argument=_name_of(tensor, specification.schema, values),
                expected="torch.strided",
                got=foreign.name,
                where=specification.where,
                hint=f"call it with `{foreign.hint.format('x')}`",
            )
