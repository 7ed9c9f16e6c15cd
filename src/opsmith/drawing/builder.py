"""Builder of graphs, with the names and storages of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from opsmith import errors
from opsmith.drawing.graph import Edge, Form, Graph, Group, Kind, Node, Role, Saved


class TensorNames:
    """Names of tensors, by identity; the first name stays, unless a later name has a role."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[Tensor, Owner]] = {}

    def add(self, name: str, tensor: Tensor, role: Role | None = None) -> None:
        """Name a tensor; the default role is parameter, input or intermediate result."""
        known = self._named.get(id(tensor))
        if known is None or (role is not None and known[1].role == "intermediate"):
            self._named[id(tensor)] = (tensor, Owner(role or _role(tensor), name))

    def add_module(self, module: torch.nn.Module, prefix: str = "") -> None:
        """Name the parameters and buffers of a module as its `state_dict` does."""
        for name, parameter in module.named_parameters(prefix):
            self.add(name, parameter, "parameter")
        for name, buffer in module.named_buffers(prefix):
            self.add(name, buffer, "buffer")

    def add_values(self, values: Iterable[tuple[str, Any]]) -> None:
        """Name the tensors in some values, and the parameters and buffers of the modules in them."""
        for name, value in values:
            if isinstance(value, Tensor):
                self.add(name, value)
            elif isinstance(value, torch.nn.Module):
                self.add_module(value, name)

    def of(self, tensor: Tensor) -> Owner:
        """The name and role of a tensor; an unnamed one is an input or a parameter."""
        known = self._named.get(id(tensor))
        if known is not None:
            return known[1]
        return Owner("parameter" if isinstance(tensor, torch.nn.Parameter) else "input", "")

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._named

    def own(self, storages: Storages, *, computed: bool = False) -> None:
        """Register the owners of the named tensors' storages.

        Args:
            storages: The storages.
            computed: True to register the intermediate results, False to register all other tensors.
                Intermediate results must be registered last, since they may be views of inputs.
        """
        for tensor, owner in self._named.values():
            if (owner.role == "intermediate") == computed:
                storages.own(tensor, owner.role, owner.name)


def _role(tensor: Tensor) -> Role:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "input" if tensor.grad_fn is None else "intermediate"


def given_names(given: Any) -> TensorNames:
    """Return the names in `names=`.

    Raises:
        UsageError: If it is neither a module nor a dict of tensors and modules.
    """
    names = TensorNames()
    if given is None:
        return names
    if isinstance(given, torch.nn.Module):
        names.add_module(given)
        return names
    fits = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
    if not fits or not all(isinstance(each, Tensor | torch.nn.Module) for each in given.values()):
        raise errors.UsageError(
            "`names` must name tensors",
            argument="names",
            expected="a module, or a dict from names to tensors and modules",
            got=type(given).__name__,
            hint='write `names=model`, or `names={"x": x, "model": model}`',
        )
    names.add_values(given.items())
    return names


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The local and global variables of a frame."""
    if frame is None:
        return
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in list(scope.items()):
            if not name.startswith("_"):
                yield name, value


@dataclass(frozen=True)
class Owner:
    """A tensor outside of the graph that keeps a storage alive.

    Args:
        role: Its role.
        name: Its name.
    """

    role: Role
    name: str


class Storages:
    """The storages of one trace, numbered in order of first use, with their owners.

    This object keeps the storages alive, so that their numbers stay unique.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._owners: dict[int, Owner] = {}
        self._counted: set[int] = set()
        self._next = 0

    def own(self, tensor: Tensor, role: Role, name: str) -> None:
        """Register the owner of a tensor's storage; the first registration stays."""
        number, _ = self._of(tensor)
        self._owners.setdefault(number, Owner(role, name))

    def saved(self, name: str, value: Any) -> Saved:
        """Return a saved value; only the first value in a storage counts its bytes."""
        if not isinstance(value, Tensor):
            self._next += 1
            return Saved(name, None, 0, self._next, "packed", True)
        number, size = self._of(value)
        owner = self._owners.get(number, Owner("intermediate", ""))
        first = number not in self._counted
        self._counted.add(number)
        return Saved(name, form_of(value), size, number, owner.role, first, owner.name)

    def _of(self, tensor: Tensor) -> tuple[int, int]:
        """Return number and bytes of a tensor's storage; a tensor without a storage counts as a storage."""
        try:
            key: Any = tensor.untyped_storage()
            size = int(key.nbytes())
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a tensor of a transform
            key, size = tensor, tensor.numel() * tensor.element_size()
        if id(key) not in self._numbers:
            self._next += 1
            self._numbers[id(key)] = self._next
            self._held.append(key)
        return self._numbers[id(key)], size


def form_of(tensor: Tensor) -> Form:
    """Shape, dtype and device of a tensor."""
    return Form(
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
    )


class GraphBuilder:
    """Nodes, edges and groups of a graph under construction.

    Args:
        names: Names of tensors.
        memory: Record saved tensors.

    Attributes:
        storages: The storages with their owners.
        nodes, edges, groups: The parts of the graph so far.
    """

    def __init__(self, names: TensorNames, *, memory: bool) -> None:
        self.names, self.memory = names, memory
        self.storages = Storages()
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.groups: list[Group] = []

    def node(self, kind: Kind, label: str, **fields: Any) -> str:
        """Add a node with these fields of `Node`, and return its id."""
        self.nodes.append(Node(f"n{len(self.nodes)}", kind, label, **fields))
        return self.nodes[-1].id

    def edge(
        self, source: str, target: str, label: str = "", kind: Literal["flow", "saved", "view"] = "flow"
    ) -> None:
        """Add an edge."""
        self.edges.append(Edge(source, target, label, kind))

    def graph(
        self, title: str, subject: Literal["autograd", "forward", "operator"], notes: Sequence[str] = ()
    ) -> Graph:
        """The finished graph."""
        parts = tuple(self.nodes), tuple(self.edges), tuple(self.groups)
        return Graph(title, subject, *parts, tuple(notes), self.memory)
