"""Whether the parameters of a kernel in C++ or CUDA are an operator's arguments and results."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith import errors
from opsmith.build.form import Form
from opsmith.build.parameter import Parameter
from opsmith.core.kinds import Kind
from opsmith.core.schema import Schema
from opsmith.kernels.choosing import plain

DEVICES = {"C++": "cpu", "CUDA": "cuda", "Triton": "cuda"}
"""Where a kernel runs, by the language that messages say it is written in."""

_FORMS = {"Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool", "str": "str"}


def arguments_of(schema: Schema, operator: str, where: str) -> tuple[Parameter, ...]:
    """What each argument is in C++.

    Raises:
        KernelSignatureError: If a C++ kernel cannot take one, or cannot give a result.
    """
    check_results(schema, "C++", operator, where)
    return tuple(_argument(each.name, each.kind, operator, where) for each in schema.arguments)


def _argument(name: str, kind: Kind, operator: str, where: str) -> Parameter:
    form = _FORMS.get(kind.base.annotation)
    listed = kind.sequence and (form == "str" or kind.item_optional or kind.optional)
    if form is None or kind.encoded or listed:
        raise cannot_take(
            name,
            kind,
            "C++",
            "a tensor, int, float, bool or str, or None for one; a list of any of these but str",
            operator,
            where,
        )
    return Parameter(form + "[]" * kind.sequence, kind.optional)


def cannot_take(
    name: str, kind: Kind, language: str, expected: str, operator: str, where: str
) -> errors.KernelSignatureError:
    """The error for an argument that no kernel in a language takes.

    Args:
        name: The argument.
        kind: Its kind.
        language: One of `DEVICES`.
        expected: What such a kernel takes.
        operator: Name of the operator.
        where: `file:line` of the kernel.
    """
    return errors.KernelSignatureError(
        f"a {language} kernel cannot take `{name}`",
        operator=operator,
        argument=name,
        expected=expected,
        got=kind.annotation(),
        where=where,
        hint=_in_python(language),
    )


def check_results(schema: Schema, language: str, operator: str, where: str) -> None:
    """Refuse results that no kernel from source gives.

    Raises:
        KernelSignatureError: If one may be None, or is a list.
    """
    for result in schema.results:
        if result.optional or result.sequence:
            raise errors.KernelSignatureError(
                f"a {language} kernel cannot give a result that may be None, or a list",
                operator=operator,
                argument=result.name,
                expected="results that are one tensor each",
                got=result.annotation(),
                where=where,
                hint=_in_python(language),
            )


def check_parameters(
    candidates: Sequence[Sequence[Parameter]],
    wanted: Sequence[Parameter],
    names: Sequence[str],
    language: str,
    operator: str,
    where: str,
) -> None:
    """Hold the parameters of each candidate to the operator's arguments, and then its results.

    Args:
        candidates: The parameters of each instance of the kernel.
        wanted: What the arguments and results are.
        names: Their names.
        language: One of `DEVICES`.
        operator: Name of the operator.
        where: `file:line` of the kernel.

    Raises:
        KernelSignatureError: If there are others.
    """
    for candidate in candidates:
        fits = len(candidate) == len(wanted) and all(map(Parameter.serves, candidate, wanted))
        if not fits:
            raise errors.KernelSignatureError(
                f"the parameters of the {language} kernel are not the operator's arguments and results",
                operator=operator,
                expected=f"({', '.join(f'{each} {name}' for each, name in zip(wanted, names, strict=True))})",
                got=f"({', '.join(map(str, candidate))})",
                where=where,
                hint="give the kernel these parameters in this order; a view may be Contiguous or "
                "ChannelsLast, and say how many dimensions it has",
            )


def check_written(
    name: str, form: Form, parameter: Parameter, language: str, operator: str, where: str
) -> None:
    """Hold a view that a kernel writes to the result.

    Args:
        name: The result.
        form: As the reference gives it.
        parameter: The view.
        language: One of `DEVICES`.
        operator: Name of the operator.
        where: `file:line` of the kernel.

    Raises:
        KernelSignatureError: If the reference gives another dtype, or another number of dimensions.
    """
    if not parameter.holds(form.dtype, len(form.shape)):
        raise errors.KernelSignatureError(
            f"the {language} kernel does not write the result that the reference gives",
            operator=operator,
            argument=name,
            expected=f"{plain(form.dtype)} of {len(form.shape)} dimensions",
            got=str(parameter),
            where=where,
            hint="change the view, or leave the dtype out of `dtypes=`",
        )


def _in_python(language: str) -> str:
    return f"give the kernel in Python: `@op.kernel({DEVICES[language]!r})`"
