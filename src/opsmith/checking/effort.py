"""Levels of effort: the limits of a check."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from opsmith.core.effort_level import Level, effort_at, no_such_level

LARGE = 40_000
"""Largest sample, in elements, of which `Effort.elements` elements are moved; of a larger sample, fewer."""

LEAST = 16
"""Minimum number of elements to move, however large a sample is."""

ALL = sys.maxsize
"""No limit."""


@dataclass(frozen=True)
class ByLevel:
    """A limit for each level: `quick`, `default` and `thorough`."""

    quick: int
    default: int
    thorough: int

    def __get__(self, effort: Effort, _: type) -> int:
        limit: int = getattr(self, effort.name)
        return limit


@dataclass(frozen=True)
class Effort:
    """Limits of a check: how many inputs, layouts and runs each property goes through.

    A limit is a number, or `ALL` for no limit.

    Args:
        name: `quick`, `default` or `thorough`; for an effort that you made, the level that it is made from.
        variations: Inputs to derive from the author's samples of each rank.
        argument_values: Values to try of arguments that are not tensors, out of those that types and code
            show.
        samples: Samples for the properties that run each sample many times.
        elements: Elements of a sample that finite differences move one at a time. In a larger sample, they
            move some elements, and random directions instead of the rest.
        exhaustive: True if each sample is traced by every means (opcheck, each backend of `torch.compile`,
            each dtype of autocast, fake tensors of each dtype), and kernels also run in several threads.
        seconds: Seconds after which a property starts no further input.

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
    """True if the operator is compiled and exported, fake tensors of every dtype are tried (else of two
    dtypes), gradients are computed for every choice of inputs (else for each input alone, for all inputs
    except one, and for all), side effects are also checked on slices of larger tensors, and CUDA kernels are
    compiled for every architecture (else only for the latest)."""
    subset = ByLevel(4, ALL, ALL)
    """Samples for the properties that run on a few of them."""
    layouts = ByLevel(7, ALL, ALL)
    """Layouts of inputs and grad_outputs to try, each alone."""
    layout_samples = ByLevel(2, 6, ALL)
    """Samples that are tried in several layouts."""
    layout_combinations = ByLevel(1, 3, 12)
    """Runs of a sample in which several tensors have an unusual layout at once."""
    sanitized_samples = ByLevel(2, 8, ALL)
    """Samples on which kernels run under sanitizers in every layout."""
    special_samples = ByLevel(1, 2, ALL)
    """Samples into which special values are put."""
    transform_samples = ByLevel(0, 1, ALL)
    """Samples on which `vmap` and symbolic sizes are tried in full."""
    batched_samples = ByLevel(1, ALL, ALL)
    """Samples that are differentiated for several grad_outputs at once."""
    spot_checked_after = ByLevel(1, ALL, ALL)
    """Samples of which every element is moved. Of later samples, a few elements and random directions are
    moved, unless these disagree with autograd."""
    tangent_weights = ByLevel(1, 2, 2)
    """Random weightings of the results with which tangents are compared with finite differences."""
    fresh = ByLevel(2, 3, 6)
    """Fresh inputs on which a hypothesis about a cause is tested."""
    repeats = ByLevel(2, 3, 10)
    """Repeated runs of a call that must give equal results."""
    neighbours = ByLevel(0, 2, 2)
    """Samples of other shapes whose calls are interleaved with the tested call."""
    programs = ByLevel(2_000, 10_000, 200_000)
    """Maximum number of Triton programs that a check interprets."""
    call_programs = ByLevel(500, 2_000, 20_000)
    """Maximum number of Triton programs that are interpreted in one call."""
    threads = ByLevel(1_000_000, 4_000_000, 40_000_000)
    """Maximum number of threads of CUDA kernels that a check runs on the CPU."""
    call_threads = ByLevel(100_000, 400_000, 4_000_000)
    """Maximum number of threads of CUDA kernels that run on the CPU in one call."""

    def __post_init__(self) -> None:
        if self.name not in get_args(Level):
            raise no_such_level(self.name, "check")

    def moved(self, size: int) -> int:
        """Number of elements of a sample to move: fewer in a large sample, since each move costs a whole run.

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
