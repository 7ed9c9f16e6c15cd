"""Levels of effort: the limits that a check keeps to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from opsmith.core.effort_level import Level, effort_at, no_such_level

LARGE = 40_000
"""Most elements of a sample for `Effort.elements` of them to be moved."""

LEAST = 16
"""Fewest elements to move, however large a sample is."""

ALL = sys.maxsize
"""No limit."""


@dataclass(frozen=True)
class ByLevel:
    """A limit of each level: `quick`, `default` and `thorough`."""

    quick: int
    default: int
    thorough: int

    def __get__(self, effort: Effort, _: type) -> int:
        limit: int = getattr(self, effort.name)
        return limit


@dataclass(frozen=True)
class Effort:
    """Limits of a check: how many inputs, layouts and runs each property goes through.

    A limit is a number; `ALL` stands for no limit. Those that are not given are those of the level.

    Args:
        name: `quick`, `default` or `thorough`; of an effort of your own, the level that it is made from.
        variations: Inputs to derive from the author's samples of each rank.
        argument_values: Values of arguments other than tensors to try, of those that types and code know.
        samples: Samples for the properties that make many runs of each.
        elements: Elements of a sample that finite differences move one at a time; in a larger sample, some of
            them and random directions stand for all.
        exhaustive: True if each sample is traced by every means: opcheck, each backend of `torch.compile`,
            each dtype of autocast, fake tensors of each dtype. Kernels run in several threads, too.
        seconds: Seconds after which a property takes no further input.

    Raises:
        UsageError: If the name is not a level.

    Example:
        >>> from dataclasses import replace
        >>> replace(EFFORTS["quick"], variations=10).variations
        10
    """

    name: Level
    variations: int
    argument_values: int
    samples: int
    elements: int
    exhaustive: bool
    seconds: float

    full = ByLevel(False, True, True)
    """True if the operator is compiled and exported, fake tensors of every dtype are tried (else of two),
    gradients are taken by every choice of inputs (else by each alone, by all but one, and by all), side
    effects are checked on slices of larger tensors too, and CUDA kernels are compiled for every architecture
    (else for the latest alone)."""
    subset = ByLevel(4, ALL, ALL)
    """Samples for the properties that run on a few of them."""
    layouts = ByLevel(7, ALL, ALL)
    """Layouts of inputs and grad_outputs to try, each alone."""
    layout_samples = ByLevel(2, 6, ALL)
    """Samples that are tried in several layouts."""
    layout_combinations = ByLevel(1, 3, 12)
    """Trials of a sample in which several tensors have an odd layout at once."""
    sanitized_samples = ByLevel(2, 8, ALL)
    """Samples on which kernels run under sanitizers in every layout."""
    special_samples = ByLevel(1, 2, ALL)
    """Samples that special values are put into."""
    transform_samples = ByLevel(0, 1, ALL)
    """Samples on which `vmap` and symbolic sizes are tried in full."""
    batched_samples = ByLevel(1, ALL, ALL)
    """Samples that are differentiated by several grad_outputs at once."""
    spot_checked_after = ByLevel(1, ALL, ALL)
    """Samples on which every element is moved; on later ones a few elements and random directions stand for
    all, as long as these agree with autograd."""
    tangent_weights = ByLevel(1, 2, 2)
    """Random weights of the results by which tangents are held to finite differences."""
    fresh = ByLevel(2, 3, 6)
    """Fresh inputs on which a hypothesis about a cause is tested."""
    repeats = ByLevel(2, 3, 10)
    """Runs of a call that must give the same each time."""
    neighbours = ByLevel(0, 2, 2)
    """Samples of other shapes whose calls are interleaved with the tested call."""
    programs = ByLevel(2_000, 10_000, 200_000)
    """Programs of Triton that are interpreted in all."""
    call_programs = ByLevel(500, 2_000, 20_000)
    """Programs of Triton that are interpreted in one call."""
    threads = ByLevel(1_000_000, 4_000_000, 40_000_000)
    """Threads of CUDA kernels that run on the CPU in all."""
    call_threads = ByLevel(100_000, 400_000, 4_000_000)
    """Threads of CUDA kernels that run on the CPU in one call."""

    def __post_init__(self) -> None:
        if self.name not in get_args(Level):
            raise no_such_level(self.name, "check")

    def moved(self, size: int) -> int:
        """Number of elements of a sample to move: fewer in a large one, since each move costs a whole run.

        Args:
            size: Number of elements of the sample.

        Example:
            >>> EFFORTS["quick"].moved(100), EFFORTS["quick"].moved(1_000_000)
            (64, 16)
        """
        return max(min(self.elements, LEAST), min(self.elements, self.elements * LARGE // max(size, 1)))


_LEVELS: tuple[tuple[Level, int, int, int, int, bool, float], ...] = (
    ("quick", 3, 4, 1, 64, False, 60.0),
    ("default", 12, 12, 3, 2048, False, 120.0),
    ("thorough", 60, ALL, ALL, 16384, True, ALL),
)

EFFORTS: Mapping[str, Effort] = MappingProxyType({row[0]: Effort(*row) for row in _LEVELS})


def effort_named(name: object) -> Effort:
    """Return the effort of a level.

    Raises:
        UsageError: If there is no such level.
    """
    return effort_at(name, EFFORTS, "check")
