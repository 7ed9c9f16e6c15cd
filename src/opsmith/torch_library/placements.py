"""DTensors: an operator's placements are those that torch derives for its reference.

The reference runs on the DTensors themselves, below autograd, so that each operation in it gets its
placements, and its communication, from DTensor; formulas run on DTensors in the same way. A kernel takes
memory as it lies there: it runs on every rank's shards where a trial proves that this comes to the same.

DTensor can derive placements from a registered decomposition too, but takes it for granted that what runs on
shards is what ran on the whole: `x * x.shape[0]` is then silently wrong, and a reference that
makes a tensor is refused. `register_sharding` asks the author to write down what can be derived.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import takes_kernel
from opsmith.core.calls import tensors_in
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.distributed import (
    dtensor,
    dtensors_in,
    gathered,
    local,
    mapped,
    mesh_of,
    replicated,
)
from opsmith.torch_library.random_state import generators_in

MOST_TRIALS = 1024
"""How many kinds of call an operator remembers the outcome of a trial for."""


def settle_placements(specification: Specification, values: list[Any]) -> list[Any]:
    """Argument values that are all DTensors or none, of placements that the operator can be right for.

    Raises:
        PlacementError: If DTensors are mixed with plain tensors, sharded where nothing says what happens to
            shards, or given to an operator that draws random numbers.
    """
    placed = dtensors_in(values)
    if not placed or capabilities.innermost_layer() is not None:
        return values  # the layers of `torch.func` are taken off first
    if specification.opaque or len(placed) < len(tensors_in(values)):
        for name, value in zip(specification.schema.names, values, strict=True):
            for tensor in tensors_in([value]):
                _refuse(specification, name, tensor)
        mesh = placed[0].device_mesh
        values = mapped(lambda tensor: tensor if mesh_of(tensor) else replicated(tensor, mesh), values)
    if specification.random or generators_in(values):
        raise errors.PlacementError(
            "it draws random numbers, and nothing says that every rank draws the right ones",
            operator=specification.name,
            got=_described(placed[0]),
            where=specification.where,
            hint="pass what is drawn as an argument, or call it on this rank's part, `x.to_local()`",
        )
    return values


def _refuse(specification: Specification, name: str, tensor: Tensor) -> None:
    if mesh_of(tensor) is None:
        if tensor.ndim == 0 or capabilities.replicates_implicitly():
            return
        raise errors.PlacementError(
            "a plain tensor is given beside a DTensor",
            operator=specification.name,
            argument=name,
            expected="DTensors only, or none",
            got=f"a plain tensor of shape {list(tensor.shape)}",
            where=specification.where,
            hint=f"call it with `distribute_tensor({name}, mesh, placements)`",
        )
    placed: Any = tensor
    if specification.opaque and not all(each.is_replicate() for each in placed.placements):
        raise errors.PlacementError(
            "it is opaque: nothing says what becomes of the parts of a tensor",
            operator=specification.name,
            argument=name,
            expected="a DTensor that is replicated",
            got=_described(placed),
            where=specification.where,
            hint=f"call it with `{name}.redistribute(placements=[Replicate()] * mesh.ndim)`",
        )


def _described(tensor: Any) -> str:
    return f"a DTensor of shape {list(tensor.shape)}, placed as {list(tensor.placements)}"


class Placements:
    """What happens to DTensors at one operator in the dispatcher.

    Args:
        library: Where the operator is registered.
        overload: The operator.
        specification: Tells what is in force.
        reference: Takes argument values, returns what the operator does, by the reference.
    """

    def __init__(
        self,
        library: torch.library.Library,
        overload: Any,
        specification: Callable[[], Specification],
        reference: Callable[[list[Any]], Any],
    ) -> None:
        self._library, self._overload = library, overload
        self._specification, self._reference = specification, reference
        self._served = False
        self._tried_for: Specification | None = None
        self._tried: dict[Any, Sequence[Callable[[Tensor], Tensor]] | None] = {}
        self.serve()

    def serve(self) -> None:
        """Take DTensors from now on, if there are any in this process; to import them would take a second."""
        kind = dtensor()
        if self._served or kind is None:
            return
        self._served = True
        torch.library.register_torch_dispatch(self._overload, kind, self._rule, lib=self._library)

    def _rule(self, kind: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        specification = self._specification()
        values = settle_placements(specification, specification.schema.received(args, kwargs or {}))
        _refuse_forms(specification, values)
        if specification.opaque:
            return self._on_whole_tensors(values)
        if takes_kernel(specification, values):
            shards = mapped(local, values)
            layouts = self._layouts(values, shards)
            if layouts is not None:
                return self._on_shards(shards, layouts)
        try:
            return self._reference(values)
        except errors.OpsmithError:
            raise
        except NotImplementedError as error:  # on every rank alike: DTensor lacks an operation, or has it
            warnings.warn(
                f"opsmith: {specification.name} gathers its DTensors on every rank, since torch derives no "
                f"placements for it: {error}",
                stacklevel=2,
            )
        return self._on_whole_tensors(values)

    def _on_shards(self, shards: list[Any], layouts: Sequence[Callable[[Tensor], Tensor]]) -> Any:
        """Call the operator on this rank's shards, and make a DTensor of each result."""
        args, kwargs = self._specification().schema.dispatched(shards)
        results = self._overload(*args, **kwargs)
        if isinstance(results, Tensor):
            return layouts[0](results)
        return tuple(layout(result) for layout, result in zip(layouts, results, strict=True))

    def _on_whole_tensors(self, values: list[Any]) -> Any:
        """Call the operator on every rank, all of it."""
        mesh = dtensors_in(values)[0].device_mesh
        whole = [lambda result: replicated(result, mesh)] * len(self._specification().schema.results)
        return self._on_shards(mapped(lambda tensor: local(gathered(tensor)), values), whole)

    def _layouts(self, values: list[Any], shards: list[Any]) -> Sequence[Callable[[Tensor], Tensor]] | None:
        """What makes a DTensor of each result of a kernel on shards; None where none may run on them."""
        specification = self._specification()
        if any(type(shard) is not Tensor for shard in tensors_in(shards)):
            return None  # a trace: it sees the operations, and a compiler puts them together
        if self._tried_for is not specification:
            self._tried_for, self._tried = specification, {}
        key = tuple(map(_key, values, shards))
        if key not in self._tried:
            from opsmith.torch_library.shard_trial import try_on_shards

            if len(self._tried) == MOST_TRIALS:
                self._tried.clear()
            self._tried[key] = try_on_shards(self._reference, values)
        return self._tried[key]


def _refuse_forms(specification: Specification, values: list[Any]) -> None:
    """Refuse results of which no trial tells how many there are."""
    if specification.schema.always_tensors or not (
        specification.opaque or takes_kernel(specification, values)
    ):
        return
    raise errors.PlacementError(
        "what a kernel returns on shards cannot be put together where it may be None, or a list",
        operator=specification.name,
        got=_described(dtensors_in(values)[0]),
        where=specification.where,
        hint="call it on whole tensors: `x.full_tensor()`",
    )


def _key(value: Any, shard: Any) -> Any:
    """What the outcome of a trial depends on."""
    if isinstance(value, list | tuple) and isinstance(shard, list):
        return tuple(map(_key, value, shard))
    if not isinstance(value, Tensor):
        try:
            hash(value)
        except TypeError:
            return object()  # it is tried each time
        return type(value), value
    placed: Any = value
    return (
        placed.device_mesh,
        placed.placements,
        value.shape,
        value.stride(),
        shard.shape,
        shard.stride(),
        value.dtype,
    )
