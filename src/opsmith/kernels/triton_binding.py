"""What each parameter of a Triton kernel gets, which its name tells; and what it takes of each tensor."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from opsmith import errors
from opsmith.build.triton.source import LAUNCH_OPTIONS, KernelParameter, TritonSource
from opsmith.core.schema import Schema
from opsmith.kernels.signature import check_results
from opsmith.kernels.tensor_layout import TensorLayout

Kind = Literal["pointer", "value", "numel", "size", "stride", "given"]
_PART = re.compile(r"(?P<name>\w+?)_(?:(?P<numel>numel)|(?P<kind>size|stride)_(?P<at>\d+)|ptr)")
_SCALARS = ("int", "float", "bool")


@dataclass(frozen=True, slots=True)
class Bound:
    """What a parameter gets.

    Attributes:
        parameter: Its name.
        kind: What it gets of what it is about; `given` for what the author gives it.
        name: The argument, result or constant that it is about.
        at: The dimension of a size or stride.
    """

    parameter: str
    kind: Kind
    name: str
    at: int = 0

    def of(self, values: Mapping[str, Any]) -> Any:
        """What the parameter gets in a call.

        Args:
            values: Arguments, results and constants by name.
        """
        value = values[self.name]
        if self.kind in ("pointer", "value", "given"):
            return value
        if value is None:  # whose pointer says so
            return 0
        if self.kind == "numel":
            return value.numel()
        return value.shape[self.at] if self.kind == "size" else value.stride(self.at)


@dataclass(frozen=True, slots=True)
class Binding:
    """How a kernel's parameters are filled.

    Attributes:
        bounds: What each parameter gets, but those that its decorators or defaults fill.
        takes: What it takes of each tensor whose memory it sees, by name.
        options: What Triton is told beside, by name: values, or functions.
    """

    bounds: tuple[Bound, ...]
    takes: Mapping[str, TensorLayout]
    options: tuple[str, ...]


def bind(
    source: TritonSource,
    schema: Schema,
    constants: Mapping[str, Any],
    layouts: Mapping[str, str],
    operator: str,
) -> Binding:
    """Find out what each parameter gets.

    Args:
        source: The kernel.
        schema: The operator's arguments and results.
        constants: What the author gives, by parameter.
        layouts: In which layout he wants a tensor.
        operator: The operator's name.

    Raises:
        KernelSignatureError: If it cannot be told, or something has no place.
    """
    check_results(schema, "Triton", operator, source.where)
    names = [parameter.name for parameter in source.parameters]
    for name in constants:
        if name not in names and name not in LAUNCH_OPTIONS:
            raise _misfit(
                f"`{name}` is no parameter of the Triton kernel",
                source,
                operator,
                argument="constants",
                expected=f"one of {_listed(names)}, or of {_listed(LAUNCH_OPTIONS)}",
                got=f"`{name}`",
                hint="name a parameter of the kernel",
            )
    found = [_bound(each, source, schema, constants, operator) for each in source.parameters]
    bounds = tuple(each for each in found if each is not None)
    written = {bound.name for bound in bounds if bound.kind == "pointer"}
    for result in schema.results:
        if result.name not in written:
            raise _misfit(
                f"the Triton kernel has no parameter for `{result.name}`, and cannot write it",
                source,
                operator,
                argument=result.name,
                expected=f"a parameter `{result.name}` or `{result.name}_ptr`",
                got=f"({', '.join(each.name for each in source.parameters)})",
                hint="add it, and store the result there",
            )
    options = tuple(name for name in constants if name not in names)
    return Binding(bounds, _takes(bounds, layouts, source, operator), options)


def _bound(
    parameter: KernelParameter,
    source: TritonSource,
    schema: Schema,
    constants: Mapping[str, Any],
    operator: str,
) -> Bound | None:
    """What a parameter gets; None where a decorator or a default fills it."""
    name = parameter.name
    if name in constants:
        return Bound(name, "given", name)
    results = {result.name for result in schema.results}
    kinds = {argument.name: argument.kind for argument in schema.arguments}
    tensors = results | {
        name for name, kind in kinds.items() if kind.base.annotation == "Tensor" and not kind.sequence
    }
    if name in tensors:
        return Bound(name, "pointer", name)
    if name in kinds:
        kind = kinds[name]
        if kind.base.annotation in _SCALARS and not kind.sequence and not kind.encoded:
            return Bound(name, "value", name)
        raise _misfit(
            f"a Triton kernel cannot take `{name}`",
            source,
            operator,
            argument=name,
            expected="a tensor, int, float or bool, or None for one",
            got=kind.annotation(),
            hint=f"make numbers of it: `constants={{'SOME': lambda {name}: ...}}`",
        )
    part = _PART.fullmatch(name)
    if part is not None and part["name"] in tensors:
        about = part["name"]
        if part["numel"]:
            return Bound(name, "numel", about)
        if part["kind"]:
            return Bound(name, "size" if part["kind"] == "size" else "stride", about, int(part["at"]))
        return Bound(name, "pointer", about)
    if name in source.filled or parameter.default:
        return None
    raise _misfit(
        f"nothing says what the parameter `{name}` of the Triton kernel gets",
        source,
        operator,
        argument=name,
        expected=f"the name of an argument or result ({_listed([*schema.names, *results])}), that of a "
        "tensor with `_ptr`, `_numel`, `_size_0` or `_stride_0` behind it, or one of `constants=`",
        got=f"`{name}`",
        hint=f"rename it, or give it: `constants={{{name!r}: ...}}`",
    )


def _takes(
    bounds: tuple[Bound, ...], layouts: Mapping[str, str], source: TritonSource, operator: str
) -> dict[str, TensorLayout]:
    takes: dict[str, TensorLayout] = {}
    pointers = dict.fromkeys(bound.name for bound in bounds if bound.kind == "pointer")
    for name in pointers:
        sizes = {bound.at for bound in bounds if bound.name == name and bound.kind == "size"}
        strides = {bound.at for bound in bounds if bound.name == name and bound.kind == "stride"}
        dim = 1 + max(sizes | strides, default=-1) or None
        lacking = sorted(set(range(dim or 0)) - strides)
        if strides and lacking:
            raise _misfit(
                f"the Triton kernel takes some strides of `{name}`, and not all",
                source,
                operator,
                argument=name,
                expected=", ".join(f"{name}_stride_{at}" for at in range(dim or 0)),
                got=", ".join(f"{name}_stride_{at}" for at in sorted(strides)),
                hint="take all of them, or none: then the tensor is contiguous",
            )
        takes[name] = TensorLayout(dim, layouts.get(name, "any" if strides else "contiguous"))
    for name, layout in layouts.items():
        if name not in takes or layout not in ("contiguous", "channels-last"):
            raise _misfit(
                "`layouts=` says what it cannot",
                source,
                operator,
                argument="layouts",
                expected=f"`contiguous` or `channels-last` for one of {_listed(takes)}",
                got=f"{layout!r} for `{name}`",
                hint="leave it out: a tensor whose strides the kernel takes may have any, others are "
                "made contiguous",
            )
    return takes


def names_in(
    function: Callable[..., Any], known: Mapping[str, Any], what: str, source: TritonSource, operator: str
) -> tuple[str, ...]:
    """The names of what a function takes of a call.

    Args:
        function: A grid, or a constant that depends on the call.
        known: Everything that it may name.
        what: What the function is, in messages.
        source: The kernel.
        operator: The operator's name.

    Raises:
        KernelSignatureError: If it names something else.
    """
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.name not in known and parameter.default is parameter.empty:
            raise _misfit(
                f"{what} names `{parameter.name}`, which is none of the operator's",
                source,
                operator,
                argument=parameter.name,
                expected=f"one of {_listed(known)}",
                got=f"`{parameter.name}`",
                hint="name what it needs: arguments, results, and in the grid constants of the kernel",
            )
    return tuple(name for name in parameters if name in known)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _misfit(
    problem: str,
    source: TritonSource,
    operator: str,
    *,
    argument: str,
    expected: str,
    got: str,
    hint: str,
) -> errors.KernelSignatureError:
    return errors.KernelSignatureError(
        problem,
        operator=operator,
        argument=argument,
        expected=expected,
        got=got,
        where=source.where,
        hint=hint,
    )
