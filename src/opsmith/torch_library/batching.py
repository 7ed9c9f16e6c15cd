"""An operator under one `vmap` level: a target that computes with a batch, and is again a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.calls import tensors_in
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.gradient_values import Form
from opsmith.torch_library.random_state import RandomState
from opsmith.torch_library.result_flattening import Flat, ResultFlattening
from opsmith.torch_library.targets import Forms, Target, VectorProduct

Dim = int | None


@dataclass
class Batched:
    """A target whose arguments carry one more dimension each, or do not.

    Args:
        inner: The target for one example.
        dims: For each flat argument its batch dimension, or None.
        size: How many examples there are.
        randomness: What `vmap` was told about random operations.
        result_dims: For each result its batch dimension; known after the first computation.
    """

    inner: Target
    dims: tuple[Dim, ...]
    size: int
    randomness: str
    result_dims: tuple[Dim, ...] = field(default=())

    @property
    def specification(self) -> Specification:
        """The operator."""
        return self.inner.specification

    @property
    def flattening(self) -> Flattening:
        """How its arguments lie in flat form."""
        return self.inner.flattening

    @property
    def results(self) -> ResultFlattening:
        """How its results lie in flat form."""
        return self.inner.results

    @property
    def node(self) -> Any:
        """The class of its autograd node."""
        return self.inner.node

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs: the same as for one example."""
        return self.inner.plan(needed)

    def below(self, flat: Sequence[Any]) -> Flat:
        """All results for the whole batch, below autograd: the reference, batched operation by operation."""
        return self.example(flat)

    def example(self, flat: Sequence[Any]) -> Flat:
        """All results for the whole batch, as one example of the level further out."""
        there: list[bool] = []

        def one(flat: Sequence[Any]) -> tuple[Tensor, ...]:
            results = self.inner.example(flat)
            there[:] = [result is not None for result in results]
            return tuple(tensors_in(list(results)))

        found, dims = self._over_examples(one, (self.dims,))(tuple(flat))
        # A result that no example changes gets a batch too: each example's gradient of it counts once.
        results = iter(
            (result.expand(self.size, *result.shape).clone(), 0) if dim is None else (result, dim)
            for result, dim in zip(found, dims, strict=True)
        )
        pairs = [next(results) if is_there else (None, None) for is_there in there]
        self.result_dims = tuple(dim for _, dim in pairs)
        return tuple(result for result, _ in pairs)

    def vjp(self, plan: BackwardPlan, forms: Forms, state: RandomState | None) -> VectorProduct:
        """The vector-Jacobian product of the whole batch."""
        inputs = tuple(
            _example_form(form, dim) if form else None
            for form, dim in zip(forms.inputs, self.dims, strict=True)
        )
        results = tuple(
            _example_form(form, dim) if form else None
            for form, dim in zip(forms.results, self.result_dims, strict=True)
        )
        shapes = tuple(
            _example_shape(shape, dim) if shape is not None else None
            for shape, dim in zip(forms.shapes, self.dims, strict=True)
        )
        product = self.inner.vjp(plan, Forms(inputs, shapes, results, forms.mixed), state)

        def batched(saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            given = tuple(
                dim if grad is not None else None for grad, dim in zip(grads, self.result_dims, strict=True)
            )
            names = tuple(saved)
            values = tuple(saved[name] for name in names)
            dims = tuple(self._dims_of(name, saved[name]) for name in names)

            def one(values: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
                return tuple(product(dict(zip(names, values, strict=True)), grads))

            found, found_dims = self._over_examples(one, (dims, given))(values, tuple(grads))
            return [
                self._reduced(gradient, dim, wanted, form)
                for gradient, dim, wanted, form in zip(found, found_dims, self.dims, inputs, strict=True)
            ]

        return batched

    def jvp(self, every: Mapping[str, Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tangents of the results of the whole batch."""
        names = tuple(every)
        values = tuple(every[name] for name in names)
        dims = tuple(self._dims_of(name, every[name]) for name in names)
        moving = tuple(dim if t is not None else None for t, dim in zip(tangents, self.dims, strict=True))

        def one(values: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(self.inner.jvp(dict(zip(names, values, strict=True)), tangents))

        found, found_dims = self._over_examples(one, (dims, moving))(values, tuple(tangents))
        return tuple(
            None if tangent is None else capabilities.reduce_to_dim(tangent, dim, wanted, self.size)
            for tangent, dim, wanted in zip(found, found_dims, self.result_dims, strict=True)
        )

    def _over_examples(self, function: Any, dims: Any) -> Any:
        return capabilities.over_examples(function, dims, self.size, self.randomness)

    def _dims_of(self, name: str, value: Any) -> Any:
        if name in self.results.spans:
            return self.results.item(name, self.result_dims)
        dims = self.dims[self.flattening.spans[name]]
        return list(dims) if self.flattening.is_list(name) else dims[0]

    def _reduced(self, gradient: Any, dim: Dim, wanted: Dim, form: Form | None) -> Tensor | None:
        if gradient is None or form is None:
            return None
        reduced: Tensor = capabilities.reduce_to_dim(
            gradient, dim, wanted, self.size, form.shape if wanted is not None else None
        )
        return reduced


def _example_form(form: Form, dim: Dim) -> Form:
    return Form(_example_shape(form.shape, dim), form.dtype, form.device)


def _example_shape(shape: torch.Size, dim: Dim) -> torch.Size:
    if dim is None:
        return shape
    return torch.Size(size for place, size in enumerate(shape) if place != dim % len(shape))
