"""Binding of a Triton kernel's parameters to arguments and results, by their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from opsmith import errors
from opsmith.core.kernels import BuiltKernel
from opsmith.core.schema import Schema
from opsmith.kernels.common.parameters import Parameter, check_results, unsupported_argument
from opsmith.kernels.triton.source import LAUNCH_OPTIONS, TritonParameter, TritonSource

BoundKind = Literal["pointer", "value", "numel", "size", "stride", "given"]
_PART = re.compile(r"(?P<name>\w+?)_(?:(?P<numel>numel)|(?P<kind>size|stride)_(?P<dim>\d+)|ptr)")
_SCALARS = ("int", "float", "bool")
_Error = Callable[..., errors.KernelSignatureError]


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """Parameter, and the value that is passed to it.

    Attributes:
        parameter: Name of the parameter.
        kind: Property that is passed, such as a size; `given` for a value of `constants=`.
        name: Name of an argument, result or constant.
        dim: Dimension of a size or stride.
    """

    parameter: str
    kind: BoundKind
    name: str
    dim: int = 0

    def of(self, values: Mapping[str, Any]) -> Any:
        """Return the value of the parameter in a call.

        Args:
            values: Arguments and results by name; the constants for `given`.
        """
        value = values[self.name]
        if self.kind in ("pointer", "value", "given"):
            return value
        if value is None:  # the pointer is None, too
            return 0
        if self.kind == "numel":
            return value.numel()
        return value.shape[self.dim] if self.kind == "size" else value.stride(self.dim)


@dataclass(frozen=True, slots=True)
class Binding:
    """Binding of all parameters of a kernel.

    Attributes:
        bounds: Parameters that are bound; decorators or defaults fill the others.
        tensors: Parameter of each tensor whose memory the kernel accesses, by name.
        options: Names of `constants=` that are options of Triton's launch.
    """

    bounds: tuple[BoundParameter, ...]
    tensors: Mapping[str, Parameter]
    options: tuple[str, ...]


def bind(
    kernel: BuiltKernel[TritonSource], constants: Mapping[str, Any], layouts: Mapping[str, str]
) -> Binding:
    """Bind the parameters of a kernel.

    Args:
        kernel: The kernel.
        constants: Values of `constants=`, by name.
        layouts: Layouts of `layouts=`, by name of a tensor.

    Raises:
        KernelSignatureError: If a parameter cannot be bound, or if a result, a written argument or a constant
            has no parameter.
    """
    check_results(kernel)
    source, schema = kernel.source, kernel.operator.specification.schema
    for argument in schema.arguments:
        if argument.alias and argument.kind.sequence:
            raise unsupported_argument(kernel, argument, "a tensor or None, to write into")
    error = partial(kernel.error, errors.KernelSignatureError)
    names = [parameter.name for parameter in source.parameters]
    for name in constants:
        if name not in names and name not in LAUNCH_OPTIONS:
            raise error(
                f"`{name}` is not a parameter of the Triton kernel",
                argument="constants",
                expected=f"one of {_listed(names)}, or of {_listed(LAUNCH_OPTIONS)}",
                got=f"`{name}`",
                hint="name a parameter of the kernel",
            )
    found = [_bind_one(each, source, schema, constants, error) for each in source.parameters]
    bounds = tuple(each for each in found if each is not None)
    pointers = {bound.name for bound in bounds if bound.kind == "pointer"}
    for name in (*schema.written, *(result.name for result in schema.results)):
        if name not in pointers:
            raise error(
                f"the Triton kernel has no parameter for `{name}`, so it cannot write it",
                argument=name,
                expected=f"a parameter `{name}` or `{name}_ptr`",
                got=f"({', '.join(names)})",
                hint="add this parameter, and store the values there",
            )
    _check_tuning(source, schema, bounds, error)
    options = tuple(name for name in constants if name not in names)
    written = {*schema.written, *(result.name for result in schema.results)}
    return Binding(bounds, _tensors(bounds, written, layouts, error), options)


def _check_tuning(
    source: TritonSource, schema: Schema, bounds: Iterable[BoundParameter], error: _Error
) -> None:
    """Refuse a tuning whose runs would each write into an argument."""
    tuners = [layer for layer in source.layers if len(getattr(layer, "configs", ())) > 1]
    for bound in bounds:
        kept = all(bound.parameter in (getattr(layer, "restore_value", None) or ()) for layer in tuners)
        if bound.kind == "pointer" and bound.name in schema.written and not kept:
            raise error(
                f"`triton.autotune` runs the kernel many times, and each run writes into `{bound.name}`",
                argument=bound.name,
                expected="a tuning that restores the written arguments",
                got=f"{len(source.configs)} configurations",
                hint=f"write `triton.autotune(..., restore_value=[{bound.parameter!r}])`, or remove "
                "the decorator",
            )


def _bind_one(
    parameter: TritonParameter,
    source: TritonSource,
    schema: Schema,
    constants: Mapping[str, Any],
    error: _Error,
) -> BoundParameter | None:
    """Bind a parameter; None if a decorator or a default fills it."""
    name = parameter.name
    if name in constants:
        return BoundParameter(name, "given", name)
    results = {result.name for result in schema.results}
    kinds = {argument.name: argument.kind for argument in schema.arguments}
    tensors = results | {
        name for name, kind in kinds.items() if kind.base.annotation == "Tensor" and not kind.sequence
    }
    if name in tensors:
        return BoundParameter(name, "pointer", name)
    if name in kinds:
        kind = kinds[name]
        if kind.base.annotation in _SCALARS and not kind.sequence and not kind.encoded:
            return BoundParameter(name, "value", name)
        raise error(
            f"a Triton kernel cannot take `{name}`",
            argument=name,
            expected="a tensor, int, float, bool or None",
            got=kind.annotation(),
            hint=f"convert it to numbers: `constants={{'SOME': lambda {name}: ...}}`",
        )
    part = _PART.fullmatch(name)
    if part is not None and part["name"] in tensors:
        if part["numel"]:
            return BoundParameter(name, "numel", part["name"])
        if part["kind"]:
            bound: BoundKind = "size" if part["kind"] == "size" else "stride"
            return BoundParameter(name, bound, part["name"], int(part["dim"]))
        return BoundParameter(name, "pointer", part["name"])
    if name in source.filled or parameter.has_default:
        return None
    raise error(
        f"the parameter `{name}` of the Triton kernel is not bound to anything",
        argument=name,
        expected=f"the name of an argument or result ({_listed([*schema.names, *results])}), the name of a "
        "tensor with the ending `_ptr`, `_numel`, `_size_0` or `_stride_0`, or a name in `constants=`",
        got=f"`{name}`",
        hint=f"rename the parameter, or give its value: `constants={{{name!r}: ...}}`",
    )


def _tensors(
    bounds: tuple[BoundParameter, ...], written: Collection[str], layouts: Mapping[str, str], error: _Error
) -> dict[str, Parameter]:
    """Return the parameter of each tensor, from the sizes and strides that the kernel takes."""
    tensors: dict[str, Parameter] = {}
    for name in dict.fromkeys(bound.name for bound in bounds if bound.kind == "pointer"):
        sizes = {bound.dim for bound in bounds if bound.name == name and bound.kind == "size"}
        strides = {bound.dim for bound in bounds if bound.name == name and bound.kind == "stride"}
        dim = 1 + max(sizes | strides, default=-1) or None
        if strides and set(range(dim or 0)) - strides:
            raise error(
                f"the Triton kernel takes some strides of `{name}`, but not all",
                argument=name,
                expected=", ".join(f"{name}_stride_{each}" for each in range(dim or 0)),
                got=", ".join(f"{name}_stride_{each}" for each in sorted(strides)),
                hint="take all strides; or take no strides, if the tensor may be contiguous",
            )
        layout = layouts.get(name, "any" if strides else "contiguous")
        tensors[name] = Parameter("Tensor", written=name in written, dim=dim, layout=layout)
    for name, layout in layouts.items():
        if name not in tensors or layout not in ("contiguous", "channels-last"):
            raise error(
                "`layouts=` has an entry that is not valid",
                argument="layouts",
                expected=f"`contiguous` or `channels-last` for one of {_listed(tensors)}",
                got=f"{layout!r} for `{name}`",
                hint="leave the entry out: if the kernel takes a tensor's strides, the tensor may have any "
                "strides; other tensors are made contiguous",
            )
    return tensors


def names_of_call(
    kernel: BuiltKernel[TritonSource], function: Callable[..., Any], known: Mapping[str, Any], what: str
) -> tuple[str, ...]:
    """Return the parameters of a grid's or constant's function, which name values of a call.

    Args:
        kernel: The kernel.
        function: A grid, or a constant that depends on the call.
        known: All names that it may use.
        what: Description of the function, for messages.

    Raises:
        KernelSignatureError: If it uses a name that is not in `known`.
    """
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.name not in known and parameter.default is parameter.empty:
            raise kernel.error(
                errors.KernelSignatureError,
                f"{what} names `{parameter.name}`, which the operator does not have",
                argument=parameter.name,
                expected=f"one of {_listed(known)}",
                got=f"`{parameter.name}`",
                hint="use the names of arguments and results; the grid may also use constants of the kernel",
            )
    return tuple(name for name in parameters if name in known)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
