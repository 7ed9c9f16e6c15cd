"""DTensors: an operator's placements are those that torch derives for its reference."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import takes_kernel
from opsmith.core.call_arguments import tensors_in
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.random_state import generators_in


def dtensor() -> Any:
    """Torch's class of distributed tensors; None where nothing has imported it, which takes a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def dtensors_in(values: Iterable[Any]) -> list[Any]:
    """The DTensors among argument values, those in lists too."""
    kind = dtensor()
    return [] if kind is None else [each for each in tensors_in(list(values)) if isinstance(each, kind)]


def replicating(values: Iterable[Any]) -> AbstractContextManager[None]:
    """Context for code of the author: where a value is a DTensor, plain tensors count as replicated.

    They are what the code makes by itself, `torch.arange(x.shape[0])`, which is the same on every rank.
    """
    return capabilities.implicit_replication() if dtensors_in(values) else nullcontext()


def replicated(tensor: Tensor, mesh: Any) -> Tensor:
    """A tensor that is the same on every rank, as a DTensor on a mesh."""
    from torch.distributed.tensor import Replicate

    placed: Tensor = dtensor().from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed


def mesh_of(tensor: Tensor) -> Any:
    """The mesh of a DTensor; None for any other tensor."""
    kind = dtensor()
    return tensor.device_mesh if kind is not None and isinstance(tensor, kind) else None


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    kind = dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def gathered(tensor: Tensor) -> Tensor:
    """A DTensor that is the same on every rank; other tensors as they are."""
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(tensor)
    if mesh is None:
        return tensor
    placed: Any = tensor.detach()  # torch 2.11 detaches an unchanged leaf in place
    with torch.no_grad():
        whole: Tensor = placed.redistribute(placements=[Replicate()] * mesh.ndim)
    return whole


MAX_TRIALS = 1024
"""Maximum number of trials whose outcome an operator keeps."""


def validated_placements(specification: Specification, values: list[Any]) -> list[Any]:
    """Validate the placements of arguments, and replicate plain tensors beside DTensors.

    Raises:
        PlacementError: If DTensors are mixed with plain tensors, sharded where nothing defines the result on
            shards, or given to an operator that draws random numbers.
    """
    placed = dtensors_in(values)
    if not placed or capabilities.innermost_transform() is not None:
        return values  # the levels of `torch.func` are handled first
    if specification.opaque or len(placed) < len(tensors_in(values)):
        for name, value in zip(specification.schema.names, values, strict=True):
            for tensor in tensors_in([value]):
                _refuse_placement(specification, name, tensor)
        mesh = placed[0].device_mesh
        values = map_tensors(lambda tensor: tensor if mesh_of(tensor) else replicated(tensor, mesh), values)
    if specification.random or generators_in(values):
        raise specification.error(
            errors.PlacementError,
            "it draws random numbers, and the ranks may draw different ones",
            got=_described(placed[0]),
            hint="pass what is drawn as an argument, or call it on this rank's part, `x.to_local()`",
        )
    return values


def _refuse_placement(specification: Specification, name: str, tensor: Tensor) -> None:
    if mesh_of(tensor) is None:
        if tensor.ndim == 0 or capabilities.replicates_implicitly():
            return
        raise specification.error(
            errors.PlacementError,
            "a plain tensor is given beside a DTensor",
            argument=name,
            expected="DTensors only, or none",
            got=f"a plain tensor of shape {list(tensor.shape)}",
            hint=f"call it with `distribute_tensor({name}, mesh, placements)`",
        )
    placed: Any = tensor
    if specification.opaque and not all(each.is_replicate() for each in placed.placements):
        raise specification.error(
            errors.PlacementError,
            "it is opaque, so that its results on parts of a tensor are unknown",
            argument=name,
            expected="a DTensor that is replicated",
            got=_described(placed),
            hint=f"call it with `{name}.redistribute(placements=[Replicate()] * mesh.ndim)`",
        )


def _described(tensor: Any) -> str:
    return f"a DTensor of shape {list(tensor.shape)}, placed as {list(tensor.placements)}"


