"""Levels of effort: the limits that a check keeps to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import get_args

from opsmith.core.effort_level import Level, effort_at, no_such_level

LARGE = 40_000
"""Most elements of a sample for `Effort.elements` of them to be moved."""

LEAST = 16
"""Fewest elements to move, however large a sample is."""

ALL = sys.maxsize
"""No limit."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a check: how many inputs, layouts and runs each property goes through.

    A limit is a number; `ALL` stands for no limit. The defaults are those of the level `default`.

    Args:
        name: `quick`, `default` or `thorough`; of an effort of your own, the level that it is made from.
        variations: Inputs to derive from the author's samples of each rank.
        argument_values: Values of arguments other than tensors to try, of those that types and code know.
        samples: Samples for the properties that make many runs of each.
        subset: Samples for the properties with `Property.subset`.
        layouts: Layouts of inputs and grad_outputs to try, each alone.
        layout_samples: Samples that are tried in several layouts.
        layout_combinations: Trials of a sample in which several tensors have an odd layout at once.
        sanitized_samples: Samples on which kernels run under sanitizers in every layout.
        special_samples: Samples that special values are put into.
        transform_samples: Samples on which `vmap` and symbolic sizes are tried in full.
        batched_samples: Samples that are differentiated by several grad_outputs at once.
        elements: Elements of a sample that finite differences move one at a time; in a larger sample, some of
            them and random directions stand for all.
        spot_checked_after: Samples on which every element is moved; on later ones a few elements and random
            directions stand for all, as long as these agree with autograd.
        tangent_weights: Random weights of the results by which tangents are held to finite differences.
        fresh: Fresh inputs on which a hypothesis about a cause is tested.
        repeats: Runs of a call that must give the same each time.
        neighbours: Samples of other shapes whose calls are interleaved with the tested call.
        programs: Programs of Triton that are interpreted in all.
        call_programs: Programs of Triton that are interpreted in one call.
        threads: Threads of CUDA kernels that run on the CPU in all.
        call_threads: Threads of CUDA kernels that run on the CPU in one call.
        compiled: True if the operator is compiled and exported.
        exhaustive: True if each sample is traced by every means: opcheck, each backend of `torch.compile`,
            each dtype of autocast, fake tensors of each dtype. Kernels run in several threads, too.
        fake_dtypes: True if fake tensors of every dtype are tried; else of two.
        input_choices: True if gradients are taken by every choice of inputs; else by each alone, by all but
            one, and by all.
        sliced: True if side effects are checked on slices of larger tensors too.
        seconds: Seconds after which a property takes no further input.
        architectures: True if CUDA kernels are compiled for every architecture; else for the latest alone.

    Raises:
        UsageError: If the name is not a level.

    Example:
        >>> from dataclasses import replace
        >>> replace(EFFORTS["quick"], variations=10).variations
        10
    """

    name: Level
    variations: int = 12
    argument_values: int = 12
    samples: int = 3
    subset: int = ALL
    layouts: int = ALL
    layout_samples: int = 6
    layout_combinations: int = 3
    sanitized_samples: int = 8
    special_samples: int = 2
    transform_samples: int = 1
    batched_samples: int = ALL
    elements: int = 2048
    spot_checked_after: int = ALL
    tangent_weights: int = 2
    fresh: int = 3
    repeats: int = 3
    neighbours: int = 2
    programs: int = 10_000
    call_programs: int = 2_000
    threads: int = 4_000_000
    call_threads: int = 400_000
    compiled: bool = True
    exhaustive: bool = False
    fake_dtypes: bool = True
    input_choices: bool = True
    sliced: bool = True
    architectures: bool = True
    seconds: float = 120.0

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


_DEFAULT = Effort(name="default")

_QUICK = replace(
    _DEFAULT,
    name="quick",
    variations=3,
    argument_values=4,
    samples=1,
    subset=4,
    layouts=7,
    layout_samples=2,
    layout_combinations=1,
    sanitized_samples=2,
    special_samples=1,
    transform_samples=0,
    batched_samples=1,
    elements=64,
    spot_checked_after=1,
    tangent_weights=1,
    fresh=2,
    repeats=2,
    neighbours=0,
    programs=2_000,
    call_programs=500,
    threads=1_000_000,
    call_threads=100_000,
    compiled=False,
    fake_dtypes=False,
    input_choices=False,
    sliced=False,
    architectures=False,
    seconds=60.0,
)

_THOROUGH = replace(
    _DEFAULT,
    name="thorough",
    variations=60,
    argument_values=ALL,
    samples=ALL,
    layout_samples=ALL,
    layout_combinations=12,
    sanitized_samples=ALL,
    special_samples=ALL,
    transform_samples=ALL,
    elements=16384,
    fresh=6,
    repeats=10,
    programs=200_000,
    call_programs=20_000,
    threads=40_000_000,
    call_threads=4_000_000,
    exhaustive=True,
    seconds=ALL,
)

EFFORTS: Mapping[str, Effort] = MappingProxyType({each.name: each for each in (_QUICK, _DEFAULT, _THOROUGH)})


def effort_named(name: object) -> Effort:
    """Return the effort of a level.

    Raises:
        UsageError: If there is no such level.
    """
    return effort_at(name, EFFORTS, "check")
