"""`vmap` of an operator: by one call for the batch, by a class's own rule, or operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.origins.function_class import AdoptedFunction, StructureMismatchError, class_of, leaves
from opsmith.core.shapes import ELEMENTWISE, LEADING, leads
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.gradient_values import CallMetadata, TensorMetadata
from opsmith.torch_library.autograd.primitive import Primitive, VjpFunction
from opsmith.torch_library.autograd.random_state import RandomState, generators_in
from opsmith.torch_library.contract import refuse_nondeterminism
from opsmith.torch_library.flattening import ArgumentFlattening, Flat, ResultFlattening

Dim = int | None
Dims = Sequence[Dim]
T = TypeVar("T")


class BatchedPrimitive(Primitive):
    """A primitive under one `vmap` level: some arguments have an additional dimension.

    Args:
        inner: The primitive of one example.
        dims: Batch dimension of each flat argument, or None.
        size: Number of examples.
        randomness: The `randomness` argument of `vmap`.

    Attributes:
        result_dims: Batch dimension of each result; known after the first computation.
    """

    def __init__(self, inner: Primitive, dims: tuple[Dim, ...], size: int, randomness: str) -> None:
        super().__init__(inner.registered, inner.flattening)
        self.inner, self.dims, self.size, self.randomness = inner, dims, size, randomness
        self.result_dims: tuple[Dim, ...] = ()

    @property
    def results(self) -> ResultFlattening:
        """Flat form of its results."""
        return self.inner.results

    def below(self, flat: Sequence[Any]) -> Flat:
        """Compute the batch below autograd: the reference, batched operation by operation."""
        return self.example(flat)

    def example(self, flat: Sequence[Any]) -> Flat:
        """Compute the batch, as one example of the next outer level."""
        present: list[bool] = []

        def one(flat: Sequence[Any]) -> tuple[Tensor, ...]:
            results = self.inner.example(flat)
            present[:] = [result is not None for result in results]
            return tuple(tensors_in(list(results)))

        found, dims = self._over_examples(one, (self.dims,))(tuple(flat))
        # A result that does not depend on the batch is expanded, so that each example's gradient counts once.
        results = iter(
            (result.expand(self.size, *result.shape).clone(), 0) if dim is None else (result, dim)
            for result, dim in zip(found, dims, strict=True)
        )
        pairs = [next(results) if is_there else (None, None) for is_there in present]
        self.result_dims = tuple(dim for _, dim in pairs)
        return tuple(result for result, _ in pairs)

    def vjp(self, plan: BackwardPlan, metadata: CallMetadata, state: RandomState | None) -> VjpFunction:
        """The vector-Jacobian product of the whole batch."""
        inputs = _of_examples(_example_metadata, metadata.inputs, self.dims)
        results = _of_examples(_example_metadata, metadata.results, self.result_dims)
        shapes = _of_examples(_example_shape, metadata.shapes, self.dims)
        product = self.inner.vjp(plan, CallMetadata(inputs, shapes, results, metadata.mixed), state)

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
                self._reduced(gradient, dim, wanted, tensor_metadata)
                for gradient, dim, wanted, tensor_metadata in zip(
                    found, found_dims, self.dims, inputs, strict=True
                )
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

    def _reduced(
        self, gradient: Any, dim: Dim, wanted: Dim, tensor_metadata: TensorMetadata | None
    ) -> Tensor | None:
        if gradient is None or tensor_metadata is None:
            return None
        reduced: Tensor = capabilities.reduce_to_dim(
            gradient, dim, wanted, self.size, tensor_metadata.shape if wanted is not None else None
        )
        return reduced


def _of_examples(
    convert: Callable[[T, Dim], T], values: Sequence[T | None], dims: Dims
) -> tuple[T | None, ...]:
    """Convert metadata of batched tensors to metadata of one example; None stays None."""
    return tuple(
        None if value is None else convert(value, dim) for value, dim in zip(values, dims, strict=True)
    )


def _example_metadata(tensor_metadata: TensorMetadata, dim: Dim) -> TensorMetadata:
    return TensorMetadata(
        _example_shape(tensor_metadata.shape, dim), tensor_metadata.dtype, tensor_metadata.device
    )


def _example_shape(shape: torch.Size, dim: Dim) -> torch.Size:
    if dim is None:
        return shape
    return torch.Size(size for index, size in enumerate(shape) if index != dim % len(shape))


@dataclass(frozen=True)
class BatchedCall:
    """A single call of the operator that computes all examples.

    Args:
        flat: Its flat arguments.
        restore: Converts its flat results, with their labels, to the results of the batch, whose batch
            dimension comes first.
    """

    flat: list[Any]
    restore: Callable[[Sequence[Any], Sequence[str]], Flat]


def batched_call(
    specification: Specification,
    flattening: ArgumentFlattening,
    flat: Sequence[Any],
    dims: Dims,
    size: int,
    randomness: str,
) -> BatchedCall | None:
    """The single call that computes a batch; None if the reference must be batched instead.

    Args:
        specification: The operator.
        flattening: Flattening of its arguments.
        flat: The arguments; batched arguments have an additional dimension.
        dims: Batch dimension of each argument, or None.
        size: Number of examples.
        randomness: The `randomness` argument of `vmap`.
    """
    draws = generators_in(flat) or (specification.random and randomness != "different")
    if specification.batching is None or draws:
        return None
    if specification.batching == ELEMENTWISE:
        return _elementwise(specification, flat, dims, size)
    return _leading(specification, flattening.names, flat, dims, size)


def _elementwise(
    specification: Specification, flat: Sequence[Any], dims: Dims, size: int
) -> BatchedCall | None:
    """Put the batch dimension first, then sizes of 1, so that each example broadcasts as it would alone."""
    ranks = [
        value.dim() - (dim is not None)
        for value, dim in zip(flat, dims, strict=True)
        if isinstance(value, Tensor)
    ]
    dtypes = {value.dtype for value in flat if isinstance(value, Tensor)}
    if len(dtypes) > 1 and min(ranks) == 0:
        return None  # dtype promotion treats a 0-dimensional tensor differently
    rank = max(ranks)

    def lifted(value: Tensor, dim: int) -> Tensor:
        first = value.movedim(dim, 0)
        return first.reshape(size, *(1,) * (rank - first.dim() + 1), *first.shape[1:])

    arguments = [value if dim is None else lifted(value, dim) for value, dim in zip(flat, dims, strict=True)]
    shape = torch.broadcast_shapes(*(value.shape for value in arguments if isinstance(value, Tensor)))

    def restore(results: Sequence[Any], labels: Sequence[str]) -> Flat:
        for label, result in zip(labels, results, strict=True):
            if result is not None and result.shape != shape:
                raise _missing_batch_dimension(specification, label, shape, result)
        return tuple(results)

    return BatchedCall(arguments, restore)


def _leading(
    specification: Specification, names: Sequence[str], flat: Sequence[Any], dims: Dims, size: int
) -> BatchedCall | None:
    """Merge the batch dimension with the operator's dimension of independent examples."""
    shapes, batching = specification.shapes, specification.batching
    assert shapes is not None
    assert batching is not None
    arguments: list[Any] = []
    lead: int | None = None
    mixed = len({value.dtype for value in flat if isinstance(value, Tensor)}) > 1
    for name, value, dim in zip(names, flat, dims, strict=True):
        if not isinstance(value, Tensor) or not leads(batching, shapes, name):
            if dim is not None:
                return None  # the argument must be the same for all examples
            arguments.append(value)
            continue
        first = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        if mixed and first.dim() == 1 and batching == LEADING:
            return None  # dtype promotion treats a 0-dimensional example differently
        if batching != LEADING:
            if first.dim() < 2:
                return None  # the operator raises its own error
            lead = first.shape[1]
            first = first.reshape(size * lead, *first.shape[2:])
        arguments.append(first)

    def restore(results: Sequence[Any], labels: Sequence[str]) -> Flat:
        wanted = size if lead is None else size * lead
        for label, result in zip(labels, results, strict=True):
            if result is not None and (result.dim() == 0 or result.shape[0] != wanted):
                raise _missing_batch_dimension(specification, label, (wanted, ...), result)
        if lead is None:
            return tuple(results)
        return tuple(
            None if result is None else result.reshape(size, lead, *result.shape[1:]) for result in results
        )

    return BatchedCall(arguments, restore)


