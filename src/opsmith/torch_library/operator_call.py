"""A call of an operator, as the layers of autograd and `torch.func` act on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.backward import Vjp
from opsmith.torch_library.effects import run_pure
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.random_state import RandomState
from opsmith.torch_library.tangents import jvp
from opsmith.torch_library.targets import Forms, VectorProduct


class Registered(Protocol):
    """What a call needs of the registration of its operator."""

    specification: Specification
    whole: Any
    node: Any

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs."""
        ...


@dataclass(frozen=True)
class OperatorCall:
    """An operator, for calls with lists of given lengths: the innermost target."""

    registered: Registered
    flattening: Flattening

    @property
    def specification(self) -> Specification:
        """The operator."""
        return self.registered.specification

    @property
    def node(self) -> Any:
        """The class of its autograd node."""
        return self.registered.node

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs."""
        return self.registered.plan(needed)

    def call(self, flat: Sequence[Any]) -> tuple[Tensor, ...]:
        """All results, hidden ones too, through the dispatcher."""
        args, kwargs = self.specification.schema.dispatched(self.flattening.pack(flat))
        results = self.registered.whole(*args, **kwargs)
        return results if isinstance(results, tuple) else (results,)

    def below(self, flat: Sequence[Any]) -> tuple[Tensor, ...]:
        """All results, hidden ones too, computed below autograd."""
        with capabilities.below_autograd():
            return self.call(flat)

    def example(self, flat: Sequence[Any]) -> tuple[Tensor, ...]:
        """All results, hidden ones too, by the reference, for tensors that may carry a batch."""
        return run_pure(self.specification, self.specification.computed_by, self.flattening.pack(flat))

    def vjp(self, plan: BackwardPlan, forms: Forms, state: RandomState | None) -> VectorProduct:
        """The vector-Jacobian product of a call with these forms."""
        return Vjp(self.specification, plan, self.flattening, forms, state)

    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results."""
        return jvp(self, every, tangents)
