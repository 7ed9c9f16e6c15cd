"""Graphs: immutable values that tracers return and renderers read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from opsmith.core.cached_property import cached_property
from opsmith.display import framed, short_repr, titled_repr

SCHEMA = 1
"""Version of the keys of `Graph.to_dict`."""

Kind = Literal[
    "operator",  # of opsmith
    "operation",  # torch's own
    "function",  # an autograd.Function that is not adopted
    "accumulate",  # AccumulateGrad of a leaf
    "parameter",
    "buffer",
    "input",
    "constant",
    "saved",  # a saved tensor of none of the kinds above
    "base",  # the base of an output that is a view
    "output",
    "module",  # a folded module, operator or section
    "answer",  # a gradient without a formula, described in words
    "reference",  # next to a user of a tensor with many users, in place of the tensor; only in pictures
]
Role = Literal["parameter", "buffer", "input", "output", "intermediate", "packed"]
INTERMEDIATE: tuple[Role, ...] = ("intermediate", "packed")
"""Roles of tensors that only the graph keeps alive."""


@dataclass(frozen=True)
class Form:
    """The shape, dtype and device of a tensor.

    Args:
        shape: The shape.
        dtype: The name of the dtype, without `torch.`.
        device: The name of the device.
    """

    __repr__ = short_repr

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        device = "" if self.device == "cpu" else f" {self.device}"
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}{device}"


@dataclass(frozen=True)
class Saved:
    """A tensor that a node saves for the backward.

    Args:
        name: Its name in the node.
        form: Shape, dtype and device; None if a hook has packed it.
        bytes: The size of its whole storage, which the tensor keeps alive.
        storage: The number of the storage: tensors with the same number share memory.
        role: `intermediate` if only the graph keeps it alive; otherwise its role outside of the graph.
        counted: True if its bytes count here; otherwise they count at an earlier node with the same storage.
            of: Its name outside of the graph, as a parameter, an input, an output or a variable.
    """

    __repr__ = short_repr

    name: str
    form: Form | None
    bytes: int
    storage: int
    role: Role
    counted: bool
    of: str = ""

    def __str__(self) -> str:
        form = f" {self.form}" if self.form else ""
        owner = {"packed": "packed by a hook", "intermediate": self.of}.get(
            self.role, f"{self.role} {self.of}"
        )
        remarks = [owner.strip()] * bool(owner.strip()) + ["counted elsewhere"] * (not self.counted)
        size = format_bytes(self.bytes) if self.role != "packed" else ""
        return f"{self.name}{form}{' ' * bool(size)}{size}" + (f" ({', '.join(remarks)})" if remarks else "")


@dataclass(frozen=True)
class Node:
    """A node: an operation, or a tensor.

    Args:
        id: Its name in the graph.
        kind: Its kind.
        label: Its label in pictures: `opsmith::linear`, `MulBackward0`, `weight`.
        name: The module that consists of only this node; empty for none.
        forms: Shape, dtype and device of the tensor, or of each result.
        group: The innermost group that contains it. attributes: Further arguments and properties, by name.
        saved: The tensors that it saves for the backward.
        where: `file:line` of the call; empty if unknown.
        source: The text of that line.
        recorded: The name of autograd's node: `MulBackward0`.
        holds: The number of nodes that a folded node stands for.
        overwritten: True if a saved tensor was modified in place, so that a backward raises.
    """

    __repr__ = short_repr

    id: str
    kind: Kind
    label: str
    name: str = ""
    forms: tuple[Form, ...] = ()
    group: str | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    saved: tuple[Saved, ...] = ()
    where: str = ""
    source: str = ""
    recorded: str = ""
    holds: int = 1
    overwritten: bool = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that the node saves, without storages that an earlier node saves."""
        return sum(each.bytes for each in self.saved if each.counted)

    @property
    def own_bytes(self) -> int:
        """Bytes that the node saves and only the graph keeps alive."""
        return sum(each.bytes for each in self.saved if each.counted and each.role in INTERMEDIATE)


@dataclass(frozen=True)
class Edge:
    """An edge from one node to another.

    Args:
        source: The node at its start. target: The node at its end.
        label: The name of the target's input; empty if it has none.
        kind: `flow`; `saved`, between a tensor and the node that saves it; `view`, from a base to its view.
        count: The number of edges that it represents, between folded nodes.
    """

    __repr__ = short_repr

    source: str
    target: str
    label: str = ""
    kind: Literal["flow", "saved", "view"] = "flow"
    count: int = 1


@dataclass(frozen=True)
class Group:
    """A group of nodes that can be folded: a call of a module or an operator, or a section.

    Args:
        id: Its name in the graph.
        label: `layer1.0.conv1`, with the number of the call if there are several.
        kind: Its kind.
        title: The class of a module.
        parent: The group that contains it.
    """

    __repr__ = short_repr

    id: str
    label: str
    kind: Literal["module", "operator", "section", "part"] = "module"
    title: str = ""
    parent: str | None = None


