"""Whether the parameters of a CUDA kernel are an operator's arguments and results, and take these values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opsmith.build.cuda.parameters import MAX_DIM, CudaParameter
from opsmith.core.calls import tensors_in
from opsmith.core.kinds import Kind
from opsmith.core.schema import Schema
from opsmith.kernels.choosing import choose_candidate
from opsmith.kernels.signature import cannot_take, check_parameters, check_results

_BYTES = {"Tensor": 0, "int": 8, "float": 8, "bool": 1}
"""What an argument is to a kernel, with the bytes of a number of it."""


def check_cuda_parameters(
    candidates: Sequence[Sequence[CudaParameter]], schema: Schema, operator: str, where: str
) -> None:
    """Hold the parameters of each candidate to the operator's arguments, and then its results.

    Raises:
        KernelSignatureError: If there are others, or no CUDA kernel takes an argument or gives a result.
    """
    check_results(schema, "CUDA", operator, where)
    arguments = [
        _argument(each.name, each.kind, operator, where)
        for each in schema.arguments
        if each.name in passed(schema)
    ]
    results = [CudaParameter("Tensor", written=True) for _ in schema.results]
    names = [*passed(schema), *(result.name for result in schema.results)]
    check_parameters(candidates, [*arguments, *results], names, "CUDA", operator, where)


def passed(schema: Schema) -> tuple[str, ...]:
    """The arguments that are parameters of a CUDA kernel: all but texts."""
    return tuple(
        each.name for each in schema.arguments if each.kind.base.annotation != "str" or each.kind.sequence
    )


def _argument(name: str, kind: Kind, operator: str, where: str) -> CudaParameter:
    form = kind.base.annotation
    if form not in _BYTES or kind.encoded or (kind.sequence and (kind.item_optional or kind.optional)):
        expected = "a tensor, int, float or bool, or None for one; a list of any of these"
        raise cannot_take(name, kind, "CUDA", expected, operator, where)
    return CudaParameter(form + "[]" * kind.sequence, kind.optional, item=_BYTES[form])


def chosen(
    names: Sequence[str], values: Sequence[Any], candidates: Sequence[Sequence[CudaParameter]]
) -> int | str:
    """The number of the first candidate that takes these values, or why none does.

    Args:
        names: Names of the arguments that are passed.
        values: Their values.
        candidates: The parameters of each instance: arguments, and then results.
    """
    choice = choose_candidate(names, values, candidates)
    if isinstance(choice, str):
        return choice
    for name, value, parameter in zip(names, values, candidates[choice], strict=False):
        misfit = _too_large(name, value, parameter)
        if misfit is not None:
            return misfit
    return choice


def _too_large(name: str, value: Any, parameter: CudaParameter) -> str | None:
    """Why a value does not fit into the room that a parameter has."""
    for tensor in tensors_in([value]):
        if tensor.dim() > parameter.most_dim:
            return f"`{name}` has {tensor.dim()} dimensions, and a view has room for {MAX_DIM}"
    if isinstance(value, list | tuple) and len(value) > parameter.room:
        return f"`{name}` has {len(value)} items, and `{parameter}` has room for {parameter.room}"
    if parameter.form in ("int", "int[]") and value is not None:
        bits = parameter.item * 8 - 1
        items = value if isinstance(value, list | tuple) else [value]
        beyond = [each for each in items if not -(2**bits) <= each < 2**bits]
        if beyond:
            return f"`{name}` is {beyond[0]}, and it takes an int of {bits + 1} bits"
    return None
