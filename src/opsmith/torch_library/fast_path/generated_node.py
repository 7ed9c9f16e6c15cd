"""An autograd node generated for one operator and one set of inputs that need gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.core.backward_plan import backward_plan
from opsmith.core.formula import Formula
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import CallMetadata, TensorMetadata, constant_results, fit
from opsmith.torch_library.autograd.node import RecordedOperator
from opsmith.torch_library.autograd.vjp import Vjp, note_formula, written_into
from opsmith.torch_library.fast_path.purity import CONTRACT_NAMES, ContractSource, never_writes
from opsmith.torch_library.flattening import ArgumentFlattening, ResultFlattening


@dataclass(frozen=True)
class NodeSignature:
    """Properties that all calls with one signature share.

    Args:
        kernel: The function that computes the result.
        examples: An empty tensor like each input that requires a gradient: rank, dtype, device.
        mixed: True if floating dtypes are mixed.
    """

    kernel: Callable[..., Any]
    examples: dict[str, Tensor]
    mixed: bool

    def key(self) -> tuple[Any, ...]:
        """The hashable identity of the signature."""
        examples = ((name, each.dtype, each.device) for name, each in self.examples.items())
        return self.kernel, self.mixed, *examples

    def gradient(self, name: str, shape: torch.Size) -> TensorMetadata:
        """Metadata that the gradient of an input must have."""
        example = self.examples[name]
        return TensorMetadata(shape, example.dtype, example.device)


class GeneratedNodes:
    """Generated nodes of an operator with one result, for one set of inputs that need gradients.

    Args:
        specification: The operator; each of the inputs has a formula.
        needed: The inputs.
        validate: Validates a result that failed the quick checks.
    """

    def __init__(
        self, specification: Specification, needed: frozenset[str], validate: Callable[..., Tensor]
    ) -> None:
        names = [name for name in specification.schema.tensor_names if name in needed]
        self._specification = specification
        self._source = _NodeSource(specification, names)
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
            **CONTRACT_NAMES,
            "_op_Function": torch.autograd.Function,
            "_op_Exception": Exception,
            "_op_kernel": signature.kernel,
            "_op_result_dtype": None,
            "_op_validate": self._validate,
            "_op_grad_enabled": torch.is_grad_enabled,
            "_op_compiling": torch.compiler.is_dynamo_compiling,
            "_op_autocast": capabilities.any_autocast,
            "_op_written": partial(_refuse_writes, specification, [*node_source.tensors, "grad"]),
        }
        full_backward = names["_op_full_backward"] = _full_backward(specification, node_source, signature)

        def first(context: Any, grad: Tensor) -> tuple[Any, ...]:
            """The backward until a call has shown that no formula writes to saved tensors."""
            gradients = full_backward(context, grad)
            if not torch.compiler.is_dynamo_compiling():  # a traced formula has not run
                self._mark_verified_pure()
            return gradients

        names["_op_first"] = first
        names["_op_floating"] = partial(_record_result_dtype, specification, names)
        for name, formula in node_source.formulas.items():
            names[f"_op_formula_{name}"] = formula.function
            names[f"_op_dtype_{name}"] = signature.examples[name].dtype
            names[f"_op_device_{name}"] = signature.examples[name].device
            names[f"_op_fit_{name}"] = partial(_fit, specification, name, formula, signature)
            names[f"_op_note_{name}"] = partial(note_formula, specification, formula)
        names["_op_same_gradients"] = lambda *tensors: False
        names["_op_update_guard"] = _GradientGuard(names)
        exec(
            node_source.source({name: example.device.type for name, example in signature.examples.items()}),
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


_DEVICE_PREDICATES = {"cpu": "is_cpu", "cuda": "is_cuda"}
"""Attributes that are quicker to read than the device."""


class _NodeSource:
    """The source of one node. Its own names begin with `_op_`, so that an argument may have any other."""

    def __init__(self, specification: Specification, needed: list[str]) -> None:
        self.specification = specification
        self.schema: Schema = specification.schema
        rules = specification.gradients.rules
        self.formulas = {name: rule for name in needed if isinstance(rule := rules[name], Formula)}
        used = {p for formula in self.formulas.values() for p in formula.parameters}
        saved = backward_plan(specification, frozenset(needed)).saved
        tensors = (*self.schema.tensor_names, *self.schema.result_position)
        self.tensors = [name for name in saved if name in tensors]
        self.values = [name for name in (*saved, *self.schema.shapes) if name in used.difference(tensors)]

    def local(self, name: str) -> str:
        """Name of an input, a result or a gradient in the source."""
        result = self.schema.results[0]
        return {result.name: "_op_result", result.gradient_name(): "_op_grad"}.get(name, name)

    def value(self, name: str) -> str:
        """Source of a value that is saved and not a tensor: an argument, or the shape of one."""
        tensor = self.schema.shapes.get(name)
        if tensor is None:
            return name
        optional = self.schema.by_name[tensor].kind.optional
        return f"({tensor}.shape if {tensor} is not None else None)" if optional else f"{tensor}.shape"

    def source(self, devices: dict[str, str]) -> str:
        """Source of the class, for inputs on these types of device."""
        arguments = ", ".join(self.schema.names)
        to_kernel = ", ".join(
            f"{each.name}={each.name}" if each.keyword_only else each.name for each in self.schema.arguments
        )
        contract = ContractSource(self.specification)
        before = "_op_before" if contract.may_write else "None"
        saved = [*map(self.local, self.tensors)]
        counts = capabilities.versions_source([*saved, "_op_grad"])
        may_write = not all(never_writes(formula.function) for formula in self.formulas.values())
        refuse_writes = f"if _op_before != {counts}: _op_written(_op_before, {counts})"
        shaped = [name for name in self.formulas if name not in self.tensors]
        shapes = [f"_op_shape_{name}" for name in shaped]
        kept = [*(f"{name}.shape" for name in shaped), *map(self.value, self.values)]
        formulas = "".join(self._call(name, formula) for name, formula in self.formulas.items())
        checks = [self._check(name, devices[name]) for name in self.formulas]
        guarded = not may_write and not shaped
        if guarded:
            # The guard cannot take nested tensors, which formulas that are proved pure cannot make.
            pairs = ", ".join(f"_op_d_{name}, {name}" for name in self.formulas)
            # The guard rejects tensors under autocast, so that autocast is checked behind it only.
            full_backward = "if _op_autocast(): return _op_full_backward(_op_ctx, _op_grad)"
            checks = [
                f"if not _op_same_gradients({pairs}):",
                *_indented([full_backward, *checks, f"_op_update_guard({pairs})"]),
            ]
        special = " or _op_autocast()" * (not guarded) + " or _op_grad.is_inference()" * may_write
        returned = _tuple(f"_op_d_{name}" if name in self.formulas else "None" for name in self.schema.names)
        return f"""
