"""A graph as a plain value: tracers return it, renderers only read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

SCHEMA = 1
"""Version of what `to_dict` returns; it changes when a key changes its meaning or goes."""

Kind = Literal[
    "operator",  # of opsmith
    "operation",  # torch's own
    "function",  # an autograd.Function that nobody adopted
    "accumulate",  # where a leaf's gradient is added up
    "parameter",
    "buffer",
    "input",
    "constant",
    "saved",  # a tensor that is kept, and is nothing of the above
    "base",  # what an output is a view of
    "output",
    "module",  # folded: what a module, an operator or a section holds
    "answer",  # a gradient that no formula computes, in words
    "reference",  # to a tensor that many use, beside one of them: in pictures alone
]
Role = Literal["parameter", "buffer", "input", "output", "intermediate", "packed"]
INTERMEDIATE: tuple[Role, ...] = ("intermediate", "packed")
"""What nobody but the graph keeps."""


@dataclass(frozen=True)
class Form:
    """What a tensor looks like.

    Args:
        shape: Its sizes.
        dtype: As torch calls it, without `torch.`.
        device: As torch calls it.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        place = "" if self.device == "cpu" else f" {self.device}"
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}{place}"


@dataclass(frozen=True)
class Saved:
    """A tensor that a node keeps for the backward.

    Args:
        name: What the node calls it.
        form: What it looks like; None where a hook has packed it.
        bytes: What its storage takes, all of which it keeps.
        storage: Number of the storage: tensors of one number share memory.
        role: Whose it is: the graph's alone, or somebody's who has it anyway.
        counted: Whether its bytes count here; else they do at another node, which comes first.
        of: What it is called elsewhere: the name of a parameter, of an input, of an output, or of a variable.
    """

    name: str
    form: Form | None
    bytes: int
    storage: int
    role: Role
    counted: bool
    of: str = ""

    def __str__(self) -> str:
        form = f" {self.form}" if self.form else ""
        whose = {"packed": "packed by a hook", "intermediate": self.of}.get(
            self.role, f"{self.role} {self.of}"
        )
        told = [whose.strip()] * bool(whose.strip()) + ["counted elsewhere"] * (not self.counted)
        size = shown_bytes(self.bytes) if self.role != "packed" else ""
        return f"{self.name}{form}{' ' * bool(size)}{size}" + (f" ({', '.join(told)})" if told else "")


@dataclass(frozen=True)
class Node:
    """A node: an operation, or a tensor.

    Args:
        id: Its name in the graph.
        kind: What it is.
        label: What it is called in pictures: `opsmith::linear`, `MulBackward0`, `weight`.
        name: The module that it belongs to alone, or nothing.
        forms: What its results look like, or the tensor itself.
        group: The innermost group that it is in.
        attributes: What else is known about it, by name.
        saved: What it keeps for the backward.
        where: `file:line` that it was called at, where that is known.
        source: That line.
        recorded: The name of autograd's node: `MulBackward0`.
        holds: Of a folded node: how many nodes it stands for.
        overwritten: Whether something that it saved was written to since, so that a backward raises.
    """

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
        """What it keeps, storages that an earlier node keeps not counted again."""
        return sum(each.bytes for each in self.saved if each.counted)

    @property
    def own_bytes(self) -> int:
        """What of that nobody but the graph keeps."""
        return sum(each.bytes for each in self.saved if each.counted and each.role in INTERMEDIATE)


@dataclass(frozen=True)
class Edge:
    """What flows from one node to another.

    Args:
        source: Where it comes from.
        target: Where it goes.
        label: Which input of the target it is, where that has a name.
        kind: `flow`; `saved`, of a tensor and who keeps it; `view`, of a tensor and its base.
        count: How many edges it stands for, between folded nodes.
    """

    source: str
    target: str
    label: str = ""
    kind: Literal["flow", "saved", "view"] = "flow"
    count: int = 1


@dataclass(frozen=True)
class Group:
    """What can be folded: one call of a module or an operator, or a section of a graph that has none.

    Args:
        id: Its name in the graph.
        label: `layer1.0.conv1`, with the number of the call if there is more than one.
        kind: What it is.
        title: The class of a module.
        parent: The group that it is in.
    """

    id: str
    label: str
    kind: Literal["module", "operator", "section", "part"] = "module"
    title: str = ""
    parent: str | None = None


@dataclass(frozen=True)
class Graph:
    """A graph of operations and tensors, in an order in which everything comes after what it is made of.

    Args:
        title: What it is of.
        subject: `autograd`: the nodes that a backward runs through; `forward`: the calls that computed
            something; `operator`: an operator's reference and its formulas.
        nodes: The nodes, each after those that lead to it.
        edges: What flows between them.
        groups: What can be folded, each after the one that it is in.
        notes: What a reader has to know about the picture.
        memory: Whether it was looked at what is kept.
    """

    title: str
    subject: Literal["autograd", "forward", "operator"]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    memory: bool = True

    @cached_property
    def by_id(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.id: node for node in self.nodes}

    @property
    def kept_bytes(self) -> int:
        """What all nodes keep for the backward, each storage counted once."""
        return sum(node.kept_bytes for node in self.nodes)

    @property
    def own_bytes(self) -> int:
        """What of that are intermediate results, which go when the graph goes."""
        return sum(node.own_bytes for node in self.nodes)

    def heaviest(self, count: int = 10) -> list[Node]:
        """The nodes that keep the most of what only the graph keeps, the heaviest first."""
        keeping = [node for node in self.nodes if node.own_bytes]
        return sorted(keeping, key=lambda node: -node.own_bytes)[:count]

    def inputs_of(self, node: str) -> list[Node]:
        """The nodes that lead to this one."""
        return [self.by_id[edge.source] for edge in self.edges if edge.target == node]

    def members(self, group: str) -> list[Node]:
        """The nodes in a group, at any depth."""
        return self._members.get(group, [])

    @cached_property
    def _members(self) -> dict[str, list[Node]]:
        parents = {each.id: each.parent for each in self.groups}
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for group in ancestry(node.group, parents):
                found.setdefault(group, []).append(node)
        return found

    def summary(self) -> str:
        """How much there is, and what it keeps, in a line."""
        text = counted(len(self.nodes), "node")
        if not self.memory:
            return f"{text}; what it keeps was not looked at"
        if self.subject != "operator" or self.kept_bytes:
            text += f"; keeps {shown_bytes(self.kept_bytes) if self.kept_bytes else 'nothing'}"
            if self.kept_bytes:
                share = shown_bytes(self.own_bytes) if self.own_bytes else "none"
                share = "all" if self.own_bytes == self.kept_bytes else share
                text += f" for the backward, {share} of it intermediate results"
            packed = sum(each.role == "packed" for node in self.nodes for each in node.saved)
            if packed:
                text += f"; {counted(packed, 'tensor')} packed by hooks not counted"
        return text

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


def ancestry(group: str | None, parents: dict[str, str | None]) -> list[str]:
    """A group and those that it is in, the innermost first."""
    found = []
    while group is not None:
        found.append(group)
        group = parents[group]
    return found


def shown_bytes(count: int) -> str:
    """A number of bytes as people read it.

    Example:
        >>> shown_bytes(24), shown_bytes(4_700_000)
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
    """Labels of which those that come more than once have a number behind them.

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
