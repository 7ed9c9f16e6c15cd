"""torch's random state: saved before the forward, and restored when the reference is recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """State of the default generators of the devices of a call, and of generators among its arguments."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    own: tuple[tuple[torch.Generator, Tensor], ...]

    @classmethod
    def now(cls, values: Sequence[Any]) -> RandomState:
        """The current state, for a call with these arguments."""
        indices = {value.device.index for value in values if isinstance(value, Tensor) and value.is_cuda}
        return cls(
            torch.get_rng_state(),
            {index: torch.cuda.get_rng_state(index) for index in sorted(indices)},
            tuple((generator, generator.get_state()) for generator in generators_in(values)),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context that draws the same numbers again, and restores the state at its end."""
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
    """The generators among argument values, including generators in lists."""
    found: list[torch.Generator] = []
    for value in values:
        items = value if isinstance(value, list | tuple) else [value]
        found += [item for item in items if type(item) is torch.Generator]
    return found
