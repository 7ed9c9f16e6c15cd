"""Tables in C++ for the operators of a library without Python; see operators.h."""

from __future__ import annotations

from dataclasses import dataclass

from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.cpp.literals import array, flag, text

ACCEPTED = ("any", "nested", "contiguous")
"""Layouts of an argument for which the results are contiguous, in the order of `enum Accepted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedOperator:
    """Operator of a library.

    Attributes:
        name: `namespace::name`.
        names: Names of the arguments.
        arguments: Parameters for the arguments.
        accepted: For each argument, one of `ACCEPTED`.
        results: Number of results.
        shapes: Text of `shapes=`; may be empty.
        sizing: Sizes of the results by `shapes`: see `sizing_of`; empty if it does not determine them.
        calls: Sizes of the results in calls of an exported model, if there is no other source.
    """

    name: str
    names: tuple[str, ...]
    arguments: tuple[Parameter, ...]
    accepted: tuple[str, ...]
    results: int
    shapes: str
    sizing: tuple[int, ...]
    calls: tuple[tuple[int, ...], ...] = ()

    def tables(self, number: int) -> list[str]:
        """Return the tables that the operator's row names, as lines of C++.

        Args:
            number: Number of the operator in the library.
        """
        arguments = map(_argument, self.names, self.arguments, self.accepted)
        calls = [f"call_{number}_{at}" for at in range(len(self.calls))]
        return [
            array(f"const opsmith::OperatorArgument arguments_{number}", arguments),
            array(f"const int64_t sizing_{number}", map(whole, self.sizing)),
            *(
                array(f"const int64_t {name}", map(whole, each))
                for name, each in zip(calls, self.calls, strict=True)
            ),
            array(f"const int64_t* const calls_{number}", calls),
        ]

    def row(self, number: int) -> str:
        """Return the operator's row, an `Operator` in C++."""
        fields = [
            text(self.name),
            f"arguments_{number}",
            str(len(self.arguments)),
            str(self.results),
            text(self.shapes),
            f"sizing_{number}" if self.sizing else "nullptr",
            f"calls_{number}",
            str(len(self.calls)),
        ]
        return f"{{{', '.join(fields)}}}"


def whole(value: int) -> str:
    """Return a whole number of 64 bits in C++."""
    return "INT64_MIN" if value == -(2**63) else str(int(value))


def _argument(name: str, parameter: Parameter, accepted: str) -> str:
    type = PARAMETER_TYPES.index(parameter.type)
    flags = f"{flag(parameter.optional)}, {flag(parameter.written)}"
    return f"{{{text(name)}, {type}, {flags}, {ACCEPTED.index(accepted)}}}"
