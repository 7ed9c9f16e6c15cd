"""Samples that a check is given, and those of the operator where it is given none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opsmith.checking.side_effects.random_states import seed_torch, torch_state_restored
from opsmith.core.call_arguments import CallArguments
from opsmith.core.samples import Make, samples_of
from opsmith.core.shape_samples import samples_for
from opsmith.core.specification import Specification

GivenSamples = Callable[..., Iterable[Any]] | Iterable[Any] | None

GIVEN = "the samples given to `check`"
"""Location of a list of them in messages."""


def drawn(
    specification: Specification, samples: GivenSamples, seed: int, name: str | None = None
) -> list[CallArguments]:
    """The samples' calls."""
    source = samples_for(specification) if samples is None else samples
    if source is None:
        return []
    with drawing(seed) as make:
        return samples_of(source, make, specification.schema, name or specification.name, GIVEN)


@contextmanager
def drawing(seed: int) -> Iterator[Make]:
    """A region with seeded random state, for authors who draw without `make`."""
    with torch_state_restored():
        seed_torch(seed)
        yield Make(generator=torch.Generator().manual_seed(seed))