class {self.specification.short_name}(_op_Function):
    @staticmethod
    def forward(_op_ctx, {arguments}):
        {f"_op_before = {contract.before()}" if contract.may_write else ""}
        _op_result = _op_kernel({to_kernel})
        if not ({contract.held()}):
            _op_result = _op_validate(_op_kernel, _op_result, [{arguments}], {before})
        if _op_result.dtype is not _op_result_dtype:
            _op_floating(_op_result)
        _op_ctx.save_for_backward({", ".join(saved)})
        {f"_op_ctx.kept = {_tuple(kept)}" if kept else ""}
        return _op_result

    backward = staticmethod(_op_first)

    @staticmethod
    def fast_backward(_op_ctx, _op_grad):
        if _op_grad_enabled() or _op_compiling(){special}:
            return _op_full_backward(_op_ctx, _op_grad)
        {f"{_tuple(saved)} = _op_ctx.saved_tensors" if saved else ""}
        {f"{_tuple([*shapes, *self.values])} = _op_ctx.kept" if kept else ""}
        {f"_op_before = {counts}" if may_write else ""}
{formulas}
{"".join(f"{line}{chr(10)}" for line in _indented(_indented(checks)))}
        {refuse_writes if may_write else ""}
        return {returned}
"""

    def _call(self, name: str, formula: Formula) -> str:
        """Source of the call of one formula."""
        # A wrapped function may take its arguments in another order than its signature has.
        code = getattr(formula.function, "__code__", None)
        in_order = code is not None and code.co_varnames[: code.co_argcount] == formula.keywords
        arguments = ", ".join(
            self.local(parameter) if in_order else f"{keyword}={self.local(parameter)}"
            for keyword, parameter in zip(formula.keywords, formula.parameters, strict=True)
        )
        return f"""
        try:
            _op_d_{name} = _op_formula_{name}({arguments})
        except _op_Exception as _op_error:
            _op_note_{name}(_op_error)
            raise
