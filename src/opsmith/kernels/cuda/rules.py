"""Rules of a CUDA kernel that its author declares: launches, scratch buffers, initial values, limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import index as whole_number
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import LAUNCH_OPTIONS, Launch
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.kernels.common.dtypes import CPP_TYPES, dtype_name
from opsmith.kernels.cuda.launch import Geometry, LaunchRule, LaunchRules, launch_rule, launch_rules

if TYPE_CHECKING:  # imported with the first call
    from opsmith.torch_library.result_layouts import ResultLayout

MAX_DIM = 8
"""Capacity of a view without a number of dimensions; a test compares it with the header's."""


@dataclass(frozen=True, slots=True)
class ScratchRule:
    """Rule for a buffer that a kernel gets in addition to its results.

    Args:
        name: Name of the buffer.
        sizes: Rule for the sizes of the buffer.
        dtype: The dtype, or the name of an argument or result with the same dtype.
    """

    name: str
    sizes: LaunchRule
    dtype: torch.dtype | str

    def layout(self, values: Mapping[str, Any]) -> ResultLayout:
        """Return the buffer's layout in a call; it is contiguous.

        Args:
            values: Arguments and results by name, as tensors without data.

        Raises:
            LaunchError: If a size cannot be computed, or the argument with the dtype is None.
        """
        from opsmith.torch_library.result_layouts import ResultLayout

        sizes = self.sizes.value(values)
        if any(size < 0 for size in sizes):
            raise self.sizes.error(" x ".join(map(str, sizes)), "sizes that are not negative")
        dtype = self.dtype
        if isinstance(dtype, str):
            tensors = tensors_in([values[dtype]])
            if not tensors:
                got = f"`{dtype}` is {values[dtype]!r}"
                raise self.sizes.error(got, "the name of an argument that is a tensor in each call")
            dtype = tensors[0].dtype
        return ResultLayout.of(torch.empty(sizes, dtype=dtype, device="meta"))


@dataclass(frozen=True, slots=True)
class KernelRules:
    """Rules for the whole work of a kernel in a call.

    Args:
        launches: Launches of the kernel, in order.
        scratch: Scratch buffers of the kernel, in order.
        initial: Value that fills a result or a scratch buffer before the launches, by name.
        max_spills: Maximum bytes of register spills; None for no limit.
        max_registers: Maximum registers per thread; None for no limit.
    """

    launches: tuple[LaunchRules, ...]
    scratch: tuple[ScratchRule, ...] = ()
    initial: Mapping[str, LaunchRule] = field(default_factory=dict)
    max_spills: int | None = None
    max_registers: int | None = None

    @property
    def names(self) -> set[str]:
        """Names of the arguments and results on which the rules depend."""
        return {name for rule in self._every for name in rule.names}

    @property
    def are_expressions(self) -> bool:
        """True if no part is a function in Python."""
        return not any(callable(part) for rule in self._every for part in rule.parts)

    @property
    def _every(self) -> list[LaunchRule]:
        rules = [*self.initial.values(), *(each.sizes for each in self.scratch)]
        for launch in self.launches:
            rules += [launch.grid, launch.block, launch.shared, *launch.constants.values()]
        return rules

    def initial_number(self, name: str, values: Mapping[str, Any]) -> float | None:
        """Return the number that fills a result or a scratch buffer; None if it is not filled.

        Args:
            name: Name of the result or scratch buffer.
            values: Arguments, results and scratch buffers by name, as tensors without data.

        Raises:
            LaunchError: If it is not a number, or the dtype cannot represent it.
        """
        rule = self.initial.get(name)
        if rule is None:
            return None
        found, dtype = rule.found(values), values[name].dtype
        try:
            (number,) = map(real_number, found)
        except (TypeError, ValueError):
            got = ", ".join(map(repr, found))
            raise rule.error(got, "one number") from None
        if not _holds(dtype, number):
            raise rule.error(f"{number}", f"a number that {dtype_name(dtype)} can represent")
        return number

    def geometries(
        self, values: Mapping[str, Any], results: Sequence[str], written: Sequence[str] = ()
    ) -> tuple[Geometry | None, ...]:
        """Compute each launch of a call; None for a launch that is left out.

        All launches are left out if there is nothing to write. A launch without blocks is left out if another
        launch has blocks, or if all results with elements have initial values.

        Args:
            values: Arguments, results and scratch buffers by name, as tensors without data.
            results: Names of the results.
            written: Names of the arguments that the kernel may write into.

        Raises:
            LaunchError: If a launch exceeds a GPU's limits, or no block fills a result that has elements.
        """
        some = [name for name in results if values[name].numel()]
        writable = any(tensor.numel() for tensor in tensors_in([values[name] for name in written]))
        if not some and not writable:
            return (None,) * len(self.launches)
        empty = [0 in rules.grid.value(values) for rules in self.launches]
        if all(empty) and any(name not in self.initial for name in some):
            empty = [False] * len(empty)  # an error follows
        return tuple(
            None if without else rules.geometry(values)
            for rules, without in zip(self.launches, empty, strict=True)
        )


