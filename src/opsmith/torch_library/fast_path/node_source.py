"""The source of a generated autograd node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from opsmith.core.argument_types import ArgumentType
from opsmith.core.backward_plan import backward_plan
from opsmith.core.formula import Formula
from opsmith.core.gradients import NEEDED
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.fast_path.purity import ContractSource, never_writes

_DEVICE_PREDICATES = {"cpu": "is_cpu", "cuda": "is_cuda"}
"""Attributes that are quicker to read than the device."""


def item_names(schema: Schema, lengths: Mapping[str, int]) -> dict[str, list[str]]:
    """Names in a source for the tensors of each argument, of which a list has several.

    Args:
        schema: The operator's signature.
        lengths: The lengths of lists of tensors.
    """
    return {
        name: [f"_op_item_{name}_{at}" for at in range(lengths[name])] if name in lengths else [name]
        for name in schema.names
    }


def sequence_source(kind: ArgumentType, items: Iterable[str]) -> str:
    """Source of a new list or tuple, as an argument of this kind is annotated, of items."""
    listed = "".join(f"{item}, " for item in items)
    return f"({listed})" if kind.as_tuple else f"[{listed}]"


def make_lists(names: Iterable[str], items: Mapping[str, Sequence[str]]) -> str:
    """Source of lists of tensors, as formulas get them, from their items."""
    return "; ".join(f"{name} = [{', '.join(items[name])}]" for name in names)


def to_kernel_source(schema: Schema, items: Mapping[str, Sequence[str]]) -> str:
    """Source of the arguments of a kernel, which gets lists of its own."""
    return ", ".join(
        (f"{each.name}=" if each.keyword_only else "")
        + (sequence_source(each.kind, items[each.name]) if _is_list(each.kind) else each.name)
        for each in schema.arguments
    )


def _is_list(kind: ArgumentType) -> bool:
    return kind.is_tensor and kind.sequence


class NodeSource:
    """The source of one node. Its own names begin with `_op_`, so that an argument may have any other.

    Args:
        specification: The operator.
        needed: The tensors that need gradients, by their names in the source; each has a formula, or is
            declared zero.
        lengths: The lengths of lists of tensors.

    Attributes:
        plan: The plan of the backward.
        items: Names of the tensors of each argument.
        lists: The same for lists alone.
        formulas: The formulas to run, each with the inputs whose gradients it computes.
        inputs: The tensors that need gradients, in the order of the formulas; those that are zero come last.
        tensors: Names of the inputs and results that are saved as tensors.
        values: Names of the arguments and shapes that are kept otherwise.
        shaped: The tensors among `inputs` whose shapes are kept.
        filled: Positions of the results whose metadata are kept: a formula may need zeros for a gradient that
            is not there.
    """

    def __init__(
        self, specification: Specification, needed: Collection[str], lengths: Mapping[str, int]
    ) -> None:
        self.specification = specification
        self.schema: Schema = specification.schema
        self.items = item_names(self.schema, lengths)
        self.lists = {name: self.items[name] for name in lengths}
        self._owners = {item: name for name, each in self.items.items() for item in each}
        inputs = frozenset(self._owners[item] for item in needed)
        plan = self.plan = backward_plan(specification, inputs)
        self.formulas = [(each, [n for n in each.answers_for if n in inputs]) for each in plan.formulas]
        answered = [name for _, names in self.formulas for name in names]
        self.inputs = [
            item for name in (*answered, *plan.zeros) for item in self.items[name] if item in needed
        ]
        self.zeros = [item for item in self.inputs if self._owners[item] in plan.zeros]
        used = {p for formula in plan.formulas for p in formula.parameters}
        tensors = (*self.schema.tensor_names, *self.schema.result_position)
        self.tensors = [name for name in plan.saved if name in tensors]
        known = {*plan.saved, *used}.difference(tensors)  # a second order may run the reference again
        self.values = [name for name in (*self.schema.names, *self.schema.shapes) if name in known]
        self.shaped = [item for item in self.inputs if self._owners[item] not in self.tensors]
        positions = self.schema.gradient_position
        named = [[positions[p] for p in formula.parameters if p in positions] for formula in plan.formulas]
        self._named = sorted({position for each in named for position in each})
        self._followed = [self.schema.result_position[name] for name in plan.follows_hidden]
        self.filled = sorted({position for each in named if len(each) > 1 for position in each})
        self._several = len(self.schema.results) > 1
        numbers = [f"_{at}" * self._several for at in range(len(self.schema.results))]
        self._results = [f"_op_result{number}" for number in numbers]
        self._grads = [f"_op_grad{number}" for number in numbers]

    def local(self, name: str) -> str:
        """Name of an input, a result or a gradient in the source."""
        if name in self.schema.result_position:
            return self._results[self.schema.result_position[name]]
        if name in self.schema.gradient_position:
            return self._grads[self.schema.gradient_position[name]]
        return name

    def value(self, name: str) -> str:
        """Source of a value that is saved and not a tensor: an argument, or the shape of one."""
        tensor = self.schema.shapes.get(name)
        if tensor is None:
            return name
        optional = self.schema.by_name[tensor].kind.optional
        return f"({tensor}.shape if {tensor} is not None else None)" if optional else f"{tensor}.shape"

    @property
    def saved(self) -> list[str]:
        """The saved tensors, by their names in the source."""
        return [item for name in self.tensors for item in self.items.get(name, [self.local(name)])]

    @property
    def read(self) -> list[str]:
        """The name of each tensor that formulas get: saved ones, and gradients of results."""
        saved = [name for name in self.tensors for _ in self.items.get(name, [name])]
        return [*saved, *(self.schema.results[at].gradient_name() for at in self._named)]

    def label(self, item: str) -> str:
        """Label of a tensor in messages: `x`, or `xs[0]`."""
        name = self._owners[item]
        return f"{name}[{self.lists[name].index(item)}]" if name in self.lists else name

    @property
    def results_with_gradient(self) -> list[int]:
        """Positions of the results whose gradients formulas use."""
        return self._named

    def source(self, devices: dict[str, str]) -> str:
        """Source of the class, for inputs on these types of device."""
        schema = self.schema
        arguments = "".join(f", {item}" for each in self.items.values() for item in each)
        values = ", ".join(schema.names)
        to_kernel = to_kernel_source(schema, self.items)
        contract = ContractSource(self.specification)
        before = "_op_before" if contract.may_write else "None"
        saved = self.saved
        saved_lists = [name for name in self.tensors if name in self.lists]
        results, grads = ", ".join(self._results), ", ".join(self._grads)
        counts = capabilities.versions_source([*saved, *(self._grads[at] for at in self._named)])
        may_write = not all(never_writes(formula.function) for formula, _ in self.formulas)
        refuse_writes = f"if _op_before != {counts}: _op_written(_op_before, {counts})"
        kept = [
            *(f"{item}.shape" for item in self.shaped),
            *map(self.value, self.values),
            *("({0}.shape, {0}.dtype, {0}.device)".format(self._results[at]) for at in self.filled),
        ]
        shapes = [f"_op_shape_{item}" for item in self.shaped]
        names_of_kept = [*shapes, *self.values, *(f"_op_metadata_{at}" for at in self.filled)]
        formulas = "".join(self._call(formula, names) for formula, names in self.formulas)
        formulas += "".join(
            f"\n        _op_d_{item} = _op_zeros_{item}({self._shape(item)})" for item in self.zeros
        )
        checks = [self._check(item, devices[item]) for item in self.inputs if item not in self.zeros]
        guarded = not may_write and not self.shaped
        if guarded:
            # The guard cannot take nested tensors, which formulas that are proved pure cannot make.
            pairs = ", ".join(f"_op_d_{item}, {item}" for item in self.inputs)
            # The guard rejects tensors under autocast, so that autocast is checked behind it only.
            full_backward = f"if _op_autocast(): return _op_full_backward(_op_ctx, {grads})"
            checks = [
                f"if not _op_same_gradients({pairs}):",
                *_indented([full_backward, *checks, f"_op_update_guard({pairs})"]),
            ]
        every = [item for each in self.items.values() for item in each]
        returned = _tuple(f"_op_d_{item}" if item in self.inputs else "None" for item in every)
        constants = [
            each for each, role in zip(self._results, schema.results, strict=True) if not role.differentiable
        ]
        without = f"_op_ctx.non_differentiable = {_tuple(constants)}"
        dtypes = " and ".join(f"{self._results[at]}.dtype is _op_result_dtype_{at}" for at in self._named)
        return f"""
