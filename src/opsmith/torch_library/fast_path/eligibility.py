"""Eligibility for the fast path: of operators, of the arguments of a call, and of call signatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.argument_types import BOOL, FLOAT, INT, STR, ArgumentType
from opsmith.core.call_arguments import requires_gradient, tensors_in
from opsmith.core.formula import Formula, NonDifferentiable
from opsmith.core.kernels import BuiltKernel, choose
from opsmith.core.location import where
from opsmith.core.schema import REQUIRED, Argument, Schema
from opsmith.core.shapes import ANY
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import mixes_dtypes
from opsmith.torch_library.fast_path.generated_node import GeneratedNodes, NodeSignature
from opsmith.torch_library.fast_path.purity import ContractSource
from opsmith.torch_library.validation import validate_results

_SCALARS = {FLOAT: "_op_float", INT: "_op_int", BOOL: "_op_bool", STR: "_op_str"}
MAX_OPTIONAL_TENSORS = 3
"""Each optional tensor doubles the number of lists of signatures."""
PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
MAX_SIGNATURES = 16
"""Maximum number of signatures; calls with others are examined in Python each time."""

Implementation = tuple[Any, Callable[..., Any] | None, Callable[..., Any] | None, bool, bool, bool]
"""Guard on the tensors; kernel; a node's `apply`, or None; whether a tensor requires a gradient; whether the
kernel is in C++, and refuses by itself what must not be written; whether it writes in any layout."""

SLOW_PATH: Implementation = (None, None, None, False, False, False)
"""Result for a call that must go through the dispatcher."""


def has_fast_path(specification: Specification) -> bool:
    """Return True if calls of an operator may take the fast path."""
    schema = specification.schema
    tensors = [argument.kind for argument in schema.arguments if argument.kind.is_tensor]
    optional = sum(kind.optional for kind in tensors)
    by_context = any(kernel.by_context for kernel in specification.kernels)
    reserved = any(name.startswith("_op_") for name in (*schema.names, specification.short_name))
    single = (
        len(schema.results) == 1
        and schema.always_tensors
        and schema.results[0].differentiable  # others are detached on the slow path only
    )
    return (
        (single or returns_several(schema) or bool(schema.written and not schema.results))
        and not (schema.written and schema.hidden)
        and not (reserved or by_context or specification.random or specification.adopted is not None)
        and optional < len(tensors)
        and optional <= MAX_OPTIONAL_TENSORS
        and not any(kind.sequence and (kind.optional or kind.item_optional) for kind in tensors)
    )


def returns_several(schema: Schema) -> bool:
    """Return True for an operator that writes nothing and has several results, hidden ones counted."""
    return not schema.written and schema.always_tensors and len(schema.results) > 1


def from_source_alone(schema: Schema) -> bool:
    """Return True if only calls that a kernel from source computes, without gradients, take the fast path.

    Such a kernel writes into nothing but what it should, and its results are new. Of several results and of
    lists, checks in Python would cost more than they spare.
    """
    lists = any(argument.kind.is_tensor and argument.kind.sequence for argument in schema.arguments)
    return lists or returns_several(schema)


@dataclass
class CallSignatures:
    """Known call signatures of one operator.

    Args:
        specification: The operator.
        known: For each set of optional tensors that are given, and by the lengths of lists of tensors, the
            implementations of known signatures.
    """

    specification: Specification
    known: tuple[dict[tuple[int, ...], list[Implementation]], ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = [each for each in self.specification.schema.arguments if each.kind.is_tensor]
        self._optional = [each.name for each in tensors if each.kind.optional]
        self._lists = [each.name for each in tensors if each.kind.sequence]
        # Operators without lists have one list of signatures in each, which their code names.
        self.known = tuple({(): []} if not self._lists else {} for _ in range(2 ** len(self._optional)))
        self._nodes: dict[frozenset[str], GeneratedNodes] = {}
        self._graphless: dict[Callable[..., Any], Callable[..., Any]] = {}
        validate = self.validate_write if self.specification.schema.written else self.validate
        self._in_inference = _inference_call(self.specification, validate)

    def select(self, values: tuple[Any, ...]) -> Implementation:
        """Select the implementation of a call with these argument values, and cache it by its signature."""
        specification = self.specification
        given = dict(zip(specification.schema.names, values, strict=True))
        tensors = tensors_in(list(values))
        if not capabilities.nothing_active() or not all(_is_dense(tensor) for tensor in tensors):
            return SLOW_PATH
        in_memory = specification.kernels or specification.opaque or specification.schema.written
        if in_memory and not all(map(_is_materialized, tensors)):
            return SLOW_PATH
        if not self.in_shape(values):
            return SLOW_PATH
        accepted, rejected = choose(specification.kernels, values)
        if any(each.strict for each in rejected):
            return SLOW_PATH
        kernel = accepted.kernel.function if accepted else specification.reference
        in_cpp = any_layout = False
        if isinstance(kernel, BuiltKernel) and kernel.pure:
            in_cpp = True
            any_layout = kernel.takes_any_layout and all(each.elsewhere for each in rejected)
            kernel = kernel.direct
        elif from_source_alone(specification.schema):
            return SLOW_PATH
        elif accepted or specification.opaque:
            kernel = self._without_graph(kernel)
        guard = capabilities.tensor_guard(tensors)
        if specification.schema.written:
            implementation = self._writing(guard, kernel, given, tensors, in_cpp, any_layout)
        else:
            implementation = self._implementation(guard, kernel, given, tensors)
        number = sum(2**bit for bit, name in enumerate(reversed(self._optional)) if given[name] is not None)
        kept = sum(map(len, self.known[number].values()))
        # The guard never accepts a tensor that is given twice: such calls are selected each time.
        if implementation is not SLOW_PATH and kept < MAX_SIGNATURES and guard(*tensors):
            lengths = tuple(len(given[name]) for name in self._lists)
            self.known[number].setdefault(lengths, []).append(implementation)
        return implementation

    def _without_graph(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a kernel in `no_grad`, since it may use torch operations on weights of its own."""
        if kernel not in self._graphless:
            self._graphless[kernel] = torch.no_grad()(kernel)
        return self._graphless[kernel]

    def _writing(
        self,
        guard: Any,
        kernel: Callable[..., Any],
        given: dict[str, Any],
        tensors: list[Tensor],
        in_cpp: bool,
        any_layout: bool,
    ) -> Implementation:
        """The implementation of a call that writes in place; the slow path takes one that makes a node."""
        written = tensors_in([given[name] for name in self.specification.schema.written])
        # Which kernel takes a call may depend on the layout of what is written, which the guard does not see.
        if not (any_layout or all(tensor.is_contiguous() for tensor in written)):
            return SLOW_PATH
        in_inference = None
        if torch.is_inference_mode_enabled():
            # Without versions, torch cannot tell that a kernel in Python has written.
            if not (in_cpp or kernel is self.specification.reference):
                return SLOW_PATH
            in_inference = partial(self._in_inference, kernel)
        elif any(tensor.is_inference() for tensor in tensors):
            return SLOW_PATH
        requires = any(tensor.requires_grad for tensor in tensors)
        return guard, kernel, in_inference, requires, in_cpp, any_layout

    def _implementation(
        self,
        guard: Any,
        kernel: Callable[..., Any],
        given: dict[str, Any],
        tensors: list[Tensor],
    ) -> Implementation:
        specification = self.specification
        requires = {name for name in specification.schema.tensor_names if requires_gradient([given[name]])}
        if any(tensor.is_inference() for tensor in tensors) or torch.is_inference_mode_enabled():
            if requires and not torch.is_inference_mode_enabled():
                return SLOW_PATH
            return guard, kernel, partial(self._in_inference, kernel), False, False, False
        if from_source_alone(specification.schema):
            return guard, kernel, None, bool(requires), True, False
        # Without formulas and kernels autograd records the reference.
        ordinary = not (specification.gradients.given or kernel is not specification.reference)
        if not requires or ordinary:
            return guard, kernel, None, bool(requires), False, False
        nodes = self._fast_node(requires)
        if nodes is None:
            return SLOW_PATH
        examples = {name: given[name].detach().new_empty((0,) * given[name].dim()) for name in requires}
        node = nodes.of(NodeSignature(kernel, examples, mixes_dtypes(list(given.values()))))
        return guard, kernel, capabilities.direct_apply(node), True, False, False

    def _fast_node(self, requires: set[str]) -> GeneratedNodes | None:
        """The nodes for calls in which these tensors require a gradient; None where there are none."""
        rules = self.specification.gradients.rules
        needed = frozenset(name for name in requires if not isinstance(rules.get(name), NonDifferentiable))
        formulas = [rules.get(name) for name in needed]
        if not needed or not all(isinstance(rule, Formula) and not rule.joint for rule in formulas):
            return None
        if needed not in self._nodes:
            self._nodes[needed] = GeneratedNodes(self.specification, needed, self.validate)
        return self._nodes[needed]

    def in_shape(self, values: tuple[Any, ...]) -> bool:
        """Return True if the tensors have the declared shapes."""
        shapes = self.specification.shapes
        return shapes is None or shapes.bind(self.specification.schema, values)[1] is None

    def validate(
        self,
        kernel: Callable[..., Any],
        result: Any,
        values: list[Any],
        before: tuple[int | None, ...] | None,
    ) -> Any:
        """Validate a result that failed the quick checks against the whole contract, and return it.

        Args:
            kernel: The function that computed it.
            result: The result.
            values: The argument values.
            before: Version counters of the tensors among them before the call; None if not recorded.

        Raises:
            MutationError, AliasError, ResultTypeError, LayoutError, CapturedTensorError: See their names.
        """
        specification = self.specification
        versions = None if before is None else [count for count in before if count is not None]
        results = validate_results(specification, kernel, result, values, versions)
        shown = tuple(results[at] for at in specification.schema.visible)
        without = not any(tensor.requires_grad for tensor in tensors_in(values))
        if without and any(each.requires_grad for each in shown):
            raise self._captures(kernel)
        return shown[0] if len(shown) == 1 else shown

    def validate_write(
        self,
        kernel: Callable[..., Any],
        result: Any,
        values: list[Any],
        before: tuple[tuple[int | None, ...], tuple[int | None, ...]] | None,
    ) -> Any:
        """Validate a call in place as `validate` does, and return what the operator returns.

        Args:
            kernel: The function that wrote.
            result: What it returned.
            values: The argument values.
            before: Version counters before the call: of the tensors that are read, and of those written.
        """
        schema = self.specification.schema
        read, counts = before or ((), ())
        versions = None if before is None else [count for count in read if count is not None]
        results = validate_results(self.specification, kernel, result, values, versions)
        written = tensors_in([values[schema.names.index(name)] for name in schema.written])
        for tensor, count in zip(written, [count for count in counts if count is not None], strict=False):
            if capabilities.version(tensor) == count:
                torch.autograd.graph.increment_version(tensor)  # the kernel wrote past torch
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*written, *results)):
            raise self._captures(kernel)
        if schema.returns is not None:
            return written[0]
        return results[0] if results else None

    def _captures(self, kernel: Callable[..., Any]) -> errors.OpsmithError:
        return self.specification.error(
            errors.CapturedTensorError,
            "it uses something that requires a gradient and is not an argument",
            expected="a function of its arguments alone",
            got="a result that requires a gradient, from arguments that do not",
            where=where(kernel),
            hint="make it an argument, or use `.detach()` of it",
        )


