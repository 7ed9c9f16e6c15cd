"""Signatures of calls that take the fast path, and the implementation of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from opsmith.core.call_arguments import requires_gradient, tensors_in
from opsmith.core.kernels import BuiltKernel, choose
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.graph_cuts import is_cut
from opsmith.torch_library.autograd.primitive import RegisteredOperator
from opsmith.torch_library.calls.routes import RouteTable
from opsmith.torch_library.contract import Before, Contract, State
from opsmith.torch_library.fast_path.node_source import item_names, make_lists, to_kernel_source
from opsmith.torch_library.fast_path.purity import ContractSource

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
MAX_SIGNATURES = 16
"""Maximum number of signatures whose guards are tried one after another."""

MAX_OTHER_SIGNATURES = 256
"""Maximum number of further signatures, which are looked up by dtypes and ranks."""

MAX_CONDITIONS = 3
"""Maximum number of optional tensors that conditions tell apart: each doubles the number of cases."""

Apply = Callable[..., Any] | Literal[False] | None
Implementation = tuple[Any, Callable[..., Any] | None, Apply, bool, bool, bool]
"""Guard on the tensors; kernel; a node's `apply`, None where there is none, and False where a call with
gradients takes the slow path; whether a tensor requires a gradient; whether the kernel is in C++, returns new
memory, and refuses by itself what must not be written; whether it writes in any layout."""

SLOW_PATH: Implementation = (None, None, None, False, False, False)
"""Result for a call that must go through the dispatcher."""


class CallSignatures(ABC):
    """Known call signatures of one operator.

    Args:
        specification: The operator.

    Attributes:
        known: For each set of optional tensors that are given, and by the lengths of lists of tensors, the
            implementations of known signatures.
    """

    on_dtensors: Callable[[tuple[Any, ...]], Any] | None = None

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        tensors = [each for each in specification.schema.arguments if each.kind.is_tensor]
        optional = [each.name for each in tensors if each.kind.optional]
        self.lists = [each.name for each in tensors if each.kind.sequence]
        # A few optional tensors choose a list by conditions, more of them by a key.
        self.chosen_by = optional if len(optional) <= MAX_CONDITIONS else []
        self.optional_keys = optional if len(optional) > MAX_CONDITIONS else []
        self.known: tuple[dict[tuple[int, ...], list[Implementation]], ...] = tuple(
            {} if self.by_key else {(): []} for _ in range(2 ** len(self.chosen_by))
        )
        self._others: dict[tuple[Any, ...], list[tuple[Any, Implementation]]] = {}

    @property
    def by_key(self) -> bool:
        """True if a key chooses among known signatures; else there is one list of them, which code names."""
        return bool(self.lists or self.optional_keys)

    def select(self, values: tuple[Any, ...]) -> Implementation:
        """Select the implementation of a call with these argument values, and cache it by its signature."""
        placed = None if self.on_dtensors is None else self.on_dtensors(values)
        if placed is not None:  # no guard in C knows placements: the call is computed here
            return None, _nothing, lambda *_: placed, False, False, False
        given = dict(zip(self.specification.schema.names, values, strict=True))
        tensors = tensors_in(list(values))
        if self.is_slow(tensors):
            return SLOW_PATH
        key: tuple[int, ...] = tuple(given[name] is not None for name in self.optional_keys)
        key += tuple(len(given[name]) for name in self.lists)
        number = sum(2**bit for bit, name in enumerate(reversed(self.chosen_by)) if given[name] is not None)
        # A guard never accepts a tensor that is given twice.
        places = {id(tensor): at for at, tensor in enumerate(tensors)}
        distinct = [tensors[at] for at in places.values()]
        form = number, *key, *(places[id(tensor)] for tensor in tensors)
        form += tuple((tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in distinct)
        for guard, implementation in self._others.get(form, ()):
            if guard(*distinct):
                return implementation
        if not capabilities.nothing_active() or not all(_is_dense(tensor) for tensor in tensors):
            return SLOW_PATH
        guard = capabilities.tensor_guard(distinct)
        implementation = self.implement(guard, given, tensors)
        if implementation is SLOW_PATH or not guard(*distinct):
            return implementation
        if len(distinct) == len(tensors) and sum(map(len, self.known[number].values())) < MAX_SIGNATURES:
            self.known[number].setdefault(key, []).append(implementation)
        else:
            if len(self._others) >= MAX_OTHER_SIGNATURES:
                self._others.clear()
            self._others.setdefault(form, []).append((guard, implementation))
        return implementation

    def is_slow(self, tensors: list[Tensor]) -> bool:
        """Return True if no implementation can serve calls with tensors like these."""
        return False

    @abstractmethod
    def implement(self, guard: Any, given: dict[str, Any], tensors: list[Tensor]) -> Implementation:
        """Choose what computes calls with the signature of these argument values.

        Args:
            guard: Accepts tensors with the metadata of these.
            given: The argument values by name.
            tensors: The tensors among them.
        """


class KernelSignatures(CallSignatures):
    """Known call signatures of an operator whose kernels or reference compute it.

    Args:
        registered: The operator.
        on_dtensors: Computes a call on DTensors from its argument values; returns None for the slow path.
    """

    def __init__(
        self,
        registered: RegisteredOperator,
        on_dtensors: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        super().__init__(registered.specification)
        self.on_dtensors, self._registered = on_dtensors, registered
        self._routes = RouteTable(registered)
        self._inference_calls: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._graphless: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._writes_lists = bool(self.lists and self.specification.schema.written)
        self._devices_in_cpp = {
            kernel.device
            for kernel in self.specification.kernels
            if isinstance(kernel.function, BuiltKernel) and kernel.function.pure
        }

    def is_slow(self, tensors: list[Tensor]) -> bool:
        """Return True for written lists that no kernel in C++ takes: checks in Python would cost too much."""
        return self._writes_lists and all(
            tensor.device.type not in self._devices_in_cpp for tensor in tensors[:1]
        )

    def implement(self, guard: Any, given: dict[str, Any], tensors: list[Tensor]) -> Implementation:
        """Choose the kernel, or the reference, and the node where gradients are needed."""
        specification, values = self.specification, tuple(given.values())
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
        elif self._writes_lists:
            return SLOW_PATH
        elif accepted or specification.opaque:
            kernel = self._without_graph(self._registered.held(kernel))
        if specification.schema.written:
            return self._writing(guard, kernel, given, tensors, in_cpp, any_layout)
        return self._implementation(guard, kernel, given, tensors, in_cpp)

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
            in_inference = partial(self._in_inference(given), kernel, in_cpp)
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
        in_cpp: bool,
    ) -> Implementation:
        specification = self.specification
        requires = requires_gradient(tensors)
        if any(tensor.is_inference() for tensor in tensors) or torch.is_inference_mode_enabled():
            if requires and not torch.is_inference_mode_enabled():
                return SLOW_PATH
            return guard, kernel, partial(self._in_inference(given), kernel, in_cpp), False, in_cpp, False
        # Without formulas and kernels autograd records the reference.
        ordinary = not (specification.gradients.given or kernel is not specification.reference)
        if requires and ordinary and is_cut(kernel):
            return SLOW_PATH
        if not requires or ordinary:
            return guard, kernel, None, requires, in_cpp, False
        route = self._routes.route(list(given.values()), tensors)
        apply: Apply = False if route is None or route.apply is None else route.apply
        return guard, kernel, apply, True, in_cpp, False

    def _lengths(self, given: dict[str, Any]) -> dict[str, int]:
        return {name: len(given[name]) for name in self.lists}

    def _in_inference(self, given: dict[str, Any]) -> Callable[..., Any]:
        """The call in inference mode, for lists of these lengths."""
        lengths = self._lengths(given)
        key = tuple(lengths.values())
        if key not in self._inference_calls:
            written = bool(self.specification.schema.written)
            validate = self.validate_write if written else self.validate_all
            self._inference_calls[key] = _inference_call(self.specification, lengths, validate)
        return self._inference_calls[key]

    def in_shape(self, values: tuple[Any, ...]) -> bool:
        """Return True if the tensors have the declared shapes."""
        shapes = self.specification.shapes
        return shapes is None or shapes.bind(self.specification.schema, values)[1] is None

    def validate(
        self,
        kernel: Callable[..., Any],
        result: Any,
        values: list[Any],
        before: Before | tuple[int, ...] | None,
    ) -> Any:
        """Validate as `validate_all` does, and return what the operator returns."""
        results = self.validate_all(kernel, result, values, before)
        shown = tuple(
            results[at] if self.specification.schema.results[at].differentiable else results[at].detach()
            for at in self.specification.schema.visible
        )
        return shown[0] if len(shown) == 1 else shown

    def validate_all(
        self,
        kernel: Callable[..., Any],
        result: Any,
        values: list[Any],
        before: Before | tuple[int, ...] | None,
    ) -> tuple[Any, ...]:
        """Validate results that failed the quick checks against the whole contract, and return all of them.

        Args:
            kernel: The function that computed them.
            result: What it returned.
            values: The argument values.
            before: The states of the tensors among them before the call, or their version counters, from
                C++; None if not recorded.

        Raises:
            MutationError, AliasError, ResultTypeError, LayoutError, CapturedTensorError: See their names.
        """
        contract = Contract(self.specification)
        if before is not None and not isinstance(before, Before):
            before = Before([State(version) for version in before], [])
        results = contract.results(kernel, result, values, before)
        if not requires_gradient(values) and requires_gradient(list(results)):
            raise contract.captured(kernel)
        return results

    def validate_write(
        self,
        kernel: Callable[..., Any],
        result: Any,
        values: list[Any],
        before: Before | None,
    ) -> Any:
        """Validate a call in place as `validate` does, and return what the operator returns.

        Args:
            kernel: The function that wrote.
            result: What it returned.
            values: The argument values.
            before: The states of the tensors among them before the call; None if not recorded.
        """
        schema, contract = self.specification.schema, Contract(self.specification)
        results = contract.results(kernel, result, values, before)
        written = tensors_in([values[schema.names.index(name)] for name in schema.written])
        for tensor, state in zip(written, before.written if before else (), strict=False):
            if capabilities.version(tensor) == state.version is not None:
                torch.autograd.graph.increment_version(tensor)  # the kernel wrote past torch
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*written, *results)):
            raise contract.captured(kernel)
        if schema.returns is not None:
            return written[0]
        return results[0] if results else None


def _inference_call(
    specification: Specification, lengths: dict[str, int], validate: Callable[..., Any]
) -> Callable[..., Any]:
    """Generate the call in inference mode.

    It takes the items of lists one by one. It returns what a node returns, all results; or for an operator in
    place what that returns.
    """
    schema = specification.schema
    contract = ContractSource(specification)
    names: dict[str, Any] = {**contract.names, "_op_validate": validate}
    items = item_names(schema, lengths)
    arguments = "".join(f"{item}, " for each in items.values() for item in each)
    values = "".join(f"{name}, " for name in schema.names)
    returned = contract.returned() if schema.written else "_op_result"
    held = " and (_op_in_cpp or _op_holds(_op_before, _op_values))" if contract.may_write else ""
    several = schema.written or len(schema.results) > 1
    source = f"""
def _op_in_inference(_op_kernel, _op_in_cpp, {arguments}):
    {make_lists(lengths, items)}
    _op_values = [{values}]
    _op_before = {"None if _op_in_cpp else _op_states(_op_values)" if contract.may_write else None}
    _op_result = _op_kernel({to_kernel_source(schema, items)})
    if {contract.fresh()}{held}:
        return {returned}
    {"_op_result" if several else "(_op_result,)"} = _op_validate(
        _op_kernel, _op_result, _op_values, _op_before
    )
    return _op_result
"""
    exec(source, names)
    made: Callable[..., Any] = names["_op_in_inference"]
    return made


def _nothing() -> None:
    """Kernel of a call that is computed already."""


def _is_dense(tensor: Tensor) -> bool:
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_quantized or capabilities.is_gradient_batch(tensor))


def _is_materialized(tensor: Tensor) -> bool:
    """Return True if a kernel can read the memory of a tensor as it is; torch operations take any tensor."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