def _missing_batch_dimension(
    specification: Specification, name: str, shape: Sequence[Any], result: Tensor
) -> errors.ShapeError:
    sizes = ", ".join("..." if each is ... else str(each) for each in shape)
    return specification.error(
        errors.ShapeError,
        f"`{name}` has no batch dimension, but it needs one with `batching={specification.batching!r}`",
        argument=name,
        expected=f"[{sizes}]",
        got=str(list(result.shape)),
        hint="leave `batching=` out: then each example is computed separately",
    )


class VmapInfo(NamedTuple):
    """Arguments of a class's `vmap` rule, under torch's names.

    Attributes:
        batch_size: Number of examples.
        randomness: The `randomness` argument of `vmap`.
    """

    batch_size: int
    randomness: str


def has_vmap_rule(specification: Specification) -> bool:
    """Return True if the operator was adopted from a class with a `vmap` rule."""
    own = specification.origin.own("vmap")
    return own is not None and own.function is not None


def run_vmap_rule(
    specification: Specification, info: VmapInfo, dims: Sequence[int | None], values: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Run the `vmap` rule of a class.

    Args:
        specification: The operator.
        info: Size and randomness of the batch.
        dims: Batch dimension of each flat argument, or None.
        values: The arguments.

    Returns:
        The results, and the batch dimension of each result or None.

    Raises:
        ResultCountError: If the rule does not return results and their dimensions.
    """
    adopted = class_of(specification.origin)
    rule: Any = adopted.method("vmap")
    refuse_nondeterminism(specification)
    given, rest = adopted.spread(values), iter(_tensor_dims(values, dims))
    if not adopted.parameters.plain:
        dims = [next(rest) if isinstance(value, Tensor) else None for value in given]
    returned = rule(info, tuple(dims), *given)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _vmap_result_error(adopted, shown(returned))
    values, returned_dims = returned
    if isinstance(adopted.outputs, tuple) and not isinstance(returned_dims, tuple | list):
        returned_dims = (returned_dims,) * len(adopted.outputs)  # one dimension for all
    try:
        results = {i: value for i, value in leaves(adopted.outputs, values) if i is not None}
        indices = {i: dim for i, dim in leaves(adopted.outputs, returned_dims) if i is not None}
    except StructureMismatchError as misfit:
        raise _vmap_result_error(adopted, shown(misfit.value)) from None
    order = range(len(adopted.schema.results))
    return tuple(results[i] for i in order), tuple(indices[i] for i in order)


def _tensor_dims(values: Sequence[Any], dims: Sequence[int | None]) -> list[int | None]:
    """Return the batch dimensions of only the tensors, including tensors in lists."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [dim for item, dim in zip(flat, dims, strict=True) if isinstance(item, Tensor)]


def _vmap_result_error(adopted: AdoptedFunction, got: str) -> errors.ResultCountError:
    return adopted.error(
        errors.ResultCountError,
        f"`{adopted.name}.vmap` does not return the results and their batch dimensions",
        expected="a tuple of two: the results of forward, and a dimension or None for each result",
        got=got,
        hint="return `(result, 0)`",
    )
