"""Out form of an operator: it writes its results into tensors that the caller gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.argument_types import TENSOR, ArgumentType
from opsmith.core.formula import listed
from opsmith.core.schema import Argument, Schema
from opsmith.core.specification import OUT, Specification


def out_form(specification: Specification, compute: Callable[[list[Any]], Sequence[Tensor]]) -> Specification:
    """Return the specification of the out form, an in-place operator that writes into `out`.

    It has the arguments of the operator and a keyword-only argument for each visible result. Hidden results
    stay results.

    Args:
        specification: The operator.
        compute: Computes all results, as new tensors, from a list of argument values.

    Raises:
        UsageError: If a result may be a list or None, or if there is no result.
    """
    schema = specification.schema
    visible = [schema.results[position] for position in schema.visible]
    if not visible or not schema.always_tensors:
        found = ", ".join(each.annotation() for each in visible) or "none"
        raise specification.error(
            errors.UsageError,
            "`out=` needs results that are tensors in every call",
            expected="a result `Tensor`, or a tuple of tensors",
            got=found,
            hint="call it without `out=`, and copy the results"
            if schema.results
            else _void_hint(specification),
        )
    names = out_names(schema)
    if taken := {*names} & {*schema.names}:
        raise specification.error(
            errors.UsageError,
            f"`out=` needs the name `{min(taken)}`, which is already an argument",
            argument=min(taken),
            hint="rename the argument",
        )
    letters = (
        letter for letter in ascii_lowercase if letter not in {each.alias for each in schema.arguments}
    )
    outs = tuple(
        Argument(name, ArgumentType(TENSOR), keyword_only=True, alias=letter)
        for name, letter in zip(names, letters, strict=False)
    )
    written = Schema(
        (*schema.arguments, *outs), tuple(each for each in schema.results if each.hidden), single=False
    )
    return Specification(
        specification.name + OUT,
        _copied(specification, written, compute),
        written,
        specification.module,
        specification.qualname,
        specification.where,
        random=specification.random,
        deterministic=specification.deterministic,
    )


def _copied(
    specification: Specification, written: Schema, compute: Callable[[list[Any]], Sequence[Tensor]]
) -> Callable[..., Any]:
    schema = specification.schema
    count = len(schema.arguments)

    @functools.wraps(specification.reference)
    def into(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = written.call_values(args, kwargs)
        results = compute(values[:count])
        visible = [results[position] for position in schema.visible]
        for out, result, name in zip(values[count:], visible, out_names(schema), strict=True):
            refuse_other(specification, name, out, result)
        for out, result in zip(values[count:], visible, strict=True):
            out.copy_(result)
        return tuple(results[position] for position in schema.hidden)

    return into


def out_names(schema: Schema) -> tuple[str, ...]:
    """Return the names in torch's schema of the tensors that results are written into.

    Example:
        >>> import torch
        >>> from opsmith.core.schema import schema_of
        >>> def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ...     return x[:1] * 1, x[1:] * 1
        >>> out_names(schema_of(split, "demo::split"))
        ('out0', 'out1')
    """
    count = len(schema.visible)
    return ("out",) if count == 1 else tuple(f"out{number}" for number in range(count))


def refuse_other(specification: Specification, name: str, out: Tensor, result: Tensor) -> None:
    """Refuse a tensor that does not fit the result that is written into it.

    Raises:
        ShapeError: If it has a different shape; torch would resize it.
        ResultTypeError: If it has a different dtype.
        PlacementError: If it is on a different device, or a DTensor with different placements.
    """
    kinds = {
        "shape": errors.ShapeError,
        "dtype": errors.ResultTypeError,
        "device": errors.PlacementError,
        "placements": errors.PlacementError,
    }
    for what, kind in kinds.items():
        found, wanted = getattr(out, what, None), getattr(result, what, None)
        if found != wanted:
            found, wanted = (list(each) if isinstance(each, tuple) else each for each in (found, wanted))
            raise specification.error(
                kind,
                f"`{name}` has {'other' if what == 'placements' else 'another'} {what} than the result",
                argument=name,
                expected=f"{what} {wanted}",
                got=f"{found}",
                hint=_placed_hint(wanted, name)
                if what == "placements"
                else f"make it with `torch.empty({list(result.shape)}, dtype={result.dtype})`",
            )


def _void_hint(specification: Specification) -> str:
    written = listed(specification.schema.written)
    return f"it writes into {written} itself; `{specification.variable}.functional` takes `out=`"


def _placed_hint(placements: Any, name: str) -> str:
    if placements is None or any(each.is_partial() for each in placements):
        return "call it without `out=`, and copy the results"
    return f"call it with `{name}.redistribute(placements={placements})`"
