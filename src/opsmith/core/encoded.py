"""Values that torch's dispatcher carries in another form: members of enums, literals, any object."""

from __future__ import annotations

from enum import Enum, Flag
from typing import Any

from opsmith.core.bases import Base
from opsmith.core.tokens import Unknown, holds_tensor, object_of, token_of


def enum_base(members: type[Enum]) -> Base | None:
    """The base for an enum, by the names of its members; None for flags, whose sums have no name."""
    if issubclass(members, Flag):
        return None

    def lower(value: Any) -> str:
        if not isinstance(value, members):
            raise TypeError(members)
        return value.name

    def lift(value: Any) -> Any:
        return members.__members__.get(value, value) if type(value) is str else value

    return Base(
        members.__name__,
        "str",
        lambda value: isinstance(value, members),
        lower,
        lift,
        tuple(members.__members__),
        members if len(members) else None,
    )


def literal_base(values: tuple[Any, ...]) -> Base | None:
    """The base for `Literal[...]` of strings or of whole numbers; None for others."""
    types = {type(value) for value in values}
    if types not in ({str}, {int}):
        return None

    def accepts(value: Any) -> bool:
        return type(value) in types and value in values

    return Base(
        f"Literal[{', '.join(map(repr, values))}]", "str" if types == {str} else "int", accepts, held=True
    )


OBJECT = Base(
    "object",
    "int",
    lambda value: not isinstance(value, Unknown) and not holds_tensor(value),
    token_of,
    object_of,
    hint="take tensors as arguments of their own; a number stands for an object of the process that made it: "
    "call the operator by its handle",
)
"""Any object at all, by a number that stands for it: a callable, a module, a dict, a nested tuple."""
