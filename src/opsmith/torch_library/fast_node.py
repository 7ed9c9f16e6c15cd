"""An autograd node written out for one operator: it calls the formulas needed and looks at their answers."""

from __future__ import annotations

from collections.abc import Callable
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
from opsmith.torch_library.differentiation import constant_results
from opsmith.torch_library.effects import settle
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.gradient_values import Form, fit
from opsmith.torch_library.targets import Forms, mixes_dtypes


def fast_node(specification: Specification, kernel: Callable[..., Any]) -> Any:
    """Write the node of an operator with one result and a formula for every tensor; None for any other.

    Args:
        specification: The operator.
        kernel: What computes the result.
    """
    rules = specification.gradients.rules
    formulas = {
        name: rule
        for name in specification.schema.tensor_names
        if isinstance(rule := rules.get(name), Formula) and not rule.joint
    }
    if len(formulas) < len(specification.schema.tensor_names) or not formulas:
        return None
    if not specification.schema.results[0].differentiable:
        return None
    writing = _Writing(specification, formulas)
    unproven = [
        specification.name
    ]  # empty once a backward has shown that no formula writes into what is saved
    names: dict[str, Any] = {
        "_op_Function": torch.autograd.Function,
        "_op_Tensor": Tensor,
        "_op_type": type,
        "_op_Exception": Exception,
        "_op_RuntimeError": RuntimeError,
        "_op_strided": torch.strided,
        "_op_kernel": kernel,
        "_op_settle": settle(specification, kernel),
        "_op_grad_enabled": torch.is_grad_enabled,
        "_op_is_view": capabilities.is_view,
        "_op_written": partial(_refuse_writes, specification, [*writing.tensors, "grad"]),
        "_op_refuse": partial(_refuse_constant, specification),
        "_op_mixes": mixes_dtypes,
        "_op_in_full": _in_full(specification, writing.tensors, writing.values, unproven),
        "_op_unproven": unproven,
        **{f"_op_formula_{name}": formula.function for name, formula in formulas.items()},
        **{f"_op_fit_{name}": _fit(specification, name, formula) for name, formula in formulas.items()},
        **{
            f"_op_note_{name}": partial(note_formula, specification, formula)
            for name, formula in formulas.items()
        },
    }
    exec(writing.source(), names)
    return names[specification.short_name]


class _Writing:
    """The source of one node. Its own names begin with `_op_`, so that an argument may have any other."""

    def __init__(self, specification: Specification, formulas: dict[str, Formula]) -> None:
        self.specification = specification
        self.name = specification.short_name
        self.schema: Schema = specification.schema
        self.formulas = formulas
        self.place = {name: position for position, name in enumerate(self.schema.names)}
        self.users: dict[str, list[str]] = {}
        for name, formula in formulas.items():
            for parameter in formula.parameters:
                if parameter not in self.schema.gradient_position:
                    self.users.setdefault(parameter, []).append(name)
        self.tensors = [
            name for name in self.users if name in formulas or name in self.schema.result_position
        ]
        self.values = [name for name in self.users if name not in self.tensors]

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

    def needed(self, name: str) -> str:
        """A condition: some formula that uses this input or result is needed."""
        return " or ".join(f"_op_n[{self.place[user]}]" for user in self.users[name])

    def source(self) -> str:
        """The class."""
        arguments = ", ".join(self.schema.names)
        kernel_arguments = ", ".join(
            f"{each.name}={each.name}" if each.keyword_only else each.name for each in self.schema.arguments
        )
        before = capabilities.versions_source(list(self.formulas))
        given = capabilities.versions_source([*map(self.local, self.tensors), "_op_grad"])
        fresh = fresh_source(self.specification)
        saved = _tuple(f"{self.local(name)} if {self.needed(name)} else None" for name in self.tensors)
        forms = _tuple(
            f"({name}.shape, {name}.dtype, {name}.device) if _op_n[{self.place[name]}] else None"
            for name in self.formulas
        )
        unpack_tensors = (
            f"{_tuple(map(self.local, self.tensors))} = _op_ctx.saved_tensors" if self.tensors else ""
        )
        unpack_values = f"{_tuple(self.values)} = _op_ctx.values" if self.values else ""
        unpack_forms = f"{_tuple(f'_op_form_{name}' for name in self.formulas)} = _op_ctx.forms"
        returned = _tuple(f"_op_d_{name}" if name in self.formulas else "None" for name in self.schema.names)
        return f"""
class {self.name}(_op_Function):
    @staticmethod
    def forward(_op_ctx, {arguments}):
        try:
            _op_before = {before}
        except _op_RuntimeError:
            _op_before = None  # an inference tensor does not count how often it was written to
        _op_result = _op_kernel({kernel_arguments})
        if not ({fresh}
                and (_op_before is None or _op_before == {before})):
            _op_result = _op_settle(_op_result, [{arguments}], _op_before)
        if not (_op_result.is_floating_point() or _op_result.is_complex()):
            _op_refuse(_op_result)
        _op_n = _op_ctx.needs_input_grad
        _op_ctx.save_for_backward({saved[1:-1]})
        _op_ctx.values = {_tuple(map(self.value, self.values))}
        _op_ctx.forms = {forms}
        _op_ctx.mixed = {self.mixes_dtypes()}
        return _op_result

    @staticmethod
    def backward(_op_ctx, _op_grad):
        if _op_unproven or _op_grad_enabled():
            return _op_in_full(_op_ctx, _op_grad)
        {unpack_tensors}
        {unpack_values}
        {unpack_forms}
        _op_before = {given}
{"".join(self._formula(name, formula) for name, formula in self.formulas.items())}
        if _op_before != {given}:
            _op_written(_op_before, {given})
        return {returned}
"""

    def mixes_dtypes(self) -> str:
        """A condition: the tensors given differ in dtype, and floating ones among them do."""
        tensors = [each for each in self.schema.arguments if each.kind.is_tensor]
        first = next((each.name for each in tensors if not each.kind.optional), None)
        if first is None:
            return f"_op_mixes([{', '.join(self.formulas)}])"
        differs = " or ".join(
            f"({each.name} is not None and {each.name}.dtype is not {first}.dtype)"
            if each.kind.optional
            else f"{each.name}.dtype is not {first}.dtype"
            for each in tensors
            if each.name != first
        )
        return f"({differs}) and _op_mixes([{', '.join(self.formulas)}])" if differs else "False"

    def _formula(self, name: str, formula: Formula) -> str:
        arguments = ", ".join(
            f"{keyword}={self.local(parameter)}"
            for keyword, parameter in zip(formula.keywords, formula.parameters, strict=True)
        )
        return f"""
        _op_d_{name} = None
        if _op_form_{name} is not None:
            try:
                _op_d_{name} = _op_formula_{name}({arguments})
            except _op_Exception as _op_error:
                _op_note_{name}(_op_error)
                raise
            if not (_op_type(_op_d_{name}) is _op_Tensor
                    and (_op_d_{name}.shape, _op_d_{name}.dtype, _op_d_{name}.device) == _op_form_{name}
                    and _op_d_{name}.layout is _op_strided):
                _op_d_{name} = _op_fit_{name}(_op_d_{name}, _op_ctx)
"""


