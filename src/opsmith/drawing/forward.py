"""Forward graphs: the recorded calls of a module or function as nodes and edges."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.tensors import named_tensors, nested_tensors
from opsmith.drawing.builder import GraphBuilder, TensorNames, form_of
from opsmith.drawing.graph import Graph, Kind, Saved, counted
from opsmith.drawing.grouping import nested
from opsmith.drawing.node_attributes import context_tensors, saved_values
from opsmith.drawing.recording import RecordedCall, Recording, module_regions, preserved_state
from opsmith.drawing.subject import DrawnCall


@dataclass(frozen=True)
class CallRecord:
    """The record of a call.

    Args:
        recording: The calls inside.
        outputs: The tensors that it returned, by name.
        names: Names of its input tensors.
    """

    recording: Recording
    outputs: dict[str, Tensor]
    names: TensorNames


def record_call(subject: DrawnCall, names: TensorNames) -> CallRecord:
    """Run a call and record it; buffers and the random state are preserved.

    Raises:
        UsageError: If a module's parameters have no shape yet.
        Exception: If the call raises.
    """
    if subject.module is not None:
        _refuse_lazy(subject.module)
    for name, tensor in subject.tensors():
        names.add(name, tensor, "input")
    recording = Recording()
    for tensor in nested_tensors((subject.args, subject.kwargs)):
        recording.claim(tensor.grad_fn, None)
    regions = module_regions(recording, subject.module) if subject.module is not None else nullcontext()
    with preserved_state(subject.module), eager():
        if subject.module is not None:
            names.add_module(subject.module)
        with regions, recording:
            returned = subject.function(*subject.args, **subject.kwargs)
    outputs = dict(named_tensors(returned, subject.output))
    recording.see(outputs.values())
    return CallRecord(recording, outputs, names)


def _refuse_lazy(module: torch.nn.Module) -> None:
    """Raise an error for a lazy module, whose parameters the call would initialize."""
    owned = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in owned if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise errors.UsageError(
            f"`{lazy[0]}` of the module has no shape yet",
            argument="subject",
            expected="a module whose parameters and buffers have shapes",
            got=f"{counted(len(lazy), 'uninitialized tensor')}",
            hint="call it once before you draw it: the call gives a lazy module its shapes",
        )


def eager() -> Any:
    """Context manager in which compiled functions run eagerly, so that their calls are recorded."""
    return torch.compiler.set_stance("force_eager")


def forward_graph(found: CallRecord, title: str, *, memory: bool = True) -> Graph:
    """Return the graph of a recorded call.

    Args:
        found: The call.
        title: The title.
        memory: Record saved tensors.
    """
    builder = CallGraphBuilder(found.names, memory=memory)
    found.names.own(builder.storages)
    for name, tensor in found.outputs.items():
        builder.storages.own(tensor, "output", name)
    found.names.own(builder.storages, computed=True)
    ends = builder.add(found.recording, list(found.outputs.values()))
    drawn = sum(node.kind in ("operator", "operation") for node in builder.nodes)
    for (name, tensor), end in zip(found.outputs.items(), ends, strict=True):
        builder.edge(end, builder.node("output", name, forms=(form_of(tensor),)))
    note = _left_out(found, len(found.recording.calls) - drawn)
    return nested(builder.graph(title, "forward", [note] * bool(note)))


def _left_out(found: CallRecord, left: int) -> str:
    """Return a note about calls that are not drawn; it may be unknown if an output depends on them."""
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
            f"{', '.join(unseen)} {comes} from no recorded call: transforms of torch.func are not recorded, "
            f"and {counted(left, 'call')} {verb} not drawn"
        )
    return f"{counted(left, 'call')} that no output depends on {verb} left out"


class CallGraphBuilder(GraphBuilder):
    """Builder of the graph of one or several recordings.

    Args:
        names: Names of tensors that no recorded call has computed.
        memory: Record saved tensors.
    """

    def __init__(self, names: TensorNames, *, memory: bool) -> None:
        super().__init__(names, memory=memory)
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._calls: dict[int, str] = {}

    def tensor(self, tensor: Tensor, kind: Kind, label: str, **fields: Any) -> str:
        """Add a node for a tensor that calls use."""
        added = self.node(kind, label, forms=(form_of(tensor),), **fields)
        self._tensors[id(tensor)] = (tensor, added)
        return added

    def add(self, recording: Recording, ends: list[Tensor], group: str | None = None) -> list[str]:
        """Add the recorded calls that lead to these tensors or return values to Python.

        Args:
            recording: The calls.
            ends: Results.
            group: The group that contains all of it.

        Returns:
            The node that computes each of the ends.
        """
        sources = [recording.source_of(end) for end in ends]
        used = _used(sources, recording.calls)
        ids = {each.id: f"{group or ''}{each.id}" for each in recording.groups}
        self.groups += [
            replace(each, id=ids[each.id], parent=ids[each.parent] if each.parent else group)
            for each in recording.groups
        ]
        for call in recording.calls:
            if call.number in used:
                self._add(call, ids[call.group] if call.group else group)
        return [self._source(source) for source in sources]

    def _add(self, call: RecordedCall, group: str | None) -> None:
        sources = [(self._source(source), label) for source, label in call.sources]
        added = self._calls[id(call)] = self.node(
            "operator" if call.operator is not None else "operation",
            call.label,
            forms=call.forms,
            group=group,
            attributes=call.attributes,
            saved=self._saved(call),
            where=call.where,
            source=call.source,
            recorded=", ".join(type(each).__name__ for each in reversed(call.recorded)),
        )
        for source, label in dict.fromkeys(sources):
            self.edge(source, added, label)

    def _saved(self, call: RecordedCall) -> tuple[Saved, ...]:
        """Return the tensors that autograd saves for a call; empty if a recorded backward freed them."""
        if not self.memory:
            return ()
        return tuple(
            self.storages.saved(name, value)
            for node in reversed(call.recorded)
            for name, value in {**(saved_values(node) or {}), **context_tensors(node)}.items()
            if value is not None
        )

    def _source(self, source: RecordedCall | Tensor) -> str:
        if isinstance(source, RecordedCall):
            return self._calls[id(source)]
        if id(source) not in self._tensors:
            known, owner = source in self.names, self.names.of(source)
            kind: Kind = "constant"
            if known and owner.role == "intermediate":
                kind = "input"
            elif known and owner.role in get_args(Kind):
                kind = owner.role  # type: ignore[assignment]  # a role that is a kind as well
            self.tensor(source, kind, owner.name)
        return self._tensors[id(source)][1]


def _used(ends: list[RecordedCall | Tensor], calls: list[RecordedCall]) -> set[int]:
    """Return the numbers of the calls on which an output, or a value returned to Python, depends."""
    pending = [end for end in ends if isinstance(end, RecordedCall)] + [call for call in calls if call.reads]
    found: set[int] = set()
    while pending:
        call = pending.pop()
        if call.number not in found:
            found.add(call.number)
            pending.extend(source for source, _ in call.sources if isinstance(source, RecordedCall))
    return found
