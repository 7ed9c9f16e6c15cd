"""Whether the parameters of a C++ kernel are an operator's arguments and results."""

from __future__ import annotations

from opsmith import errors
from opsmith.build.parameter import Parameter
from opsmith.core.kinds import Kind
from opsmith.core.schema import Schema

_FORMS = {"Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool", "str": "str"}


def arguments_of(schema: Schema, operator: str, where: str) -> tuple[Parameter, ...]:
    """What each argument is in C++.

    Raises:
        KernelSignatureError: If a C++ kernel cannot take one, or cannot give a result.
    """
    for result in schema.results:
        if result.optional or result.sequence:
            raise errors.KernelSignatureError(
                "a C++ kernel cannot give a result that may be None, or a list",
                operator=operator,
                argument=result.name,
                expected="results that are one tensor each",
                got=result.hint(),
                where=where,
                mend="give the kernel in Python: `@op.kernel('cpu')`",
            )
    return tuple(_argument(each.name, each.kind, operator, where) for each in schema.arguments)


def _argument(name: str, kind: Kind, operator: str, where: str) -> Parameter:
    form = _FORMS.get(kind.base.hint)
    listed = kind.sequence and (form == "str" or kind.item_optional or kind.optional)
    if form is None or kind.encoded or listed:
        raise errors.KernelSignatureError(
            f"a C++ kernel cannot take `{name}`",
            operator=operator,
            argument=name,
            expected="a tensor, int, float, bool or str, or None for one; a list of any of these but str",
            got=kind.hint(),
            where=where,
            mend="give the kernel in Python: `@op.kernel('cpu')`",
        )
    return Parameter(form + "[]" * kind.sequence, kind.optional)


def check_signature(
    candidates: tuple[tuple[Parameter, ...], ...], schema: Schema, operator: str, where: str
) -> None:
    """Hold the parameters of each candidate to the operator's arguments, and then its results.

    Raises:
        KernelSignatureError: If there are others.
    """
    arguments = arguments_of(schema, operator, where)
    results = tuple(Parameter("Tensor", written=True) for _ in schema.results)
    names = [*schema.names, *(result.name for result in schema.results)]
    wanted = (*arguments, *results)
    for candidate in candidates:
        fits = len(candidate) == len(wanted) and all(map(_serves, candidate, wanted))
        if not fits:
            raise errors.KernelSignatureError(
                "the parameters of the C++ kernel are not the operator's arguments and results",
                operator=operator,
                expected=f"({', '.join(f'{each} {name}' for each, name in zip(wanted, names, strict=True))})",
                got=f"({', '.join(map(str, candidate))})",
                where=where,
                mend="give the kernel these parameters in this order; a view may be Contiguous or "
                "ChannelsLast, and say how many dimensions it has",
            )


def _serves(given: Parameter, wanted: Parameter) -> bool:
    same = (given.form, given.written) == (wanted.form, wanted.written)
    return same and given.optional == wanted.optional
