"""Computations of known calls on DTensors: the reference on DTensors, or the operator on their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import choose
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.primitive import RegisteredOperator
from opsmith.torch_library.calls.computation import Computation, UnknownCallError
from opsmith.torch_library.dtensor.placements import (
    author_code,
    dtensor,
    is_authors,
    is_unplaced,
    note_placement,
    replicating,
)
from opsmith.torch_library.dtensor.rule import MAX_TRIALS, DTensorRule
from opsmith.torch_library.torch_messages import MIXED_WITH_DTENSOR, has_message


class DTensorComputations:
    """Computations of the calls of one operator whose tensors are all DTensors.

    A call in which torch raises an error is validated in full, and then computed, or refused with a reason.
    The contract is checked on the shards.

    Args:
        registered: The registration of the operator.
        rule: Its dispatch rule for DTensors, for all results.
    """

    def __init__(self, registered: RegisteredOperator, rule: DTensorRule) -> None:
        specification = registered.specification
        self._registered, self._specification, self._rule = registered, specification, rule
        schema = specification.schema
        lists = any(each.kind.is_tensor and each.kind.sequence for each in schema.arguments)
        self._eligible = not (
            specification.draws or lists or specification.opaque or schema.written or schema.new_values
        )
        self._only_tensors = all(each.kind.is_tensor and not each.kind.optional for each in schema.arguments)
        self._ordinary = not (specification.kernels or specification.gradients.given)
        self._mixes = False
        self._on_shards: dict[Any, _ShardCall | None] = {}

    def computation(self, requires: bool) -> tuple[Computation | None, bool]:
        """The computation of calls, and True if autograd records it.

        Args:
            requires: True if a gradient is required.

        Returns:
            The computation, or None if calls must be validated in full; and True if autograd records it.
        """
        if not self._eligible:
            return None, False
        in_cpp = capabilities.calls_in_cpp()
        if in_cpp is not None and capabilities.on("sharding"):
            in_cpp.use_dtensor(dtensor())
        # Autograd records only a reference, unless plain tensors that it makes must count as replicated.
        recorded = requires and self._ordinary and not self._mixes
        compute = Computation(
            self._specification,
            self._specification.reference,
            partial(self._returned, recorded),
            below_autograd=False,
            has_graph=recorded,
            contiguous=False,
            tensors_of=None if self._only_tensors else _tensors,
            on_mesh=True,
        )
        return compute, recorded

    def _returned(self, recorded: bool, *args: Any, **kwargs: Any) -> Any:
        """The results of the reference or the kernel, as DTensors.

        Args:
            recorded: True if autograd records the reference.
            args: The positional arguments.
            kwargs: The keyword arguments.

        Raises:
            UnknownCallError: If torch raises an error, or a result is not a DTensor.
        """
        # The keys of DTensors do not show modes.
        if not self._eligible or (recorded and self._mixes) or capabilities.seen_by_modes():
            raise UnknownCallError
        try:
            with replicating([*args, *kwargs.values()]) if self._mixes else author_code:
                if self._specification.kernels:
                    returned = self._by_kernel(*args, **kwargs)
                else:
                    returned = self._specification.reference(*args, **kwargs)
        except Exception as error:
            if is_authors(error) and not isinstance(error, UnknownCallError):
                note_placement(self._specification, error, [*args, *kwargs.values()])
                raise
            if is_unplaced(error):  # validation in full gathers the DTensors
                self._eligible = False
            if has_message(error, MIXED_WITH_DTENSOR):  # the reference makes plain tensors
                self._mixes = True
            raise UnknownCallError from error
        kind = dtensor()
        for each in returned if isinstance(returned, tuple | list) else (returned,):
            if type(each) is not kind:
                raise UnknownCallError
        return returned

    def _by_kernel(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the operator on shards; the reference's results if those are not proved right."""
        key = tuple(map(_key, (*args, *kwargs.values())))
        if key not in self._on_shards:
            if len(self._on_shards) >= MAX_TRIALS:
                self._on_shards.clear()
            self._on_shards[key] = self._shard_call([*args, *kwargs.values()])
        on_shards = self._on_shards[key]
        if on_shards is None:
            return self._specification.reference(*args, **kwargs)
        return on_shards(args, kwargs)

    def _shard_call(self, values: list[Any]) -> _ShardCall | None:
        """The call on shards if the trial has proved it right; None for the reference.

        Raises:
            UnknownCallError: If a kernel refuses the call with an error, or shards have no data.
        """
        accepted, rejected = choose(self._specification.kernels, values)
        shards = [capabilities.shard_of(value) for value in values if isinstance(value, Tensor)]
        if any(each.strict for each in rejected) or any(type(shard) is not Tensor for shard in shards):
            raise UnknownCallError
        layouts = self._rule.layouts(values) if accepted else None
        if layouts is None:
            return None
        schema, owner = self._specification.schema, self._registered.owner
        if owner is not None and not schema.hidden:
            return _ShardCall(owner, layouts)
        on_plain = self._rule.on_plain_tensors
        return _ShardCall(lambda *args, **kwargs: on_plain(schema.call_values(args, kwargs)), layouts)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return tensors_in([*values])


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return capabilities.shard_key(value)
    return type(value), tuple(value) if isinstance(value, list) else value


@dataclass
class _ShardCall:
    """The operator on the shards of DTensors, and the layouts of its results.

    Args:
        call: The operator: it takes plain arguments, and returns the result, or a tuple of all results.
        layouts: Layout of each result.
        like: For each result, a function that makes its DTensor, as in an earlier call.
    """

    call: Callable[..., Any]
    layouts: Sequence[Callable[[Tensor], Tensor]]
    like: tuple[Callable[[Tensor], Tensor | None], ...] = ()

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the result, or a tuple of all results."""
        returned = self.call(*map(_local, args), **{name: _local(value) for name, value in kwargs.items()})
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


def _local(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    shard = capabilities.shard_of(value)
    return shard.detach() if shard.requires_grad else shard  # the gradient goes through the DTensor's node
