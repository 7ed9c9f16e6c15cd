"""Trace a subject: tensors, a module, a function or an operator becomes a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.core.tensors import named_tensors
from opsmith.drawing.autograd import autograd_graph
from opsmith.drawing.builder import TensorNames, given_names, variables
from opsmith.drawing.forward import forward_graph, record_call
from opsmith.drawing.graph import Graph
from opsmith.drawing.operators import operator_graph
from opsmith.drawing.subject import Options, function_call, operator_call


def trace(subject: Any, options: Options | None = None, frame: FrameType | None = None) -> Graph:
    """Trace a tensor, several tensors, a module, a function or an operator.

    Args:
        subject: The subject.
        options: The options.
        frame: The frame whose variables name tensors that have no other name.

    Raises:
        UsageError: If the subject or an option is invalid.
        NoGraphError, FreedGraphError: If a tensor has no graph, or its saved tensors were freed.
        MissingSamplesError: If an operator has neither samples nor inputs.
    """
    options = options or Options()
    if isinstance(subject, Operator):
        if options.training:
            raise errors.UsageError(
                "an operator is drawn with its gradient formulas, and has no training graph",
                operator=subject.name,
                argument="training",
                expected="a module or a function",
                hint="leave `training` out, or draw a function that calls the operator",
            )
        graph = operator_graph(subject, operator_call(subject, options.inputs, options.kwargs))
        return graph if options.title is None else replace(graph, title=options.title)
    names = given_names(options.names)
    if callable(subject) and not isinstance(subject, type | Tensor):
        return _of_call(subject, options, names)
    outputs = _outputs(subject)
    given_options = {
        "inputs": options.inputs is not None,
        "kwargs": options.kwargs,
        "training": options.training,
    }
    if any(given_options.values()):
        raise errors.UsageError(
            "tensors cannot be called",
            argument=next(name for name, given in given_options.items() if given),
            expected="a module, a function or an operator to call",
            got=type(subject).__name__,
            hint="leave this argument out, or draw the function that computes the tensors",
        )
    names.add_values(variables(frame))
    named = {_named(name, tensor, names): tensor for name, tensor in outputs.items()}
    return autograd_graph(named, names, options, f"autograd graph of {', '.join(named)}")


def _of_call(subject: Any, options: Options, names: TensorNames) -> Graph:
    found = record_call(function_call(subject, options.inputs, options.kwargs), names)
    name = type(subject).__name__ if isinstance(subject, torch.nn.Module) else ""
    title = options.title or name or str(getattr(subject, "__name__", type(subject).__name__))
    if not found.outputs:
        raise errors.UsageError(
            f"`{title}` returns no tensor",
            expected="a tensor, or tuples, lists and dicts of tensors",
            hint="return the tensors to draw",
        )
    if not options.training:
        return forward_graph(found, title, memory=options.memory)
    behind = {name: tensor for name, tensor in found.outputs.items() if tensor.grad_fn is not None}
    described = f"training graph of {title}"
    return autograd_graph(behind or found.outputs, names, options, described, found.recording)


def _outputs(subject: Any) -> dict[str, Tensor]:
    if isinstance(subject, Tensor):
        return {"output": subject}
    if isinstance(subject, Mapping) and subject:
        found = {str(key): value for key, value in subject.items()}
        if all(isinstance(each, Tensor) for each in found.values()):
            return found
    if isinstance(subject, tuple | list) and subject and all(isinstance(each, Tensor) for each in subject):
        return dict(named_tensors(subject, "output"))
    hint = 'draw the graph of a loss or an output: `opsmith.draw(loss, "graph.svg")`'
    if isinstance(subject, type) and issubclass(subject, torch.autograd.Function):
        hint = "adopt it with `opsmith.adopt(...)`, or draw a tensor that it has computed"
    if isinstance(subject, type) and issubclass(subject, torch.nn.Module):
        hint = f"draw an instance: `opsmith.draw({subject.__name__}(...), path, inputs=...)`"
    raise errors.UsageError(
        "this cannot be drawn",
        argument="subject",
        expected="a tensor, a tuple or dict of tensors, a module, a function or an operator",
        got=f"the class `{subject.__name__}`" if isinstance(subject, type) else type(subject).__name__,
        hint=hint,
    )


def _named(name: str, tensor: Tensor, names: TensorNames) -> str:
    """The name of an output: the key of a mapping, or the name of its variable."""
    if tensor in names and (name == "output" or name.startswith("output[")):
        return names.of(tensor).name
    return name