class {self.specification.short_name}(_op_Function):
    @staticmethod
    def forward(_op_ctx{arguments}):
        {make_lists(self.lists, self.items)}
        {f"_op_before = {contract.before()}" if contract.may_write else ""}
        _op_result = _op_kernel({to_kernel})
        if not ({contract.held()}):
            {"_op_result" if self._several else "(_op_result,)"} = _op_validate(
                _op_kernel, _op_result, [{values}], {before}
            )
        {f"{results} = _op_result" if self._several else ""}
        {f"if not ({dtypes}): _op_floating([{results}])" if dtypes else ""}
        {without if constants else ""}
        _op_ctx.materialize_grads = False
        _op_ctx.to_save = {_tuple(saved)}
        {f"_op_ctx.kept = {_tuple(kept)}" if kept else ""}
        return _op_result

    backward = staticmethod(_op_first)

    @staticmethod
    def fast_backward(_op_ctx, {grads}):
        if {self._special(guarded=guarded, may_write=may_write)}:
            return _op_full_backward(_op_ctx, {grads})
        {f"{_tuple(saved)} = _op_ctx.saved_tensors" if saved else ""}
        {make_lists(saved_lists, self.items)}
        {f"{_tuple(names_of_kept)} = _op_ctx.kept" if kept else ""}
        {f"_op_before = {counts}" if may_write else ""}
{self._fill()}
{formulas}
{"".join(f"{line}{chr(10)}" for line in _indented(_indented(checks)))}
        {refuse_writes if may_write else ""}
        return {returned}
