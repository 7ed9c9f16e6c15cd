"""From a model to a program of ONNX by torch's exporter, whose errors become ones that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.exporting.axes import Axes
from opsmith.exporting.places import where_called
from opsmith.exporting.references import first_line, user_inputs
from opsmith.exporting.sizes import varies
from opsmith.exporting.specialising import culprit
from opsmith.torch_library import capabilities
from opsmith.torch_library.hushed import hushed

Table = Mapping[Any, Any]

Translate = Callable[..., Any]
"""From a program of torch, or a module with its inputs and `dynamic_shapes`, to one of ONNX."""

TORCH_S_OWN = ("aten", "prim", "prims", "higher_order", "_operator")
"""Namespaces of operators whose export is a matter between torch and ONNX."""


def translator(opset: int, table: Table) -> Translate:
    """Set torch's exporter up for the programs of one export: it is told of our operators.

    Args:
        opset: Version of ONNX's operators.
        table: What it is told of our operators.
    """
    with hushed():
        inner = capabilities.onnx_translator(opset, table)

    def translate(*args: Any) -> Any:
        with hushed(), torch.no_grad():
            return inner(*args)

    return translate


def captured(
    model: torch.nn.Module, inputs: Sequence[Tensor], axes: Axes, translate: Translate, table: Table
) -> Any:
    """A model in ONNX, as torch's exporter has it; its dynamic axes stay open.

    Args:
        model: Takes tensors and returns tensors.
        inputs: What it is traced with.
        axes: Which of their axes are dynamic.
        translate: torch's exporter.
        table: What it is told of our operators.

    Raises:
        DynamicAxisError: If the model fixes one of them.
        ExportError: If torch's exporter does not take the model.
    """
    dims = axes.dims(torch.export.Dim.DYNAMIC)
    try:
        program = translate(model, tuple(inputs), (dims,) if axes else None)
    except Exception as error:
        chain = list(_chain(error))
        own = next((each for each in chain if isinstance(each, errors.OpsmithError)), None)
        if own is not None:
            raise own from None
        _refuse_fixed(model, inputs, axes)
        _refuse_unknown(model, inputs, table)
        raise errors.ExportError(
            f"torch's exporter does not take the model: {first_line(chain[-1])}",
            got=type(chain[-1]).__name__,
            hint="`torch.export.export(model, args)` must take it, and ONNX have an operator for each of "
            "torch's in it; the error that led to this one says more",
        ) from error
    _refuse_fixed(model, inputs, axes, program.exported_program)
    return program


def _chain(error: BaseException) -> Any:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _open(model: torch.nn.Module, inputs: Sequence[Tensor], axes: Axes) -> Any:
    """The model's program, whatever it does with the sizes of dynamic axes; None where there is none."""
    dims = axes.dims(torch.export.Dim.AUTO)
    try:
        with hushed(), torch.no_grad():
            return torch.export.export(
                model, tuple(inputs), dynamic_shapes=(dims,) if axes else None, strict=False
            )
    except Exception:  # what is wrong with it is told by whoever asks
        return None


def _refuse_fixed(model: torch.nn.Module, inputs: Sequence[Tensor], axes: Axes, program: Any = None) -> None:
    """Refuse a model that fixes the size of a dynamic axis.

    Raises:
        DynamicAxisError: Naming the axis, and the line.
    """
    if not axes:
        return
    found = _open(model, inputs, axes) if program is None else program
    if found is None:
        return
    for node, name, of, given in zip(user_inputs(found), axes.inputs, axes.of, inputs, strict=True):
        for axis, title in of.items():
            if varies(node.meta["val"].shape[axis]):
                continue
            raise errors.DynamicAxisError(
                f"the model fixes the axis `{title}`, which is to be dynamic",
                argument=name,
                expected=f"a computation for every size of axis {axis} of `{name}`",
                got=f"one for size {given.shape[axis]} alone",
                where=culprit(lambda: _open(model, inputs, axes), given.shape[axis]),
                hint="compute with `x.shape` as it comes, without comparing it with numbers or making a "
                "number of it, or leave the axis out of `dynamic=`",
            )


def _refuse_unknown(model: torch.nn.Module, inputs: Sequence[Tensor], table: Table) -> None:
    """Refuse a model with an operator that is neither torch's nor ours.

    Raises:
        ExportError: Naming it, and what is wrong with it.
    """
    found = _open(model, inputs, Axes((), ()))
    for node in () if found is None else found.graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if space in TORCH_S_OWN or node.target in table:
            continue
        name = f"{space}::{str(node.target).split('.')[1]}"
        writes = capabilities.on("registered") and not capabilities.signature_of(node.target).pure
        adopt = f"`opsmith.adopt(torch.ops.{name.replace('::', '.')}, reference=f)`"
        raise errors.ExportError(
            "the model calls an operator that writes into its arguments, or returns views of them, and a "
            "node of ONNX does neither"
            if writes
            else "the model calls an operator that opsmith does not know, and ONNX has no node for it",
            operator=name,
            where=where_called(node),
            hint="register one that returns what this one writes, and call that"
            if writes
            else f"adopt it first, with a reference: {adopt}",
        )
