"""From tensors to the graph that a backward runs through: every node of autograd, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.formula import Formula
from opsmith.drawing.attributes import recorded_attributes
from opsmith.drawing.calls import Call, Recording
from opsmith.drawing.graph import Edge, Form, Graph, Group, Kind, Node, Saved
from opsmith.drawing.kept import kept_by, on_context
from opsmith.drawing.leaves import leaf_of
from opsmith.drawing.names import Names
from opsmith.drawing.nesting import nested
from opsmith.drawing.places import short_place, site_of_traceback
from opsmith.drawing.storages import Storages, form_of
from opsmith.torch_library import capabilities
from opsmith.torch_library.recorded_as import RecordedAs, recorded_as


def autograd_graph(
    outputs: Mapping[str, Tensor],
    names: Names,
    *,
    title: str,
    show_saved: bool = False,
    memory: bool = True,
    recording: Recording | None = None,
) -> Graph:
    """The graph behind some tensors.

    Args:
        outputs: The tensors, by name.
        names: What other tensors are called.
        title: What it is a graph of.
        show_saved: Whether what torch's own nodes save is in the graph too; what operators and other
            Functions save always is.
        memory: Whether to look at what is kept.
        recording: The calls that made it, where they were recorded.

    Raises:
        NoGraphError: If a tensor has none.
        FreedGraphError: If what it kept is gone.
    """
    for name, tensor in outputs.items():
        refuse_without_graph(tensor, name)
    tracing = _Tracing(names, show_saved=show_saved, memory=memory, recording=recording)
    for name, tensor in outputs.items():
        names.add(name, tensor, "output")
    order = ordered([tensor.grad_fn for tensor in outputs.values()])
    names.own(tracing.storages)
    tracing.own_leaves(order)
    names.own(tracing.storages, computed=True)
    for node in order:
        tracing.add(node)
    for name, tensor in outputs.items():
        tracing.add_output(name, tensor)
    return nested(tracing.graph(title))


def refuse_without_graph(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that no operation on something that requires a gradient has made.

    Raises:
        NoGraphError: If it is one.
    """
    if tensor.grad_fn is not None:
        return
    leaf = tensor.requires_grad
    raise errors.NoGraphError(
        f"`{name}` has no graph: "
        + (
            "it is a leaf, which nothing was computed into"
            if leaf
            else "nothing that it was computed from requires a gradient"
        ),
        argument=name,
        expected="a tensor with a `grad_fn`",
        got=f"{form_of(tensor)}, requires_grad={leaf}",
        hint="draw what is computed from it"
        if leaf
        else "call `requires_grad_()` on an input before the computation, and leave `torch.no_grad()` "
        "and `detach()` out",
    )


def ordered(roots: Sequence[Any]) -> list[Any]:
    """All nodes behind some, each after those behind it."""
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[tuple[Any, bool]] = [(root, False) for root in reversed(roots)]
    while pending:
        node, done = pending.pop()
        if done:
            found.append(node)
        elif node is not None and id(node) not in seen:
            seen.add(id(node))
            pending.append((node, True))
            pending.extend((behind, False) for behind, _ in reversed(node.next_functions))
    return found


