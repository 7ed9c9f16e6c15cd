"""Launches of a CUDA kernel that its author declares: grid, block, shared memory, constants."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as whole_number
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.expression import Expression, ExpressionError, Language, parse
from opsmith.core.kernels import Launch, LaunchValue
from opsmith.core.location import where
from opsmith.kernels.common.gpu_resources import MOST_BLOCK, MOST_GRID, MOST_THREADS

LAUNCH = Language(
    "numbers, arguments and results by name, `x.numel`, `x.shape[0]`, `x.dim`, `x.itemsize`, `+ - * / // %`, "
    "`ceil`, `floor`, `min`, `max`, `len`, comparisons, and `a if b else c`",
    functions={"ceil": math.ceil, "floor": math.floor, "len": len, "max": max, "min": min},
    attributes={
        "dim": lambda tensor: tensor.dim(),
        "itemsize": lambda tensor: tensor.element_size(),
        "numel": lambda tensor: tensor.numel(),
        "shape": lambda tensor: tuple(tensor.shape),
    },
    conditions=True,
)
"""The language of the grid, block, shared memory and constants of a CUDA kernel."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Grid, block and dynamic shared memory of one launch.

    Attributes:
        grid: Number of blocks, in three dimensions.
        block: Number of threads of a block, in three dimensions.
        shared: Bytes of dynamic shared memory of each block.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]


