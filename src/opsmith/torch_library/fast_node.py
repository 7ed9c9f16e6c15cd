"""An autograd node written out for one operator and the inputs that need gradients: it calls formulas."""

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
from opsmith.torch_library.backward import Vjp, note_formula, written_into
from opsmith.torch_library.contract_source import CONTRACT_NAMES, ContractSource
from opsmith.torch_library.differentiation import constant_results
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.gradient_values import Form, fit
from opsmith.torch_library.recorded_as import RecordedAs
from opsmith.torch_library.result_flattening import ResultFlattening
from opsmith.torch_library.targets import Forms
from opsmith.torch_library.unwritten import never_writes


@dataclass(frozen=True)
class CallForm:
    """What is the same for all calls of one form.

    Args:
        kernel: What computes the result.
        examples: An empty tensor like each input that requires a gradient: rank, dtype, device.
        mixed: Whether floating dtypes are mixed.
    """

    kernel: Callable[..., Any]
    examples: dict[str, Tensor]
    mixed: bool

    def key(self) -> tuple[Any, ...]:
        """What tells the form from others."""
        examples = ((name, each.dtype, each.device) for name, each in self.examples.items())
        return self.kernel, self.mixed, *examples

    def gradient(self, name: str, shape: torch.Size) -> Form:
        """What a gradient of an input must look like."""
        example = self.examples[name]
        return Form(shape, example.dtype, example.device)


class FastNode:
    """The nodes of an operator with one result, for calls in which these inputs need gradients.

    Args:
        specification: The operator; each of the inputs has a formula.
        needed: The inputs.
        settled: Holds a result that does not look right to the whole contract.
    """

    def __init__(
        self, specification: Specification, needed: frozenset[str], settled: Callable[..., Tensor]
    ) -> None:
        names = [name for name in specification.schema.tensor_names if name in needed]
        self._specification = specification
        self._writing = _Writing(specification, names)
        self._settled = settled
        self._classes: dict[Any, Any] = {}
        self._proven = False

    def of(self, form: CallForm) -> Any:
        """The class of the node for calls of this form: made once, however often the form comes."""
        key = form.key()
        if key not in self._classes:
            self._classes[key] = self._write(form)
            if self._proven:
                _go_on(self._classes[key])
        return self._classes[key]

    def _write(self, form: CallForm) -> Any:
        specification, writing = self._specification, self._writing
        names: dict[str, Any] = {
            **CONTRACT_NAMES,
            "_op_Function": torch.autograd.Function,
            "_op_Exception": Exception,
            "_op_kernel": form.kernel,
            "_op_result_dtype": None,
            "_op_settle": self._settled,
            "_op_grad_enabled": torch.is_grad_enabled,
            "_op_compiling": torch.compiler.is_dynamo_compiling,
            "_op_autocast": capabilities.any_autocast,
            "_op_written": partial(_refuse_writes, specification, [*writing.tensors, "grad"]),
        }
        in_full = names["_op_in_full"] = _in_full(specification, writing, form)

        def first(context: Any, grad: Tensor) -> tuple[Any, ...]:
            """The backward until one has shown that no formula writes into what is saved."""
            gradients = in_full(context, grad)
            if not torch.compiler.is_dynamo_compiling():  # what is traced has not run
                self._prove()
            return gradients

        names["_op_first"] = first
        names["_op_floating"] = partial(_note_floating, specification, names)
        for name, formula in writing.formulas.items():
            names[f"_op_formula_{name}"] = formula.function
            names[f"_op_dtype_{name}"] = form.examples[name].dtype
            names[f"_op_device_{name}"] = form.examples[name].device
            names[f"_op_fit_{name}"] = partial(_fit, specification, name, formula, form)
            names[f"_op_note_{name}"] = partial(note_formula, specification, formula)
        names["_op_same"] = lambda *tensors: False
        names["_op_remember"] = _Remembering(names)
        exec(writing.source({name: example.device.type for name, example in form.examples.items()}), names)
        node = names[specification.short_name]
        node.recorded_as = RecordedAs(specification, tuple(writing.tensors))
        return node

    def _prove(self) -> None:
        """From now on each class runs the backward that does not look for writes once more."""
        self._proven = True
        for node in self._classes.values():
            _go_on(node)


