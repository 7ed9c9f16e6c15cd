"""The model to export: its call, its input and output tensors, its dynamic axes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.tensors import named_tensors, nested_tensors, replace_tensors, tiled
from opsmith.exporting.dtypes import ONNX_TYPES, TYPE_NAMES

SMALLEST = 2
"""Smallest size of a dynamic axis during tracing: torch specialises sizes of 0 and 1."""


class FlatModel(torch.nn.Module):
    """A module from tensors to tensors around a model; all other arguments are constant.

    Args:
        model: A module or an operator.
        call: Positional and keyword arguments; each call replaces the tensors among them.
    """

    def __init__(self, model: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.model = model  # a module becomes a child; the handle of an operator does not
        self.call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors in the results of a call with these tensors."""
        return tuple(nested_tensors(self.returned(*tensors)))

    def returned(self, *tensors: Tensor) -> Any:
        """The results of a call with these tensors, as the model returns them."""
        args, kwargs = replace_tensors(self.call, iter(tensors))
        return self.model(*args, **kwargs)


def read_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call.

    Raises:
        UsageError: If `args` is not a tensor or tuple, or `kwargs` is not a dict.
    """
    if not isinstance(args, Tensor | tuple | list):
        raise errors.UsageError(
            "`args` must be a tensor or a tuple",
            argument="args",
            expected="a tensor, or a tuple of the model's positional arguments",
            got=type(args).__name__,
            hint="write `(x, y)`; keyword arguments go into `kwargs=`",
        )
    if not isinstance(kwargs, Mapping | None):
        raise errors.UsageError(
            "`kwargs` must be a dict",
            argument="kwargs",
            expected="a dict of the model's keyword arguments",
            got=type(kwargs).__name__,
            hint='write `{"y": y}`; positional arguments go into `args`',
        )
    return ((args,) if isinstance(args, Tensor) else tuple(args)), dict(kwargs or {})


def bound_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call with their parameter names, positional arguments first; `*xs` is a tuple.

    Raises:
        UsageError: If the arguments do not fit the model's signature.
    """
    if isinstance(model, Operator):
        names = model.specification.schema.names
        given = [(names[min(at, len(names) - 1)], value) for at, value in enumerate(args)]
        return given + list(kwargs.items())
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise errors.UsageError(
            f"`args` do not fit the model: {error}",
            argument="args",
            expected=f"the arguments of `forward{signature}`",
            hint="pass a tuple of the positional arguments as `args`, and a dict of the others as `kwargs=`",
        ) from error
    return [*signature.bind_partial(*args).arguments.items(), *kwargs.items()]


def input_tensors(named: Sequence[tuple[str, Any]]) -> tuple[list[str], list[Tensor]]:
    """Names and values of the tensors in the arguments of a call.

    Raises:
        ExportError: If ONNX does not allow inputs of a tensor's type.
    """
    found = [leaf for name, value in named for leaf in named_tensors(value, name, item_name)]
    for name, tensor in found:
        if tensor.dtype not in ONNX_TYPES or tensor.layout != torch.strided:
            raise errors.ExportError(
                "ONNX has no inputs of this type",
                argument=name,
                expected=TYPE_NAMES,
                got=f"{tensor.dtype}, {tensor.layout}",
                hint="convert the tensor before the model: `torch.view_as_real(x)`, `x.to_dense()`",
            )
    return [name for name, _ in found], [tensor for _, tensor in found]


def refuse_writing(model: Any) -> None:
    """Refuse an operator that writes into its arguments.

    Raises:
        ExportError: If the operator does this.
    """
    if isinstance(model, Operator) and model.specification.schema.written:
        specification = model.specification
        raise specification.error(
            errors.ExportError,
            "it writes into its arguments, and a node of ONNX cannot do this",
            hint=f"export `{specification.variable}.functional`, which returns the written tensors instead",
        )


def item_name(name: str, key: Any) -> str:
    """The name of an item in ONNX: `xs_0`, `x_key`."""
    return f"{name}_{key}" if name else str(key)