@dataclass(frozen=True, slots=True)
class LaunchRule:
    """Rule that computes a part of a launch from a call.

    Args:
        name: `grid`, or `constants['K']`.
        parts: Numbers, expressions, or one function.
        parameters: Parameter names of the function.
        operator: Name of the operator, for messages.
    """

    name: str
    parts: tuple[float | Expression | Callable[..., Any], ...]
    parameters: tuple[str, ...]
    operator: str

    @property
    def depends_on_call(self) -> bool:
        """True if the value may differ between calls."""
        return any(each.names if isinstance(each, Expression) else callable(each) for each in self.parts)

    @property
    def names(self) -> set[str]:
        """Names of the arguments and results on which the value depends."""
        expressions = [each for each in self.parts if isinstance(each, Expression)]
        return {*self.parameters, *(name for each in expressions for name in each.names)}

    def value(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Compute the value for a call, in whole numbers.

        Raises:
            LaunchError: If the value is not in whole numbers.
        """
        return tuple(map(self._integer, self.found(values)))

    def found(self, values: Mapping[str, Any]) -> list[Any]:
        """Compute the value for a call: the results of the expressions or of the function.

        Raises:
            LaunchError: If an expression has no value.
        """
        found: list[Any] = []
        for each in self.parts:
            if isinstance(each, Expression):
                try:
                    found.append(each.value(values))
                except ExpressionError as error:
                    raise self.error(f"`{each.text}`: {error}") from None
            elif callable(each):
                found.append(each(*(values[name] for name in self.parameters)))
            else:
                found.append(each)
        if len(found) == 1 and isinstance(found[0], tuple | list):
            found = [*found[0]]
        return found

    def _integer(self, value: Any) -> int:
        from fractions import Fraction  # this import is slow

        if isinstance(value, Fraction) and value.denominator == 1:
            return int(value)
        try:
            return whole_number(value)
        except TypeError:
            shown = f"{float(value):g}" if isinstance(value, Fraction) else repr(value)
            raise self.error(f"{shown}, which is not a whole number") from None

    def error(
        self, got: str, expected: str = "whole numbers; round with `ceil(...)` or `//`"
    ) -> errors.LaunchError:
        """Return the error for a value that cannot be computed, or cannot be used."""
        return errors.LaunchError(
            f"`{self.name}` of a CUDA kernel cannot be computed",
            operator=self.operator,
            argument=self.name,
            expected=expected,
            got=got,
            where=next((where(each) for each in self.parts if callable(each)), None),
            hint="correct the expression, or use a function of arguments and results instead",
        )


@dataclass(frozen=True, slots=True)
class LaunchRules:
    """Rules for all parts of one launch.

    Args:
        entry: Name of the kernel if the source has several; empty for the source's default kernel.
        passed: Names of the arguments, results and scratch buffers that are passed to it, in order.
        grid: Number of blocks.
        block: Number of threads of a block.
        shared: Bytes of dynamic shared memory.
        constants: Numbers of the kernel's template, by name.
    """

    entry: str
    passed: tuple[str, ...]
    grid: LaunchRule
    block: LaunchRule
    shared: LaunchRule
    constants: Mapping[str, LaunchRule]

    @property
    def call(self) -> str:
        """The kernel with the names that are passed to it, such as `fold(partial, result)`."""
        return f"{self.entry}({', '.join(self.passed)})"

    def constants_of(self, values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """Compute the numbers of the template for a call.

        Raises:
            LaunchError: If a number cannot be computed.
        """
        return tuple((name, rule.value(values)[0]) for name, rule in self.constants.items())

    def fixed_constants(self) -> tuple[tuple[str, int], ...] | None:
        """Return the numbers of the template; None if they depend on the call."""
        if any(rule.depends_on_call for rule in self.constants.values()):
            return None
        return self.constants_of({})

    def geometry(self, values: Mapping[str, Any]) -> Geometry:
        """Compute the launch of a call.

        Args:
            values: Arguments, results and scratch buffers by name, as tensors without data.

        Raises:
            LaunchError: If the launch has no block, or exceeds a GPU's limits.
        """
        grid = self._within(self.grid, MOST_GRID, 1, values)
        block = self._within(self.block, MOST_BLOCK, 1, values)
        shared = self._within(self.shared, (2**31 - 1,), 0, values)
        geometry = Geometry(_three(grid), _three(block), shared[0])
        if geometry.threads > MOST_THREADS:
            raise _outside_limits(self.block, block, f"at most {MOST_THREADS} threads together", values)
        return geometry

    def _within(
        self, rule: LaunchRule, most: tuple[int, ...], least: int, values: Mapping[str, Any]
    ) -> tuple[int, ...]:
        found = rule.value(values)
        fits = all(least <= each <= limit for each, limit in zip(found, most, strict=False))
        if not fits or len(found) > len(most):
            raise _outside_limits(rule, found, f"{least} to {' x '.join(map(str, most))}", values)
        return found


def launch_rules(
    launch: Launch, operator: str, arguments: Sequence[str], passed: Sequence[str], number: int | None = None
) -> LaunchRules:
    """Read one launch that an author declares.

    Args:
        launch: The launch; its kernel may be empty for the source's default kernel.
        operator: Name of the operator.
        arguments: Names of the arguments.
        passed: Names of the arguments that a kernel takes, of the results and of the scratch buffers.
        number: Position of the launch in `launches=`; None without `launches=`.

    Raises:
        LaunchError: If a part is not an expression, or uses an unknown name.
    """
    entry, chosen = "", tuple(passed)
    before = "" if number is None else f"launches[{number}]."
    if number is not None:
        entry, chosen = _kernel_call(launch.kernel, passed, number)
    names = tuple(dict.fromkeys((*arguments, *passed)))
    return LaunchRules(
        entry,
        chosen,
        launch_rule(f"{before}grid", launch.grid, operator, names, 3),
        launch_rule(f"{before}block", launch.block, operator, names, 3),
        launch_rule(f"{before}shared", launch.shared, operator, names),
        {
            name: launch_rule(f"{before}constants[{name!r}]", declared, operator, arguments)
            for name, declared in launch.constants.items()
        },
    )


def _kernel_call(text: Any, passed: Sequence[str], number: int) -> tuple[str, tuple[str, ...]]:
    """Return the kernel that a launch names, and the names that are passed to the kernel."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\)\s*)?", text if isinstance(text, str) else "")
    named = [] if match is None or match[2] is None else [each.strip() for each in match[2].split(",")]
    unknown = [name for name in named if name not in passed]
    if match is None or unknown:
        raise errors.LaunchError(
            f"`launches[{number}]` of a CUDA kernel does not name a kernel and its parameters",
            argument=f"launches[{number}]",
            expected=f"a kernel, and in parentheses some of {', '.join(f'`{each}`' for each in passed)}",
            got=repr(text) if match is None else f"`{text}`, which names `{unknown[0]}`",
            hint=f"write for example `opsmith.Launch({f'fold({passed[-1]})'!r}, grid=1)`",
        )
    return match[1], tuple(named) if match[2] is not None else tuple(passed)


