"""A trial on stand-ins: does an operator on every rank's shards come to the operator on the DTensors?

The reference is run twice on tensors without data: on the shards, as one rank has them, and on the DTensors
that they are parts of. DTensor, too, ends in operations on shards. If these are the same operations with the
same arguments, and no rank asks another for anything, then the first run is the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.core.calls import tensors_in
from opsmith.torch_library import capabilities
from opsmith.torch_library.distributed import dtensor, local, mapped


@dataclass(frozen=True)
class Layout:
    """How the shards of a result make a DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self, shard: Tensor) -> Tensor:
        """The DTensor of which this is the shard of this rank."""
        placed: Tensor = dtensor().from_local(
            shard, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return placed

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """The layout of a DTensor."""
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


class _NotProvenError(Exception):
    """The trial has met something that it cannot follow, or that differs."""


class _Terms:
    """What each tensor of a run is: an input, or an operation on such, as a number.

    The same operation on the same tensors has the same number in every run. What nothing is made of, as when
    DTensor looks up the shape of a result, takes no part.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no identity is used twice
        self._known_only = False

    def start(self, inputs: Sequence[Tensor], *, known_only: bool) -> None:
        """Begin a run on these inputs; one that may only do what an earlier run has done, if so asked."""
        self._known_only = False
        self._of = {}
        for place, tensor in enumerate(inputs):
            self._meet(tensor, ("input", place))
        self._known_only = known_only

    def _meet(self, tensor: Tensor, term: Any) -> None:
        self._alive.append(tensor)
        self._of[id(tensor)] = self._numbers.setdefault(term, len(self._numbers))

    def term(self, value: Any) -> Any:
        """A value with tensors as their numbers, everything else with its type, since 1 is not 1.0."""
        if isinstance(value, Tensor):
            return "tensor", self._of[id(value)]
        if isinstance(value, list | tuple):
            return tuple(map(self.term, value))
        if isinstance(value, dict):
            return tuple((name, self.term(item)) for name, item in sorted(value.items()))
        return type(value), value

    def see(self, operator: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run an operation, and take note of what its results are."""
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise _NotProvenError
        term = operator, self.term(args), self.term(kwargs)
        if self._known_only and (term, 0) not in self._numbers:
            raise _NotProvenError  # before torch logs that a shard does not fit
        results = run()
        for place, tensor in enumerate([results] if isinstance(results, Tensor) else results or ()):
            if isinstance(tensor, Tensor):
                self._meet(tensor, (term, place))
        return results


def try_on_shards(reference: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Layout] | None:
    """How results are laid out, if the operator may run on the shards of these DTensors; None if not."""
    try:
        return _tried(reference, values)
    except Exception:  # whatever it is, the trial proved nothing; if it is an error, the call itself says so
        return None


def _tried(reference: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Layout] | None:
    terms = _Terms()
    with torch.no_grad(), capabilities.fake_mode() as mode:
        placed = mapped(lambda tensor: Layout.of(tensor)(mode.from_tensor(local(tensor))), values)
        shards = mapped(local, placed)
        ends = []
        for inputs in (placed, shards):
            terms.start(tensors_in(shards), known_only=inputs is shards)
            with capabilities.watching_shards(terms.see):
                results = reference(inputs)
            results = [results] if isinstance(results, Tensor) else list(results)
            ends.append((terms.term(mapped(local, results)), results))
    (through_dtensor, whole), (directly, _) = ends
    return [Layout.of(result) for result in whole] if through_dtensor == directly else None