def real_number(value: Any) -> float:
    """Return a real number as a Python number.

    Raises:
        TypeError: If it is not a real number.

    Example:
        >>> from fractions import Fraction
        >>> real_number(Fraction(1, 2)), real_number(Fraction(2)), real_number(True)
        (0.5, 2, 1)
    """
    from fractions import Fraction  # this import is slow

    if isinstance(value, Fraction) and value.denominator == 1:
        return int(value)
    try:
        return whole_number(value)
    except TypeError:
        if isinstance(value, Real):
            return float(value)
        raise


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return True if a dtype can represent a number; floating-point numbers are rounded."""
    try:
        held = torch.zeros(2, dtype=dtype)  # torch does not check the range for a single element
        held.fill_(float(number) if dtype.is_floating_point else number)
    except (RuntimeError, OverflowError):
        return False
    return dtype.is_floating_point or held[0].item() == number


def kernel_rules(specification: Specification, options: Mapping[str, Any]) -> KernelRules:
    """Read the launches and buffers of a kernel that an author declares.

    Args:
        specification: The operator.
        options: See `CudaOptions`.

    Raises:
        LaunchError: If a part is not valid.
    """
    operator, schema = specification.name, specification.schema
    with errors.about(operator):
        results = tuple(result.name for result in schema.results)
        scratch = tuple(_scratch_rules(specification, options.get("scratch", {}), (*schema.names, *results)))
        made = (*results, *(each.name for each in scratch))
        passed = (*passed_arguments(schema), *made)
        initial = _initial_rules(operator, options.get("initial", {}), made, (*schema.names, *made))
        launches = options.get("launches")
        if launches is None:
            only = Launch("", **{name: options[name] for name in LAUNCH_OPTIONS if name in options})
            rules: tuple[LaunchRules, ...] = (launch_rules(only, operator, schema.names, passed),)
        else:
            rules = tuple(
                launch_rules(launch, operator, schema.names, passed, number)
                for number, launch in enumerate(_checked_launches(launches))
            )
            _check_passed(rules, made)
        return KernelRules(rules, scratch, initial, options.get("max_spills"), options.get("max_registers"))


def passed_arguments(schema: Schema) -> tuple[str, ...]:
    """Return the arguments that are passed to a CUDA kernel: all except strings."""
    return tuple(
        each.name for each in schema.arguments if each.kind.base.annotation != "str" or each.kind.sequence
    )


def _checked_launches(launches: Any) -> Sequence[Launch]:
    listed = [*launches] if isinstance(launches, list | tuple) else [launches]
    wrong = [each for each in listed if not isinstance(each, Launch)]
    if wrong or not listed:
        raise errors.LaunchError(
            "`launches=` of a CUDA kernel is not a list of launches",
            argument="launches",
            expected="a list of at least one `opsmith.Launch(...)`",
            got=repr(wrong[0]) if wrong else "an empty list",
            hint='write `launches=[opsmith.Launch("first", grid=64), opsmith.Launch("second", grid=1)]`',
        )
    return listed


def _check_passed(launches: Sequence[LaunchRules], made: Sequence[str]) -> None:
    """Refuse a result or a scratch buffer that no launch gets."""
    missing = [name for name in made if all(name not in each.passed for each in launches)]
    if missing:
        raise errors.LaunchError(
            f"no launch of the CUDA kernel gets `{missing[0]}`",
            argument="launches",
            expected=f"`{missing[0]}` among the names in one of the launches",
            got=", ".join(f"`{each.call}`" for each in launches),
            hint=f"name `{missing[0]}` in parentheses after the kernel that writes it",
        )


def _scratch_rules(specification: Specification, declared: Any, names: Sequence[str]) -> list[ScratchRule]:
    operator = specification.name
    _check_names("scratch", declared, '{"s": ("x.shape[0]", torch.float32)}')
    rules = []
    for name, parts in declared.items():
        if name in names or not (isinstance(name, str) and name.isidentifier()):
            raise errors.LaunchError(
                f"`scratch=` of a CUDA kernel has a buffer with the name {name!r}",
                argument="scratch",
                expected="a name that differs from all arguments and results",
                got=repr(name),
                hint="choose another name",
            )
        tensors = [each.name for each in specification.schema.arguments if each.kind.is_tensor]
        tensors += [result.name for result in specification.schema.results]
        listed = [*parts] if isinstance(parts, tuple | list) else [parts]
        dtype = listed.pop() if listed else None
        if not isinstance(dtype, torch.dtype | str) or dtype not in (*CPP_TYPES, *tensors):
            raise errors.LaunchError(
                f"`scratch[{name!r}]` of a CUDA kernel does not end with its dtype",
                argument="scratch",
                expected="sizes, and then one of "
                f"{', '.join(map(dtype_name, CPP_TYPES))}, or the name of a tensor",
                got=repr(parts),
                hint='write for example `scratch={"s": ("x.shape[0]", torch.float32)}`',
            )
        sizes = listed[0] if len(listed) == 1 and callable(listed[0]) else tuple(listed)
        rule = launch_rule(f"scratch[{name!r}]", sizes, operator, names, MAX_DIM, least=0)
        rules.append(ScratchRule(name, rule, dtype))
    return rules


def _initial_rules(
    operator: str, declared: Any, made: Sequence[str], names: Sequence[str]
) -> dict[str, LaunchRule]:
    _check_names("initial", declared, f"{{{made[0]!r}: 0}}" if made else "{}")
    unknown = [name for name in declared if name not in made]
    if unknown:
        is_argument = unknown[0] in names
        raise errors.LaunchError(
            f"`initial=` of a CUDA kernel names {unknown[0]!r}, which is "
            f"{'an argument' if is_argument else 'neither a result nor a scratch buffer'}",
            argument="initial",
            expected=f"names among {', '.join(f'`{name}`' for name in made)}" if made else "nothing",
            got=", ".join(map(repr, declared)),
            hint="leave it out: an argument already has values"
            if is_argument
            else "use the names in the operator's `results=`; without `results=`, the only name is `result`",
        )
    return {
        name: launch_rule(f"initial[{name!r}]", value, operator, names, convert=real_number)
        for name, value in declared.items()
    }


def _check_names(option: str, declared: Any, example: str) -> None:
    if not isinstance(declared, Mapping):
        raise errors.LaunchError(
            f"`{option}=` of a CUDA kernel is not a dict by name",
            argument=option,
            expected=f"a dict, such as {example}",
            got=repr(declared),
            hint=f"write `{option}={example}`",
        )