def launch_rule(
    name: str,
    declared: LaunchValue | float,
    operator: str,
    names: Sequence[str],
    most: int = 1,
    least: int = 1,
    convert: Callable[[Any], Any] = whole_number,
) -> LaunchRule:
    """Read one part of a launch.

    Args:
        name: Name of the part, for messages.
        declared: The author's value in `op.kernel(...)`.
        operator: Name of the operator.
        names: Arguments and results that it may name.
        most: Maximum count of numbers.
        least: Minimum count of numbers.
        convert: Function that converts a number, or raises `TypeError` for other values.

    Raises:
        LaunchError: If it is not an expression, or uses an unknown name.
    """

    def error(got: str, expected: str = LAUNCH.description) -> errors.LaunchError:
        return errors.LaunchError(
            f"`{name}` of a CUDA kernel is not a valid launch expression",
            operator=operator,
            argument=name,
            expected=expected,
            got=got,
            where=where(declared) if callable(declared) else None,
            hint="write for example `ceil(result.numel / 256)`, or use a function of arguments and results",
        )

    listed = ", ".join(f"`{each}`" for each in names)
    if callable(declared):
        parameters = tuple(inspect.signature(declared).parameters)
        unknown = [each for each in parameters if each not in names]
        if unknown:
            got = f"a function of {', '.join(f'`{each}`' for each in unknown)}"
            raise error(got, f"a function of some of {listed}")
        return LaunchRule(name, (declared,), parameters, operator)
    parts: list[float | Expression] = []
    listed_parts: list[Any] = list(declared) if isinstance(declared, tuple | list) else [declared]
    for part in listed_parts:
        if not isinstance(part, str):
            try:
                parts.append(convert(part))
            except TypeError:
                kind = "a whole number" if convert is whole_number else "a number"
                raise error(repr(part), f"{kind}, a text, or a function") from None
            continue
        try:
            parts.append(parsed := parse(part, LAUNCH))
        except ExpressionError as refused:
            raise error(f"`{part}`: {refused}") from None
        unknown = [each for each in parsed.names if each not in names]
        if unknown:
            raise error(f"`{part}`, which names `{unknown[0]}`", f"names among {listed}")
    if not least <= len(parts) <= most:
        raise error(f"{len(parts)} numbers", f"{least} to {most} numbers")
    return LaunchRule(name, tuple(parts), (), operator)


def _outside_limits(
    rule: LaunchRule, found: tuple[int, ...], expected: str, values: Mapping[str, Any]
) -> errors.LaunchError:
    shapes = ", ".join(
        f"{name} {list(value.shape)}" for name, value in values.items() if isinstance(value, Tensor)
    )
    return errors.LaunchError(
        f"`{rule.name}` of a CUDA kernel is outside the limits of a GPU",
        operator=rule.operator,
        argument=rule.name,
        expected=expected,
        got=f"{' x '.join(map(str, found))}, for {shapes}",
        hint="compute the grid from the results, which a kernel must fill completely"
        if rule.name.endswith("grid")
        else "take a smaller number, and let each thread or block do more work",
    )


def _three(numbers: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (*numbers, 1, 1)[:3]
    return first, second, third