def _go_on(node: Any) -> None:
    """Let a node run its later backward."""
    node.backward = node.later
    capabilities.direct_backward(node, node.later)


class _Remembering:
    """Lets a node ask whether the gradients are of the form that they had the last time.

    Args:
        names: What the node's source names.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._left = 32  # where shapes change with each call, nothing is gained

    def __call__(self, *tensors: Tensor) -> None:
        """Ask for tensors like these from now on."""
        if self._left:
            self._left -= 1
            self._names["_op_same"] = capabilities.tensor_guard(tensors, sizes=True)


_DEVICE_QUESTIONS = {"cpu": "is_cpu", "cuda": "is_cuda"}
"""What is quicker to ask than the device."""


class _Writing:
    """The source of one node. Its own names begin with `_op_`, so that an argument may have any other."""

    def __init__(self, specification: Specification, needed: list[str]) -> None:
        self.specification = specification
        self.schema: Schema = specification.schema
        rules = specification.gradients.rules
        self.formulas = {name: rule for name in needed if isinstance(rule := rules[name], Formula)}
        used = {p for formula in self.formulas.values() for p in formula.parameters}
        used -= set(self.schema.gradient_position)
        known = (*self.schema.names, *self.schema.result_position, *self.schema.shapes)
        named = [name for name in known if name in used]
        tensors = (*self.schema.tensor_names, *self.schema.result_position)
        self.tensors = [name for name in named if name in tensors]
        self.values = [name for name in named if name not in tensors]

    def local(self, name: str) -> str:
        """How the source calls an input, a result or a gradient."""
        result = self.schema.results[0]
        return {result.name: "_op_result", result.gradient_name(): "_op_grad"}.get(name, name)

    def value(self, name: str) -> str:
        """What is kept under a name that stands for no tensor: an argument, or the shape of one."""
        tensor = self.schema.shapes.get(name)
        if tensor is None:
            return name
        optional = self.schema.by_name[tensor].kind.optional
        return f"({tensor}.shape if {tensor} is not None else None)" if optional else f"{tensor}.shape"

    def source(self, devices: dict[str, str]) -> str:
        """The class, for inputs on these types of device."""
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
        looks = [self._look(name, devices[name]) for name in self.formulas]
        guarded = not may_write and not shaped
        if guarded:
            # Formulas that are seen to write nowhere make no nested tensor, which could not be asked this.
            pairs = ", ".join(f"_op_d_{name}, {name}" for name in self.formulas)
            # Under autocast tensors are of another form, so that it need not be asked for each time.
            in_full = "if _op_autocast(): return _op_in_full(_op_ctx, _op_grad)"
            looks = [f"if not _op_same({pairs}):", *_indented([in_full, *looks, f"_op_remember({pairs})"])]
        special = " or _op_autocast()" * (not guarded) + " or _op_grad.is_inference()" * may_write
        returned = _tuple(f"_op_d_{name}" if name in self.formulas else "None" for name in self.schema.names)
        return f"""
class {self.specification.short_name}(_op_Function):
    @staticmethod
    def forward(_op_ctx, {arguments}):
        {f"_op_before = {contract.before()}" if contract.may_write else ""}
        _op_result = _op_kernel({to_kernel})
        if not ({contract.held()}):
            _op_result = _op_settle(_op_kernel, _op_result, [{arguments}], {before})
        if _op_result.dtype is not _op_result_dtype:
            _op_floating(_op_result)
        _op_ctx.save_for_backward({", ".join(saved)})
        {f"_op_ctx.kept = {_tuple(kept)}" if kept else ""}
        return _op_result

    backward = staticmethod(_op_first)

    @staticmethod
    def later(_op_ctx, _op_grad):
        if _op_grad_enabled() or _op_compiling(){special}:
            return _op_in_full(_op_ctx, _op_grad)
        {f"{_tuple(saved)} = _op_ctx.saved_tensors" if saved else ""}
        {f"{_tuple([*shapes, *self.values])} = _op_ctx.kept" if kept else ""}
        {f"_op_before = {counts}" if may_write else ""}
{formulas}
{"".join(f"{line}{chr(10)}" for line in _indented(_indented(looks)))}
        {refuse_writes if may_write else ""}
        return {returned}