"""

    def _check(self, name: str, device: str) -> str:
        """Source of the check of one gradient, which is fitted to its input if it does not match."""
        predicate = _DEVICE_PREDICATES.get(device, f"device == _op_device_{name}")
        # The shape of a saved tensor need not be saved.
        shape = f"{name}.shape" if name in self.tensors else f"_op_shape_{name}"
        plain = f"_op_type(_op_d_{name}) is _op_Tensor and _op_d_{name}.layout is _op_strided"
        fits = f"_op_d_{name}.dtype is _op_dtype_{name} and _op_d_{name}.{predicate}"
        condition = f"{plain} and {fits} and _op_d_{name}.shape == {shape}"
        return f"if not ({condition}): _op_d_{name} = _op_fit_{name}(_op_d_{name}, {shape})"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"


def _fit(
    specification: Specification,
    name: str,
    formula: Formula,
    signature: NodeSignature,
    gradient: Any,
    shape: torch.Size,
) -> Tensor:
    """Fit a gradient to its input."""
    return fit(
        gradient,
        signature.gradient(name, shape),
        label=name,
        operator=specification.name,
        formula=formula,
        mixed=signature.mixed,
    )


def _refuse_writes(
    specification: Specification, names: list[str], before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    """Raise an error that names the tensor that a formula wrote to, and the formulas that use it."""
    grad = specification.schema.results[0].gradient_name()
    name = next(each for each, old, new in zip(names, before, after, strict=True) if old != new)
    meaning = grad if name == "grad" else name
    rules = [rule for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    raise written_into(specification, [rule for rule in rules if meaning in rule.parameters], name)


def _record_result_dtype(specification: Specification, names: dict[str, Any], result: Tensor) -> None:
    """Refuse a result that can have no gradient; record the dtype of one that can."""
    constant_results(
        ResultFlattening(specification.schema, (None,)),
        specification,
        backward_plan(specification, frozenset(specification.schema.names)),
        [result],
    )
    names["_op_result_dtype"] = result.dtype


def _full_backward(
    specification: Specification, node_source: _NodeSource, signature: NodeSignature
) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """The backward of `OperatorNode`, for a generated node: with all checks, and with a graph."""
    schema = specification.schema
    with_shape = set(schema.shapes.values())
    flattening = ArgumentFlattening(schema, (None,) * len(schema.arguments))
    result_flattening = ResultFlattening(schema, (None,))
    plan = backward_plan(specification, frozenset(node_source.formulas))
    differentiable = specification.gradients.differentiable
    constants = [
        name for name in node_source.tensors if name in schema.tensor_names and not differentiable(name)
    ]

    def full_backward(context: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = dict(zip(node_source.tensors, context.saved_tensors, strict=True))
        for name in constants:  # they have no second order
            saved[name] = None if saved[name] is None else saved[name].detach()
        sizes = {name: saved[name].shape for name in node_source.formulas if name in saved}
        shaped = [name for name in node_source.formulas if name not in saved]
        kept = context.kept if shaped or node_source.values else ()
        sizes.update(zip(shaped, kept, strict=False))
        saved.update(zip(node_source.values, kept[len(shaped) :], strict=True))
        inputs = tuple(
            signature.gradient(name, sizes[name]) if name in sizes else None for name in schema.names
        )
        shapes = tuple(saved.get(f"{name}_shape") if name in with_shape else None for name in schema.names)
        every = CallMetadata(inputs, shapes, (TensorMetadata.of(grad),), signature.mixed)
        gradients = tuple(
            Vjp(specification, plan, flattening, result_flattening, every, None)(saved, (grad,))
        )
        return gradients

    return full_backward
