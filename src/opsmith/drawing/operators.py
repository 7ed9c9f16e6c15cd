"""Operator graphs: the reference on a call, the saved tensors, and the gradient formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan, backward_plan
from opsmith.core.formula import Formula
from opsmith.core.gradient_source import GradientSource, gradient_sources
from opsmith.core.gradients import NEEDED
from opsmith.core.location import short_location
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import ClassFormula
from opsmith.core.tensors import named_tensors, nested_tensors
from opsmith.drawing.builder import TensorNames, form_of
from opsmith.drawing.forward import CallGraphBuilder
from opsmith.drawing.graph import Graph, Group, Saved
from opsmith.drawing.grouping import without_empty
from opsmith.drawing.node_attributes import short_text
from opsmith.drawing.recording import Recording, preserved_state
from opsmith.drawing.subject import DrawnCall
from opsmith.torch_library import capabilities

REFERENCE, SAVED, BACKWARD = "reference", "saved", "backward"


def operator_graph(operator: Operator[..., Any], call: DrawnCall) -> Graph:
    """The graph of an operator on a call.

    The reference leads from inputs to results; the formulas lead from saved tensors and `grad_output` to the
    gradients of the inputs.
    """
    with preserved_state(None):
        return _OperatorGraphBuilder(operator, call).build()


class _OperatorGraphBuilder(CallGraphBuilder):
    def __init__(self, operator: Operator[..., Any], call: DrawnCall) -> None:
        super().__init__(TensorNames(), memory=False)
        self._operator = operator
        self._specification = operator.specification
        schema = self._specification.schema
        values = schema.call_values(call.args, call.kwargs)
        self._values: dict[str, Any] = dict(zip(schema.names, values, strict=True))
        self._notes: list[str] = []
        self._nodes_of: dict[str, list[tuple[Tensor, str]]] = {}

    def build(self) -> Graph:
        """Run the operator and its formulas, and return their graph."""
        specification = self._specification
        for name, value in self._values.items():
            self._nodes_of[name] = [
                (tensor, self.tensor(tensor, "input", label)) for label, tensor in named_tensors(value, name)
            ]
            for tensor, _ in self._nodes_of[name]:
                self.storages.own(tensor, "input", name)
        self._forward()
        sources = gradient_sources(specification, list(self._values.values()))
        by_autograd = {source for source in sources.values() if source.kind in ("ordinary", "kernel", "own")}
        for source in by_autograd:  # the same formula for every input
            self._answer("every input", source)
        if not by_autograd:
            self._backward(sources)
        graph = self.graph(specification.name, "operator", self._notes)
        return without_empty(replace(graph, memory=True))

    def _forward(self) -> None:
        """Record the reference and add its results; an operator without a torch reference is one node."""
        specification = self._specification
        others = tuple(
            (name, short_text(value))
            for name, value in self._values.items()
            if value is not None and not list(nested_tensors(value))
        )
        args, kwargs = specification.schema.split(list(self._values.values()))
        own = specification.origin.own("forward")
        if specification.opaque or own:
            returned, saved = self._call_operator(args, kwargs)
            label = "opaque" if specification.opaque else "its own kernel"
            if own and own.function:
                label = str(own)
            where = short_location(specification.where)
            added = self.node("operation", label, attributes=others, where=where, saved=saved)
            results = [result for result in specification.schema.results if not result.hidden]
            for name, each in self._nodes_of.items():
                for _, node in each:
                    self.edge(node, added, name)
            flat = returned if len(results) > 1 else (returned,)
            self._results(results, flat, lambda tensors: [added] * len(tensors))
            return
        title = short_location(specification.where)
        self.groups.append(Group(REFERENCE, specification.name, "operator", f"reference, {title}"))
        with Recording() as recording:
            returned = specification.reference(*args, **kwargs)
        results = list(specification.schema.results)
        flat = returned if len(results) > 1 else (returned,)
        self._results(results, flat, lambda tensors: self.add(recording, tensors, REFERENCE))
        if others:
            call = ", ".join(f"{name}={value}" for name, value in others)
            self._notes.append(f"on a call with {call}")

    def _call_operator(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Saved, ...]]:
        """Call the operator, and return its result with the tensors that an adopted class saves."""
        if self._specification.origin.kind != "class":
            with torch.no_grad():
                return self._operator(*args, **kwargs), ()
        leaves = [leaf for each in self._nodes_of.values() for leaf, _ in each if _differentiable(leaf)]
        try:
            for leaf in leaves:
                leaf.requires_grad_()
            returned = self._operator(*args, **kwargs)
            nodes = {id(each.grad_fn): each.grad_fn for each in nested_tensors(returned) if each.grad_fn}
            values = [pair for node in nodes.values() for pair in capabilities.saved_tensors(node).items()]
        finally:
            for leaf in leaves:
                leaf.requires_grad_(False)
        saved = [self.storages.saved(f"saved {name}", value) for name, value in values]
        return returned, tuple(saved)

    def _results(self, results: list[Any], values: Any, sources: Any) -> None:
        """Add a node for each result."""
        named = [
            (result, label, tensor)
            for result, value in zip(results, values, strict=True)
            for label, tensor in named_tensors(value, result.name)
        ]
        ends = sources([tensor for _, _, tensor in named])
        for (result, label, tensor), end in zip(named, ends, strict=True):
            hidden = (("hidden", "callers do not see it"),) * result.hidden
            added = self.node("output", label, forms=(form_of(tensor),), attributes=hidden)
            self.edge(end, added)
            self.storages.own(tensor, "intermediate" if result.hidden else "output", label)
            self._nodes_of.setdefault(result.name, []).append((tensor, added))

    def _backward(self, sources: Mapping[str, GradientSource]) -> None:
        specification = self._specification
        rules = specification.gradients
        names = frozenset(filter(rules.differentiable, specification.schema.tensor_names))
        plan = backward_plan(specification, names)
        self.groups.append(Group(BACKWARD, "backward", "part"))
        saved = self._saved_values(plan)
        done: list[Formula] = []
        for name, source in sources.items():
            if not list(nested_tensors(self._values[name])):
                continue
            rule = rules.rules.get(name)
            if isinstance(rule, Formula) and not isinstance(rule, ClassFormula):
                if rule not in done:
                    done.append(rule)
                    self._formula(rule, saved)
            else:
                self._answer(name, source)

    def _saved_values(self, plan: BackwardPlan) -> dict[str, Any]:
        """Add the saved tensors, and return all values by name, with an alias for each saved value."""
        found: dict[str, Any] = dict(self._values)
        if plan.saved:
            self.groups.append(Group(SAVED, "saved for the backward", "part"))
        for name in plan.saved:
            aliases = []
            pairs = self._nodes_of.get(name, ())
            for position, (tensor, node) in enumerate(pairs):
                label = f"{name}[{position}]" if len(pairs) > 1 else name
                alias = tensor.detach()
                saved = self.storages.saved(label, tensor)
                self.edge(
                    node, self.tensor(alias, "saved", label, group=SAVED, saved=(saved,)), "saved", "saved"
                )
                aliases.append(alias)
            if aliases:
                value = found.get(name)
                found[name] = aliases if isinstance(value, list | tuple) else aliases[0]
        return found

    def _formula(self, formula: Formula, saved: Mapping[str, Any]) -> None:
        """Record a formula on the saved tensors and a `grad_output` of ones."""
        schema = self._specification.schema
        number = len(self.groups)
        inputs = ", ".join(f"`{name}`" for name in formula.answers_for)
        label = f"gradient{'s' * (len(formula.answers_for) > 1)} of {inputs}".replace("`", "")
        group = Group(f"formula{number}", label, "part", short_location(formula.where), BACKWARD)
        self.groups.append(group)
        values: dict[str, Any] = {}
        for parameter in formula.parameters:
            if parameter in schema.gradient_position:
                values[parameter] = self._grad_output(parameter)
            elif parameter == NEEDED:
                values[parameter] = frozenset(formula.answers_for)
            elif parameter in schema.shapes:
                tensor = self._values[schema.shapes[parameter]]
                values[parameter] = None if tensor is None else tensor.shape
            else:
                values[parameter] = saved.get(parameter)
        given = {
            keyword: values[parameter]
            for keyword, parameter in zip(formula.keywords, formula.parameters, strict=True)
        }
        with torch.no_grad(), Recording() as recording:
            answer = formula.function(**given)
        answers = answer if formula.joint else {formula.answers_for[0]: answer}
        found = {name: dict(named_tensors(value, f"gradient of {name}")) for name, value in answers.items()}
        tensors = [tensor for each in found.values() for tensor in each.values()]
        ends = iter(self.add(recording, tensors, group.id) if tensors else [])
        for name, gradients in found.items():
            shapes = [tensor.shape for tensor, _ in self._nodes_of[name]]
            for position, (each, tensor) in enumerate(gradients.items()):
                end = next(ends)
                if position < len(shapes) and tensor.shape != shapes[position]:
                    tensor, end = self._fitted(tensor, shapes[position], end, group.id)
                self.edge(end, self.node("output", each, forms=(form_of(tensor),), group=BACKWARD))
            if not gradients:
                value = answers[name]
                self._answer(name, GradientSource("declared", "none" if value is None else repr(value)))

    def _fitted(self, grad: Tensor, shape: torch.Size, end: str, group: str) -> tuple[Tensor, str]:
        """Add the sum that opsmith computes if a gradient has the broadcast shape of its input."""
        fitted = grad.new_empty(shape)
        why = (("why", "the formula leaves out the sum over broadcast dimensions"),)
        label = "summed to the input"
        added = self.node("operation", label, forms=(form_of(fitted),), group=group, attributes=why)
        self.edge(end, added)
        return fitted, added

    def _grad_output(self, name: str) -> Tensor:
        """The gradient of a result: a tensor of ones, whose node all formulas share."""
        known = self._nodes_of.get(name)
        if known is None:
            result = next(each for each in self._specification.schema.results if each.gradient_name() == name)
            like = self._nodes_of[result.name][0][0]
            grad = torch.ones_like(like)
            known = self._nodes_of[name] = [(grad, self.tensor(grad, "input", name, group=BACKWARD))]
        return known[0][0]

    def _answer(self, name: str, source: GradientSource) -> None:
        """Add a gradient without a formula."""
        shown = replace(source, where=source.where and short_location(source.where))
        added = self.node("answer", f"gradient of {name}", attributes=(("is", str(shown)),))
        if source.runs_again:
            for node in self.nodes:
                if node.kind == "saved":
                    self.edge(node.id, added)


def _differentiable(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.requires_grad
