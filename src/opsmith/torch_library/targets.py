"""What a differentiation layer acts on: an operator, or an operator under one `vmap` level and more.

A target under a `vmap` level is a target again, so that layers nest in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.specification import Specification
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.gradient_values import Form
from opsmith.torch_library.random_state import RandomState
from opsmith.torch_library.result_flattening import ResultFlattening

VectorProduct = Callable[[Mapping[str, Any], Sequence[Tensor | None]], list[Tensor | None]]
"""Takes saved values by name and the gradient of each result; gives the gradient of each flat argument."""


@dataclass(frozen=True)
class Forms:
    """Forms of a call's tensors.

    Args:
        inputs: For each flat argument its form, where it is a tensor that needs a gradient; else None.
        shapes: For each flat argument its shape, where it is a tensor; else None.
        results: Form of each flat result; None for one that is not there.
        mixed: Whether the call mixed floating dtypes.
    """

    inputs: tuple[Form | None, ...]
    shapes: tuple[torch.Size | None, ...]
    results: tuple[Form | None, ...]
    mixed: bool

    @classmethod
    def of(cls, flat: Sequence[Any], results: Sequence[Any], needs: Sequence[bool]) -> Forms:
        """The forms of these arguments, of which some need a gradient, and results."""
        inputs = tuple(
            Form.of(value) if need and isinstance(value, Tensor) else None
            for value, need in zip(flat, needs, strict=True)
        )
        shapes = tuple(value.shape if isinstance(value, Tensor) else None for value in flat)
        return cls(
            inputs,
            shapes,
            tuple(None if result is None else Form.of(result) for result in results),
            mixes_dtypes(flat),
        )


class Target(Protocol):
    """An operator for a given shape of call, as layers see it."""

    @property
    def specification(self) -> Specification:
        """The operator."""
        ...

    @property
    def flattening(self) -> Flattening:
        """How its arguments lie in flat form."""
        ...

    @property
    def results(self) -> ResultFlattening:
        """How its results lie in flat form; where there are lists, known after the first computation."""
        ...

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs."""
        ...

    @property
    def node(self) -> Any:
        """The class of its autograd node."""
        ...

    def example(self, flat: Sequence[Any]) -> tuple[Tensor, ...]:
        """All results, hidden ones too, by the reference, for tensors that may carry a batch."""
        ...

    def below(self, flat: Sequence[Any]) -> tuple[Tensor, ...]:
        """All results, hidden ones too, computed below autograd."""
        ...

    def vjp(self, plan: BackwardPlan, forms: Forms, state: RandomState | None) -> VectorProduct:
        """The vector-Jacobian product of a call with these forms."""
        ...

    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results, from all arguments and results by name and tangents of flat arguments."""
        ...


def mixes_dtypes(values: Sequence[Any]) -> bool:
    """Whether the tensors among some values have more than one dtype that can have a gradient."""
    return len({each.dtype for each in values if isinstance(each, Tensor) and has_gradient(each.dtype)}) > 1


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex
