"""torch's random state, kept from a forward and set again where its reference is recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of the CPU's generator, of those of the devices of some tensors, and of some of their own."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    own: tuple[tuple[torch.Generator, Tensor], ...]

    @classmethod
    def now(cls, values: Sequence[Any]) -> RandomState:
        """The state at this moment, for a call with these arguments."""
        indices = {value.device.index for value in values if isinstance(value, Tensor) and value.is_cuda}
        return cls(
            torch.get_rng_state(),
            {index: torch.cuda.get_rng_state(index) for index in sorted(indices)},
            tuple((generator, generator.get_state()) for generator in generators_in(values)),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """A region that draws the same numbers again, and leaves the state outside as it was."""
        with torch.random.fork_rng(devices=list(self.cuda)):
            torch.set_rng_state(self.cpu)
            for index, state in self.cuda.items():
                torch.cuda.set_rng_state(state, index)
            before = [(generator, generator.get_state()) for generator, _ in self.own]
            try:
                for generator, state in self.own:
                    generator.set_state(state)
                yield
            finally:
                for generator, state in before:
                    generator.set_state(state)


def generators_in(values: Iterable[Any]) -> list[torch.Generator]:
    """The generators among argument values, those in lists too."""
    found: list[torch.Generator] = []
    for value in values:
        items = value if isinstance(value, list | tuple) else [value]
        found += [item for item in items if type(item) is torch.Generator]
    return found