def names_of_outputs(model: Any, returned: Any) -> list[str]:
    """Names for the tensors that a model returns; for an operator, the names of its results.

    Raises:
        ExportError: If the model returns no tensor.
    """
    pairs = [("" if isinstance(returned, Mapping) else "output", returned)]
    if isinstance(model, Operator):
        shown = [each.name for each in model.specification.schema.results if not each.hidden]
        pairs = list(zip(shown, (returned,) if len(shown) == 1 else returned, strict=True))
    names = [name for title, value in pairs for name, _ in named_tensors(value, title, item_name)]
    if not names:
        raise errors.ExportError(
            "the model returns no tensor",
            expected="a tensor, or tuples, lists and dicts of tensors",
            got=type(returned).__name__,
            hint="return the tensors that the file should compute",
        )
    return names


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A region in which a module is in evaluation mode; each submodule's mode is restored at the end.

    Warns:
        UserWarning: If the module or a submodule is in training mode.
    """
    if not isinstance(model, torch.nn.Module):
        yield
        return
    training = [part for part in model.modules() if part.training]
    if training:
        warnings.warn(
            "the model is in training mode, but it is exported in evaluation mode; call `model.eval()` "
            "before the export to remove this warning",
            UserWarning,
            stacklevel=4,
        )
    try:
        model.eval()
        yield
    finally:
        for part in training:
            part.training = True


@dataclass(frozen=True)
class Axes:
    """Names of dynamic axes.

    Args:
        inputs: Names of the inputs, in order.
        of: For each input, its dynamic axes by position.
    """

    inputs: tuple[str, ...]
    of: tuple[Mapping[int, str], ...]

    def __bool__(self) -> bool:
        return any(self.of)

    def positions(self, name: str) -> str:
        """The positions of an axis in words: `axis 0 of x, axis 1 of y`."""
        found = [
            f"axis {axis} of `{given}`"
            for given, axes in zip(self.inputs, self.of, strict=True)
            for axis, each in sorted(axes.items())
            if each == name
        ]
        return ", ".join(found)

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The size of each dynamic axis in these inputs."""
        return {
            name: tensor.shape[axis]
            for tensor, axes in zip(tensors, self.of, strict=True)
            for axis, name in axes.items()
        }

    def at(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """The inputs, resized to these sizes of the dynamic axes."""
        return [
            tiled(tensor, {axis: sizes[name] for axis, name in axes.items() if name in sizes})
            for tensor, axes in zip(tensors, self.of, strict=True)
        ]

    def dims(self, dim: Any) -> tuple[dict[int, Any], ...]:
        """The `dynamic_shapes` for `torch.export`: `dim` at each dynamic axis of each input."""
        return tuple(dict.fromkeys(axes, dim) for axes in self.of)


def read_axes(dynamic: Any, names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """The axes that `dynamic=` names.

    Args:
        dynamic: `{"x": {0: "batch"}}`, or None.
        names, tensors: The inputs.

    Raises:
        UsageError: If `dynamic` is not such a mapping, or names an input or axis that does not exist.
        DynamicAxisError: If an axis has several sizes, or size 0.
    """
    given = {} if dynamic is None else dynamic
    form = '`dynamic={"x": {0: "batch"}}`'
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise errors.UsageError(
            "the dynamic axes cannot be read",
            argument="dynamic",
            expected="a mapping from axis to name for each input",
            got=repr(dynamic),
            hint=f"write {form}",
        )
    unknown = [name for name in given if name not in names]
    if unknown:
        raise errors.UsageError(
            f"there is no input `{unknown[0]}` whose axes could be dynamic",
            argument="dynamic",
            expected=", ".join(names) or "no inputs",
            got=str(unknown[0]),
            hint="name one of these inputs",
        )
    of = tuple(
        _axes_of(given.get(name, {}), name, tensor) for name, tensor in zip(names, tensors, strict=True)
    )
    axes = Axes(tuple(names), of)
    _refuse_odd_sizes(axes, tensors)
    return axes


def _axes_of(given: Mapping[Any, Any], name: str, tensor: Tensor) -> dict[int, str]:
    found: dict[int, str] = {}
    for axis, title in given.items():
        fits = isinstance(axis, int) and -tensor.ndim <= axis < tensor.ndim
        if not fits or not isinstance(title, str) or not title.isidentifier():
            raise errors.UsageError(
                f"`{name}` has no such dynamic axis",
                argument="dynamic",
                expected=f"axes from {-tensor.ndim} to {tensor.ndim - 1}, with identifiers as names",
                got=f"{{{axis!r}: {title!r}}}",
                hint='write `{0: "batch"}`',
            )
        found[axis % tensor.ndim] = title
    return found


def _refuse_odd_sizes(axes: Axes, tensors: Sequence[Tensor]) -> None:
    found: dict[str, set[int]] = {}
    for tensor, of in zip(tensors, axes.of, strict=True):
        for axis, name in of.items():
            found.setdefault(name, set()).add(tensor.shape[axis])
    for name, sizes in found.items():
        if len(sizes) > 1:
            raise errors.DynamicAxisError(
                f"the axis `{name}` has several sizes in the given inputs",
                argument=name,
                expected=f"one size: {axes.positions(name)}",
                got=" and ".join(map(str, sorted(sizes))),
                hint="give axes of different sizes different names",
            )
        if 0 in sizes:
            raise errors.DynamicAxisError(
                f"the axis `{name}` has size 0 in the given inputs",
                argument=name,
                expected=f"at least 1: {axes.positions(name)}",
                got="0",
                hint="give inputs that are not empty; the file takes other sizes, too",
            )


def traced_inputs(axes: Axes, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs for tracing: every dynamic axis has at least the size 2, since torch specialises 0 and 1."""
    small = {name: SMALLEST for name, size in axes.sizes(tensors).items() if size < SMALLEST}
    return axes.at([tensor.detach() for tensor in tensors], small)


def other_sizes(size: int) -> list[int]:
    """Other sizes of an axis at which an export is compared, the preferred ones first.

    Example:
        >>> other_sizes(4)
        [5, 8, 7, 12, 3, 2, 1]
    """
    preferred = [size + 1, 2 * size, 2 * size - 1, 3 * size, size - 1, size // 2, 1]
    return [each for each in dict.fromkeys(preferred) if each > 0 and each != size]