class DTensorRule:
    """The dispatch rule of one operator for DTensors.

    Args:
        library: The library of the operator.
        overload: The operator.
        specification: Returns the current specification.
        reference: Computes the results from argument values by the reference.
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
        """Register the rule if DTensor is imported in this process, which would take a second."""
        kind = dtensor()
        if self._served or kind is None:
            return
        self._served = True
        torch.library.register_torch_dispatch(self._overload, kind, self._rule, lib=self._library)

    def _rule(self, kind: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        specification = self._specification()
        values = validated_placements(specification, specification.schema.received(args, kwargs or {}))
        _refuse_lists(specification, values)
        if specification.opaque:
            return self._on_whole_tensors(values)
        if takes_kernel(specification, values):
            shards = map_tensors(local_shard, values)
            layouts = self._layouts(values, shards)
            if layouts is not None:
                return self._on_shards(shards, layouts)
        try:
            return self._reference(values)
        except errors.OpsmithError:
            raise
        except NotImplementedError as error:  # raised on every rank alike: DTensor lacks an operation
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
        return self._on_shards(map_tensors(lambda tensor: local_shard(gathered(tensor)), values), whole)

    def _layouts(self, values: list[Any], shards: list[Any]) -> Sequence[Callable[[Tensor], Tensor]] | None:
        """Functions that make a DTensor of each result on shards; None if the kernel may not run on them."""
        specification = self._specification()
        if any(type(shard) is not Tensor for shard in tensors_in(shards)):
            return None  # a trace, which the compiler fuses
        if self._tried_for is not specification:
            self._tried_for, self._tried = specification, {}
        key = tuple(map(_trial_key, values, shards))
        if key not in self._tried:
            if len(self._tried) == MAX_TRIALS:
                self._tried.clear()
            self._tried[key] = shard_layouts(self._reference, values)
        return self._tried[key]


def _refuse_lists(specification: Specification, values: list[Any]) -> None:
    """Refuse results whose number no trial can determine."""
    if specification.schema.always_tensors or not (
        specification.opaque or takes_kernel(specification, values)
    ):
        return
    raise specification.error(
        errors.PlacementError,
        "what a kernel returns on shards cannot be put together where it may be None, or a list",
        got=_described(dtensors_in(values)[0]),
        hint="call it on whole tensors: `x.full_tensor()`",
    )


def _trial_key(value: Any, shard: Any) -> Any:
    """Cache key of the outcome of a trial."""
    if isinstance(value, list | tuple) and isinstance(shard, list):
        return tuple(map(_trial_key, value, shard))
    if not isinstance(value, Tensor):
        try:
            hash(value)
        except TypeError:
            return object()  # not cached
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


@dataclass(frozen=True)
class ShardLayout:
    """Mesh, placements and shape by which the shards of a result form a DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self, shard: Tensor) -> Tensor:
        """The DTensor that has this tensor as the shard of this rank."""
        placed: Tensor = dtensor().from_local(
            shard, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return placed

    @classmethod
    def of(cls, tensor: Any) -> ShardLayout:
        """The layout of a DTensor."""
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


class _NotProvenError(Exception):
    """The trial found a difference, or an operation that it cannot compare."""


class _TermNumbering:
    """Numbers of the tensors of a run: equal for equal inputs, and for equal operations on equal tensors.

    The same operation on the same tensors has the same number in every run. Unused tensors, as when DTensor
    looks up the shape of a result, do not affect the comparison.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of: dict[int, int] = {}
        self._alive: list[Tensor] = []  # kept, so that no id is reused
        self._known_only = False

    def start(self, inputs: Sequence[Tensor], *, known_only: bool) -> None:
        """Begin a run on these inputs; with `known_only`, operations that no earlier run had raise."""
        self._known_only = False
        self._of = {}
        for position, tensor in enumerate(inputs):
            self._meet(tensor, ("input", position))
        self._known_only = known_only

    def _meet(self, tensor: Tensor, term: Any) -> None:
        self._alive.append(tensor)
        self._of[id(tensor)] = self._numbers.setdefault(term, len(self._numbers))

    def term(self, value: Any) -> Any:
        """A hashable form of a value: tensors as numbers, others with their type, since 1 is not 1.0."""
        if isinstance(value, Tensor):
            return "tensor", self._of[id(value)]
        if isinstance(value, list | tuple):
            return tuple(map(self.term, value))
        if isinstance(value, dict):
            return tuple((name, self.term(item)) for name, item in sorted(value.items()))
        return type(value), value

    def see(self, operator: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run an operation, and number its results."""
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise _NotProvenError
        term = operator, self.term(args), self.term(kwargs)
        if self._known_only and (term, 0) not in self._numbers:
            raise _NotProvenError  # before torch logs a shape mismatch
        results = run()
        for position, tensor in enumerate([results] if isinstance(results, Tensor) else results or ()):
            if isinstance(tensor, Tensor):
                self._meet(tensor, (term, position))
        return results


def shard_layouts(reference: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[ShardLayout] | None:
    """Layouts of the results if the operator may run on the shards of these DTensors; else None."""
    try:
        return _proven_layouts(reference, values)
    except Exception:  # the trial proved nothing; the call itself raises a real error
        return None


def _proven_layouts(reference: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[ShardLayout] | None:
    terms = _TermNumbering()
    with torch.no_grad(), capabilities.fake_mode() as mode:
        placed = map_tensors(
            lambda tensor: ShardLayout.of(tensor)(mode.from_tensor(local_shard(tensor))), values
        )
        shards = map_tensors(local_shard, placed)
        ends = []
        for inputs in (placed, shards):
            terms.start(tensors_in(shards), known_only=inputs is shards)
            with capabilities.observe_shards(terms.see):
                results = reference(inputs)
            results = [results] if isinstance(results, Tensor) else list(results)
            ends.append((terms.term(map_tensors(local_shard, results)), results))
    (through_dtensor, whole), (directly, _) = ends
    return [ShardLayout.of(result) for result in whole] if through_dtensor == directly else None
