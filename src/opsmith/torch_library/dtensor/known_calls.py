"""Known calls on DTensors, past the dispatcher: the reference on them, or the operator on their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.core.kernels import choose
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.prepared_rule import PreparedRule
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator
from opsmith.torch_library.calls.computation import UnknownCallError
from opsmith.torch_library.dtensor.placements import (
    author_code,
    dtensor,
    is_authors,
    is_unplaced,
    note_placement,
    replicating,
)
from opsmith.torch_library.dtensor.rule import MAX_TRIALS, DTensorRule
from opsmith.torch_library.flattening import ArgumentFlattening, detached
from opsmith.torch_library.torch_messages import MIXED_WITH_DTENSOR, has_message

MAX_KNOWN = 256
"""Maximum number of signatures that are kept."""


class DTensorCalls:
    """Calls of one operator whose tensors are all DTensors, outside of modes and transforms.

    A call that it does not compute takes the slow path, which validates it and refuses with a reason. So does
    a call in which torch raises here: nothing is written, since the operator declares no write.

    Args:
        registered: The registration of the operator.
        rule: Its dispatch rule for DTensors, that of all results.
    """

    def __init__(self, registered: RegisteredOperator, rule: DTensorRule) -> None:
        specification = registered.specification
        self._specification, self._rule = specification, rule
        schema = specification.schema
        lists = any(each.kind.is_tensor and each.kind.sequence for each in schema.arguments)
        self._eligible = not (
            specification.draws or lists or specification.opaque or schema.written or schema.new_values
        )
        self._eligible &= not specification.origin.registered and schema.always_tensors
        self._constant = [at for at, each in enumerate(schema.results) if not each.differentiable]
        self._formulas = bool(specification.gradients.given)
        self._ordinary = not (specification.kernels or self._formulas)
        self._mixes = False
        self._by_keyword = schema.positional < len(schema.names)
        self._single, self._count = schema.single, len(schema.results)
        self._tensor_places = [at for at, each in enumerate(schema.arguments) if each.kind.is_tensor]
        self._only_tensors = len(self._tensor_places) == len(schema.names)
        self._on_shards: dict[Any, _ShardCall | None] = {}
        self._known: dict[Any, Callable[..., Any]] = {}
        if self._eligible:
            flattening = ArgumentFlattening(schema, (None,) * len(schema.names))
            self._primitive = OperatorPrimitive(registered, flattening)

    def results(self, values: tuple[Any, ...]) -> Any:
        """The results of the reference or kernel; None where the call must be validated in full.

        Args:
            values: The argument values.
        """
        tensors: Sequence[Any] = values
        if not self._only_tensors:
            tensors = [values[at] for at in self._tensor_places if values[at] is not None]
        if not self._is_known(tensors):
            return None
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        try:
            # Without formulas and kernels autograd records the reference, on plain tensors of its own too.
            if not recorded or (self._ordinary and not self._mixes):
                return self._without_constant_graphs(self._computed(values))
            return self._apply(values)(*values)  # what hooks of saved tensors raise is not for the full way
        except UnknownCallError:
            return None

    def _is_known(self, tensors: Sequence[Any]) -> bool:
        """Return True if calls with tensors like these need not be validated in full."""
        kind = dtensor()
        if kind is None or not self._eligible or any(type(tensor) is not kind for tensor in tensors):
            return False
        if not tensors or not capabilities.nothing_active() or torch.is_inference_mode_enabled():
            return False
        self._kind = kind
        in_cpp = capabilities.calls_in_cpp()
        if in_cpp is not None:
            in_cpp.use_dtensor(kind)
        return True

    def _apply(self, values: Sequence[Any]) -> Callable[..., Any]:
        """The `apply` of a node for calls with tensors like these, made once."""
        key = tuple(
            [
                (each.dtype, each.ndim, each.device, each.requires_grad) if isinstance(each, Tensor) else None
                for each in values
            ]
        )
        apply = self._known.get(key)
        if apply is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            apply = self._known[key] = PreparedRule(self._primitive, self._all_results, values).apply
        return apply

    def _is_new(self, result: Any, values: Sequence[Any]) -> bool:
        """Return True for a DTensor that is no argument."""
        return type(result) is self._kind and all(result is not value for value in values)

    def _without_constant_graphs(self, found: Any) -> Any:
        """The result, or all of several, of which those without a gradient have no graph."""
        if not self._constant:
            return found
        results = list(found if self._count > 1 else (found,))
        for at in self._constant:
            results[at] = detached(results[at])
        return tuple(results) if self._count > 1 else results[0]

    def _all_results(self, values: Sequence[Any]) -> tuple[Any, ...]:
        found = self._computed(values)
        return (found,) if self._count == 1 else found

    def _computed(self, values: Sequence[Any]) -> Any:
        """The result, or all of several, without a graph.

        Raises:
            UnknownCallError: Where the full way has to compute them, or raises the error with a reason.
        """
        try:
            results = self._compute(values)
        except Exception as error:
            if is_authors(error) and not isinstance(error, UnknownCallError):
                note_placement(self._specification, error, values)
                raise
            if is_unplaced(error):  # the full way gathers
                self._eligible, self._known = False, {}
            if has_message(error, MIXED_WITH_DTENSOR):  # the reference makes tensors of its own
                self._mixes, self._known = True, {}
            raise UnknownCallError from error
        if results is None:
            raise UnknownCallError
        return results

    def _compute(self, values: Sequence[Any]) -> Any:
        """The result, or all of several, without a graph; None where the call must be validated in full."""
        if not self._specification.kernels:
            return self._by_reference(values)
        key = tuple(map(_key, values))
        if key not in self._on_shards:
            if len(self._on_shards) >= MAX_TRIALS:
                self._on_shards.clear()
            self._on_shards[key] = self._shard_call(list(values))
        on_shards = self._on_shards[key]
        return self._by_reference(values) if on_shards is None else on_shards(values)

    def _shard_call(self, values: list[Any]) -> _ShardCall | None:
        """The call on shards where the trial has shown that right; None for the reference.

        Raises:
            UnknownCallError: Where a kernel refuses the call with an error, or shards have no data.
        """
        accepted, rejected = choose(self._specification.kernels, values)
        shards = [capabilities.shard_of(value) for value in values if isinstance(value, Tensor)]
        if any(each.strict for each in rejected) or any(type(shard) is not Tensor for shard in shards):
            raise UnknownCallError
        layouts = self._rule.layouts(values) if accepted else None
        return None if layouts is None else _ShardCall(self._rule.on_plain_tensors, layouts)

    def _by_reference(self, values: Sequence[Any]) -> Any:
        """Run the reference on DTensors; return None where the full way has to look at what it did."""
        args: Sequence[Any] = values
        kwargs: dict[str, Any] = {}
        if self._by_keyword:
            args, kwargs = self._specification.schema.split(list(values))
        before = _versions(values)
        with replicating(values) if self._mixes else author_code:
            returned = self._specification.reference(*args, **kwargs)
        if before != _versions(values):
            return None
        results = (returned,) if self._single else tuple(returned)
        if len(results) != self._count:
            return None
        if not all(self._is_new(result, values) for result in results):
            return None
        return results[0] if self._count == 1 else results


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return capabilities.shard_key(value)
    return type(value), tuple(value) if isinstance(value, list) else value


def _versions(values: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(capabilities.version(value) for value in values if isinstance(value, Tensor))


@dataclass
class _ShardCall:
    """The operator on the shards of DTensors, and the layouts of its results.

    Args:
        call: Takes plain argument values, and returns all results.
        layouts: Layout of each result.
        like: For each result a function that makes its DTensor, as in an earlier call.
    """

    call: Callable[[list[Any]], Any]
    layouts: Sequence[Callable[[Tensor], Tensor]]
    like: tuple[Callable[[Tensor], Tensor | None], ...] = ()

    def __call__(self, values: Sequence[Any]) -> Any:
        """Compute the result, or all of several."""
        local = [capabilities.shard_of(value) if isinstance(value, Tensor) else value for value in values]
        returned = self.call(local)
        if len(self.like) == 1:
            placed = self.like[0](returned)
            if placed is not None:
                return placed
        shards = returned if isinstance(returned, tuple) else (returned,)
        results = tuple(place(shard) for place, shard in zip(self.like, shards, strict=False))
        if not results or any(each is None for each in results):
            results = tuple(layout(shard) for layout, shard in zip(self.layouts, shards, strict=True))
            self.like = tuple(map(capabilities.placed_like, results))
        return results if isinstance(returned, tuple) else results[0]
