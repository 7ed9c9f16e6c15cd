"""`opsmith.export_onnx`: from a model with our operators in it to a file that ONNX Runtime runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.declaring import declared_operators
from opsmith.exporting.axes import read_axes, traced_inputs
from opsmith.exporting.bodies import Bodies, inlined, without_bodies
from opsmith.exporting.capturing import captured, translator
from opsmith.exporting.files import Draft, drafted
from opsmith.exporting.finishing import counted, name_axes, name_values, sign, strip
from opsmith.exporting.library import by_library_alone, calls_by_place, with_library
from opsmith.exporting.report import Export
from opsmith.exporting.request import Body, Request, read_names, read_request
from opsmith.exporting.rounding import rounding
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.scalars import exact_scalars
from opsmith.exporting.subject import Flat, bound_call, evaluating, input_leaves, output_names, read_call
from opsmith.exporting.tensors import leaves
from opsmith.exporting.translating import complete, our_nodes, translations
from opsmith.exporting.verifying import Verification, refuse_random


def export_onnx(
    model: torch.nn.Module | Operator[..., Any],
    args: Tensor | tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    body: Body = "function",
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    verify: bool = True,
    library: str | os.PathLike[str] | None = None,
) -> Export:
    """Write a model or an operator as a file that ONNX Runtime runs, once the two were compared.

    Args:
        model: A module with operators of opsmith anywhere in it, or an operator.
        args: What it is called with: a tensor, or a tuple; numbers and strings become part of the file.
        path: Where the file goes.
        kwargs: What it is called with by keyword.
        body: What becomes of a call of an operator. `"function"`: a node with the operator's name, and its
            reference as a function in the file; `"inline"`: the nodes of the reference; `"node"`: a node that
            a runtime needs a kernel for.
        dynamic: Names of axes that may have any size, by input and position: `{"x": {0: "batch"}}`.
        opset: Version of ONNX's operators; by default 20.
        input_names, output_names: By default the names of the parameters, and of an operator's results.
        verify: Whether the file is compared with PyTorch, at two more sizes of every dynamic axis.
        library: Where a library of the operators' kernels in C++ goes, which ONNX Runtime uses in the place
            of bodies: `SessionOptions.register_custom_ops_library`. It is compared with PyTorch as well.

    Returns:
        What was written, and how it compared. Nothing is at `path` where an error is raised.

    Raises:
        UsageError, ExportError, DynamicAxisError, ExportMismatchError, OnnxRuntimeError: As their names say.
        CompileError, ToolchainError: If a library cannot be built.

    Example:
        >>> import torch, opsmith, tempfile
        >>> file = tempfile.mkdtemp() + "/exp.onnx"
        >>> export = opsmith.export_onnx(opsmith.ops.exp, torch.ones(3), file, dynamic={"x": {0: "n"}})
        >>> export.nodes, export.verified
        ({'opsmith::exp': 1}, True)
    """
    request = read_request(path, body, opset, verify, library)
    if not isinstance(model, torch.nn.Module | Operator):
        raise errors.UsageError(
            "this is neither a module nor an operator",
            argument="model",
            expected="an nn.Module, or an operator of opsmith",
            got=type(model).__name__,
            hint="put a function into the `forward` of a module",
        )
    call = read_call(args, kwargs)
    with evaluating(model):
        return _export(model, call, request, dynamic, input_names, output_names)


def _export(
    model: Any,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    request: Request,
    dynamic: Any,
    given_inputs: Any,
    given_outputs: Any,
) -> Export:
    default, tensors = input_leaves(bound_call(model, *call))
    flat = Flat(model, call).eval()
    with torch.no_grad():
        returned = flat.returned(*(tensor.clone() for tensor in tensors))  # a model may write into them
    inputs = read_names(given_inputs, default, "input_names")
    default = _beside(inputs, output_names(model, returned))
    outputs = read_names(given_outputs, default, "output_names", taken=inputs)
    axes = read_axes(dynamic, inputs, tensors)

    operators = declared_operators()
    specifications = {each.torch_operator: each.specification for each in operators}
    notes: list[str] = []
    table = translations(operators, request.opset, notes) | exact_scalars(request.opset)
    translate = translator(request.opset, table)
    program = captured(flat, traced_inputs(axes, tensors), axes, translate, table)
    for note in dict.fromkeys(notes):
        warnings.warn(note, UserWarning, stacklevel=3)
    pairs = list(our_nodes(program.model, specifications))
    for node, made in pairs:
        complete(node, made)
    nodes = counted(made.specification.name for _, made in pairs)
    used = {made.specification.name: made.specification for _, made in pairs}.values()
    renamed = name_values(program.model, inputs, outputs)
    name_axes(program.model, axes)
    bodies = Bodies(specifications, lambda traced: translate(traced).model)
    bodied = request.body != "node" or (request.verify and not by_library_alone(request, pairs))
    if bodied:
        bodies.give(program.model)
        bodies.attach(program.model)
    if request.verify:
        refuse_random(used)
    sign(program.model, request.body, used)
    strip(program.model)
    export = Export(
        request.path,
        request.body,
        request.opset,
        tuple(inputs),
        tuple(outputs),
        nodes,
        library=request.library,
    )
    expected = [tensor for _, tensor in leaves(returned, "")]
    rounds = rounding(program.model)
    verification = Verification(flat, tensors, expected, axes, outputs, rounds, program, renamed)
    with drafted(request.path) as draft:
        export = _written(draft, export, request, verification, bodied=bodied)
        if request.library is None:
            draft.publish()
            return export
        calls = calls_by_place([*pairs, *(bodies.inner if request.body == "function" else ())])
        held = verification if request.verify else None
        with drafted(request.library, "library") as beside:
            export = with_library(export, draft.file, beside.file, calls, held)
            beside.publish()
            draft.publish()
    return export


def _written(
    draft: Draft, export: Export, request: Request, verification: Verification, *, bodied: bool
) -> Export:
    """Write the file and hold it to everything that it must be; a node without a body is held with one."""
    model = verification.program.model
    if request.body == "inline":
        inlined(model)
    if request.verify and bodied:
        draft.write(model)
        draft.check()
        comparisons, left_out = verification.compare(Runtime(draft.file, request.path.name))
        export = replace(export, comparisons=comparisons, left_out=left_out)
    if request.body == "node" or not request.verify:
        if request.body == "node":
            without_bodies(model)
        draft.write(model)
        draft.check()
    return export


def _beside(inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Names of outputs that no input has."""
    return [f"{name}_out" if name in inputs else name for name in outputs]
