"""From recorded calls to nodes and edges."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from torch import Tensor

from opsmith.drawing.calls import Call, Recording
from opsmith.drawing.graph import Edge, Group, Kind, Node, Saved
from opsmith.drawing.kept import kept_by, on_context
from opsmith.drawing.names import Names
from opsmith.drawing.storages import Storages, form_of


class Computing:
    """Nodes and edges so far, from one recording or several.

    Args:
        names: What tensors are called that come from elsewhere.
        memory: Whether to look at what each call keeps for a backward.

    Attributes:
        nodes: The nodes.
        edges: The edges.
        groups: The groups.
        storages: Whose memory it is.
    """

    def __init__(self, names: Names, *, memory: bool) -> None:
        self.names, self._memory = names, memory
        self.storages = Storages()
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.groups: list[Group] = []
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._calls: dict[int, str] = {}

    def append(self, node: Node) -> str:
        """Add a node; its name is given here, and returned."""
        node = replace(node, id=f"n{len(self.nodes)}")
        self.nodes.append(node)
        return node.id

    def tensor(self, tensor: Tensor, kind: Kind, label: str, group: str | None = None) -> str:
        """Add a node for a tensor, at which what is computed from it begins."""
        added = self.append(Node("", kind, label, forms=(form_of(tensor),), group=group))
        self._tensors[id(tensor)] = (tensor, added)
        return added

    def add(self, recording: Recording, ends: list[Tensor], group: str | None = None) -> list[str]:
        """Add what was recorded and leads to these tensors, or to a decision of the program.

        Args:
            recording: The calls.
            ends: Results.
            group: The group that all of it is in.

        Returns:
            The node that each of the ends comes from.
        """
        sources = [recording.source_of(end) for end in ends]
        used = _used(sources, recording.calls)
        places = {each.id: f"{group or ''}{each.id}" for each in recording.groups}
        self.groups += [
            replace(each, id=places[each.id], parent=places[each.parent] if each.parent else group)
            for each in recording.groups
        ]
        for call in recording.calls:
            if call.number in used:
                self._add(call, places[call.group] if call.group else group)
        return [self._source(source) for source in sources]

    def _add(self, call: Call, group: str | None) -> None:
        sources = [(self._source(source), label) for source, label in call.sources]
        node = Node(
            "",
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
        added = self._calls[id(call)] = self.append(node)
        for source, label in dict.fromkeys(sources):
            self.edges.append(Edge(source, added, label))

    def _saved(self, call: Call) -> tuple[Saved, ...]:
        """What autograd's nodes of a call keep: nothing, where a backward in the same call has freed it."""
        if not self._memory:
            return ()
        return tuple(
            self.storages.saved(name, value)
            for node in reversed(call.recorded)
            for name, value in {**(kept_by(node) or {}), **on_context(node)}.items()
            if value is not None
        )

    def _source(self, source: Call | Tensor) -> str:
        if isinstance(source, Call):
            return self._calls[id(source)]
        if id(source) not in self._tensors:
            known, owner = source in self.names, self.names.of(source)
            kind: Kind = "constant"
            if known and owner.role == "intermediate":
                kind = "input"
            elif known and owner.role in get_args(Kind):
                kind = owner.role  # type: ignore[assignment]  # a role that is a kind, too
            self.tensor(source, kind, owner.name)
        return self._tensors[id(source)][1]


def _used(ends: list[Call | Tensor], calls: list[Call]) -> set[int]:
    """Numbers of the calls that an output, or a decision of the program, depends on."""
    pending = [end for end in ends if isinstance(end, Call)] + [call for call in calls if call.reads]
    found: set[int] = set()
    while pending:
        call = pending.pop()
        if call.number not in found:
            found.add(call.number)
            pending.extend(source for source, _ in call.sources if isinstance(source, Call))
    return found