@dataclass(frozen=True)
class Graph:
    """A graph of operations and tensors, in topological order.

    Args:
        title: The title.
        subject: `autograd`: the nodes of a backward; `forward`: recorded calls; `operator`: the reference and
            the formulas of an operator.
        nodes: The nodes, each after the nodes that lead to it.
        edges: The edges.
        groups: The groups, each after its parent.
        notes: Remarks about the graph.
        memory: True if saved tensors were recorded. depth: Number of levels of modules that are unfolded when
            the graph is displayed; None for as many as fit. show_attrs: True to show attributes on nodes when
            the graph is displayed.
    """

    title: str
    subject: Literal["autograd", "forward", "operator"]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    memory: bool = True
    depth: int | None = field(default=None, compare=False)
    show_attrs: bool = field(default=False, compare=False)

    @cached_property
    def by_id(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.id: node for node in self.nodes}

    @property
    def kept_bytes(self) -> int:
        """Bytes that all nodes save for the backward, each storage counted once."""
        return sum(node.kept_bytes for node in self.nodes)

    @property
    def own_bytes(self) -> int:
        """Saved bytes of intermediate results, which are freed with the graph."""
        return sum(node.own_bytes for node in self.nodes)

    def heaviest(self, count: int = 10) -> list[Node]:
        """The nodes that save the most intermediate bytes, the largest first."""
        keeping = [node for node in self.nodes if node.own_bytes]
        return sorted(keeping, key=lambda node: -node.own_bytes)[:count]

    def ancestry(self, group: str | None) -> list[str]:
        """A group and its ancestors, the innermost first; empty for None."""
        found = []
        while group is not None:
            found.append(group)
            group = self._parents[group]
        return found

    @cached_property
    def _parents(self) -> dict[str, str | None]:
        return {group.id: group.parent for group in self.groups}

    def members(self, group: str) -> list[Node]:
        """The nodes in a group, at any depth."""
        return self._members.get(group, [])

    @cached_property
    def _members(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for group in self.ancestry(node.group):
                found.setdefault(group, []).append(node)
        return found

    def summary(self) -> str:
        """Number of nodes, and bytes that they save, in one line; folding does not change them."""
        text = counted(sum(node.holds for node in self.nodes if node.kind != "reference"), "node")
        if not self.memory:
            return f"{text}; saved tensors were not recorded"
        if self.subject != "operator" or self.kept_bytes:
            text += f"; keeps {format_bytes(self.kept_bytes) if self.kept_bytes else 'nothing'}"
            if self.kept_bytes:
                share = format_bytes(self.own_bytes) if self.own_bytes else "none"
                share = "all" if self.own_bytes == self.kept_bytes else share
                text += f" for the backward, {share} of it intermediate results"
            packed = sum(each.role == "packed" for node in self.nodes for each in node.saved)
            if packed:
                text += f"; not counted: {counted(packed, 'tensor')} packed by hooks"
        return text

    __repr__ = titled_repr(lambda graph: f"{graph.title}: {graph.summary()}")

    def _repr_html_(self) -> str:
        from opsmith.drawing.page import to_page

        page = to_page(self, depth=self.depth, show_attrs=self.show_attrs)
        return framed(page, 560, f"graph: {self.title}")

    def to_dict(self) -> dict[str, Any]:
        """The graph in JSON's types."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "subject": self.subject,
            "summary": self.summary(),
            "memory": self.memory,
            "kept_bytes": self.kept_bytes,
            "own_bytes": self.own_bytes,
            "notes": list(self.notes),
            "groups": [asdict(group) for group in self.groups],
            "nodes": [
                {
                    **asdict(node),
                    "attributes": dict(node.attributes),
                    "kept_bytes": node.kept_bytes,
                    "own_bytes": node.own_bytes,
                }
                for node in self.nodes
            ],
            "edges": [asdict(edge) for edge in self.edges],
        }


def format_bytes(count: int) -> str:
    """A number of bytes with a unit.

    Example:
        >>> format_bytes(24), format_bytes(4_700_000)
        ('24 B', '4.7 MB')
    """
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB")
    power = next((each for each in range(1, 4) if count < 999.5 * 1000**each), 4)
    return f"{count / 1000**power:.3g} {units[power - 1]}"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "node"), counted(2, "node")
        ('1 node', '2 nodes')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def numbered(labels: Iterable[str]) -> list[str]:
    """Labels, each repeated label with a number.

    Example:
        >>> numbered(["relu", "conv", "relu"])
        ['relu #1', 'conv', 'relu #2']
    """
    every = list(labels)
    seen: dict[str, int] = {}
    found = []
    for label in every:
        seen[label] = seen.get(label, 0) + 1
        found.append(f"{label} #{seen[label]}" if every.count(label) > 1 else label)
    return found
