"""Dispatch rule of an operator for DTensors: its reference on DTensors, or a kernel on their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import takes_kernel
from opsmith.core.call_arguments import tensors_in
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors, named_tensors, nested_tensors, replace_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import Contract
from opsmith.torch_library.dtensor.placements import (
    described,
    dtensor,
    dtensors_in,
    gathered,
    is_replicated,
    is_unplaced,
    local_shard,
    note_placement,
    replicate,
    replicated,
    serve_numbers,
    validated_placements,
    warn_gathers,
)
from opsmith.torch_library.writes import label_of, raising_versions, written_tensors

if TYPE_CHECKING:  # imported with the first DTensor
    from opsmith.torch_library.dtensor.trial import Obstacle, Reference, Trial

MAX_TRIALS = 1024
"""Maximum number of trials whose outcomes an operator keeps."""


class DTensorRule:
    """The dispatch rule of one operator for DTensors.

    Args:
        library: The library of the operator.
        overload: The operator.
        specification: Returns the current specification.
        reference: Computes the results from argument values by the reference.
        tried: The same, using only torch operations, for trials.
    """

    def __init__(
        self,
        library: torch.library.Library,
        overload: Any,
        specification: Callable[[], Specification],
        reference: Reference,
        tried: Reference,
    ) -> None:
        self._library, self._overload = library, overload
        self._specification, self._reference, self._in_torch = specification, reference, tried
        self._served = False
        self._tried_for: Specification | None = None
        self._tried: dict[Any, Trial] = {}
        self.serve()

    def serve(self) -> None:
        """Register the rule if DTensor is already imported in this process; its import takes a second."""
        kind = dtensor()
        if self._served or kind is None:
            return
        self._served = True
        serve_numbers()
        torch.library.register_torch_dispatch(self._overload, kind, self._rule, lib=self._library)

    def _rule(self, kind: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        specification = self._specification()
        values = self.adapted(specification.schema.received(args, kwargs or {}))
        with raising_versions([tensor for _, tensor in written_tensors(specification, values)]):
            try:
                return self._computed(specification, values)
            except Exception as error:
                note_placement(specification, error, values)
                raise

    def _computed(self, specification: Specification, values: list[Any]) -> Any:
        tensors = tensors_in(values)
        # A trace has shards without memory: the compiler fuses the reference.
        traced = any(type(local_shard(tensor)) is not Tensor for tensor in tensors)
        by_kernel = takes_kernel(specification, values) and not traced
        whole = (by_kernel or _writes(specification)) and all(map(is_replicated, tensors))
        if specification.opaque or whole:
            return self._on_whole_tensors(values)
        layouts = self.layouts(values) if by_kernel else None
        if layouts is not None:
            return self._on_shards(values, layouts)
        try:
            # DTensor takes only operations that autograd has decomposed, such as `item`.
            # If no argument requires a gradient, a result requires one only through a captured tensor.
            graph = torch.is_grad_enabled() and specification.origin.kind != "class"
            graph = graph and not any(each.requires_grad for each in tensors)
            with (
                capabilities.above_autograd(),
                torch.set_grad_enabled(graph),
                _seeing_writes(specification, values),
            ):
                return self._reference(values)
        except Exception as error:
            if not is_unplaced(error) or specification.schema.written:  # something may be written
                raise
            results = self._on_whole_tensors(values)
            warn_gathers(specification, values, error)
        return results

    def adapted(self, values: list[Any]) -> list[Any]:
        """Validate argument values, and replicate arguments of an in-place call that torch cannot place.

        An argument that the call writes is not replicated. The call is refused if its new value needs
        communication.

        Raises:
            PlacementError: In this case, or if `validated_placements` raises it.
        """
        specification = self._specification()
        values = validated_placements(specification, values)
        if not dtensors_in(values) or capabilities.innermost_transform() is not None:
            return values  # the levels of `torch.func` are handled first
        if not _writes(specification) or all(map(is_replicated, tensors_in(values))):
            return values
        obstacle = self._trial(values).obstacle
        if obstacle is None:
            return values
        if obstacle.undeclared and obstacle.argnum is not None:
            written = tensors_in(values)[obstacle.argnum]
            raise Contract(specification).undeclared_write(specification.reference, written, values)
        _refuse_sharded(specification, values, obstacle)
        warn_gathers(specification, values, obstacle.reason)
        return map_tensors(replicate, values)

    def layouts(self, values: list[Any]) -> Sequence[Callable[[Tensor], Tensor]] | None:
        """The layout of each result if a kernel may run on the shards; None if it must not."""
        return self._trial(values).layouts

    def on_plain_tensors(self, values: list[Any]) -> Any:
        """Call the operator on plain tensors instead of DTensors."""
        args, kwargs = self._specification().schema.dispatched(values)
        with capabilities.counting_writes():
            return self._overload(*args, **kwargs)

    def _on_shards(self, values: list[Any], layouts: Sequence[Callable[[Tensor], Tensor]]) -> Any:
        """Call the operator on this rank's shards, and make a DTensor of each result."""

        def place(shards: list[Tensor]) -> Iterator[Tensor]:
            return (layout(shard) for layout, shard in zip(layouts, shards, strict=True))

        return self._called(values, map_tensors(local_shard, values), place)

    def _on_whole_tensors(self, values: list[Any]) -> Any:
        """Call the operator on whole tensors on every rank."""
        mesh = dtensors_in(values)[0].device_mesh
        with torch.no_grad():
            whole = map_tensors(gathered, values)
        return self._called(values, whole, lambda results: (replicated(each, mesh) for each in results))

    def _called(
        self, values: list[Any], local: list[Any], place: Callable[[list[Tensor]], Iterator[Tensor]]
    ) -> Any:
        """Call the operator on plain tensors instead of the DTensors, and place its results."""
        schema = self._specification().schema
        results = self.on_plain_tensors(local)
        if results is None:
            return None
        if schema.returns is not None:
            return values[schema.names.index(schema.returns)]
        return replace_tensors(results, place(list(nested_tensors(results))))

    def _trial(self, values: list[Any]) -> Trial:
        from opsmith.torch_library.dtensor.trial import Trial, try_placements

        specification = self._specification()
        if self._tried_for is not specification:
            self._tried_for, self._tried = specification, {}
        key = tuple(map(_trial_key, values))
        if key not in self._tried:
            if len(self._tried) == MAX_TRIALS:
                self._tried.clear()
            written = [tensor for _, tensor in written_tensors(specification, values)]
            declared = [
                argnum
                for argnum, tensor in enumerate(tensors_in(values))
                if any(tensor is each for each in written)
            ]
            by_kernel = takes_kernel(specification, values)
            try:
                self._tried[key] = try_placements(self._in_torch, values, declared, for_kernel=by_kernel)
            except Exception:
                if _writes(specification):
                    raise  # before anything is written
                self._tried[key] = Trial(None, None)  # the call itself raises
        return self._tried[key]