def _inference_call(specification: Specification, validate: Callable[..., Any]) -> Callable[..., Any]:
    """Generate the call in inference mode, without version counters and marks of views."""
    schema = specification.schema
    contract = ContractSource(specification)
    names: dict[str, Any] = {**contract.names, "_op_validate": validate}
    arguments = "".join(f"{name}, " for name in schema.names)
    to_kernel = "".join(f"{name}, " for name in schema.names[: schema.positional])
    to_kernel += "".join(f"{name}={name}, " for name in schema.names[schema.positional :])
    source = f"""
def _op_in_inference(_op_kernel, {arguments}):
    _op_result = _op_kernel({to_kernel})
    if {contract.fresh()}:
        return {contract.returned()}
    return _op_validate(_op_kernel, _op_result, [{arguments}], None)
"""
    exec(source, names)
    made: Callable[..., Any] = names["_op_in_inference"]
    return made


def _is_dense(tensor: Tensor) -> bool:
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_quantized or capabilities.is_gradient_batch(tensor))


def _is_materialized(tensor: Tensor) -> bool:
    """Return True if a kernel can read the memory of a tensor as it is; torch operations take any tensor."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta)


def is_int_sequence(kind: ArgumentType) -> bool:
    """Return True for a sequence of integers, as a size or stride."""
    return kind.sequence and kind.base is INT and not kind.item_optional and kind.structure is None


def are_ints(value: Any, length: int | None) -> bool:
    """Return True if a value is a plain sequence of integers, none of them symbolic."""
    if type(value) not in (tuple, torch.Size, list) or length not in (None, len(value)):
        return False
    return all(type(item) is int for item in value)


def type_condition(argument: Argument) -> str:
    """Source of a condition: the argument, not a tensor, has a type that the fast path takes."""
    kind = argument.kind
    if kind.base is FLOAT and not kind.sequence:
        return unless_none(argument, "(_op_type({0}) is _op_float or _op_type({0}) is _op_int)")
    if is_int_sequence(kind):
        several = f"_op_are_ints({{0}}, {kind.length})"
        return unless_none(argument, f"_op_type({{0}}) is _op_int or {several}" if kind.spread else several)
    if kind.base in _SCALARS and (not kind.sequence or kind.spread):
        return unless_none(argument, f"_op_type({{0}}) is {_SCALARS[kind.base]}")
    name = argument.name
    if kind.base.exact is not None and not kind.sequence:
        return unless_none(argument, f"_op_type({{0}}) is _op_exact_{name}")
    return (
        "False"
        if kind.structure is not None or argument.default is REQUIRED
        else f"{name} is _op_default_{name}"
    )


def unless_none(argument: Argument, condition: str) -> str:
    """Source of a condition on an argument; an optional one that is None fulfils it."""
    text = condition.format(argument.name)
    return f"({argument.name} is None or {text})" if argument.kind.optional else f"({text})"


def size_condition(specification: Specification) -> str:
    """Source of a condition: sizes of the same letter are equal; empty if nothing is to be checked."""
    shapes = specification.shapes
    if shapes is None:
        return ""
    everything = f"_op_in_shape(({', '.join(specification.schema.names)}, ))"
    lists = {each.name for each in specification.schema.arguments if each.kind.sequence}
    if lists & set(shapes.arguments) or sum(dims.leading for dims in shapes.arguments.values()) > 1:
        return everything
    optional = {each.name for each in specification.schema.arguments if each.kind.optional}
    if shapes.integers & optional:
        return everything  # None is not a size
    first: dict[str, str] = {name: name for name in shapes.integers}
    conditions: list[str] = []
    for name in sorted(shapes.arguments, key=lambda name: name in optional):
        dims = shapes.arguments[name]
        agree: list[str] = []
        for dim, size in enumerate(dims.sizes):
            found = f"{name}.size({dim - len(dims.sizes)})"
            if size == ANY:
                continue
            if size.isdigit():
                agree.append(f"{found} == {size}")
            elif not size.isidentifier() or (size not in first and name in optional):
                return everything  # an expression, or a letter of an optional argument only
            elif size in first:
                agree.append(f"{found} == {first[size]}")
            else:
                first[size] = found
        if agree and name in optional:
            conditions.append(f"({name} is None or {' and '.join(agree)})")
        else:
            conditions += agree
    return " and ".join(conditions)
