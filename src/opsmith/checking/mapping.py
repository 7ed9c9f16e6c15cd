"""Ways to batch the arguments of a sample, and a call under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.sample import Sample
from opsmith.core.calls import tensors_in

SIZE = 3


@dataclass(frozen=True)
class Way:
    """One way to batch the arguments of a sample.

    Args:
        dims: For each argument that has a batch, its dimension.
        out_dim: Where the batch lies in the results.
        size: How many examples there are.
        labels: How messages call the tensors among the arguments, by place.
    """

    dims: Mapping[int, int]
    labels: Mapping[int, str]
    out_dim: int = 0
    size: int = SIZE

    def __str__(self) -> str:
        given = ", ".join(f"{label}: {self.dims.get(place)}" for place, label in self.labels.items())
        out = f", out_dims={self.out_dim}" if self.out_dim else ""
        count = f"a batch of {self.size}" if self.size else "an empty batch"
        return f"in_dims=({given}){out}, {count}"


def ways(sample: Sample, *, every: bool) -> Iterator[Way]:
    """The ways in which a sample is batched: all arguments, each alone, in first, last and mixed dimensions.

    Args:
        sample: The sample.
        every: Whether to yield all of them; else, those that differ most.
    """
    labels = {
        place: sample.labels[place] for place, value in enumerate(sample.flat) if isinstance(value, Tensor)
    }
    places = tuple(labels)
    second = {place: min(1, sample.flat[place].dim()) for place in places}
    yield Way(dict.fromkeys(places, 0), labels)
    yield Way(dict.fromkeys(places, -1), labels, out_dim=-1)
    if len(places) > 1:
        yield from (Way({place: 0}, labels) for place in (places if every else places[-1:]))
    if not every:
        return
    yield Way(second, labels)
    if len(places) > 1:
        mixed = {place: -1 if at % 2 else 0 for at, place in enumerate(places)}
        yield Way(mixed, labels)
    yield Way(dict.fromkeys(places, 0), labels, size=1)


def map_over(
    function: Any, batch: Sequence[Any], dims: Mapping[int, int], out_dim: int = 0, randomness: str = "error"
) -> list[Tensor | None]:
    """The results of a function under `vmap`, the batch in the first dimension; None where it gave None.

    Args:
        function: Takes flat arguments, returns results.
        batch: Flat arguments.
        dims: For each argument that has a batch, its dimension.
        out_dim: Where `vmap` is to put the batch.
        randomness: As of `vmap`.
    """
    tensors = [place for place, value in enumerate(batch) if isinstance(value, Tensor)]
    there: list[bool] = []

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        flat = list(batch)
        for place, value in zip(tensors, given, strict=True):
            flat[place] = value
        results = list(function(flat))
        there[:] = [result is not None for result in results]
        return tuple(tensors_in(results))

    over = torch.func.vmap(call, tuple(dims.get(place) for place in tensors), out_dim, randomness)
    found = iter(over(*(batch[place] for place in tensors)))
    return [next(found).movedim(out_dim, 0) if is_there else None for is_there in there]
