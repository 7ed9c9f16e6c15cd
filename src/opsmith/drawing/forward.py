"""From a call to the graph of what it computes: each function that was called, in its modules."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.drawing.calls import Recording, tensors_in
from opsmith.drawing.computing import Computing
from opsmith.drawing.graph import Edge, Graph, Node, counted
from opsmith.drawing.names import Names
from opsmith.drawing.nesting import nested
from opsmith.drawing.regions import following
from opsmith.drawing.storages import form_of
from opsmith.drawing.subject import Subject, named_tensors
from opsmith.drawing.undisturbed import undisturbed


@dataclass(frozen=True)
class Recorded:
    """A call that was carried out, and what was recorded.

    Args:
        recording: The calls in it.
        outputs: The tensors that it returned, by name.
        names: What the tensors are called that it was given.
    """

    recording: Recording
    outputs: dict[str, Tensor]
    names: Names


def recorded(subject: Subject, names: Names) -> Recorded:
    """Carry out a call, and record it. Buffers and the random state are what they were, afterwards.

    What it raises is raised.

    Raises:
        UsageError: If a module's parameters have no shape yet.
    """
    if subject.module is not None:
        _refuse_lazy(subject.module)
    for name, tensor in subject.tensors():
        names.add(name, tensor, "input")
    recording = Recording()
    for tensor in tensors_in((subject.args, subject.kwargs)):
        recording.ignore(tensor.grad_fn)
    regions = following(recording, subject.module) if subject.module is not None else nullcontext()
    with undisturbed(subject.module), eager():
        if subject.module is not None:
            names.add_module(subject.module)
        with regions, recording:
            returned = subject.function(*subject.args, **subject.kwargs)
    outputs = named_tensors(returned, subject.output)
    recording.see(outputs.values())
    return Recorded(recording, outputs, names)


def _refuse_lazy(module: torch.nn.Module) -> None:
    """Refuse a lazy module: the call would give it its shapes, and it is only to be looked at."""
    owned = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in owned if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise errors.UsageError(
            f"`{lazy[0]}` of the module has no shape yet",
            argument="subject",
            expected="a module whose parameters and buffers are there",
            got=f"{counted(len(lazy), 'uninitialized tensor')}",
            hint="call it once on its inputs before it is drawn: that gives a lazy module its shapes",
        )


def eager() -> Any:
    """A region in which compiled functions run as they were written: that is where calls are seen."""
    return torch.compiler.set_stance("force_eager")


def forward_graph(found: Recorded, title: str, *, memory: bool = True) -> Graph:
    """The graph of a recorded call.

    Args:
        found: The call.
        title: What it is a graph of.
        memory: Whether to look at what each call keeps for a backward.
    """
    computing = Computing(found.names, memory=memory)
    found.names.own(computing.storages)
    for name, tensor in found.outputs.items():
        computing.storages.own(tensor, "output", name)
    found.names.own(computing.storages, computed=True)
    ends = computing.add(found.recording, list(found.outputs.values()))
    drawn = sum(node.kind in ("operator", "operation") for node in computing.nodes)
    for (name, tensor), end in zip(found.outputs.items(), ends, strict=True):
        added = computing.append(Node("", "output", name, forms=(form_of(tensor),)))
        computing.edges.append(Edge(end, added))
    note = _left_out(found, len(found.recording.calls) - drawn)
    return nested(
        Graph(
            title,
            "forward",
            tuple(computing.nodes),
            tuple(computing.edges),
            tuple(computing.groups),
            (note,) if note else (),
            memory,
        )
    )


def _left_out(found: Recorded, left: int) -> str:
    """What has to be said of calls that are not drawn: whether no output depends on them can be unknown."""
    if not left:
        return ""
    sources = {name: found.recording.source_of(tensor) for name, tensor in found.outputs.items()}
    unseen = [
        f"`{name}`" for name, each in sources.items() if isinstance(each, Tensor) and each not in found.names
    ]
    verb = "is" if left == 1 else "are"
    if unseen:
        comes = "comes" if len(unseen) == 1 else "come"
        return (
            f"{', '.join(unseen)} {comes} from no call that was seen: transforms of torch.func are not "
            f"followed, and {counted(left, 'call')} {verb} not drawn"
        )
    return f"{counted(left, 'call')} that no output depends on {verb} left out"