class _Tracing:
    """The graph so far. Autograd's nodes are held by the list that they come from, and keep their `id`."""

    def __init__(self, names: Names, *, show_saved: bool, memory: bool, recording: Recording | None) -> None:
        self.storages = Storages()
        self._names, self._show_saved, self._memory = names, show_saved, memory
        self._recording = recording
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._groups: list[Group] = list(recording.groups) if recording is not None else []
        self._ids: dict[int, str] = {}
        self._tensors: dict[Any, str] = {}
        self._of_calls: dict[int, Group] = {}

    def graph(self, title: str) -> Graph:
        """What was gathered."""
        notes = []
        broken = [node.label for node in self._nodes if node.overwritten]
        if broken:
            notes.append(
                f"what {', '.join(dict.fromkeys(broken))} saved was written to since: a backward raises"
            )
        return Graph(
            title,
            "autograd",
            tuple(self._nodes),
            tuple(self._edges),
            tuple(self._groups),
            tuple(notes),
            self._memory,
        )

    def own_leaves(self, order: Sequence[Any]) -> None:
        """Tell whose the storages of leaves are, before anything is found to keep them."""
        for node in order:
            leaf = leaf_of(node)
            if leaf is not None:
                owner = self._names.of(leaf)
                self.storages.own(leaf, owner.role, owner.name)

    def add(self, node: Any) -> None:
        """Add one of autograd's nodes, and the edges that lead to it."""
        name = type(node).__name__
        leaf = leaf_of(node)
        if leaf is not None:
            source = self._leaf(leaf)
            added = self._append(Node("", "accumulate", name, forms=(form_of(leaf),), recorded=name))
            self._ids[id(node)] = added.id
            self._edges.append(Edge(source, added.id))
            return
        record = recorded_as(node)
        call = self._recording.call_of(node) if self._recording is not None else None
        where, source_line = self._place(node, call)
        kind, label = _kind(node, record, name)
        saved, overwritten = self._saved(node, record)
        added = self._append(
            Node(
                "",
                kind,
                label,
                forms=_forms(node),
                group=self._group(call, record),
                attributes=(*recorded_attributes(node), *_rules(record)),
                saved=tuple(each for each, _ in saved),
                where=where,
                source=source_line,
                recorded=name,
                overwritten=overwritten,
            )
        )
        self._ids[id(node)] = added.id
        labels = iter(record.inputs if record is not None else ())
        for behind, _ in node.next_functions:
            if behind is not None:
                self._edges.append(Edge(self._ids[id(behind)], added.id, next(labels, "")))
        if self._show_saved or kind in ("operator", "function"):
            for each, value in saved:
                self._edges.append(Edge(self._kept(each, value), added.id, each.name, "saved"))

    def add_output(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that was asked for, and what it is a view of."""
        added = self._append(Node("", "output", name, forms=(form_of(tensor),)))
        self._edges.append(Edge(self._ids[id(tensor.grad_fn)], added.id))
        base = capabilities.view_base(tensor)
        if base is None:
            return
        known = self._tensors.get(id(base))
        if known is None:
            label = self._names.of(base).name if base in self._names else "base"
            known = self._append(Node("", "base", label, forms=(form_of(base),))).id
            self._tensors[id(base)] = known
            if base.grad_fn is not None and id(base.grad_fn) in self._ids:
                self._edges.append(Edge(self._ids[id(base.grad_fn)], known))
        self._edges.append(Edge(known, added.id, "view of", "view"))

    def _append(self, node: Node) -> Node:
        node = replace(node, id=f"n{len(self._nodes)}")
        self._nodes.append(node)
        return node

    def _leaf(self, leaf: Tensor) -> str:
        if id(leaf) not in self._tensors:
            owner = self._names.of(leaf)
            kind: Kind = "parameter" if owner.role == "parameter" else "input"
            added = self._append(Node("", kind, owner.name, forms=(form_of(leaf),)))
            self._tensors[id(leaf)] = added.id
        return self._tensors[id(leaf)]

    def _kept(self, saved: Saved, value: Any) -> str:
        """The node of a tensor that is kept: a leaf's own, or one for all who keep it in this form."""
        if id(value) in self._tensors:
            return self._tensors[id(value)]
        key = (
            (saved.storage, saved.form, value.stride(), value.storage_offset()) if _is_plain(value) else saved
        )
        if key not in self._tensors:
            kinds: dict[str, Kind] = {"parameter": "parameter", "input": "input", "buffer": "buffer"}
            kind = kinds.get(saved.role, "saved")
            forms = (saved.form,) if saved.form is not None else ()
            added = self._append(Node("", kind, saved.of or saved.name, forms=forms))
            self._tensors[key] = added.id
        return self._tensors[key]

    def _saved(self, node: Any, record: RecordedAs | None) -> tuple[list[tuple[Saved, Any]], bool]:
        """What a node saved, each with the value, and whether any of it was written to since."""
        if not self._memory:
            return [], False
        values = kept_by(node)
        if values is None:
            raise _freed(type(node).__name__)
        if record is not None and len(record.saved) == len(values):
            values = dict(zip(record.saved, values.values(), strict=True))
        named = {f"saved {name}" if name.isdigit() else name: value for name, value in values.items()}
        named |= on_context(node)
        kept = [
            (self.storages.saved(name, value), value) for name, value in named.items() if value is not None
        ]
        return kept, capabilities.overwritten(node)

    def _place(self, node: Any, call: Call | None) -> tuple[str, str]:
        if call is not None:
            return call.where, call.source
        return site_of_traceback(list(node.metadata.get("traceback_", ())))

    def _group(self, call: Call | None, record: RecordedAs | None) -> str | None:
        """The region of a call; an operator whose operations autograd records is one of its own."""
        if call is None:
            return None
        if call.operator is None or record is not None:
            return call.group
        if call.number not in self._of_calls:
            group = Group(f"o{call.number}", call.label, "operator", "operator", call.group)
            self._of_calls[call.number] = group
            self._groups.append(group)
        return self._of_calls[call.number].id


def _is_plain(value: Any) -> bool:
    try:
        return isinstance(value, Tensor) and value.storage_offset() >= 0
    except (NotImplementedError, RuntimeError):  # sparse, or a stand-in of a transform
        return False


def _kind(node: Any, record: RecordedAs | None, name: str) -> tuple[Kind, str]:
    if record is not None:
        return "operator", record.specification.name
    function = capabilities.forward_class(node)
    if function is not None or hasattr(node, "saved_tensors"):
        return "function", function.__name__ if function is not None else name.removesuffix("Backward")
    return "operation", name


def _forms(node: Any) -> tuple[Form, ...]:
    return tuple(
        Form(shape, str(dtype).removeprefix("torch."), str(device))
        for shape, dtype, device in capabilities.result_forms(node)
    )


def _rules(record: RecordedAs | None) -> tuple[tuple[str, str], ...]:
    """What computes the gradients of an operator's inputs."""
    if record is None:
        return ()
    rules = record.specification.gradients.rules
    return tuple(
        (
            f"gradient of {name}",
            f"formula, {short_place(rule.where)}" if isinstance(rule, Formula) else repr(rule),
        )
        for name in dict.fromkeys(label.partition("[")[0] for label in record.inputs)
        if (rule := rules.get(name)) is not None
    )


def _freed(name: str) -> errors.FreedGraphError:
    return errors.FreedGraphError(
        f"the graph was freed: what `{name}` kept for the backward is gone",
        expected="a graph that no `backward()` has run through",
        got="one whose saved tensors were freed",
        hint="draw before `backward()`, or call `backward(retain_graph=True)`; `memory=False` draws "
        "the nodes alone",
    )
