"""What is under check: an operator with its samples, run so that every run is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.effort import EFFORTS, Effort
from opsmith.checking.exceptions import Overlooking, WrongCountError, WrongFormError, calls_operator, in_words
from opsmith.checking.report import Ran
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.core.kernels import Kernel, choose
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.outputs import MisfitError, Outputs, leaves
from opsmith.core.results import Result
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.effects import run_pure
from opsmith.torch_library.result_flattening import ResultFlattening

CPU = torch.device("cpu")

APART = 0x51ED270B
"""Keeps the numbers of probes apart from those of samples, which are drawn from the same seed."""

NUDGES = 3
"""The stream (see `Subject.generator`) by which inputs are moved a little to see whether an answer stays."""


@dataclass(frozen=True)
class Subject:
    """An operator under check.

    Args:
        specification: What is known of it.
        samples: What it is run on.
        seed: Seed of everything random.
        effort: How much to look at.
        operator: The operator; None for one of torch.library.
        apply: What is called in the operator's place, with the same arguments: a class's own `apply`, or the
            operator of torch.library.
        shown_as: How the report calls it, if not by the operator's name.
        symmetric: Labels of the inputs that are made symmetric before it sees them (see `symmetry`).
        limit_s: Seconds that a call may take in a process that is watched.
        ran: The dtypes in which it was run.
    """

    specification: Specification
    samples: tuple[Sample, ...]
    seed: int
    effort: Effort = EFFORTS["default"]
    operator: Operator[..., Any] | None = None
    apply: Callable[..., Any] | None = None
    shown_as: str | None = None
    symmetric: frozenset[str] = frozenset()
    limit_s: float = 60.0
    ran: Ran = field(default_factory=Ran, compare=False, repr=False)

    @property
    def name(self) -> str:
        """How the report calls it."""
        return self.shown_as or self.specification.name

    @calls_operator
    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call of it returns, as users make it."""
        call = self.apply or self.operator
        assert call is not None
        self.ran.note((*args, *kwargs.values()))
        return call(*args, **kwargs)

    @calls_operator
    def referred(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the reference returns, called as it is."""
        return self.specification.reference(*args, **kwargs)

    def by_reference(self) -> Subject:
        """The same with the reference in the operator's place: no kernel runs, which may end the process."""
        return replace(self, apply=self.specification.reference) if self._ours else self

    @property
    def _ours(self) -> bool:
        """Whether it is called as an operator, and is no class that stands for itself."""
        return self.operator is not None and self.apply is None

    @property
    def foreign(self) -> bool:
        """Whether it is an operator of torch.library, which nothing but itself says anything about."""
        return self.operator is None

    @property
    def torch_operator(self) -> Any:
        """The operator as torch knows it; None for a class, which torch knows no operator of."""
        if self.foreign:
            assert self.specification.own is not None
            return self.specification.own.overload
        return self.operator.torch_operator if self.operator is not None and self.apply is None else None

    @cached_property
    def has_truth(self) -> bool:
        """Whether a run in a higher precision is a better answer.

        It is not for an opaque operator, whose function is all there is, nor for a random one, which draws
        other numbers in another dtype.
        """
        opaque = self.specification.opaque and not self.foreign
        return not (opaque or self.specification.random or self._reference_draws)

    def every(self, sample: Sample) -> tuple[Result, ...]:
        """Every flat result for a sample: one for each tensor of a list, by its label."""
        if self.specification.schema.always_tensors:
            return self.specification.schema.results
        lying = self._lying(sample)
        pairs = zip(lying.described, lying.labels, strict=True)
        return tuple(replace(result, name=label) for result, label in pairs)

    def results(self, sample: Sample) -> tuple[Result, ...]:
        """The flat results for a sample that callers see."""
        return tuple(result for result in self.every(sample) if not result.hidden)

    def places(self, sample: Sample) -> list[int]:
        """Where the results that callers see lie among all flat ones."""
        return [place for place, result in enumerate(self.every(sample)) if not result.hidden]

    def _lying(self, sample: Sample) -> ResultFlattening:
        """How the reference's results for a sample lie in flat form: run once for each."""
        if sample.position not in self._lies:
            schema = self.specification.schema
            with self.seeded(), torch.no_grad():
                args, kwargs = sample.arguments(_own_generators(sample.at()))
                returned = self.referred(args, kwargs)
            self._lies[sample.position] = ResultFlattening.of(
                schema, (returned,) if schema.single else returned
            )
        return self._lies[sample.position]

    @cached_property
    def _lies(self) -> dict[int, ResultFlattening]:
        return {}

    def call(self, sample: Sample, flat: Sequence[Any]) -> list[Any]:
        """The results that callers see, from the operator itself.

        Raises:
            WrongCountError: If it returns a list of another length than the reference.
            WrongFormError: If a class returns another structure than it did before.
        """
        with self.seeded():
            args, kwargs = sample.arguments(_own_generators(self._symmetrised(sample, flat)))
            returned = self.called(args, kwargs)
        adopted = self.specification.adopted
        if adopted is not None:  # its results may lie in tuples inside of tuples
            return self._parts(adopted.outputs, returned, flat)
        self._hold_count(sample, returned, self.specification.schema.visible, lambda: self.runs_at(flat))
        return self._listed(returned)

    @calls_operator
    def reference(
        self, sample: Sample, flat: Sequence[Any], function: Callable[..., Any] | None = None
    ) -> list[Tensor]:
        """All results of the reference, or of a function in its place, as plain PyTorch: hidden ones too."""
        with self.seeded():
            args, kwargs = sample.arguments(_own_generators(self._symmetrised(sample, flat)))
            return self._listed((function or self.specification.reference)(*args, **kwargs))

    def _symmetrised(self, sample: Sample, flat: Sequence[Any]) -> Sequence[Any]:
        if not self.symmetric:
            return flat
        pairs = zip(sample.labels, flat, strict=True)
        return [(value + value.mH) / 2 if label in self.symmetric else value for label, value in pairs]

    def kernel(self, sample: Sample, flat: Sequence[Any], function: Callable[..., Any]) -> list[Tensor]:
        """All results of a kernel, hidden ones too, held to the contract of kernels.

        Raises:
            WrongCountError: If it returns a list of another length than the reference.
        """
        values = sample.flattening.pack(_own_generators(flat))
        self.ran.note(values)
        with self.seeded(), torch.no_grad():
            returned = run_pure(self.specification, function, values)
        every = range(len(self.specification.schema.results))
        self._hold_count(sample, returned, every, lambda: where(function))
        return self._listed(returned, packed=True)

    def _hold_count(
        self, sample: Sample, returned: Any, positions: Sequence[int], place: Callable[[], str]
    ) -> None:
        """Hold the lengths of the lists that came back to those of the reference's."""
        described = [self.specification.schema.results[position] for position in positions]
        if not any(result.sequence for result in described):
            return
        results = returned if isinstance(returned, tuple) else (returned,)
        spans = self._lying(sample).spans
        for result, each in zip(described, results, strict=True):
            span = spans[result.name]
            if result.sequence and len(each) != span.stop - span.start:
                raise WrongCountError(result.name, len(each), span.stop - span.start, place())

    def _parts(self, outputs: Outputs, returned: Any, flat: Sequence[Any]) -> list[Any]:
        """The results of a class, out of the structure that it returns them in."""
        name = self.specification.schema.results[0].name
        try:
            parts = [each for position, each in leaves(outputs, returned) if position is not None]
        except MisfitError as error:
            words = in_words(error.value), in_words(error.outputs)
            raise WrongFormError(name, *words, self.runs_at(flat)) from error
        for each in parts:
            if each is not None and not isinstance(each, Tensor):
                raise WrongFormError(name, in_words(each), "a tensor", self.runs_at(flat))
        return parts

    def _listed(self, returned: Any, *, packed: bool = False) -> list[Any]:
        """The flat results of a call."""
        bare = self.specification.schema.single and not packed
        results = [returned] if bare or not isinstance(returned, tuple | list) else returned
        if self.specification.schema.always_tensors:
            return list(results)
        return [each for one in results for each in (one if isinstance(one, list | tuple) else [one])]

    def plain(
        self, sample: Sample, function: Callable[..., Any] | None = None
    ) -> Callable[[Sequence[Any]], list[Tensor]]:
        """The reference, or a function in its place, from flat arguments to visible results."""
        return lambda flat: self.visible(sample, self.reference(sample, flat, function))

    def runs_at(self, flat: Sequence[Any]) -> str:
        """`file:line` of what computes a call: the kernel that takes it, or the reference."""
        accepted = choose(self.specification.kernels, list(flat))[0]
        return accepted.kernel.where if accepted else self.specification.where

    def visible(self, sample: Sample, every: list[Tensor]) -> list[Tensor]:
        """Those of all results that callers see."""
        if len(every) != len(self.every(sample)):
            return every  # a stand-in may leave the hidden ones out
        return [every[place] for place in self.places(sample)]

    @cached_property
    def single_precision(self) -> bool:
        """Whether it computes in float32, whatever comes in.

        An adopted class may be declared so. Of what is checked as it is, its results tell.
        """
        adopted = self.specification.adopted
        declared = adopted is not None and "float32" in adopted.kinds
        return declared or (self.apply is not None and any(map(self._rounds_in, self.samples)))

    def _rounds_in(self, sample: Sample) -> bool:
        """Whether a sample's results in float64 are float32 numbers that do not see what float32 does not.

        Whoever rounds on purpose, as to whole numbers, does not see large steps either.
        """
        if not sample.inexact:
            return False

        def inexact(flat: list[Any]) -> list[Tensor]:
            return [each for each in self.call(sample, flat) if is_inexact(each)]

        def moved(step: float) -> list[Any]:
            return [value * (1 + step) if is_inexact(value) else value for value in sample.at(torch.float64)]

        with torch.no_grad(), Overlooking():  # the properties report what it raises
            results = inexact(sample.at(torch.float64))
            narrow = [_through_float32(each) for each in results]
            rounded = inexact([_through_float32(value) for value in sample.at(torch.float64)])
            same = [inexact(moved(2.0**-40)), rounded, narrow]
            return bool(results) and _equal(results, *same) and not _equal(results, inexact(moved(2.0**-10)))
        return False

    @property
    def own_code(self) -> bool:
        """Whether its reference is the forward of a Function class, which nobody meant for autograd."""
        adopted = self.specification.adopted
        return adopted is not None and adopted.reference is None

    @property
    def linear(self) -> bool:
        """Whether its backward is linear in what comes in: an adopted class may be declared not to be."""
        adopted = self.specification.adopted
        return adopted is None or "nonlinear" not in adopted.kinds

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
            for function in (self.called, self.referred):
                args, kwargs = sample.arguments(sample.at())
                with Overlooking():  # the properties report what it raises
                    function(args, kwargs)
            return not torch.equal(before, torch.get_rng_state())

    def generator(self, stream: int = 0) -> torch.Generator:
        """A generator for probes, at its start; samples drawn from the same seed are not what it gives.

        An incoming gradient that is the input itself hides faults: much of the right gradient may vanish.

        Args:
            stream: Which of several; each gives other numbers.
        """
        return torch.Generator().manual_seed(self.seed + APART * (stream + 1))

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the operator is checked: the CPU, and where it has kernels that can run here."""
        own = self.specification.own
        adopted = own.devices if own is not None else ()
        types = dict.fromkeys((*(kernel.device for kernel in self.specification.kernels), *adopted))
        others = [torch.device(kind) for kind in types if kind != "cpu" and missing_device(kind) is None]
        return (CPU, *others)

    def devices_with(self, dtype: torch.dtype) -> tuple[torch.device, ...]:
        """Those of the devices that have a dtype: not each has float64."""
        return tuple(device for device in self.devices if _has_dtype(device, dtype))

    def kernels_on(self, device: torch.device) -> Sequence[Kernel]:
        """The kernels attached for a device."""
        return [kernel for kernel in self.specification.kernels if kernel.device == device.type]


def _through_float32(value: Any) -> Any:
    if not is_inexact(value):
        return value
    return value.to(torch.complex64 if value.is_complex() else torch.float32).to(value.dtype)


def _equal(first: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether lists of tensors hold the same numbers, whatever their dtypes."""
    return all(
        len(first) == len(other)
        and all(torch.equal(one.to(two.dtype), two) for one, two in zip(first, other, strict=True))
        for other in others
    )


def drawing_operations(subject: Subject, sample: Sample) -> list[tuple[str, bool]]:
    """The operations of the reference that draw, each with whether it draws from a generator of its own."""
    draws: list[tuple[str, bool]] = []

    def see(operator: Any, kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            draws.append((str(operator), isinstance(kwargs.get("generator"), torch.Generator)))

    args, kwargs = sample.arguments(sample.at())
    # Suppressed, since the properties report what the reference raises; what it drew before that counts.
    with torch.random.fork_rng(), torch.no_grad(), capabilities.watching(see), Overlooking():
        subject.referred(args, kwargs)
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
