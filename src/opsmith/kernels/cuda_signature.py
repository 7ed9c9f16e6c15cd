"""Whether the parameters of a CUDA kernel are an operator's arguments and results, and take these values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cuda.parameters import MAX_DIM, CudaParameter
from opsmith.core.calls import tensors_in
from opsmith.core.kinds import Kind
from opsmith.core.schema import Schema
from opsmith.kernels.choosing import choose_candidate

_FORMS = {"Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool"}
_BYTES = {"int": 8, "float": 8, "bool": 1}


def parameters_of(schema: Schema, operator: str, where: str) -> tuple[CudaParameter, ...]:
    """What each argument is in CUDA, and then each result; a `str` is no parameter.

    Raises:
        KernelSignatureError: If a CUDA kernel cannot take one, or cannot give a result.
    """
    for result in schema.results:
        if result.optional or result.sequence:
            raise _cannot(
                "give a result that may be None, or a list", result.name, result.hint(), operator, where
            )
    return (
        *(
            _argument(each.name, each.kind, operator, where)
            for each in schema.arguments
            if each.name in passed(schema)
        ),
        *(CudaParameter("Tensor", written=True) for _ in schema.results),
    )


def passed(schema: Schema) -> tuple[str, ...]:
    """The arguments that are parameters of a CUDA kernel: all but texts."""
    return tuple(each.name for each in schema.arguments if each.kind.base.hint != "str" or each.kind.sequence)


def _argument(name: str, kind: Kind, operator: str, where: str) -> CudaParameter:
    form = _FORMS.get(kind.base.hint)
    if form is None or kind.encoded or (kind.sequence and (kind.item_optional or kind.optional)):
        raise _cannot(f"take `{name}`", name, kind.hint(), operator, where)
    return CudaParameter(form + "[]" * kind.sequence, kind.optional, item=_BYTES.get(form, 0))


def _cannot(what: str, name: str, got: str, operator: str, where: str) -> errors.KernelSignatureError:
    return errors.KernelSignatureError(
        f"a CUDA kernel cannot {what}",
        operator=operator,
        argument=name,
        expected="tensors, int, float, bool, or None for one, and lists of them; each result one tensor",
        got=got,
        where=where,
        mend="give the kernel in Python: `@op.kernel('cuda')`",
    )


def check_parameters(
    candidates: Sequence[Sequence[CudaParameter]], schema: Schema, operator: str, where: str
) -> None:
    """Hold the parameters of each candidate to the operator's arguments, and then its results.

    Raises:
        KernelSignatureError: If there are others.
    """
    wanted = parameters_of(schema, operator, where)
    names = [*passed(schema), *(result.name for result in schema.results)]
    for candidate in candidates:
        if len(candidate) != len(wanted) or not all(map(_serves, candidate, wanted)):
            shown = (f"{each} {name}" for each, name in zip(wanted, names, strict=True))
            raise errors.KernelSignatureError(
                "the parameters of the CUDA kernel are not the operator's arguments and results",
                operator=operator,
                expected=f"({', '.join(shown)})",
                got=f"({', '.join(map(str, candidate))})",
                where=where,
                mend="give the kernel these parameters in this order; a view may be Contiguous or "
                "ChannelsLast, and say how many dimensions it has",
            )


def _serves(given: CudaParameter, wanted: CudaParameter) -> bool:
    same = (given.form, given.written) == (wanted.form, wanted.written)
    return same and given.optional == wanted.optional


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


def written_dtype(
    name: str, dtype: torch.dtype, dim: int, parameter: CudaParameter, operator: str, where: str
) -> None:
    """Hold a view of a result to the result.

    Raises:
        KernelSignatureError: If the reference gives another dtype, or another number of dimensions.
    """
    if dtype == parameter.dtype and parameter.dim in (None, dim) and dim <= parameter.most_dim:
        return
    raise errors.KernelSignatureError(
        "the CUDA kernel does not write the result that the reference gives",
        operator=operator,
        argument=name,
        expected=f"{str(dtype).removeprefix('torch.')} of {dim} dimensions",
        got=str(parameter),
        where=where,
        mend="change the view, or leave the dtype out of `dtypes=`",
    )
