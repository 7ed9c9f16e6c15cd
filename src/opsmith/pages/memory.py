"""What a call keeps for the backward, as autograd has recorded it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.checking.samples.sample import sample_named
from opsmith.core.operator import Operator
from opsmith.drawing import Options, Saved, trace
from opsmith.pages.samples import first_call


@dataclass(frozen=True)
class Entry:
    """A tensor that is kept.

    Args:
        by: The node that keeps it.
        saved: The tensor.
    """

    by: str
    saved: Saved


@dataclass(frozen=True)
class Kept:
    """What a call keeps.

    Args:
        call: The call, in words.
        entries: The tensors.
        summary: How much that is together.
    """

    call: str
    entries: tuple[Entry, ...]
    summary: str


def kept_by(operator: Operator[..., Any]) -> Kept:
    """What the first sample's call keeps, where every floating input requires a gradient.

    Raises:
        MissingSamplesError: If there is no sample.
        NoGraphError: If no result requires a gradient.
    """
    schema = operator.specification.schema
    call = first_call(operator)
    values = [_requiring(each) for each in schema.call_values(call.args, call.kwargs)]
    named = dict(zip(schema.names, values, strict=True))

    def run(**inputs: Any) -> Any:
        args, kwargs = schema.split([inputs[name] for name in schema.names])
        return operator(*args, **kwargs)

    names = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    graph = trace(run, Options(inputs=named, names=names, training=True, title=operator.name))
    entries = tuple(Entry(node.label, each) for node in graph.nodes for each in node.saved)
    return Kept(sample_named(0, schema.names, values), entries, graph.summary().partition("; ")[2])


def _requiring(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (
            type(value)(map(_requiring, value)) if any(isinstance(each, Tensor) for each in value) else value
        )
    inexact = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if inexact else value
