"""Trial of a reference on DTensors without data: shows its writes, and if a kernel may run on shards."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.capabilities.operation import Operation
from opsmith.torch_library.dtensor.placements import dtensor, dtensors_in, local_shard, mesh_of

Reference = Callable[[list[Any]], Any]
"""Function that computes results from argument values."""


@dataclass(frozen=True)
class ShardLayout:
    """Mesh, placements and shape with which the shards of a result form a DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self, shard: Tensor) -> Tensor:
        """The DTensor whose shard on this rank is this tensor."""
        placed: Tensor = dtensor().from_local(
            shard, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return placed

    @classmethod
    def of(cls, tensor: Any) -> ShardLayout:
        """The layout of a DTensor; sizes that are symbols of a trace get the values of this call."""
        shape = torch.Size(map(concrete, tensor.shape))
        return cls(tensor.device_mesh, tensor.placements, shape, tuple(map(concrete, tensor.stride())))


@dataclass(frozen=True)
class Obstacle:
    """The reason why a reference cannot be trusted to write on these DTensors.

    Args:
        reason: A sentence without its full stop.
        argnum: Position, among the tensors of the call, of the tensor that it would write; None if unknown.
        placements: The placements that its new value would have; None if unknown.
        communicates: True if the new value needs communication, False if that is unknown.
        undeclared: True if the operator does not declare that it writes the tensor.
    """

    reason: str
    argnum: int | None = None
    placements: tuple[Any, ...] | None = None
    communicates: bool = False
    undeclared: bool = False


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    Args:
        layouts: Layout of each tensor among the results if a kernel may run on the shards; else None.
        obstacle: The reason why the reference cannot write on the DTensors; None if it can.
    """

    layouts: Sequence[ShardLayout] | None
    obstacle: Obstacle | None


class _ObstacleError(Exception):
    def __init__(self, obstacle: Obstacle) -> None:
        super().__init__(obstacle)
        self.obstacle = obstacle


class _NotProvenError(Exception):
    """The trial found a difference, or an operation that it cannot compare."""


class _TermNumbering:
    """Numbers of the tensors of a run: equal for equal inputs, and for equal operations on equal tensors.

    The same operation on the same tensors has the same number in every run. The value of a tensor consists of
    the operation that made it, and the later writes into its storage. Unused tensors, as when DTensor looks
    up the shape of a result, do not affect the comparison.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._seen: set[Any] = set()
        self._of: dict[int, int] = {}
        self._history: dict[int, int] = {}
        self._writes: dict[int, int] = {}
        self._alive: list[Any] = []  # kept, so that no id is reused
        self._known_only = False

    def start(self, inputs: Sequence[Tensor], *, known_only: bool) -> None:
        """Begin a run on these inputs; with `known_only`, an operation not in an earlier run raises."""
        self._of, self._history, self._writes = {}, {}, {}
        for position, tensor in enumerate(inputs):
            self._meet(tensor, ("input", position))
        self._known_only = known_only

    def _number(self, term: Any) -> int:
        return self._numbers.setdefault(term, len(self._numbers))

    def _meet(self, tensor: Tensor, term: Any) -> None:
        self._alive.append(tensor)
        self._of[id(tensor)] = self._number(term)

    def storage(self, tensor: Tensor) -> int:
        """A number for the storage of a tensor, the same for all its views."""
        storage = capabilities.storage_of(tensor)
        self._alive.append(storage)
        return id(storage)

    def writes(self, storage: int) -> int:
        """The number of writes into a storage in this run."""
        return self._writes.get(storage, 0)

    def term(self, value: Any) -> Any:
        """A hashable form of a value: tensors as numbers, others with their type, since 1 is not 1.0."""
        if isinstance(value, Tensor):
            if id(value) not in self._of:  # made without the dispatcher, as by `torch.tensor`
                self._meet(value, ("unknown", len(self._numbers)))
            return "tensor", self._of[id(value)], self._history.get(self.storage(value))
        if isinstance(value, list | tuple):
            return tuple(map(self.term, value))
        if isinstance(value, dict):
            return tuple((name, self.term(item)) for name, item in sorted(value.items()))
        return type(value), value

    def see(self, operation: Operation) -> Any:
        """Run an operation, and number its results and written tensors."""
        operator = operation.operator
        term: tuple[Any, ...] = operator, self.term(operation.args), self.term(operation.kwargs)
        if torch.Tag.nondeterministic_seeded in operator.tags:
            term = (*term, len(self._numbers))  # never the same again
        if self._known_only and term not in self._seen:
            raise _NotProvenError  # before torch logs a shape mismatch
        self._seen.add(term)
        results = operation.run()
        for position, tensor in enumerate(operation.written):
            storage = self.storage(tensor)
            written = term, "write", position, self._history.get(storage)
            self._history[storage] = self._number(written)
            self._writes[storage] = self.writes(storage) + 1
        for position, tensor in enumerate([results] if isinstance(results, Tensor) else results or ()):
            if isinstance(tensor, Tensor) and not any(tensor is each for each in operation.written):
                self._meet(tensor, (term, position))
        return results


class _PlacedWrites:
    """Observer of a reference's writes into DTensors, which must reach the memory of their shards.

    DTensor sometimes makes a copy where plain torch makes a view, for example of one column of a tensor
    with sharded columns. A write into the copy is lost, and a read from it after a write returns the old
    value.

    Args:
        inputs: The DTensors of the call.
        terms: The observer of operations on shards.
        declared: Positions of the inputs that the operator may write into.
    """

    def __init__(self, inputs: Sequence[Any], terms: _TermNumbering, declared: Container[int]) -> None:
        self._terms, self._declared = terms, declared
        self._argnums = {self._storage(tensor): argnum for argnum, tensor in enumerate(inputs)}
        self._copies: dict[int, tuple[int, int]] = {}  # storage viewed, and its number of writes then

    def _storage(self, tensor: Any) -> int:
        return self._terms.storage(local_shard(tensor))

    def see(self, operation: Operation) -> Any:
        """Run an operation on DTensors.

        Raises:
            _ObstacleError: If it would write into other memory, or change placements.
        """
        self._refuse_copies(operation)
        written: list[Any] = dtensors_in(operation.written)
        before = [(each, self._storage(each), each.placements, local_shard(each).shape) for each in written]
        counts = [self._terms.writes(storage) for _, storage, _, _ in before]
        for _, storage, _, _ in before:
            argnum = self._argnums.get(storage)
            if argnum is not None and argnum not in self._declared:
                raise _ObstacleError(Obstacle(f"`{operation.operator}` writes it", argnum, undeclared=True))
        try:
            results = operation.run()
        except Exception:
            found = _placements_instead(operation) if written else None
            if found is not None and found != before[0][2]:
                raise self._would_be_placed(operation, before[0][1], found) from None
            raise
        for (tensor, storage, placements, shape), count in zip(before, counts, strict=True):
            moved = tensor.placements != placements
            reshaped = local_shard(tensor).shape != shape
            if (moved and not reshaped) or self._terms.writes(storage) == count:
                raise self._would_be_placed(operation, storage, tensor.placements if moved else None)
            if reshaped and storage in self._argnums:
                raise _ObstacleError(
                    Obstacle(f"`{operation.operator}` changes its shape", self._argnums[storage])
                )
        for source in dtensors_in(operation.viewed)[:1]:
            viewed = self._storage(source)
            for result in dtensors_in([results]):
                if self._storage(result) != viewed:
                    root = self._copies.get(viewed, (viewed, 0))[0]
                    self._copies[self._storage(result)] = root, self._terms.writes(root)
        return results

    def _would_be_placed(
        self, operation: Operation, storage: int, placements: tuple[Any, ...] | None
    ) -> _ObstacleError:
        placed = f"place it as {list(placements)}" if placements else "redistribute it"
        return _ObstacleError(
            Obstacle(
                f"`{operation.operator}` would {placed}",
                self._argnums.get(storage),
                placements,
                communicates=True,
            )
        )

    def _refuse_copies(self, operation: Operation) -> None:
        """Refuse a write into a copy, and the use of a copy whose tensor has been written since."""
        for tensor in dtensors_in([*operation.args, *operation.kwargs.values()]):
            root, count = self._copies.get(self._storage(tensor), (None, 0))
            if root is None:
                continue
            written = any(tensor is each for each in operation.written)
            if written or self._terms.writes(root) != count:
                use = "writes" if written else "reads after a write"
                whole = "it" if root in self._argnums else "a tensor of the reference"
                raise _ObstacleError(
                    Obstacle(
                        f"`{operation.operator}` {use} a part of {whole}, placed as "
                        f"{list(tensor.placements)}",
                        self._argnums.get(root),
                        tensor.placements,
                        communicates=True,
                    )
                )


def _placements_instead(operation: Operation) -> tuple[Any, ...] | None:
    """The placements of the result of an operation's functional form; None if it has no such form."""
    packet = operation.operator.overloadpacket
    namespace = getattr(torch.ops, operation.operator.namespace)
    functional = getattr(namespace, packet.__name__.removesuffix("_"), None)
    if functional is None or functional is packet:
        return None
    try:
        result = functional(*operation.args, **operation.kwargs)
    except Exception:  # the caller raises the same error
        return None
    placed = dtensors_in([result])
    return placed[0].placements if placed else None


def try_placements(
    reference: Reference, values: Sequence[Any], declared: Container[int], *, for_kernel: bool
) -> Trial:
    """Run a reference on DTensors without data.

    Args:
        reference: Computes the results.
        values: Argument values; all tensors in them are DTensors.
        declared: Positions, among all tensors, of the tensors that it may write into.
        for_kernel: True to prove that a kernel may run on the shards, too.

    Raises:
        Exception: If the reference breaks the contract of operators, or also raises on whole tensors.
    """
    with torch.no_grad(), torch.inference_mode(False), capabilities.without_modes():
        try:
            return _tried(reference, values, declared, for_kernel=for_kernel)
        except errors.OpsmithError:
            raise
        except _ObstacleError as error:
            return Trial(None, error.obstacle)
        except Exception as error:  # the trial shows nothing
            _raise_as_on_whole_tensors(reference, values)
            said = str(error).strip().partition("\n")[0]
            return Trial(None, Obstacle(f"{type(error).__name__}: {said}"))


def _raise_as_on_whole_tensors(reference: Reference, values: Sequence[Any]) -> None:
    """Raise a reference's error on whole tensors without data: then placements are not its cause."""
    with capabilities.fake_mode():
        whole = map_tensors(_without_data, map(concrete, values))
        try:
            reference(whole)
        except Exception as error:
            if type(error).__module__ == "builtins":  # otherwise the cause is a fake tensor's missing data
                raise


def _tried(
    reference: Reference, values: Sequence[Any], declared: Container[int], *, for_kernel: bool
) -> Trial:
    terms = _TermNumbering()
    # First, since it raises an error without the capability.
    observing = capabilities.observe_shards(terms.see)
    with capabilities.fake_mode():
        placed = map_tensors(
            lambda tensor: ShardLayout.of(tensor)(_without_data(local_shard(tensor))), map(concrete, values)
        )
        shards = map_tensors(local_shard, placed)
        inputs = tensors_in(shards)
        terms.start(inputs, known_only=False)
        with capabilities.observe_shards(terms.see, _PlacedWrites(tensors_in(placed), terms, declared).see):
            whole = _results(reference(placed))
        through_dtensor = terms.term([map_tensors(local_shard, whole), inputs])
        if not for_kernel:
            return Trial(None, None)
        layouts = [ShardLayout.of(result) if mesh_of(result) else None for result in tensors_in(whole)]
        terms.start(inputs, known_only=True)
        try:
            with observing:
                directly = terms.term([_results(reference(shards)), inputs])
        except Exception:  # nothing is proved
            return Trial(None, None)
    proven = through_dtensor == directly and None not in layouts
    return Trial([each for each in layouts if each] if proven else None, None)


def _results(returned: Any) -> list[Any]:
    if returned is None:
        return []
    return [returned] if isinstance(returned, Tensor) else list(returned)


def _without_data(tensor: Tensor) -> Tensor:
    """A plain tensor with the metadata of a tensor, in a mode whose tensors have no data."""
    sizes, strides = (tuple(map(concrete, each)) for each in (tensor.shape, tensor.stride()))
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def concrete(value: Any) -> Any:
    """The value in this call of a number that is a symbol of a trace; other values unchanged.

    Raises:
        ValueError: If it depends on data.
    """
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if value.node.hint is None:
            raise ValueError(f"the number {value} depends on data")
        return value.node.hint
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [concrete(each) for each in value]
        return value if all(map(is_, items, value)) else type(value)(items)
    return value
