"""The forms of calls that have been through: what computes each, and how its tensors are told again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.answers import NonDifferentiable
from opsmith.core.calls import tensors_in
from opsmith.core.formula import Formula
from opsmith.core.kernels import BuiltKernel, choose
from opsmith.core.location import where
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract_source import CONTRACT_NAMES, ContractSource
from opsmith.torch_library.effects import settle
from opsmith.torch_library.fast_node import CallForm, FastNode
from opsmith.torch_library.targets import mixes_dtypes

PLAIN = frozenset((Tensor, torch.nn.Parameter))
LIMIT = 16
"""How many forms are kept; calls of others ask everything, in Python."""

Way = tuple[Any, Callable[..., Any] | None, Callable[..., Any] | None, bool]
"""Whether tensors are of this form; kernel; a node's `apply`, or None; whether one requires a gradient."""

NO_WAY: Way = (None, None, None, False)
"""For a call that has to go through the dispatcher."""


@dataclass
class Ways:
    """What is known about calls of one operator.

    Args:
        specification: The operator.
        known: For each set of optional tensors that are given, the ways of the forms that were met.
    """

    specification: Specification
    known: tuple[list[Way], ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = [each for each in self.specification.schema.arguments if each.kind.is_tensor]
        self._optional = [each.name for each in tensors if each.kind.optional]
        self.known = tuple([] for _ in range(2 ** len(self._optional)))
        self._nodes: dict[frozenset[str], FastNode] = {}
        self._graphless: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._in_inference = _inference_call(self.specification, self.settle)

    def admit(self, values: tuple[Any, ...]) -> Way:
        """The way of a call with these argument values."""
        specification = self.specification
        given = dict(zip(specification.schema.names, values, strict=True))
        tensors = tensors_in(list(values))
        if not capabilities.nothing_active() or not all(_dense(tensor) for tensor in tensors):
            return NO_WAY
        if (specification.kernels or specification.opaque) and not all(map(_in_memory, tensors)):
            return NO_WAY
        if not self.in_shape(values):
            return NO_WAY
        accepted, rejected = choose(specification.kernels, values)
        if any(each.strict for each in rejected):
            return NO_WAY
        kernel = accepted.kernel.function if accepted else specification.reference
        if isinstance(kernel, BuiltKernel) and kernel.pure:
            kernel = kernel.direct
        elif accepted or specification.opaque:
            kernel = self._without_graph(kernel)
        fits = capabilities.tensor_guard(tensors)
        way = self._way(fits, kernel, given, tensors)
        number = sum(
            2**place for place, name in enumerate(reversed(self._optional)) if given[name] is not None
        )
        # A tensor that is given twice is of no form, for torch: such calls come here each time.
        if way is not NO_WAY and len(self.known[number]) < LIMIT and fits(*tensors):
            self.known[number].append(way)
        return way

    def _without_graph(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel without a graph, be it made of torch operations on weights of its own."""
        if kernel not in self._graphless:
            self._graphless[kernel] = torch.no_grad()(kernel)
        return self._graphless[kernel]

    def _way(
        self, fits: Any, kernel: Callable[..., Any], given: dict[str, Any], tensors: list[Tensor]
    ) -> Way:
        specification = self.specification
        requires = {
            name
            for name in specification.schema.tensor_names
            if given[name] is not None and given[name].requires_grad
        }
        if any(tensor.is_inference() for tensor in tensors) or torch.is_inference_mode_enabled():
            if requires and not torch.is_inference_mode_enabled():
                return NO_WAY
            return fits, kernel, partial(self._in_inference, kernel), False
        # Without formula and kernel it is the reference that autograd records, as it would any function.
        ordinary = not (specification.gradients.given or kernel is not specification.reference)
        if not requires or ordinary:
            return fits, kernel, None, bool(requires)
        nodes = self._fast_node(requires)
        if nodes is None:
            return NO_WAY
        examples = {name: given[name].detach().new_empty((0,) * given[name].dim()) for name in requires}
        node = nodes.of(CallForm(kernel, examples, mixes_dtypes(list(given.values()))))
        return fits, kernel, capabilities.direct_apply(node), True

    def _fast_node(self, requires: set[str]) -> FastNode | None:
        """The nodes for calls in which these tensors require a gradient; None where there are none."""
        rules = self.specification.gradients.rules
        needed = frozenset(name for name in requires if not isinstance(rules.get(name), NonDifferentiable))
        formulas = [rules.get(name) for name in needed]
        if not needed or not all(isinstance(rule, Formula) and not rule.joint for rule in formulas):
            return None
        if needed not in self._nodes:
            self._nodes[needed] = FastNode(self.specification, needed, self.settle)
        return self._nodes[needed]

    def in_shape(self, values: tuple[Any, ...]) -> bool:
        """Whether the tensors have the shapes that the operator was declared with."""
        shapes = self.specification.shapes
        return shapes is None or shapes.bind(self.specification.schema, values)[1] is None

    def settle(
        self,
        kernel: Callable[..., Any],
        result: Any,
        values: list[Any],
        before: tuple[int | None, ...] | None,
    ) -> Tensor:
        """Hold a result that does not look right at first sight to the whole contract.

        Args:
            kernel: What computed it.
            result: The result.
            values: The argument values.
            before: How often each tensor among them had been written to; None if nobody looked.

        Raises:
            MutationError, AliasError, ResultTypeError, LayoutError, CapturedTensorError: As their names say.
        """
        settled = settle(self.specification, kernel)(result, values, before)
        if settled.requires_grad and not any(tensor.requires_grad for tensor in tensors_in(values)):
            raise errors.CapturedTensorError(
                "it uses something that requires a gradient and is no argument",
                operator=self.specification.name,
                expected="a function of its arguments alone",
                got="a result that requires a gradient, from arguments that do not",
                where=where(kernel),
                hint="make it an argument, or use `.detach()` of it",
            )
        return settled


def _inference_call(specification: Specification, settled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call in inference mode, where tensors count no writes and no result says that it is a view."""
    schema = specification.schema
    names: dict[str, Any] = {**CONTRACT_NAMES, "_op_settle": settled}
    arguments = "".join(f"{name}, " for name in schema.names)
    to_kernel = "".join(f"{name}, " for name in schema.names[: schema.positional])
    to_kernel += "".join(f"{name}={name}, " for name in schema.names[schema.positional :])
    source = f"""
def _op_in_inference(_op_kernel, {arguments}):
    _op_result = _op_kernel({to_kernel})
    if {ContractSource(specification).fresh()}:
        return _op_result
    return _op_settle(_op_kernel, _op_result, [{arguments}], None)
"""
    exec(source, names)
    made: Callable[..., Tensor] = names["_op_in_inference"]
    return made


def _dense(tensor: Tensor) -> bool:
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_quantized or capabilities.is_gradient_batch(tensor))


def _in_memory(tensor: Tensor) -> bool:
    """Whether a kernel can take the memory as it lies there; torch operations take any tensor."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
