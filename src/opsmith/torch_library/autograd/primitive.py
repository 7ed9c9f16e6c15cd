"""Differentiable operations: an operator, with its VJP, its JVP and its batching."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.autograd.forward_mode import jvp
from opsmith.torch_library.autograd.gradient_values import CallMetadata
from opsmith.torch_library.autograd.node import Node, RunsRule, through
from opsmith.torch_library.autograd.random_state import RandomState
from opsmith.torch_library.autograd.saved_values import SavedValues, save_values
from opsmith.torch_library.autograd.vjp import Vjp
from opsmith.torch_library.contract import run_call
from opsmith.torch_library.flattening import ArgumentFlattening, Flat, ResultFlattening, lengths_of

if TYPE_CHECKING:
    from opsmith.torch_library.autograd.formula_rule import FormulaRule
    from opsmith.torch_library.calls.autograd_kernel import AutogradKernel

VjpFunction = Callable[[Mapping[str, Any], Sequence[Tensor | None]], list[Tensor | None]]
"""Function of saved values by name and result gradients; returns the gradient of each flat argument."""


class RegisteredOperator(Protocol):
    """The part of a registration that a call uses."""

    specification: Specification
    owner: Any
    autograd_kernels: list[AutogradKernel]

    def call_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it through the dispatcher, and return its hidden results, too."""
        ...

    def held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel or reference, whose results are checked for their promised layout."""
        ...

    @property
    def rule(self) -> type[FormulaRule]:
        """The type of rule that its nodes have."""
        ...

    def node(self, base: type[RunsRule]) -> Any:
        """The class of its nodes; see `node_class`."""
        ...

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs."""
        ...

    def result_flattening(self, lengths: tuple[int | None, ...]) -> ResultFlattening:
        """Flat form of results with lists of these lengths."""
        ...

    @property
    def form_registration(self) -> RegisteredOperator:
        """The registration of the functional form."""
        ...

    def recorded(self, values: list[Any]) -> tuple[Any, ...]:
        """Compute a call with a graph, from argument values with validated metadata."""
        ...

    def renew_routes(self) -> None:
        """Forget all routes, but remember that calls have passed validation."""
        ...


class Primitive(ABC):
    """A differentiable operation with VJP, JVP and batching: an operator, possibly under a `vmap` level.

    Args:
        registered: The operator.
        flattening: Flat form of its arguments.

    Attributes:
        specification: The specification of the operator.
        plan: Function that plans the backward for some inputs of one example.
    """

    def __init__(self, registered: RegisteredOperator, flattening: ArgumentFlattening) -> None:
        self.registered, self.flattening = registered, flattening
        self.specification, self.plan = registered.specification, registered.plan
        self._results = registered.result_flattening((None,) * len(self.specification.schema.results))

    @property
    def results(self) -> ResultFlattening:
        """Flat form of its results; if there are lists, it is known after the first computation."""
        return self._results

    def save(
        self, names: Sequence[str], flat: Sequence[Any], results: Sequence[Any]
    ) -> tuple[tuple[Tensor, ...], SavedValues]:
        """The tensors among some arguments and results, and their form; see `save_values`."""
        return save_values(names, self.flattening, flat, results, self.results)

    @abstractmethod
    def example(self, flat: Sequence[Any]) -> Flat:
        """Compute all results by the reference, for tensors that may carry a batch."""

    @abstractmethod
    def below(self, flat: Sequence[Any]) -> Flat:
        """Compute all results below autograd."""

    @abstractmethod
    def vjp(self, plan: BackwardPlan, metadata: CallMetadata, state: RandomState | None) -> VjpFunction:
        """The vector-Jacobian product of a call with this metadata."""

    @abstractmethod
    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results, from arguments and results by name and tangents of flat arguments."""


class OperatorPrimitive(Primitive):
    """An operator, for calls with lists of given lengths.

    Args:
        registered: The operator.
        flattening: Flat form of its arguments.
        compute: Takes argument values, and returns all results; by default the dispatcher does.
    """

    def __init__(
        self,
        registered: RegisteredOperator,
        flattening: ArgumentFlattening,
        compute: Callable[[list[Any]], tuple[Any, ...]] | None = None,
    ) -> None:
        super().__init__(registered, flattening)
        self._compute = compute

    def _dispatched(self, values: list[Any]) -> tuple[Any, ...]:
        args, kwargs = self.specification.schema.dispatched(values)
        results = self.registered.call_whole(args, kwargs)
        return results if isinstance(results, tuple) else (results,)

    def _flat(self, results: tuple[Any, ...]) -> Flat:
        if self.specification.schema.always_tensors:
            return results
        self._results = self.registered.result_flattening(lengths_of(results))
        return self._results.flatten(results)

    def call(self, flat: Sequence[Any]) -> Flat:
        """Compute all results, through the dispatcher."""
        return self._flat((self._compute or self._dispatched)(self.flattening.pack(flat)))

    def below(self, flat: Sequence[Any]) -> Flat:
        """Compute all results below autograd."""
        with capabilities.below_autograd():
            return self.call(flat)

    def example(self, flat: Sequence[Any]) -> Flat:
        """Compute all results by the reference, for tensors that may carry a batch."""
        specification = self.specification
        return self._flat(run_call(specification, specification.computed_by, self.flattening.pack(flat)))

    def vjp(self, plan: BackwardPlan, metadata: CallMetadata, state: RandomState | None) -> VjpFunction:
        """The vector-Jacobian product of a call with this metadata."""
        autocast = None if self.specification.origin.casts else autocast_in_force()
        return Vjp(self.specification, plan, self.flattening, self.results, metadata, state, autocast)

    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results."""
        return jvp(self, every, tangents)


def differentiate(primitive: Primitive, flat: Sequence[Any]) -> Flat:
    """Call outside `torch.func`: with an autograd node if a gradient or tangent is needed."""
    forward_mode = capabilities.forward_mode_active()
    requires = any(isinstance(value, Tensor) and value.requires_grad for value in flat)
    if forward_mode or (requires and torch.is_grad_enabled()):
        rule = primitive.registered.rule(primitive, forward_mode=forward_mode)
        found: Flat = through(primitive.registered.node(Node).apply, rule, *flat)
        return found
    return primitive.below(flat)
