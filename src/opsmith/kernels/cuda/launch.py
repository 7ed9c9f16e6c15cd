"""Launch of a CUDA kernel as its author declares it: grid, block, shared memory, constants."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index as whole_number
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.expression import Expression, ExpressionError, Language, parse
from opsmith.core.kernels import LaunchValue
from opsmith.core.location import where
from opsmith.core.specification import Specification

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
MOST_GRID = (2**31 - 1, 65535, 65535)
MOST_BLOCK = (1024, 1024, 64)
MOST_THREADS = 1024
"""Limits of a launch, the same for all compute capabilities: CUDA programming guide, specifications."""


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
    parts: tuple[int | Expression | Callable[..., Any], ...]
    parameters: tuple[str, ...]
    operator: str

    @property
    def depends_on_call(self) -> bool:
        """True if the value may differ between calls."""
        return any(each.names if isinstance(each, Expression) else callable(each) for each in self.parts)

    def value(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Compute the value for a call: whole numbers.

        Raises:
            LaunchError: If the value is something else.
        """
        found: list[Any] = []
        for each in self.parts:
            if isinstance(each, Expression):
                try:
                    found.append(each.value(values))
                except ExpressionError as error:
                    raise self._error(f"`{each.text}`: {error}") from None
            elif callable(each):
                found.append(each(*(values[name] for name in self.parameters)))
            else:
                found.append(each)
        if len(found) == 1 and isinstance(found[0], tuple | list):
            found = [*found[0]]
        return tuple(map(self._integer, found))

    def _integer(self, value: Any) -> int:
        if isinstance(value, Fraction) and value.denominator == 1:
            return int(value)
        try:
            return whole_number(value)
        except TypeError:
            shown = f"{float(value):g}" if isinstance(value, Fraction) else repr(value)
            raise self._error(f"{shown}, which is not a whole number") from None

    def _error(self, got: str) -> errors.LaunchError:
        return errors.LaunchError(
            f"`{self.name}` of a CUDA kernel cannot be computed",
            operator=self.operator,
            argument=self.name,
            expected="whole numbers; round with `ceil(...)` or `//`",
            got=got,
            where=next((where(each) for each in self.parts if callable(each)), None),
            hint="correct the expression, or give a function of arguments and results instead",
        )


@dataclass(frozen=True, slots=True)
class LaunchRules:
    """Rules for all parts of a kernel's launch.

    Args:
        grid: Number of blocks.
        block: Number of threads of a block.
        shared: Bytes of dynamic shared memory.
        constants: Numbers of the kernel's template, by name.
        max_spills: Bytes of register spills at most; None for no limit.
        max_registers: Registers of a thread at most; None for no limit.
    """

    grid: LaunchRule
    block: LaunchRule
    shared: LaunchRule
    constants: Mapping[str, LaunchRule]
    max_spills: int | None = None
    max_registers: int | None = None

    def constants_of(self, values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """Compute the numbers of the template for a call.

        Raises:
            LaunchError: If one cannot be computed.
        """
        return tuple((name, rule.value(values)[0]) for name, rule in self.constants.items())

    def fixed_constants(self) -> tuple[tuple[str, int], ...] | None:
        """Return the numbers of the template; None if they depend on the call."""
        if any(rule.depends_on_call for rule in self.constants.values()):
            return None
        return self.constants_of({})

    def geometry(
        self, values: Mapping[str, Any], results: Sequence[str], written: Sequence[str] = ()
    ) -> Geometry | None:
        """Compute the launch of a call; None if there is nothing to write.

        Args:
            values: Arguments and results by name, as tensors without data.
            results: Names of the results.
            written: Names of the arguments that the kernel writes into. It need not write into each of them.

        Raises:
            LaunchError: If it exceeds a GPU's limits, or has no block to fill a result that has elements.
        """
        filled = any(values[name].numel() for name in results)
        writable = any(tensor.numel() for tensor in tensors_in([values[name] for name in written]))
        if not filled and (not writable or 0 in self.grid.value(values)):
            return None
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


def launch_rules(specification: Specification, options: Mapping[str, Any]) -> LaunchRules:
    """Read the launch that an author declares.

    Args:
        specification: The operator.
        options: See `CudaOptions`.

    Raises:
        LaunchError: If a part is not an expression, or names something other than arguments and results.
    """
    operator, arguments = specification.name, specification.schema.names
    names = (*arguments, *(result.name for result in specification.schema.results))
    return LaunchRules(
        _rule("grid", options["grid"], operator, names, 3),
        _rule("block", options.get("block", 256), operator, names, 3),
        _rule("shared", options.get("shared", 0), operator, names),
        {
            name: _rule(f"constants[{name!r}]", declared, operator, arguments)
            for name, declared in options.get("constants", {}).items()
        },
        options.get("max_spills"),
        options.get("max_registers"),
    )


def _rule(name: str, declared: LaunchValue, operator: str, names: Sequence[str], most: int = 1) -> LaunchRule:
    """Read one part of a launch.

    Args:
        name: Name of the part, for messages.
        declared: The author's value in `op.kernel(...)`.
        operator: Name of the operator.
        names: Arguments and results that it may name.
        most: Maximal count of numbers.

    Raises:
        LaunchError: If it is not an expression, or names something else.
    """

    def error(got: str, expected: str = LAUNCH.description) -> errors.LaunchError:
        return errors.LaunchError(
            f"`{name}` of a CUDA kernel is not a valid launch expression",
            operator=operator,
            argument=name,
            expected=expected,
            got=got,
            where=where(declared) if callable(declared) else None,
            hint="write for example `ceil(result.numel / 256)`, or give a function of arguments and results",
        )

    listed = ", ".join(f"`{each}`" for each in names)
    if callable(declared):
        parameters = tuple(inspect.signature(declared).parameters)
        unknown = [each for each in parameters if each not in names]
        if unknown:
            got = f"a function of {', '.join(f'`{each}`' for each in unknown)}"
            raise error(got, f"a function of some of {listed}")
        return LaunchRule(name, (declared,), parameters, operator)
    parts: list[int | Expression] = []
    listed_parts: list[Any] = list(declared) if isinstance(declared, tuple | list) else [declared]
    for part in listed_parts:
        if not isinstance(part, str):
            try:
                parts.append(whole_number(part))
            except TypeError:
                raise error(repr(part), "a whole number, a text, or a function") from None
            continue
        try:
            parts.append(parsed := parse(part, LAUNCH))
        except ExpressionError as refused:
            raise error(f"`{part}`: {refused}") from None
        unknown = [each for each in parsed.names if each not in names]
        if unknown:
            raise error(f"`{part}`, which names `{unknown[0]}`", f"names among {listed}")
    if not 1 <= len(parts) <= most:
        raise error(f"{len(parts)} of them", f"1 to {most} numbers")
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
        if rule.name == "grid"
        else "take fewer, and let each do more",
    )


def _three(numbers: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (*numbers, 1, 1)[:3]
    return first, second, third
