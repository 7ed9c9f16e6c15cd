"""An autograd node generated for one operator and one set of inputs that need gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.core.formula import Formula
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.formula_rule import RecordedOperator
from opsmith.torch_library.autograd.gradient_values import CallMetadata, TensorMetadata, constant_results, fit
from opsmith.torch_library.autograd.vjp import (
    Vjp,
    formula_answers,
    list_answers,
    note_formula,
    written_into,
)
from opsmith.torch_library.fast_path.node_source import NodeSource
from opsmith.torch_library.fast_path.purity import ContractSource
from opsmith.torch_library.flattening import ArgumentFlattening, ResultFlattening


@dataclass(frozen=True)
class NodeSignature:
    """Properties that all calls with one signature share.

    Args:
        kernel: The function that computes the results.
        in_cpp: True if it is in C++, and returns new tensors by itself.
        examples: An empty tensor like each tensor that needs a gradient, by its name in the source: rank,
            dtype, device.
        mixed: True if floating dtypes are mixed.
    """

    kernel: Callable[..., Any]
    in_cpp: bool
    examples: dict[str, Tensor]
    mixed: bool

    def key(self) -> tuple[Any, ...]:
        """The hashable identity of the signature."""
        examples = ((name, each.dtype, each.device) for name, each in self.examples.items())
        return self.kernel, self.in_cpp, self.mixed, *examples

    def gradient(self, item: str, shape: torch.Size) -> TensorMetadata:
        """Metadata that the gradient of a tensor must have."""
        example = self.examples[item]
        return TensorMetadata(shape, example.dtype, example.device)


class GeneratedNodes:
    """Generated nodes of an operator, for one set of tensors that need gradients.

    Args:
        specification: The operator; each of the tensors has a formula, or is declared zero.
        needed: The tensors, by their names in the source.
        lengths: The lengths of lists of tensors.
        validate: Validates results that failed the quick checks, and returns all of them in a tuple.
    """

    def __init__(
        self,
        specification: Specification,
        needed: Collection[str],
        lengths: Mapping[str, int],
        validate: Callable[..., Any],
    ) -> None:
        self._specification, self._lengths = specification, lengths
        self._source = NodeSource(specification, needed, lengths)
        self._validate = validate
        self._classes: dict[Any, Any] = {}
        self._verified_pure = False

    def of(self, signature: NodeSignature) -> Any:
        """The node class for calls with this signature, made once."""
        key = signature.key()
        if key not in self._classes:
            self._classes[key] = self._write(signature)
            if self._verified_pure:
                _use_fast_backward(self._classes[key])
        return self._classes[key]

    def _write(self, signature: NodeSignature) -> Any:
        specification, node_source = self._specification, self._source
        names: dict[str, Any] = {
            **ContractSource(specification).names,
            "_op_Function": torch.autograd.Function,
            "_op_Exception": Exception,
            "_op_kernel": signature.kernel,
            "_op_in_cpp": signature.in_cpp,
            "_op_reference": specification.reference,
            **{f"_op_result_dtype_{at}": None for at in node_source.results_with_gradient},
            "_op_validate": self._validate,
            "_op_grad_enabled": torch.is_grad_enabled,
            "_op_compiling": torch.compiler.is_dynamo_compiling,
            "_op_autocast": capabilities.any_autocast,
            "_op_zeros": lambda *metadata: TensorMetadata(*metadata).zeros(),
            "_op_written": partial(_refuse_writes, specification, node_source.read),
        }
        full_backward = names["_op_full_backward"] = _full_backward(
            specification, node_source, signature, self._lengths
        )

        def first(context: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            """The backward until a call has shown that no formula writes to saved tensors."""
            gradients = full_backward(context, *grads)
            if not torch.compiler.is_dynamo_compiling():  # a traced formula has not run
                self._mark_verified_pure()
            return gradients

        names["_op_first"] = first
        names["_op_floating"] = partial(_record_result_dtypes, specification, node_source, names)
        for formula, inputs in node_source.formulas:
            first_input = inputs[0]
            names[f"_op_formula_{first_input}"] = formula.function
            names[f"_op_needed_{first_input}"] = frozenset(inputs)
            names[f"_op_answers_{first_input}"] = partial(_answers, specification, formula, inputs)
            names[f"_op_note_{first_input}"] = partial(note_formula, specification, formula)
            for name in inputs:
                count = len(node_source.items[name])
                names[f"_op_items_{name}"] = partial(_items, specification, formula, name, count)
                for item in node_source.items[name]:
                    label = node_source.label(item)
                    names[f"_op_fit_{item}"] = partial(_fit, specification, item, label, formula, signature)
        for item in node_source.inputs:
            names[f"_op_zeros_{item}"] = partial(_zeros, item, signature)
            names[f"_op_dtype_{item}"] = signature.examples[item].dtype
            names[f"_op_device_{item}"] = signature.examples[item].device
        names["_op_same_gradients"] = lambda *tensors: False
        names["_op_update_guard"] = _GradientGuard(names)
        exec(
            node_source.source({item: example.device.type for item, example in signature.examples.items()}),
            names,
        )
        node = names[specification.short_name]
        node.recorded_operator = RecordedOperator(specification, tuple(node_source.tensors))
        return node

    def _mark_verified_pure(self) -> None:
        """Switch all classes to the fast backward, since no formula writes to saved tensors."""
        self._verified_pure = True
        for node in self._classes.values():
            _use_fast_backward(node)


def _use_fast_backward(node: Any) -> None:
    """Switch a node to its fast backward."""
    node.backward = node.fast_backward
    capabilities.direct_backward(node, node.fast_backward)


class _GradientGuard:
    """Updates the guard by which a node recognises gradients with the metadata of the last ones.

    Args:
        names: Globals of the node's source.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._left = 32  # no gain where shapes change with each call

    def __call__(self, *tensors: Tensor) -> None:
        """Guard on tensors like these from now on."""
        if self._left:
            self._left -= 1
            self._names["_op_same_gradients"] = capabilities.tensor_guard(tensors, sizes=True)


