"""Autograd graphs: the nodes that lead to some tensors, and the tensors that the nodes save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.formula import Formula
from opsmith.core.location import short_location, shown_line, user_line_of_traceback
from opsmith.drawing.builder import GraphBuilder, TensorNames, form_of
from opsmith.drawing.graph import Form, Graph, Group, Kind, Saved
from opsmith.drawing.grouping import nested
from opsmith.drawing.node_attributes import context_tensors, leaf_of, recorded_attributes, saved_values
from opsmith.drawing.recording import RecordedCall, Recording
from opsmith.drawing.subject import Options
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import RecordedOperator, recorded_operator


def autograd_graph(
    outputs: Mapping[str, Tensor],
    names: TensorNames,
    options: Options,
    title: str,
    recording: Recording | None = None,
) -> Graph:
    """Return the autograd graph of some tensors.

    Args:
        outputs: The tensors, by name.
        names: Names of further tensors. options: The options; tensors that operators and Functions save
            always have a node. title: The title if the options have none. recording: The calls that created
            the graph; None if they were not recorded.

    Raises:
        NoGraphError: If a tensor has no graph.
        FreedGraphError: If the saved tensors were freed.
    """
    for name, tensor in outputs.items():
        refuse_without_graph(tensor, name)
    builder = _AutogradGraphBuilder(names, options, recording)
    for name, tensor in outputs.items():
        names.add(name, tensor, "output")
    order = ordered([tensor.grad_fn for tensor in outputs.values()])
    names.own(builder.storages)
    builder.own_leaves(order)
    names.own(builder.storages, computed=True)
    for node in order:
        builder.add(node)
    for name, tensor in outputs.items():
        builder.add_output(name, tensor)
    return nested(builder.graph(options.title or title, "autograd", builder.notes()))


def refuse_without_graph(tensor: Tensor, name: str) -> None:
    """Raise an error for a tensor without a `grad_fn`.

    Raises:
        NoGraphError: If it has none.
    """
    if tensor.grad_fn is not None:
        return
    leaf = tensor.requires_grad
    raise errors.NoGraphError(
        f"`{name}` has no graph: "
        + (
            "it is a leaf, not the result of a computation"
            if leaf
            else "none of its inputs requires a gradient"
        ),
        argument=name,
        expected="a tensor with a `grad_fn`",
        got=f"{form_of(tensor)}, requires_grad={leaf}",
        hint="draw a result that is computed from it"
        if leaf
        else "call `requires_grad_()` on an input before the computation, and leave `torch.no_grad()` "
        "and `detach()` out",
    )


def ordered(roots: Sequence[Any]) -> list[Any]:
    """All nodes behind the roots, in topological order."""
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


class _AutogradGraphBuilder(GraphBuilder):
    """Builder of an autograd graph. The caller keeps autograd's nodes alive, so that their `id` is unique."""

    def __init__(self, names: TensorNames, options: Options, recording: Recording | None) -> None:
        super().__init__(names, memory=options.memory)
        self._show_saved, self._recording = options.show_saved, recording
        self.groups += recording.groups if recording is not None else []
        self._ids: dict[int, str] = {}
        self._tensors: dict[Any, str] = {}
        self._of_calls: dict[int, Group] = {}

    def notes(self) -> list[str]:
        """Notes about saved tensors that were modified in place."""
        broken = dict.fromkeys(node.label for node in self.nodes if node.overwritten)
        return (
            [f"tensors that {', '.join(broken)} saved were modified later: a backward raises"]
            if broken
            else []
        )

    def own_leaves(self, order: Sequence[Any]) -> None:
        """Register the leaves as owners of their storages, before any node saves them."""
        for node in order:
            leaf = leaf_of(node)
            if leaf is not None:
                owner = self.names.of(leaf)
                self.storages.own(leaf, owner.role, owner.name)

    def add(self, node: Any) -> None:
        """Add one of autograd's nodes, and the edges that lead to it."""
        name = type(node).__name__
        leaf = leaf_of(node)
        if leaf is not None:
            source = self._leaf(leaf)
            added = self.node("accumulate", name, forms=(form_of(leaf),), recorded=name)
            self._ids[id(node)] = added
            self.edge(source, added)
            return
        record = recorded_operator(node)
        call = self._recording.call_of(node) if self._recording is not None else None
        where, source_line = self._location(node, call)
        kind, label = _kind(node, record, name)
        saved, overwritten = self._saved(node, record)
        added = self.node(
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
        self._ids[id(node)] = added
        labels = iter(record.inputs if record is not None else ())
        for behind, _ in node.next_functions:
            if behind is not None:
                self.edge(self._ids[id(behind)], added, next(labels, ""))
        if self._show_saved or kind in ("operator", "function"):
            for each, value in saved:
                self.edge(self._saved_node(each, value), added, each.name, "saved")

    def add_output(self, name: str, tensor: Tensor) -> None:
        """Add an output tensor and, if it is a view, its base."""
        added = self.node("output", name, forms=(form_of(tensor),))
        self.edge(self._ids[id(tensor.grad_fn)], added)
        base = capabilities.viewed(tensor)
        if base is None:
            return
        known = self._tensors.get(id(base))
        if known is None:
            label = self.names.of(base).name if base in self.names else "base"
            known = self.node("base", label, forms=(form_of(base),))
            self._tensors[id(base)] = known
            if base.grad_fn is not None and id(base.grad_fn) in self._ids:
                self.edge(self._ids[id(base.grad_fn)], known)
        self.edge(known, added, "view of", "view")

    def _leaf(self, leaf: Tensor) -> str:
        if id(leaf) not in self._tensors:
            owner = self.names.of(leaf)
            kind: Kind = "parameter" if owner.role == "parameter" else "input"
            added = self.node(kind, owner.name, forms=(form_of(leaf),))
            self._tensors[id(leaf)] = added
        return self._tensors[id(leaf)]

    def _saved_node(self, saved: Saved, value: Any) -> str:
        """Return the node of a saved tensor: a leaf's node, or the node shared by all that save this view."""
        if id(value) in self._tensors:
            return self._tensors[id(value)]
        key = (
            (saved.storage, saved.form, value.stride(), value.storage_offset()) if _is_plain(value) else saved
        )
        if key not in self._tensors:
            kinds: dict[str, Kind] = {"parameter": "parameter", "input": "input", "buffer": "buffer"}
            kind = kinds.get(saved.role, "saved")
            forms = (saved.form,) if saved.form is not None else ()
            added = self.node(kind, saved.of or saved.name, forms=forms)
            self._tensors[key] = added
        return self._tensors[key]

    def _saved(self, node: Any, record: RecordedOperator | None) -> tuple[list[tuple[Saved, Any]], bool]:
        """Return the tensors that a node saved, with their values, and True if one was modified in place."""
        if not self.memory:
            return [], False
        values = saved_values(node)
        if values is None:
            raise _freed(type(node).__name__)
        if record is not None and len(record.saved) == len(values):
            values = dict(zip(record.saved, values.values(), strict=True))
        named = {f"saved {name}" if name.isdigit() else name: value for name, value in values.items()}
        named |= context_tensors(node)
        saved = [
            (self.storages.saved(name, value), value) for name, value in named.items() if value is not None
        ]
        return saved, capabilities.overwritten(node)

    def _location(self, node: Any, call: RecordedCall | None) -> tuple[str, str]:
        if call is not None:
            return call.where, call.source
        return shown_line(user_line_of_traceback("\n".join(node.metadata.get("traceback_", ()))))

    def _group(self, call: RecordedCall | None, record: RecordedOperator | None) -> str | None:
        """Return the group of a call; an operator whose operations autograd records is itself a group."""
        if call is None:
            return None
        if call.operator is None or record is not None:
            return call.group
        if call.number not in self._of_calls:
            group = Group(f"o{call.number}", call.label, "operator", "operator", call.group)
            self._of_calls[call.number] = group
            self.groups.append(group)
        return self._of_calls[call.number].id


def _is_plain(value: Any) -> bool:
    try:
        return isinstance(value, Tensor) and value.storage_offset() >= 0
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a tensor of a transform
        return False


def _kind(node: Any, record: RecordedOperator | None, name: str) -> tuple[Kind, str]:
    if record is not None:
        return "operator", record.specification.name
    function = capabilities.forward_class(node)
    if function is not None or hasattr(node, "saved_tensors"):
        return "function", function.__name__ if function is not None else name.removesuffix("Backward")
    return "operation", name


def _forms(node: Any) -> tuple[Form, ...]:
    return tuple(
        Form(shape, str(dtype).removeprefix("torch."), str(device))
        for shape, dtype, device in capabilities.result_metadata(node)
    )


def _rules(record: RecordedOperator | None) -> tuple[tuple[str, str], ...]:
    """Return the rule for the gradient of each input of an operator."""
    if record is None:
        return ()
    rules = record.specification.gradients.rules
    return tuple(
        (
            f"gradient of {name}",
            f"formula, {short_location(rule.where)}" if isinstance(rule, Formula) else repr(rule),
        )
        for name in dict.fromkeys(label.partition("[")[0] for label in record.inputs)
        if (rule := rules.get(name)) is not None
    )


def _freed(name: str) -> errors.FreedGraphError:
    return errors.FreedGraphError(
        f"the graph was freed: the tensors that `{name}` saved are gone",
        expected="a graph before its `backward()`",
        got="a graph whose saved tensors were freed",
        hint="draw before `backward()`, or call `backward(retain_graph=True)`; `memory=False` draws "
        "the nodes alone",
    )
