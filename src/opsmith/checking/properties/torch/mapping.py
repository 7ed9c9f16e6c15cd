"""Ways to batch the arguments of a sample, a call under `torch.func.vmap`, and its refusals."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import stated
from opsmith.checking.property import first_line
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library.torch_messages import NO_BATCHING_RULE, has_message

SIZE = 3


@dataclass(frozen=True)
class BatchDims:
    """One way to batch the arguments of a sample.

    Args:
        dims: Batch dimension of each batched argument, by its position.
        labels: Name in messages of each tensor argument, by its position.
        out_dim: Batch dimension of the results.
        size: Number of examples.
    """

    dims: Mapping[int, int]
    labels: Mapping[int, str]
    out_dim: int = 0
    size: int = SIZE

    def __str__(self) -> str:
        given = ", ".join(f"{label}: {self.dims.get(argnum)}" for argnum, label in self.labels.items())
        out = f", out_dims={self.out_dim}" if self.out_dim else ""
        count = f"a batch of {self.size}" if self.size else "an empty batch"
        return f"in_dims=({given}){out}, {count}"


def ways(sample: Sample, *, every: bool) -> Iterator[BatchDims]:
    """Choices of batched arguments and dimensions: all arguments, each alone; first, last, mixed dimensions.

    Args:
        sample: The sample.
        every: True to yield all of them; else those that differ most.
    """
    labels = {
        argnum: sample.labels[argnum] for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)
    }
    argnums = tuple(labels)
    yield BatchDims(dict.fromkeys(argnums, 0), labels)
    yield BatchDims(dict.fromkeys(argnums, -1), labels, out_dim=-1)
    if len(argnums) > 1:
        yield from (BatchDims({argnum: 0}, labels) for argnum in (argnums if every else argnums[-1:]))
    if not every:
        return
    yield BatchDims({argnum: min(1, sample.flat[argnum].dim()) for argnum in argnums}, labels)
    if len(argnums) > 1:
        yield BatchDims({argnum: -1 if at % 2 else 0 for at, argnum in enumerate(argnums)}, labels)
    yield BatchDims(dict.fromkeys(argnums, 0), labels, size=1)


def map_over(
    function: Callable[[list[Any]], Sequence[Tensor | None]],
    batch: Sequence[Any],
    dims: Mapping[int, int],
    out_dim: int = 0,
    randomness: str = "error",
) -> list[Tensor | None]:
    """The results of a function under `vmap`, the batch in the first dimension; None for a result of None.

    Args:
        function: Takes flat arguments, returns results.
        batch: Flat arguments.
        dims: For each argument that has a batch, its dimension.
        out_dim: Dimension in which `vmap` puts the batch.
        randomness: As of `vmap`.
    """
    tensors = [argnum for argnum, value in enumerate(batch) if isinstance(value, Tensor)]
    present: list[bool] = []

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        flat = list(batch)
        for argnum, value in zip(tensors, given, strict=True):
            flat[argnum] = value
        results = list(function(flat))
        present[:] = [result is not None for result in results]
        return tuple(tensors_in(results))

    over = torch.func.vmap(call, tuple(dims.get(argnum) for argnum in tensors), out_dim, randomness)
    found = iter(over(*(batch[argnum] for argnum in tensors)))
    return [next(found).movedim(out_dim, 0) if is_there else None for is_there in present]


def rule_words(subject: Subject) -> str:
    """Name of what computes a batch, in words."""
    specification = subject.specification
    if subject.kind.applied or specification.origin.registered:
        if specification.origin.own("vmap"):
            return "its own rule for `vmap`"
        return "the rule for `vmap` that torch derives from its forward" if subject.kind.applied else "`vmap`"
    if specification.batching is not None:
        return f"the rule for `vmap` that batching={specification.batching!r} makes"
    return "the rule for `vmap` that follows from the reference"


def declares_rule(subject: Subject) -> bool:
    """True if a class that is called through `apply` says that it can be mapped.

    It has a rule of its own, or `generate_vmap_rule = True`.
    """
    origin = subject.specification.origin
    return subject.kind.applied and (
        origin.own("vmap") is not None or bool(getattr(origin.subject, "generate_vmap_rule", False))
    )


def own_rule(subject: Subject) -> bool:
    """True if its author wrote a rule for batches, or declares that one call serves a batch."""
    specification = subject.specification
    return specification.batching is not None or specification.origin.own("vmap") is not None


def refusal(subject: Subject, error: Exception, *, empty: bool) -> str | None:
    """The reason for a refusal of `vmap`, by torch or the author; None for a fault.

    Args:
        subject: The subject of the check.
        error: The exception.
        empty: True if a tensor has no elements, which not all of torch's own rules support.
    """
    if isinstance(error, NotImplementedError) and (stated(error) or not declares_rule(subject)):
        return first_line(error)
    # The messages below are torch's only if torch raises them.
    if inside_own_rule(subject, error) or stated(error):
        return None
    if declares_rule(subject) and not empty:
        return None  # it promises what torch refuses
    if has_message(error, NO_BATCHING_RULE) or (empty and not own_rule(subject)):
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def inside_own_rule(subject: Subject, error: Exception) -> bool:
    """True if an exception passed through the author's own rule for `vmap`."""
    own = subject.specification.origin.own("vmap")
    code = getattr(own and own.function, "__code__", None)
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return code is not None and any(each is code for each in frames)