def _seeing_writes(specification: Specification, values: list[Any]) -> AbstractContextManager[Any]:
    """Context in which writes of the reference are counted, or refused as they happen."""
    if not torch.is_inference_mode_enabled():
        return capabilities.counting_writes()
    # In inference mode torch cannot make views of a DTensor with counted writes.
    if specification.origin.kind == "class":  # its forward restores written arguments
        return nullcontext()
    return Contract(specification).refusing_writes(specification.reference, values)


def _writes(specification: Specification) -> bool:
    """Return True for an operator whose reference writes: an in-place operator, or a functional form."""
    return bool(specification.schema.written or specification.schema.new_values)


def _refuse_sharded(specification: Specification, values: list[Any], obstacle: Obstacle) -> None:
    """Refuse to write into a DTensor that is not the same on every rank."""
    schema = specification.schema
    named = dict(zip(schema.names, values, strict=True))
    labels = [label for label, _ in named_tensors(named, label=label_of)]
    sharded = {
        label: tensor for label, tensor in written_tensors(specification, values) if not is_replicated(tensor)
    }
    if not sharded:
        return
    found = None if obstacle.argnum is None else labels[obstacle.argnum]
    label = found if found in sharded else next(iter(sharded))
    placements = obstacle.placements if found in sharded else None
    if not placements or any(each.is_partial() for each in placements):
        placements = None
    wanted = "[Replicate()] * mesh.ndim" if placements is None else f"{list(placements)}"
    what = f"`{label}` cannot be written without communication between the ranks"
    if not obstacle.communicates:
        what = f"it is not proved that `{label}` can be written without communication between the ranks"
    raise specification.error(
        errors.PlacementError,
        what,
        argument=label,
        expected="a DTensor whose new value has the same placements, without communication",
        got=f"{described(sharded[label])}; {obstacle.reason}",
        hint=f"call it with `{label}.redistribute(placements={wanted})`",
    )


def _trial_key(value: Any) -> Any:
    """Cache key of the outcome of a trial."""
    from opsmith.torch_library.dtensor.trial import concrete

    if isinstance(value, list | tuple):
        return tuple(map(_trial_key, value))
    if not isinstance(value, Tensor):
        try:
            value = concrete(value)
            hash(value)
        except (TypeError, ValueError):
            return object()  # not cached
        return type(value), value
    placed: Any = value
    shard = local_shard(value)
    sizes = (value.shape, value.stride(), shard.shape, shard.stride())
    try:
        return (
            placed.device_mesh,
            placed.placements,
            value.dtype,
            *(tuple(map(concrete, each)) for each in sizes),
        )
    except ValueError:
        return object()  # not cached
