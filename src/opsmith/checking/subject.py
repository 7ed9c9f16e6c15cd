"""What is under check: an operator with its samples, run so that every run is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.sample import Sample
from opsmith.core.calls import tensors_in
from opsmith.core.kernels import Kernel, choose
from opsmith.core.operator import Operator
from opsmith.core.schema import Result
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.effects import run_pure

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """An operator under check.

    Args:
        operator: The operator.
        samples: What it is run on.
        seed: Seed of everything random.
    """

    operator: Operator[..., Any]
    samples: tuple[Sample, ...]
    seed: int

    @property
    def specification(self) -> Specification:
        """The operator's specification."""
        return self.operator.specification

    @cached_property
    def has_truth(self) -> bool:
        """Whether a run in a higher precision is a better answer.

        It is not for an opaque operator, whose function is all there is, nor for a random one, which draws
        other numbers in another dtype.
        """
        return not (self.specification.opaque or self.specification.random or self._reference_draws)

    @property
    def results(self) -> tuple[Result, ...]:
        """The results that callers see."""
        schema = self.specification.schema
        return tuple(schema.results[position] for position in schema.visible)

    def call(self, sample: Sample, flat: Sequence[Any]) -> list[Tensor]:
        """The results that callers see, from the operator itself."""
        with self.seeded():
            args, kwargs = sample.arguments(_own_generators(flat))
            return _listed(self.operator(*args, **kwargs))

    def reference(
        self, sample: Sample, flat: Sequence[Any], function: Callable[..., Any] | None = None
    ) -> list[Tensor]:
        """All results of the reference, or of a function in its place, as plain PyTorch: hidden ones too."""
        with self.seeded():
            args, kwargs = sample.arguments(_own_generators(flat))
            return _listed((function or self.specification.reference)(*args, **kwargs))

    def kernel(self, sample: Sample, flat: Sequence[Any], function: Callable[..., Any]) -> list[Tensor]:
        """All results of a kernel, hidden ones too, held to the contract of kernels."""
        values = sample.flattening.pack(_own_generators(flat))
        with self.seeded(), torch.no_grad():
            return list(run_pure(self.specification, function, values))

    def plain(
        self, sample: Sample, function: Callable[..., Any] | None = None
    ) -> Callable[[Sequence[Any]], list[Tensor]]:
        """The reference, or a function in its place, from flat arguments to visible results."""
        return lambda flat: self.visible(self.reference(sample, flat, function))

    def runs_at(self, flat: Sequence[Any]) -> str:
        """`file:line` of what computes a call: the kernel that takes it, or the reference."""
        accepted = choose(self.specification.kernels, tensors_in(list(flat)))[0]
        return accepted.kernel.where if accepted else self.specification.where

    def visible(self, every: list[Tensor]) -> list[Tensor]:
        """Those of all results that callers see."""
        schema = self.specification.schema
        if len(every) != len(schema.results):
            return every  # a stand-in may leave the hidden ones out
        return [every[position] for position in schema.visible]

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """A region in which every run draws the same numbers; the state outside stays as it was."""
        if not self.draws:  # setting the state takes longer than most operators
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            yield

    @cached_property
    def draws(self) -> bool:
        """Whether the operator draws from torch's random state, declared or not, in any sample."""
        return self.specification.random or any(self._draws_in(sample) for sample in self.samples)

    @cached_property
    def _reference_draws(self) -> bool:
        """Whether the reference draws, be it from a generator that it is given, or makes from a seed."""
        return any(drawing_operations(self, sample) for sample in self.samples)

    def _draws_in(self, sample: Sample) -> bool:
        with torch.random.fork_rng(), torch.no_grad():
            before = torch.get_rng_state()
            for function in (self.operator, self.specification.reference):
                args, kwargs = sample.arguments(sample.at())
                with suppress(Exception):  # the properties report what it raises
                    function(*args, **kwargs)
            return not torch.equal(before, torch.get_rng_state())

    def generator(self) -> torch.Generator:
        """A generator for probes, at its start."""
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the operator is checked: the CPU, and where it has kernels that can run here."""
        types = dict.fromkeys(kernel.device for kernel in self.specification.kernels)
        others = [torch.device(kind) for kind in types if kind != "cpu" and missing_device(kind) is None]
        return (CPU, *others)

    def devices_with(self, dtype: torch.dtype) -> tuple[torch.device, ...]:
        """Those of the devices that have a dtype: not each has float64."""
        return tuple(device for device in self.devices if _has_dtype(device, dtype))

    def kernels_on(self, device: torch.device) -> Sequence[Kernel]:
        """The kernels attached for a device."""
        return [kernel for kernel in self.specification.kernels if kernel.device == device.type]


def drawing_operations(subject: Subject, sample: Sample) -> list[tuple[str, bool]]:
    """The operations of the reference that draw, each with whether it draws from a generator of its own."""
    draws: list[tuple[str, bool]] = []

    def see(operator: Any, kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            draws.append((str(operator), isinstance(kwargs.get("generator"), torch.Generator)))

    args, kwargs = sample.arguments(sample.at())
    # Suppressed, since the properties report what the reference raises; what it drew before that counts.
    with torch.random.fork_rng(), torch.no_grad(), capabilities.watching(see), suppress(Exception):
        subject.specification.reference(*args, **kwargs)
    return draws


def missing_device(kind: str) -> str | None:
    """Why nothing can run on a type of device here; None where it can."""
    try:
        torch.empty(1, device=kind).fill_(0)
    except (RuntimeError, AssertionError, ImportError) as error:
        # torch says "not compiled with ..." by AssertionError; its first line is the reason.
        return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return None


def _has_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def _own_generators(flat: Sequence[Any]) -> list[Any]:
    """The values, each generator at the state it was given in: a run must not see what another one drew."""
    return [value.clone_state() if isinstance(value, torch.Generator) else value for value in flat]


def _listed(returned: Any) -> list[Tensor]:
    """The results side by side; those of an adopted class may lie in tuples inside of tuples."""
    if not isinstance(returned, tuple | list):
        return [returned]
    return [result for each in returned for result in _listed(each)]