def fresh_source(specification: Specification) -> str:
    """A condition: the result is a dense tensor, no view or part of one, and begins where no input does."""
    elsewhere = "".join(
        f" and ({each.name} is None or _op_result.data_ptr() != {each.name}.data_ptr())"
        if each.kind.optional
        else f" and _op_result.data_ptr() != {each.name}.data_ptr()"
        for each in specification.schema.arguments
        if each.kind.is_tensor
    )
    plain = "_op_type(_op_result) is _op_Tensor and _op_result.layout is _op_strided"
    # An inference tensor is never called a view, but a part of one does not begin where its storage does.
    return f"{plain} and not _op_is_view(_op_result) and _op_result.storage_offset() == 0{elsewhere}"


def _tuple(items: Any) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"


def _fit(specification: Specification, name: str, formula: Formula) -> Callable[[Any, Any], Tensor]:
    """What is done with an answer that is not of its input's form."""
    position = specification.schema.tensor_names.index(name)

    def fit_to_form(gradient: Any, context: Any) -> Tensor:
        return fit(
            gradient,
            Form(*context.forms[position]),
            label=name,
            operator=specification.name,
            formula=formula,
            mixed=context.mixed,
        )

    return fit_to_form


def _refuse_writes(
    specification: Specification, names: list[str], before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    """Name the tensor that a formula wrote into, and the formulas that have it."""
    grad = specification.schema.results[0].gradient_name()
    name = next(each for each, old, new in zip(names, before, after, strict=True) if old != new)
    meaning = grad if name == "grad" else name
    rules = [rule for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    raise written_into(specification, [rule for rule in rules if meaning in rule.parameters], name)


def _refuse_constant(specification: Specification, result: Tensor) -> None:
    constant_results(
        specification, backward_plan(specification, frozenset(specification.schema.names)), [result]
    )


def _in_full(
    specification: Specification, tensors: list[str], values: list[str], unproven: list[str]
) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """The backward of the general node, for one that builds a graph of its own."""
    schema = specification.schema
    shaped = set(schema.shapes.values())
    flattening = Flattening(schema, (None,) * len(schema.arguments))

    def in_full(context: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = dict(zip(tensors, context.saved_tensors, strict=True))
        saved.update(zip(values, context.values, strict=True))
        forms = dict(zip(schema.tensor_names, context.forms, strict=True))
        inputs = tuple(Form(*forms[name]) if forms.get(name) else None for name in schema.names)
        shapes = tuple(saved.get(f"{name}_shape") if name in shaped else None for name in schema.names)
        needed = frozenset(name for name in schema.tensor_names if forms[name] is not None)
        plan = backward_plan(specification, needed)
        every = Forms(inputs, shapes, (Form.of(grad),), context.mixed)
        vjp = Vjp(specification, plan, flattening, every, None)
        gradients = tuple(vjp(saved, (grad,)))
        unproven.clear()
        return gradients

    return in_full
