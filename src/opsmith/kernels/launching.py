"""How a CUDA kernel is launched, as its author says it: grid, block, shared memory, constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.build.cuda.expression import ALLOWED, Expression, ExpressionError, expression
from opsmith.core.cuda_options import Said
from opsmith.core.location import where
from opsmith.core.specification import Specification

MOST_GRID = (2**31 - 1, 65535, 65535)
MOST_BLOCK = (1024, 1024, 64)
MOST_THREADS = 1024
"""CUDA programming guide, technical specifications per compute capability: the same in all that there are."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one call is launched.

    Attributes:
        grid: How many blocks, in three directions.
        block: How many threads a block has, in three directions.
        shared: Bytes of dynamic shared memory of each block.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0

    @property
    def threads(self) -> int:
        """How many threads a block has."""
        return self.block[0] * self.block[1] * self.block[2]


@dataclass(frozen=True, slots=True)
class _Rule:
    """One thing that the author says.

    Args:
        what: `grid`, or `constants['K']`.
        said: Numbers, expressions, or one function.
        parameters: Names of the function's parameters.
        operator: Name of the operator, for messages.
    """

    what: str
    said: tuple[int | Expression | Callable[..., Any], ...]
    parameters: tuple[str, ...]
    operator: str

    @property
    def depends(self) -> bool:
        """Whether it depends on the call."""
        return any(each.names if isinstance(each, Expression) else callable(each) for each in self.said)

    def value(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """What it comes to in a call: whole numbers.

        Raises:
            LaunchError: If it comes to something else.
        """
        found: list[Any] = []
        for each in self.said:
            if isinstance(each, Expression):
                try:
                    found.append(each.value(values))
                except ExpressionError as error:
                    raise self._wrong(f"`{each.text}`: {error}") from None
            elif callable(each):
                found.append(each(*(values[name] for name in self.parameters)))
            else:
                found.append(each)
        if len(found) == 1 and isinstance(found[0], tuple | list):
            found = [*found[0]]
        return tuple(self._whole(each) for each in found)

    def _whole(self, value: Any) -> int:
        if isinstance(value, Fraction) and value.denominator == 1:
            return int(value)
        if not isinstance(value, int):
            shown = f"{float(value):g}" if isinstance(value, Fraction) else repr(value)
            raise self._wrong(f"{shown}, which is no whole number")
        return value

    def _wrong(self, got: str) -> errors.LaunchError:
        return errors.LaunchError(
            f"`{self.what}` of a CUDA kernel cannot be told",
            operator=self.operator,
            argument=self.what,
            expected="whole numbers; round with `ceil(...)` or `//`",
            got=got,
            where=next((where(each) for each in self.said if callable(each)), None),
            hint="hint the expression, or give a function of arguments and results instead",
        )


def _rule(what: str, said: Said, operator: str, names: Sequence[str], most: int = 1) -> _Rule:
    """Read what the author says.

    Args:
        what: What it is, for messages.
        said: What stands in `op.kernel(...)`.
        operator: Name of the operator.
        names: The arguments and results that it may name.
        most: How many numbers it may be.

    Raises:
        LaunchError: If it is no expression, or names something else than arguments and results.
    """

    def wrong(got: str, expected: str = ALLOWED) -> errors.LaunchError:
        return errors.LaunchError(
            f"`{what}` of a CUDA kernel is nothing that can be told from the sizes of a call",
            operator=operator,
            argument=what,
            expected=expected,
            got=got,
            where=where(said) if callable(said) else None,
            hint="write for example `ceil(result.numel / 256)`, or give a function of arguments and results",
        )

    if callable(said):
        parameters = tuple(inspect.signature(said).parameters)
        unknown = [name for name in parameters if name not in names]
        if unknown:
            raise wrong(
                f"a function of {', '.join(f'`{name}`' for name in unknown)}",
                f"a function of some of {', '.join(f'`{name}`' for name in names)}",
            )
        return _Rule(what, (said,), parameters, operator)
    parts = list(said) if isinstance(said, tuple | list) else [said]
    read: list[Any] = []
    for part in parts:
        if isinstance(part, bool | int):
            read.append(part)
            continue
        if not isinstance(part, str):
            raise wrong(repr(part), "a number, a text, or a function")
        try:
            parsed = expression(part)
        except ExpressionError as error:
            raise wrong(f"`{part}`: {error}") from None
        unknown = sorted(parsed.names - {*names})
        if unknown:
            raise wrong(
                f"`{part}`, which names `{unknown[0]}`", f"names among {', '.join(f'`{n}`' for n in names)}"
            )
        read.append(parsed)
    if not 1 <= len(read) <= most:
        raise wrong(f"{len(read)} of them", f"1 to {most} numbers")
    return _Rule(what, tuple(read), (), operator)


@dataclass(frozen=True, slots=True)
class Launching:
    """All that an author says of how a kernel is launched.

    Args:
        grid: How many blocks.
        block: How many threads in each.
        shared: Bytes of dynamic shared memory.
        constants: The numbers of its template, by name.
    """

    grid: _Rule
    block: _Rule
    shared: _Rule
    constants: Mapping[str, _Rule]

    def constants_of(self, values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """The numbers of the template in a call.

        Raises:
            LaunchError: If one of them cannot be told.
        """
        return tuple((name, rule.value(values)[0]) for name, rule in self.constants.items())

    def fixed_constants(self) -> tuple[tuple[str, int], ...] | None:
        """The numbers of the template where they are the same in all calls; None where they are not."""
        if any(rule.depends for rule in self.constants.values()):
            return None
        return self.constants_of({})

    def geometry(self, values: Mapping[str, Any], results: Sequence[str]) -> Geometry | None:
        """How a call is launched; None where there is nothing to do.

        Args:
            values: Arguments and results by name; tensors without data serve.
            results: Names of the results.

        Raises:
            LaunchError: If a GPU cannot do it, or no block would fill a result that has elements.
        """
        if all(values[name].numel() == 0 for name in results):
            return None
        grid, block = self.grid.value(values), self.block.value(values)
        shared = self.shared.value(values)
        for rule, found, most, least in (
            (self.grid, grid, MOST_GRID, 1),
            (self.block, block, MOST_BLOCK, 1),
            (self.shared, shared, (2**31 - 1,), 0),
        ):
            fits = len(found) <= len(most) and all(
                least <= each <= limit for each, limit in zip(found, most, strict=False)
            )
            if not fits:
                raise _impossible(rule, found, least, most, values)
        geometry = Geometry(_three(grid), _three(block), shared[0])
        if geometry.threads > MOST_THREADS:
            raise _impossible(self.block, block, 1, (MOST_THREADS,), values)
        return geometry


def launching_of(specification: Specification, options: Mapping[str, Any]) -> Launching:
    """Read all that an author says of a launch.

    Args:
        specification: The operator.
        options: As in `CudaOptions`.

    Raises:
        LaunchError: If something of it is no expression, or names something else than arguments and results.
    """
    operator, arguments = specification.name, specification.schema.names
    names = (*arguments, *(result.name for result in specification.schema.results))
    return Launching(
        _rule("grid", options["grid"], operator, names, 3),
        _rule("block", options.get("block", 256), operator, names, 3),
        _rule("shared", options.get("shared", 0), operator, names),
        {
            name: _rule(f"constants[{name!r}]", said, operator, arguments)
            for name, said in options.get("constants", {}).items()
        },
    )


def _impossible(
    rule: _Rule, found: tuple[int, ...], least: int, most: tuple[int, ...], values: Mapping[str, Any]
) -> errors.LaunchError:
    threads = rule.what == "block" and len(most) == 1
    shapes = ", ".join(
        f"{name} {list(value.shape)}" for name, value in values.items() if isinstance(value, Tensor)
    )
    return errors.LaunchError(
        f"`{rule.what}` of a CUDA kernel is nothing that a GPU can launch",
        operator=rule.operator,
        argument=rule.what,
        expected=f"at most {most[0]} threads together"
        if threads
        else f"{least} to {' x '.join(map(str, most))}",
        got=f"{' x '.join(map(str, found))}, for {shapes}",
        hint="tell the grid from the results, all of whose elements a kernel has to write"
        if rule.what == "grid"
        else "take fewer, and let each do more",
    )


def _three(numbers: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (*numbers, 1, 1)[:3]
    return first, second, third