def _items(
    specification: Specification, formula: Formula, name: str, count: int, answer: Any
) -> Sequence[Any]:
    """The gradients of the tensors of a list."""
    return list_answers(specification, formula, name, answer, count)


def _fit(
    specification: Specification,
    item: str,
    label: str,
    formula: Formula,
    signature: NodeSignature,
    gradient: Any,
    shape: torch.Size,
) -> Tensor:
    """Fit a gradient to its input."""
    return fit(
        gradient,
        signature.gradient(item, shape),
        label=label,
        operator=specification.name,
        formula=formula,
        mixed=signature.mixed,
    )


def _zeros(item: str, signature: NodeSignature, shape: torch.Size) -> Tensor:
    """A gradient that is zero."""
    return signature.gradient(item, shape).zeros()


def _answers(specification: Specification, formula: Formula, inputs: list[str], answer: Any) -> list[Any]:
    """The gradients that a joint formula returned, in order."""
    answers = formula_answers(specification, formula, answer, inputs)
    return [answers[name] for name in inputs]


def _refuse_writes(
    specification: Specification, names: list[str], before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    """Raise an error that names the tensor that a formula wrote to, and the formulas that use it."""
    name = next(each for each, old, new in zip(names, before, after, strict=True) if old != new)
    rules = [rule for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    formulas = list(dict.fromkeys(rule for rule in rules if name in rule.parameters))
    raise written_into(specification, formulas, name)


def _record_result_dtypes(
    specification: Specification, node_source: NodeSource, names: dict[str, Any], results: list[Tensor]
) -> None:
    """Refuse results without a gradient of which a formula takes one; record the dtypes of others."""
    constant_results(
        ResultFlattening(specification.schema, (None,) * len(results)),
        specification,
        node_source.plan,
        results,
    )
    for position in node_source.results_with_gradient:
        names[f"_op_result_dtype_{position}"] = results[position].dtype


def _full_backward(
    specification: Specification,
    node_source: NodeSource,
    signature: NodeSignature,
    lengths: Mapping[str, int],
) -> Callable[..., tuple[Any, ...]]:
    """The backward of `FormulaRule`, for a generated node: with all checks, and with a graph."""
    schema = specification.schema
    flattening = ArgumentFlattening(schema, [lengths.get(name) for name in schema.names])
    result_flattening = ResultFlattening(schema, (None,) * len(schema.results))
    differentiable = specification.gradients.differentiable
    every = [(name, item) for name, items in node_source.items.items() for item in items]
    constants = [item for name, item in every if item in node_source.saved and not differentiable(name)]
    shapes_of = {tensor: shape for shape, tensor in schema.shapes.items()}

    def full_backward(context: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(every)
        saved: dict[str, Any] = dict(zip(node_source.saved, context.saved_tensors, strict=True))
        for item in constants:  # they have no second order
            saved[item] = None if saved[item] is None else saved[item].detach()
        kept = iter(getattr(context, "kept", ()))
        sizes = {item: saved[item].shape for item in node_source.inputs if item in saved}
        sizes.update((item, next(kept)) for item in node_source.shaped)
        values: dict[str, Any] = {
            name: [saved[item] for item in node_source.lists[name]]
            if name in node_source.lists
            else saved[node_source.local(name)]
            for name in node_source.tensors
        }
        values.update((name, next(kept)) for name in node_source.values)
        results = [None if grad is None else TensorMetadata.of(grad) for grad in grads]
        for position in node_source.filled:
            results[position] = TensorMetadata(*next(kept))
        inputs = tuple(signature.gradient(item, sizes[item]) if item in sizes else None for _, item in every)
        shapes = tuple(values.get(shapes_of[name]) if name in shapes_of else None for name, _ in every)
        metadata = CallMetadata(inputs, shapes, tuple(results), signature.mixed)
        vjp = Vjp(specification, node_source.plan, flattening, result_flattening, metadata, None)
        return tuple(vjp(values, grads))

    return full_backward
