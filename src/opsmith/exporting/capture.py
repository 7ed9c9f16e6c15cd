"""Capture models and operator references with `torch.export`, and translate them to ONNX."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.location import chain_of, user_line_of_frame, user_line_of_traceback, where
from opsmith.core.origins.function_class import class_of
from opsmith.core.tensors import nested_tensors
from opsmith.exporting.calls import OperatorCall, example_shape, example_size, varies
from opsmith.exporting.model import Axes
from opsmith.torch_library import capabilities
from opsmith.torch_library.origins.forward import run_forward
from opsmith.torch_library.torch_messages import quiet_exporter

Table = Mapping[Any, Any]

Translator = Callable[..., Any]
"""Function that translates a program of torch, or a module with inputs and `dynamic_shapes`, to ONNX."""

TORCH_NAMESPACES = ("aten", "prim", "prims", "higher_order", "_operator")
"""Namespaces of the operators that torch's exporter can translate without opsmith."""

LOGGER = "torch.fx.experimental.symbolic_shapes"
FIXED = "set_replacement"
"""Beginning of the lines in torch's log that report the replacement of a symbol by a number."""


def translator(opset: int, table: Table) -> Translator:
    """Torch's exporter with our operators registered, for all programs of one export.

    Args:
        opset: Version of ONNX's operators.
        table: For each operator, the function that makes its node.
    """
    with quiet_exporter():
        inner = capabilities.onnx_translator(opset, table)

    def translate(*args: Any) -> Any:
        with quiet_exporter(LOGGER), torch.no_grad():
            return inner(*args)

    return translate


def translated_model(
    model: torch.nn.Module, inputs: Sequence[Tensor], axes: Axes, translate: Translator, table: Table
) -> Any:
    """A model in ONNX, as torch's exporter returns it, with its dynamic axes symbolic.

    Args:
        model: A module from tensors to tensors.
        inputs: The inputs for tracing.
        axes: The dynamic axes of the inputs.
        translate: torch's exporter.
        table: The operators that the exporter translates in addition to torch's own.

    Raises:
        DynamicAxisError: If the model makes a dynamic axis constant.
        ExportError: If torch's exporter refuses the model.
    """
    dims = axes.dims(torch.export.Dim.DYNAMIC)
    try:
        program = translate(model, tuple(inputs), (dims,) if axes else None)
    except Exception as error:
        refusal = refused_by_torch(error, "the model")
        if type(refusal) is errors.ExportError:
            with quiet_exporter(LOGGER):
                _refuse_fixed(model, inputs, axes)
                _refuse_unknown(model, inputs, table)
        raise refusal from None
    _refuse_fixed(model, inputs, axes, program.exported_program)
    return program


def refused_by_torch(error: Exception, subject: str) -> errors.OpsmithError:
    """The error for an exception of torch's exporter; opsmith's own error if it is among the causes.

    Args:
        error: The exception.
        subject: The code that the exporter was given, in words.
    """
    chain = chain_of(error)
    for each in chain:
        if isinstance(each, errors.OpsmithError):
            return each
    return errors.ExportError(
        f"torch's exporter refuses {subject}: {first_line(chain[-1])}",
        got=type(chain[-1]).__name__,
        where=where_raised(chain[-1]),
        hint=f"`torch.export.export(model, args)` must accept {subject}, and ONNX must have an operator for "
        "each torch operator in it; `__context__` of this error has torch's own text",
    )


def exported(model: torch.nn.Module, inputs: Sequence[Any], dims: Any) -> Any:
    """The program that `torch.export` makes of a module, with these dynamic shapes."""
    with quiet_exporter(), torch.no_grad():
        return torch.export.export(
            model, tuple(inputs), dynamic_shapes=(dims,) if any(dims) else None, strict=False
        )


def _exported_or_none(model: torch.nn.Module, inputs: Sequence[Tensor], axes: Axes) -> Any:
    """The program of a model that may make dynamic axes constant; None if the model cannot be traced."""
    try:
        return exported(model, inputs, axes.dims(torch.export.Dim.AUTO))
    except Exception:  # the caller reports its own error
        return None