"""

    def _call(self, name: str, formula: Formula) -> str:
        """The call of one formula."""
        # The order that a signature tells is the one of a call only where nothing is wrapped.
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

    def _look(self, name: str, device: str) -> str:
        """A look at one gradient, which is made to fit its input if it does not."""
        asked = _DEVICE_QUESTIONS.get(device, f"device == _op_device_{name}")
        # A tensor that is saved has its shape with it.
        shape = f"{name}.shape" if name in self.tensors else f"_op_shape_{name}"
        plain = f"_op_type(_op_d_{name}) is _op_Tensor and _op_d_{name}.layout is _op_strided"
        fits = f"_op_d_{name}.dtype is _op_dtype_{name} and _op_d_{name}.{asked}"
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
    form: CallForm,
    gradient: Any,
    shape: torch.Size,
) -> Tensor:
    """Make an answer that is not of its input's form fit it."""
    return fit(
        gradient,
        form.gradient(name, shape),
        label=name,
        operator=specification.name,
        formula=formula,
        mixed=form.mixed,
    )


def _refuse_writes(
    specification: Specification, names: list[str], before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    """Name the tensor that a formula wrote into, and the formulas that have it."""
    grad = specification.schema.results[0].gradient_name()
    name = next(each for each, old, new in zip(names, before, after, strict=True) if old != new)
    meaning = grad if name == "grad" else name
    rules = [rule for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    raise written_into(specification, [rule for rule in rules if meaning in rule.parameters], name)


def _note_floating(specification: Specification, names: dict[str, Any], result: Tensor) -> None:
    """Refuse a result that can have no gradient; let the node know the dtype of one that can."""
    constant_results(
        ResultFlattening(specification.schema, (None,)),
        specification,
        backward_plan(specification, frozenset(specification.schema.names)),
        [result],
    )
    names["_op_result_dtype"] = result.dtype


def _in_full(
    specification: Specification, writing: _Writing, form: CallForm
) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """The backward of the general node, for one that builds a graph of its own."""
    schema = specification.schema
    with_shape = set(schema.shapes.values())
    flattening = Flattening(schema, (None,) * len(schema.arguments))
    lying = ResultFlattening(schema, (None,))
    plan = backward_plan(specification, frozenset(writing.formulas))
    # What it looks up is kept: a compiled backward cannot pass the lock of a cached property.
    flattening.needed((False,) * len(schema.arguments))
    differentiable = specification.gradients.differentiable
    constants = [name for name in writing.tensors if name in schema.tensor_names and not differentiable(name)]

    def in_full(context: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = dict(zip(writing.tensors, context.saved_tensors, strict=True))
        for name in constants:  # a second order goes through none of them
            saved[name] = None if saved[name] is None else saved[name].detach()
        sizes = {name: saved[name].shape for name in writing.formulas if name in saved}
        shaped = [name for name in writing.formulas if name not in saved]
        kept = context.kept if shaped or writing.values else ()
        sizes.update(zip(shaped, kept, strict=False))
        saved.update(zip(writing.values, kept[len(shaped) :], strict=True))
        inputs = tuple(form.gradient(name, sizes[name]) if name in sizes else None for name in schema.names)
        shapes = tuple(saved.get(f"{name}_shape") if name in with_shape else None for name in schema.names)
        every = Forms(inputs, shapes, (Form.of(grad),), form.mixed)
        gradients = tuple(Vjp(specification, plan, flattening, lying, every, None)(saved, (grad,)))
        return gradients

    return in_full