"""

    def _special(self, *, guarded: bool, may_write: bool) -> str:
        """Source of a condition: the backward needs all checks, or a graph."""
        conditions = ["_op_grad_enabled()", "_op_compiling()"]
        conditions += [f"{self._grads[at]} is not None" for at in self._followed]
        # torch would take zeros for gradients that are not there
        conditions.append(f"({' and '.join(f'{grad} is None' for grad in self._grads)})")
        if not guarded:
            conditions.append("_op_autocast()")
        if may_write:
            given = "({0} is not None and {0}.is_inference())" if self._several else "{0}.is_inference()"
            conditions += [given.format(self._grads[at]) for at in self._named]
        return " or ".join(conditions)

    def _call(self, formula: Formula, names: list[str]) -> str:
        """Source of the call of one formula."""
        # A wrapped function may take its arguments in another order than its signature has.
        code = getattr(formula.function, "__code__", None)
        in_order = code is not None and code.co_varnames[: code.co_argcount] == formula.keywords
        given = [
            f"_op_needed_{names[0]}" if parameter == NEEDED else self._given(parameter)
            for parameter in formula.parameters
        ]
        arguments = ", ".join(
            value if in_order else f"{keyword}={value}"
            for keyword, value in zip(formula.keywords, given, strict=True)
        )
        gradients = ", ".join(f"_op_d_{name}" for name in names)
        call = f"{gradients} = _op_formula_{names[0]}({arguments})"
        if formula.joint:
            call = f"{gradients}, = _op_answers_{names[0]}(_op_formula_{names[0]}({arguments}))"
        for name in names:
            if name in self.lists:
                items = ", ".join(f"_op_d_{item}" for item in self.lists[name])
                call += f"; ({items},) = _op_items_{name}(_op_d_{name})"
        positions = self.schema.gradient_position
        grads = [self._grads[positions[each]] for each in formula.parameters if each in positions]
        if self._several and grads:  # a gradient is linear in `grad`: it is zero where all of these are
            missing = " and ".join(f"{grad} is None" for grad in grads)
            needed = [item for name in names for item in self.items[name] if item in self.inputs]
            zeros = "; ".join(f"_op_d_{item} = _op_zeros_{item}({self._shape(item)})" for item in needed)
            call = f"""if {missing}: {zeros}
            else: {call}"""
        return f"""
        try:
            {call}
        except _op_Exception as _op_error:
            _op_note_{names[0]}(_op_error)
            raise
"""

    def _given(self, parameter: str) -> str:
        """Source of an argument of a formula."""
        position = self.schema.gradient_position.get(parameter)
        return f"_op_filled_{position}" if position in self.filled else self.local(parameter)

    def _fill(self) -> str:
        """Source of zeros in place of gradients that are not there."""
        return "".join(
            f"""
        _op_filled_{at} = {self._grads[at]}
        if _op_filled_{at} is None: _op_filled_{at} = _op_zeros(*_op_metadata_{at})"""
            for at in self.filled
        )

    def _shape(self, item: str) -> str:
        """Source of the shape of an input; that of a saved tensor need not be kept."""
        return f"{item}.shape" if self._owners[item] in self.tensors else f"_op_shape_{item}"

    def _check(self, item: str, device: str) -> str:
        """Source of the check of one gradient, which is fitted to its input if it does not match."""
        predicate = _DEVICE_PREDICATES.get(device, f"device == _op_device_{item}")
        shape = self._shape(item)
        plain = f"_op_type(_op_d_{item}) is _op_Tensor and _op_d_{item}.layout is _op_strided"
        fits = f"_op_d_{item}.dtype is _op_dtype_{item} and _op_d_{item}.{predicate}"
        condition = f"{plain} and {fits} and _op_d_{item}.shape == {shape}"
        return f"if not ({condition}): _op_d_{item} = _op_fit_{item}(_op_d_{item}, {shape})"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"