def _refuse_fixed(model: torch.nn.Module, inputs: Sequence[Tensor], axes: Axes, program: Any = None) -> None:
    """Refuse a model that makes the size of a dynamic axis constant.

    Raises:
        DynamicAxisError: If the model does this; the message names the axis and the line.
    """
    if not axes:
        return
    found = _exported_or_none(model, inputs, axes) if program is None else program
    if found is None:
        return
    for node, name, of, given in zip(user_inputs(found), axes.inputs, axes.of, inputs, strict=True):
        for axis, title in of.items():
            if varies(node.meta["val"].shape[axis]):
                continue
            raise errors.DynamicAxisError(
                f"the model makes the axis `{title}` constant, but `dynamic=` names it",
                argument=name,
                expected=f"a computation for every size of axis {axis} of `{name}`",
                got=f"a computation for size {given.shape[axis]} only",
                where=specialising_line(lambda: _exported_or_none(model, inputs, axes), given.shape[axis]),
                hint="compute with `x.shape` itself: do not compare it with numbers, and do not convert it "
                "to a number; or leave the axis out of `dynamic=`",
            )


def _refuse_unknown(model: torch.nn.Module, inputs: Sequence[Tensor], table: Table) -> None:
    """Refuse a model with an operator that belongs neither to torch nor to opsmith.

    Raises:
        ExportError: If there is such an operator.
    """
    found = _exported_or_none(model, inputs, Axes((), ()))
    for node in () if found is None else found.graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if space in TORCH_NAMESPACES or node.target in table:
            continue
        name = f"{space}::{str(node.target).split('.')[1]}"
        writes = capabilities.on("library_operators") and not capabilities.signature_of(node.target).pure
        adopt = f"`opsmith.adopt(torch.ops.{name.replace('::', '.')}, reference=f)`"
        raise errors.ExportError(
            "the model calls an operator that writes into its arguments, or returns views of them; a node "
            "of ONNX cannot do this"
            if writes
            else "the model calls an operator that opsmith does not know, and ONNX has no node for it",
            operator=name,
            where=where_called(node),
            hint="call an operator that returns new tensors, such as `op.functional` of an opsmith operator"
            if writes
            else f"adopt the operator first, with a reference: {adopt}",
        )


