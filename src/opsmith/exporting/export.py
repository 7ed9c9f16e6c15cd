"""`opsmith.export_onnx`: write a model with opsmith's operators as an ONNX file."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.output_file import unwritable, writable_file
from opsmith.core.tensors import nested_tensors
from opsmith.declaration import declared_operators
from opsmith.exporting import packages
from opsmith.exporting.bodies import Bodies, inline_bodies, remove_bodies
from opsmith.exporting.calls import OperatorCall
from opsmith.exporting.capture import translated_model, translator
from opsmith.exporting.closeness import rounding
from opsmith.exporting.library import calls_by_type, needs_library, with_library
from opsmith.exporting.model import (
    FlatModel,
    bound_call,
    evaluating,
    input_tensors,
    names_of_outputs,
    read_axes,
    read_call,
    refuse_writing,
    traced_inputs,
)
from opsmith.exporting.model_file import add_metadata, drafted, name_axes, name_values, strip_metadata
from opsmith.exporting.report import Export
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.translation import complete, exact_scalars, operator_nodes, translations
from opsmith.exporting.verification import Verification, refuse_random
from opsmith.extras import install

Body = Literal["function", "inline", "node"]
OPSETS = range(18, 24)
"""Versions of ONNX's operators that torch's exporter writes."""
DEFAULT_OPSET = 20


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
    """Write a model or an operator as an ONNX file, after a comparison with PyTorch.

    Args:
        model: A module that calls opsmith's operators anywhere, or an operator.
        args: Positional arguments: a tensor or a tuple. Numbers and strings become part of the file.
        path: Path of the file.
        kwargs: Keyword arguments.
        body: Form of a call of an operator in the file. `"function"`: a node with the operator's name, and
            the operator's reference as a function. `"inline"`: the nodes of the reference. `"node"`: only a
            node, for which the runtime needs a kernel.
        dynamic: Names of axes that may have any size, by input and position: `{"x": {0: "batch"}}`.
        opset: Version of ONNX's operators; by default 20.
        input_names: Names of the inputs; by default the names of the parameters.
        output_names: Names of the outputs; by default the names of an operator's results.
        verify: Compare the file with PyTorch on the given inputs, on two inputs with other values, one of
            which is unlike the given inputs, and at two other sizes of every dynamic axis.
        library: Path for a library of the operators' C++ kernels. ONNX Runtime loads it by
            `SessionOptions.register_custom_ops_library` and uses the kernels instead of the bodies. The
            library is compared with PyTorch, too.

    Returns:
        The file, its nodes, and the comparisons. After an error there is no file at `path`.

    Warns:
        UserWarning: If the file could not be compared, for example if ONNX Runtime cannot load it.

    Raises:
        UsageError: If an argument does not fit.
        ExportError: If the model cannot be exported.
        DynamicAxisError: If the model makes the size of a dynamic axis constant.
        ExportMismatchError: If the file and PyTorch compute different results.
        OnnxRuntimeError: If ONNX Runtime cannot run the file.
        CompileError, ToolchainError: If a library cannot be built.

    Example:
        >>> import torch, opsmith, tempfile
        >>> file = tempfile.mkdtemp() + "/exp.onnx"
        >>> export = opsmith.export_onnx(opsmith.ops.exp, torch.ones(3), file, dynamic={"x": {0: "n"}})
        >>> export.nodes, export.verified
        ({'opsmith::exp': 1}, True)
    """
    options = read_options(path, body, opset, verify, library)
    if not isinstance(model, torch.nn.Module | Operator):
        raise errors.UsageError(
            "`model` is neither a module nor an operator",
            argument="model",
            expected="an nn.Module, or an operator of opsmith",
            got=type(model).__name__,
            hint="put a function into the `forward` of a module",
        )
    call = read_call(args, kwargs)
    with evaluating(model):
        made = _written(_translated(model, call, options, dynamic, input_names, output_names), options)
    if verify and made.unverified:
        warnings.warn(
            f"`{made.path.name}` is not verified: {made.unverified}; `verify=False` removes this warning",
            UserWarning,
            stacklevel=2,
        )
    return made


def export_bodies(
    operator: Operator[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], folder: Path
) -> dict[Body, BodyExport]:
    """Export a call of an operator with each form of its body, from one translation of its graph.

    Returns:
        The result of each form. The warnings of the shared translation belong to each form.

    Raises:
        MissingExtraError: If a package of ONNX is missing.
    """
    exports: dict[Body, BodyExport] = {}
    translated: TranslatedModel | None = None
    shared: list[warnings.WarningMessage] = []
    for body in get_args(Body):
        options = read_options(folder / f"{body}.onnx", body, None, verify=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            caught += shared
            outcome: Export | errors.OpsmithError
            try:
                if translated is None:
                    translated = _translated(operator, read_call(args, kwargs), options, None, None, None)
                    shared = [*caught]
                outcome = _written(translated.copy(), options)
            except errors.MissingExtraError:
                raise
            except errors.OpsmithError as error:
                outcome = error
        messages = tuple(str(each.message) for each in caught if each.category is UserWarning)
        exports[body] = BodyExport(outcome, messages)
    return exports


@dataclass(frozen=True)
class BodyExport:
    """The result of the export of one form of body.

    Args:
        outcome: The export, or the error.
        warnings: Warnings of the translation and of the writing of the file.
    """

    outcome: Export | errors.OpsmithError
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class TranslatedModel:
    """A model that is translated to ONNX, before its file is written.

    Args:
        calls: Each node of our operators, with its call.
        bodies: The bodies of these nodes; None if the file needs no bodies.
        inputs: Names of the inputs.
        verification: The result of torch's exporter, and the comparison of this result with PyTorch.
    """

    calls: Sequence[tuple[Any, OperatorCall]]
    bodies: Bodies | None
    inputs: Sequence[str]
    verification: Verification

    @property
    def model(self) -> Any:
        """The onnx_ir model."""
        return self.verification.program.model

    def copy(self) -> TranslatedModel:
        """A copy whose model may be changed."""
        program = copy(self.verification.program)
        program.model = self.model.clone()
        copies = dict(zip(self.model.graph.all_nodes(), program.model.graph.all_nodes(), strict=True))
        calls = [(copies[node], call) for node, call in self.calls]
        return replace(self, calls=calls, verification=replace(self.verification, program=program))


def _translated(
    model: Any,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    options: ExportOptions,
    dynamic: Any,
    given_inputs: Any,
    given_outputs: Any,
) -> TranslatedModel:
    refuse_writing(model)
    names, tensors = input_tensors(bound_call(model, *call))
    flat = FlatModel(model, call).eval()
    with torch.no_grad():
        returned = flat.returned(*(tensor.clone() for tensor in tensors))  # a model may write into its inputs
    inputs = read_names(given_inputs, names, "input_names")
    names = [f"{name}_out" if name in inputs else name for name in names_of_outputs(model, returned)]
    outputs = read_names(given_outputs, names, "output_names", taken=inputs)
    axes = read_axes(dynamic, inputs, tensors)

    operators = [each.functional for each in declared_operators()]  # a node of ONNX writes nothing
    specifications = {each.torch_operator: each.specification for each in operators}
    notes: list[str] = []
    table = translations(operators, options.opset, notes) | exact_scalars(options.opset)
    translate = translator(options.opset, table)
    program = translated_model(flat, traced_inputs(axes, tensors), axes, translate, table)
    for note in dict.fromkeys(notes):
        warnings.warn(note, UserWarning, stacklevel=3)
    calls = list(operator_nodes(program.model, specifications))
    for node, made in calls:
        complete(node, made)
    renamed = name_values(program.model, inputs, outputs)
    name_axes(program.model, axes)
    by_library = options.library is not None and needs_library(calls)
    bodies = None
    if options.body != "node" or (options.verify and not by_library):
        bodies = Bodies(specifications, lambda program: translate(program).model)
        bodies.attach(program.model)
    if options.verify:
        refuse_random(made.specification for _, made in calls)
    strip_metadata(program.model)
    expected = list(nested_tensors(returned))
    verification = Verification(
        flat, tensors, expected, axes, outputs, rounding(program.model), program, renamed
    )
    return TranslatedModel(calls, bodies, inputs, verification)


def _written(translated: TranslatedModel, options: ExportOptions) -> Export:
    """Change a translated model to the form of the body, write its file, and compare the file."""
    counts = Counter(made.specification.name for _, made in translated.calls)
    used = {made.specification.name: made.specification for _, made in translated.calls}
    add_metadata(translated.model, options.body, used.values())
    missing = packages.NO_RUNTIME and f"{packages.NO_RUNTIME}; {install('onnx')}"
    export = Export(
        options.path,
        options.body,
        options.opset,
        tuple(translated.inputs),
        tuple(translated.verification.outputs),
        dict(counts),
        library=options.library,
        unverified=missing if options.verify else "`verify=False`",
    )
    verification = None if export.unverified else translated.verification
    with drafted(options.path) as draft:
        if options.body == "inline":
            inline_bodies(translated.model)
        compared = export
        if options.body != "node" or (verification is not None and translated.bodies is not None):
            draft.write(translated.model)
            if verification is not None:
                compared = verification.compare(export, _loaded(export, verification, draft.file))
        if options.body == "node":
            remove_bodies(translated.model)
            draft.write(translated.model)
            if verification is not None and options.library is None:
                export = _without_bodies(export, verification, draft.file)
        else:
            export = compared
        if options.library is not None:
            inner = translated.bodies.inner if translated.bodies and options.body == "function" else ()
            calls = calls_by_type([*translated.calls, *inner])
            with drafted(options.library, "library") as built:
                export = with_library(export, translated.model, draft.file, built.file, calls, verification)
                built.publish()
        draft.publish()
    return export


def _loaded(export: Export, verification: Verification, file: Path) -> Runtime:
    """Load a file; an error names the operators and the inputs, since ONNX Runtime does not name them."""
    try:
        return Runtime(file, export.path.name)
    except errors.OnnxRuntimeError as error:
        inputs = zip(export.inputs, verification.inputs, strict=True)
        error.got = ", ".join(
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in inputs
        )
        if len(export.calls) == 1:
            raise error.of(*export.calls) from error.__cause__
        error.args = (error.message(),)
        raise


def _without_bodies(export: Export, verification: Verification, file: Path) -> Export:
    """Compare a file whose nodes have no bodies, if ONNX Runtime has kernels for all of them."""
    try:
        runtime = Runtime(file, export.path.name)
    except errors.OnnxRuntimeError as error:
        also = "with bodies the results are PyTorch's, but the file has no bodies; a `library=` has kernels"
        return replace(export, unverified=f"{error.problem}; {also}")
    return verification.compare(export, runtime)


@dataclass(frozen=True)
class ExportOptions:
    """Validated options of an export.

    Args:
        path: Path of the file.
        body: Form of a call of an operator.
        opset: Version of ONNX's operators.
        verify: Compare the file with PyTorch.
        library: Path of the library of kernels; None if there is none.
    """

    path: Path
    body: Body
    opset: int
    verify: bool
    library: Path | None = None


def read_options(path: Any, body: Any, opset: Any, verify: Any, library: Any = None) -> ExportOptions:
    """The options, validated before the export begins.

    Raises:
        UsageError: If an option is invalid.
    """
    if body not in get_args(Body):
        raise errors.UsageError(
            "unknown form of an operator's body",
            argument="body",
            expected=", ".join(f"`{each}`" for each in get_args(Body)),
            got=repr(body),
            hint='leave `body=` out, or write `body="inline"`',
        )
    number = DEFAULT_OPSET if opset is None else opset
    if not isinstance(number, int) or isinstance(number, bool) or number not in OPSETS:
        raise errors.UsageError(
            "torch's exporter does not write this version of ONNX's operators",
            argument="opset",
            expected=f"{OPSETS[0]} to {OPSETS[-1]}",
            got=repr(opset),
            hint=f"leave `opset=` out for version {DEFAULT_OPSET}; `onnx.version_converter` may convert the "
            "file to an older version",
        )
    if not isinstance(verify, bool):
        raise errors.UsageError(
            "`verify` must be True or False",
            argument="verify",
            expected="True or False",
            got=repr(verify),
            hint="leave `verify=` out to compare the file with PyTorch",
        )
    file = writable_file(path, "model.onnx")
    return ExportOptions(file, body, number, verify, _read_library(library, file, body))


def _read_library(library: Any, file: Path, body: str) -> Path | None:
    if library is None:
        return None
    if body == "inline":
        raise errors.UsageError(
            "an inlined file has no nodes that a library could compute",
            argument="library",
            expected="`body='function'` or `body='node'`",
            got="`body='inline'`",
            hint="leave `body=` out, or leave `library=` out",
        )
    path = writable_file(library, "ops.so", "library")
    if path.absolute() == file.absolute():
        raise unwritable(path, "the exported model is written to this file", argument="library")
    return path


def read_names(given: Any, default: Sequence[str], argument: str, taken: Sequence[str] = ()) -> list[str]:
    """Names of inputs or outputs: the given names, or unique default names.

    Args:
        given: The names that the user passed, or None.
        default: A name for each tensor.
        argument: The argument that the user passed, for messages.
        taken: Names of other values of the file.

    Raises:
        UsageError: If the number of names is wrong, two names are equal, or a name is taken.
    """
    if given is None:
        found: list[str] = []
        for name in default:
            found.append(name if name not in found else f"{name}_{len(found)}")
        return found
    names = [given] if isinstance(given, str) else [name if isinstance(name, str) else "" for name in given]
    if len(names) != len(default) or len(set(names)) != len(names) or not all(names):
        raise errors.UsageError(
            f"`{argument}` does not fit the model",
            argument=argument,
            expected=f"{len(default)} different names: {', '.join(default)}",
            got=", ".join(map(str, names)) or "none",
            hint="give a name for each tensor, in this order, or leave this argument out",
        )
    clashing = [name for name in names if name in taken]
    if clashing:
        raise errors.UsageError(
            f"`{clashing[0]}` is both the name of an input and the name of an output",
            argument=argument,
            expected="names that differ from the names of the inputs",
            got=", ".join(names),
            hint="rename the input or the output; `input_names=` names inputs",
        )
    return names
