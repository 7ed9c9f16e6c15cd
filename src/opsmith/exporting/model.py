"""The model to export: its call, its input and output tensors, and one module from tensors to tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.tensors import named_tensors, nested_tensors, replace_tensors
from opsmith.exporting.dtypes import ONNX_TYPES, TYPE_NAMES


class FlatModel(torch.nn.Module):
    """A model as a module from tensors to tensors; every other argument is fixed.

    Args:
        model: A module or an operator.
        call: Positional and keyword arguments, in which the tensors of each call take the place of these.
    """

    def __init__(self, model: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.model = model  # a module becomes a child; a handle of an operator stays what it is
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
        UsageError: If they have another type.
    """
    if not isinstance(args, Tensor | tuple | list):
        raise errors.UsageError(
            "`args` must be a tensor or a tuple",
            argument="args",
            expected="a tensor, or a tuple of what the model takes by position",
            got=type(args).__name__,
            hint="write `(x, y)`; what it takes by name goes into `kwargs=`",
        )
    if not isinstance(kwargs, Mapping | None):
        raise errors.UsageError(
            "`kwargs` must be a dict",
            argument="kwargs",
            expected="a dict of what the model takes by name",
            got=type(kwargs).__name__,
            hint='write `{"y": y}`; what it takes by position goes into `args`',
        )
    return ((args,) if isinstance(args, Tensor) else tuple(args)), dict(kwargs or {})


def bound_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call, each with the name of its parameter, positional ones first.

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
            expected=f"what `forward{signature}` takes",
            hint="give `args=` a tuple of what it takes by position, and `kwargs=` a dict of the rest",
        ) from error
    positional = [
        each
        for each in signature.parameters.values()
        if each.kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    ]
    fixed = [each.name for each in positional if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    rest = [each.name for each in positional if each.kind is inspect.Parameter.VAR_POSITIONAL]
    named = [(name, value) for name, value in zip(fixed, args, strict=False)]
    named += [(f"{rest[0]}_{at}", value) for at, value in enumerate(args[len(fixed) :])]
    return named + list(kwargs.items())


def input_tensors(named: Sequence[tuple[str, Any]]) -> tuple[list[str], list[Tensor]]:
    """Names and values of the tensors in the arguments of a call.

    Raises:
        ExportError: If there is a tensor that no file can take.
    """
    found = [leaf for name, value in named for leaf in named_tensors(value, name, item_name)]
    for name, tensor in found:
        if tensor.dtype not in ONNX_TYPES or tensor.layout != torch.strided:
            raise errors.ExportError(
                "ONNX has no inputs of this type",
                argument=name,
                expected=TYPE_NAMES,
                got=f"{tensor.dtype}, {tensor.layout}",
                hint="convert it before the model: `torch.view_as_real(x)`, `x.to_dense()`",
            )
    return [name for name, _ in found], [tensor for _, tensor in found]


def item_name(name: str, key: Any) -> str:
    """The name of an item in ONNX: `xs_0`, `x_key`."""
    return f"{name}_{key}" if name else str(key)


def names_of_outputs(model: Any, returned: Any) -> list[str]:
    """Names for the tensors that a model returns: an operator's results have theirs.

    Raises:
        ExportError: If it returns no tensor.
    """
    if isinstance(model, Operator):
        results = model.specification.schema.results
        shown = [result.name for result in results if not result.hidden]
        each = (returned,) if len(shown) == 1 else returned
        names = [
            name
            for result, value in zip(shown, each, strict=True)
            for name, _ in named_tensors(value, result, item_name)
        ]
    else:
        names = [
            name
            for name, _ in named_tensors(
                returned, "" if isinstance(returned, Mapping) else "output", item_name
            )
        ]
    if not names:
        raise errors.ExportError(
            "the model returns no tensor",
            expected="a tensor, or tuples, lists and dicts of tensors",
            got=type(returned).__name__,
            hint="return what the file is to compute",
        )
    return names


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A region in which a module is in evaluation mode; the training mode of each part is restored.

    Warns:
        UserWarning: If a part of it is in training mode.
    """
    if not isinstance(model, torch.nn.Module):
        yield
        return
    training = [part for part in model.modules() if part.training]
    if training:
        warnings.warn(
            "the model is in training mode, and is exported as it is in evaluation mode; call `model.eval()` "
            "before the export, and this warning goes",
            UserWarning,
            stacklevel=4,
        )
    try:
        model.eval()
        yield
    finally:
        for part in training:
            part.training = True