class References(torch.nn.Module):
    """The references of several calls as one module, so that all bodies of a model are translated at once.

    Args:
        calls: The calls. The inputs of the module are the tensors of all calls, in order.
    """

    def __init__(self, calls: Sequence[OperatorCall]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results of all calls, in order."""
        rest = iter(tensors)
        return tuple(result for call in self.calls for result in computed(call, rest))


def computed(call: OperatorCall, given: Iterator[Any]) -> list[Tensor]:
    """The visible results of the code of a body; its inputs are the first items of `given`."""
    schema, function = call.specification.schema, source_of(call)
    inputs = [next(given) for _ in call.inputs()]
    tensors = iter([each for each in inputs if isinstance(each, Tensor)])
    sizes = iter([each for each in inputs if not isinstance(each, Tensor)])
    args = _filled(tuple(call.node.args), tensors, sizes)
    kwargs = {name: _filled(value, tensors, sizes) for name, value in call.node.kwargs.items()}
    values = schema.received(args, kwargs)
    if not call.specification.origin.referenced:
        # A call of the operator would return its declared fake results, and `forward` itself would not run.
        results: Sequence[Any] = run_forward(class_of(call.specification.origin), values).results
    else:
        positional, named = schema.split(values)
        returned = function(*positional, **named)
        results = (returned,) if schema.single else tuple(returned)
    return list(nested_tensors([results[at] for at in schema.visible]))


def _filled(value: Any, tensors: Iterator[Tensor], sizes: Iterator[Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return next(sizes if isinstance(value.meta["val"], torch.SymInt) else tensors)
    if isinstance(value, list | tuple):
        items = [_filled(each, tensors, sizes) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def source_of(call: OperatorCall) -> Any:
    """The function that a body is derived from: the reference, or the forward of an adopted class.

    Raises:
        ExportError: If there is no such function.
    """
    specification = call.specification
    if specification.opaque:
        raise errors.ExportError(
            "it is opaque: it has no reference in PyTorch from which a body could be derived",
            operator=specification.name,
            where=specification.where,
            hint="write `body='node', verify=False`, and give the runtime a kernel for the operator",
        )
    if not specification.origin.referenced:
        return specification.origin.subject.forward
    return specification.reference


def traced(calls: Sequence[OperatorCall]) -> Any:
    """The references of some calls as one program, in which symbolic sizes stay symbolic.

    Raises:
        ExportError: If torch cannot trace a reference.
        DynamicAxisError: If a reference makes a symbolic size constant.
    """
    try:
        return _traced(calls)
    except errors.OpsmithError:
        raise
    except Exception as error:
        if len(calls) > 1:  # the caller then traces each call alone, to find the one that fails
            raise
        specification, source = calls[0].specification, source_of(calls[0])
        of_class = source is not specification.reference
        raise errors.ExportError(
            f"torch cannot trace its {'forward' if of_class else 'reference'}: {first_line(error)}",
            operator=specification.name,
            where=where_raised(error) or where(source),
            hint=f"write the {'forward' if of_class else 'reference'} in torch's operations on tensors, "
            "and do not read values out of tensors; or "
            + "write the same mathematics in plain PyTorch: `adopt(..., reference=...)`; or " * of_class
            + "`body='node', verify=False`",
        ) from None


def _traced(calls: Sequence[OperatorCall]) -> Any:
    inputs = [each for call in calls for each in call.inputs()]
    auto = torch.export.Dim.AUTO
    dims = tuple(
        dict.fromkeys(_open_axes(each), auto) if isinstance(each, Tensor) else auto for each in inputs
    )

    def trace() -> Any:
        return exported(References(calls).eval(), list(map(_example, inputs)), dims)

    program = trace()
    names = [(call, name) for call in calls for name, node in call.slots() if node is not None]
    seen = [node.meta["val"] for node in user_inputs(program)]
    for (call, name), given, made in zip(names, inputs, seen, strict=True):
        if not isinstance(given, Tensor):
            if not varies(made):
                raise _fixed(call, name, f"`{name}`", int(made), trace)
            continue
        for axis in _open_axes(given):
            if not varies(made.shape[axis]):
                raise _fixed(call, name, f"axis {axis} of `{name}`", int(made.shape[axis]), trace)
    return program


def _open_axes(tensor: Tensor) -> list[int]:
    return [axis for axis, size in enumerate(tensor.shape) if varies(size)]


def _example(given: Tensor | torch.SymInt) -> Any:
    if not isinstance(given, Tensor):
        return example_size(given)
    return torch.zeros(example_shape(given), dtype=given.dtype, device=given.device)


def _fixed(
    call: OperatorCall, name: str, what: str, size: int, trace: Callable[[], Any]
) -> errors.DynamicAxisError:
    return errors.DynamicAxisError(
        f"its reference makes {what} constant, but it varies in this call",
        operator=call.specification.name,
        argument=name,
        expected="a computation for every size",
        got=f"a computation for size {size} only",
        where=specialising_line(trace, size) or call.specification.where,
        hint="export with a larger example: torch treats a size of 0 or 1 as a constant"
        if size < 2
        else "compute with the sizes themselves, and do not compare them with numbers",
    )


def user_inputs(program: Any) -> list[Any]:
    """The placeholders of a program for the inputs of the user."""
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    names = {each.arg.name for each in program.graph_signature.input_specs if each.kind is kind}
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def first_line(error: BaseException) -> str:
    """The first line of a message that is not empty; torch prints whole programs after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class _Specialisations(logging.Handler):
    """Record the user's line when torch makes a size constant."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record the innermost line of the user."""
        text = record.getMessage()
        if not text.startswith(FIXED):
            return
        line = user_line_of_frame(inspect.currentframe())
        if line is not None:
            self.seen.append((text, f"{line[0]}:{line[1]}"))


def specialising_line(trace: Callable[[], Any], size: int) -> str | None:
    """`file:line` that makes the size of a dynamic axis constant; None if torch's log does not name the size.

    torch logs each decision about a size while the line that causes it runs, so the line is read from the
    stack at that moment. The line that torch itself records may be in torch's own code.

    Args:
        trace: Function that traces the program with a dynamic axis.
        size: The constant size.
    """
    logger, watcher = logging.getLogger(LOGGER), _Specialisations()
    before = logger.handlers, logger.level, logger.propagate
    try:
        logger.handlers, logger.propagate = [watcher], False
        logger.setLevel(logging.INFO)
        trace()
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    return next((line for text, line in watcher.seen if f"= {size} " in f"{text} "), None)


def where_called(node: Any) -> str | None:
    """`file:line` of the call that became a node of torch's graph; None if torch has not recorded it."""
    return _where(node.meta.get("stack_trace"))


def where_raised(error: BaseException) -> str | None:
    """`file:line` of the user's innermost line in an exception's traceback; None if there is none."""
    return _where("".join(traceback.format_tb(error.__traceback__)))


def _where(text: Any) -> str | None:
    line = user_line_of_traceback(text)
    return None if line is None else f"{line[0]}:{line[1]}"
