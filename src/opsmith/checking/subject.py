"""Subject of a check: an operator with its samples, run so that all runs agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from opsmith.checking.effort import EFFORTS, Effort
from opsmith.checking.exceptions import Overlooking, WrongFormError, structure_of
from opsmith.checking.numerics.autodiff import record
from opsmith.checking.processes.watchdog import beat, begin_call
from opsmith.checking.report import Failure, SeenCalls
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import (
    is_state,
    random_states_restored,
    seed_all,
    seed_torch,
    torch_state_restored,
)
from opsmith.checking.side_effects.outside_state import OutsideState
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula
from opsmith.core.kernels import Kernel, choose
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.origins.declared import Part
from opsmith.core.origins.function_class import Outputs, StructureMismatchError, leaves
from opsmith.core.results import Result
from opsmith.core.specification import Specification
from opsmith.judging.attribution import calls_operator
from opsmith.judging.tensors import CPU, is_inexact, replica
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import Contract
from opsmith.torch_library.flattening import ResultFlattening

T = TypeVar("T")

GRAD_OUTPUT_SEED = 0x51ED270B
"""Offset of the seed of grad_outputs, so that their numbers differ from the samples'."""

PERTURBATIONS = 3
"""The stream of random numbers (see `Subject.generator`) that perturb inputs."""


@dataclass(frozen=True)
class SubjectKind:
    """Kind of a subject, with its truth policy: the source of the right results and gradients.

    Args:
        name: Name of the kind, in words.
        truth: `reference`: the author's reference, and autograd through it where finite differences agree.
            `forward`: the class's own forward, which was not written for autograd. `itself`: the operator
            itself, and finite differences of it.
        applied: True if it is called through the class's own `apply`.
        in_library: True if it is called through `torch.ops`; its rules are registered with torch.library.
    """

    name: str
    truth: Literal["reference", "forward", "itself"]
    applied: bool = False
    in_library: bool = False

    @property
    def has_reference(self) -> bool:
        """True if there is an author's reference, separate from the code that runs."""
        return self.truth == "reference"

    @property
    def own_forward(self) -> bool:
        """True if the class's own forward takes the place of a reference."""
        return self.truth == "forward"


OPERATOR = SubjectKind("operator", "reference")
ADOPTED = SubjectKind("adopted operator", "reference")
ADOPTED_CLASS = SubjectKind("adopted class without a reference", "forward")
FUNCTION_CLASS = SubjectKind("autograd.Function class", "forward", applied=True)
LIBRARY_OPERATOR = SubjectKind("operator of torch.library", "itself", in_library=True)


@dataclass(frozen=True)
class LibraryWrite:
    """An operator of torch.library that writes in place, and has no reference except itself.

    Args:
        specification: Its specification, whose reference calls it.
    """

    specification: Specification

    @property
    def reference(self) -> Callable[..., Any]:
        """The author's function, if known; a `custom_op` raises versions even if it wrote nothing."""
        return next(iter(self.specification.origin.sources()), self.specification.reference)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as users do."""
        return self.specification.reference(*args, **kwargs)

    def forget_calls(self) -> None:
        """Do nothing: only the dispatcher keeps its calls."""


@dataclass(frozen=True)
class SteadyRuns:
    """Conditions under which every run gives the same results.

    Args:
        seed: Seed of every random state.
        draws: True if a call draws random numbers that are not declared.
        copied: Labels of the arguments that are copied for each call.
        outside: State outside of calls, restored before each call; None if calls do not change it.
        names: Names of the parts of this state that calls change.
    """

    seed: int
    draws: bool
    copied: frozenset[str]
    outside: OutsideState | None = None
    names: tuple[str, ...] = ()

    @contextmanager
    def region(self) -> Iterator[None]:
        """A region that begins with the same random states each time; the caller's states are restored."""
        if self.outside is not None and not torch.compiler.is_compiling():
            self.outside.restore()
        with random_states_restored():
            seed_all(self.seed)
            yield

    def fresh(self, labels: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """The arguments, with a copy of each buffer."""
        return [
            value.clone() if label in self.copied and isinstance(value, Tensor) else value
            for label, value in zip(labels, values, strict=True)
        ]

    def before_backward(self, results: Sequence[Tensor]) -> None:
        """Begin every backward of a call with the same random states."""
        # A backward that draws random numbers gets different numbers than its forward.
        for node in {each.grad_fn for each in results if each.grad_fn is not None}:
            node.register_prehook(lambda grads: seed_all(self.seed + 1))

    def words(self) -> str:
        """Description for a remark."""
        copied = ", ".join([*(f"`{label}`" for label in sorted(self.copied)), *self.names])
        if self.outside is not None and not copied:
            return "with the operator's state restored before each call"
        return f"with fresh copies of {copied} for each call" if copied else "under fixed seeds"


@dataclass(frozen=True)
class Subject:
    """An operator under check.

    Args:
        specification: Specification of the operator.
        samples: Its samples.
        seed: Seed of all random numbers.
        effort: Level of effort.
        kind: Its kind, with its truth policy.
        operator: The operator; None for one of torch.library.
        in_place: The operator that writes in place, if `operator` is its functional form.
        apply: Function called instead of the operator, with the same arguments: a class's own `apply`, or the
            operator of torch.library.
        passed: Maximum number of arguments that the author passes to `apply`; None if all are passed.
        shown_as: Name in the report, if not the operator's name.
        symmetric: Labels of the inputs that are made symmetric before each call.
        narrow: Error that it raises in float64, if it takes float32 and not float64.
        refused_float64: The failure for this error; empty if it launches kernels in Triton, which seldom take
            float64.
        limit_s: Seconds that a call may take in a child process.
        dropped: Positions of the author's samples on which a call raises.
        steady: Conditions under which all runs agree, if they do not agree without them.
        outside: The state outside of its calls, as it was before the check.
        ran: The dtypes in which it has run, and the kernels that ran.
        known: Values that were computed once from its samples, for all properties.
    """

    specification: Specification
    samples: tuple[Sample, ...]
    seed: int
    effort: Effort = EFFORTS["default"]
    kind: SubjectKind = OPERATOR
    operator: Operator[..., Any] | None = None
    apply: Callable[..., Any] | None = None
    passed: int | None = None
    shown_as: str | None = None
    in_place: Operator[..., Any] | LibraryWrite | None = None
    symmetric: frozenset[str] = frozenset()
    narrow: str = ""
    refused_float64: tuple[Failure, ...] = ()
    limit_s: float = 60.0
    dropped: frozenset[int] = frozenset()
    steady: SteadyRuns | None = None
    outside: OutsideState | None = field(default=None, compare=False, repr=False)
    ran: SeenCalls = field(default_factory=SeenCalls, compare=False, repr=False)
    known: dict[Any, tuple[Sample, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def functions(self) -> list[Any]:
        """The functions and classes of which it consists."""
        specification = self.specification
        found: list[Any] = [*specification.origin.sources()]
        if self.kind.has_reference:
            found += [specification.reference, specification.fake]
        found += [kernel.given for kernel in specification.kernels]
        rules = specification.gradients.rules.values()
        found += [rule.function for rule in rules if isinstance(rule, Formula)]
        return [each for each in found if each is not None]

    @property
    def name(self) -> str:
        """Name of the subject in the report."""
        return self.shown_as or self.specification.name

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it as users do."""
        call = self.apply or self.operator
        assert call is not None
        if not torch.compiler.is_compiling():
            self.note_call((*args, *kwargs.values()))
        return _timed(call, args, kwargs)

    def note_call(self, values: Sequence[Any]) -> None:
        """Record a call of the operator: its dtypes, and the kernel that serves it.

        Args:
            values: The arguments, in the order of the schema.
        """
        self.ran.note(values)
        operator = self.operator if self.apply is None else None
        kernels = () if operator is None else operator.specification.kernels
        if len(self.ran.kernels) == len(kernels) or capabilities.innermost_transform() is not None:
            return
        # A call on fake or traced tensors runs no kernel, or runs a kernel on different tensors.
        if all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors_in([*values])):
            chosen = choose(kernels, values)[0]
            self.ran.kernels |= set() if chosen is None else {chosen.kernel}

    def referred(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the reference as it is."""
        return _timed(self.specification.reference, args, kwargs)

    def once(self, what: str, sample: Sample, compute: Callable[[], T]) -> T:
        """Compute a value from a sample for the first property that needs it, and keep it for the others.

        Args:
            sample: The sample; the same values in a different object count as a different sample.
            compute: Computes the value. An exception is not kept.
        """
        if self.steady is not None:  # runs differ between properties
            return compute()
        key = (what, id(sample), id(self.apply), self.kind, self.symmetric, self.narrow)
        if key not in self.known:
            self.known[key] = sample, compute()  # the kept sample keeps its id from being used again
        found: T = self.known[key][1]
        return found

    def restore_outside(self) -> None:
        """Restore the state outside of its calls to the state before the check."""
        if self.outside is not None and not torch.compiler.is_compiling():
            self.outside.restore()

    def by_reference(self) -> Subject:
        """The subject with its reference as the operator, so that no kernel can end the process."""
        return replace(self, apply=self.specification.reference) if self.apply is None else self

    def rank(self, sample: Sample) -> int:
        """Position of a sample among the samples on which a call does not raise."""
        return sample.position - sum(position < sample.position for position in self.dropped)

    def lacks(self, rule: Part) -> bool:
        """True if it is an operator of torch.library for which a rule is not registered."""
        return self.kind.in_library and self.specification.origin.own(rule) is None

    @property
    def torch_operator(self) -> Any:
        """The operator that is registered with torch; None for a class."""
        if self.kind.in_library:
            return self.specification.origin.subject
        return self.operator.torch_operator if self.operator is not None and self.apply is None else None

    @cached_property
    def has_truth(self) -> bool:
        """True if a run in a higher precision is closer to the truth.

        False for an opaque operator, which has no other definition, and for one that draws random numbers.
        """
        opaque = self.specification.opaque and not self.kind.in_library
        if opaque or self.specification.random:
            return False
        return not any(drawing_operations(self, sample) for sample in self.samples)

    def every(self, sample: Sample) -> tuple[Result, ...]:
        """All flat results for a sample, by label; each tensor of a list is a result."""
        if self.specification.schema.always_tensors:
            return self.specification.schema.results
        flattening = self.result_flattening(sample)
        pairs = zip(flattening.described, flattening.labels, strict=True)
        return tuple(replace(result, name=label) for result, label in pairs)

    def results(self, sample: Sample) -> tuple[Result, ...]:
        """The flat results for a sample, without hidden results."""
        return tuple(result for result in self.every(sample) if not result.hidden)

    def visible_positions(self, sample: Sample) -> list[int]:
        """Positions of the results that callers see among all flat ones."""
        return [position for position, result in enumerate(self.every(sample)) if not result.hidden]

    def result_flattening(self, sample: Sample) -> ResultFlattening:
        """Flattening of the reference's results for a sample; the reference runs once for each sample."""
        known = self._result_flattenings
        if sample.position not in known:
            with self.seeded(), torch.no_grad():
                returned = self.referred(*sample.arguments(sample.at()))
            schema = self.specification.schema
            known[sample.position] = ResultFlattening.of(schema, (returned,) if schema.single else returned)
        return known[sample.position]

    @cached_property
    def _result_flattenings(self) -> dict[int, ResultFlattening]:
        return {}

    def call(
        self,
        sample: Sample,
        flat: Sequence[Any],
        on: torch.device | None = None,
        by: Callable[[Sequence[Any], Mapping[str, Any]], Any] | None = None,
    ) -> list[Any]:
        """The results that callers see, from the operator itself.

        Args:
            on: Device on which to call it with numbers of the CPU; by default the sample's, if it runs only
                on devices other than the CPU. Results are moved back to the CPU.
            by: Function that makes the call with given arguments; `called` by default.

        Raises:
            WrongFormError: If it returns a list whose length differs from the reference's, or if a class
                returns a structure that differs from the previous one.
        """
        returned, away = self._returned(sample, flat, by or self.called, on)
        if self.steady is not None:
            self.steady.before_backward(tensors_in([returned]))
        outputs = self.specification.origin.outputs
        if outputs is not None:  # its results may be in nested tuples
            return self._received(self._parts(outputs, returned, flat), flat, away)
        self._hold_count(sample, returned, self.specification.schema.visible, lambda: self.runs_at(flat))
        return self._received(self._listed(returned), flat, away)

    def reference(
        self, sample: Sample, flat: Sequence[Any], function: Callable[..., Any] | None = None
    ) -> list[Tensor]:
        """All results of the reference, or of another function, as plain PyTorch; hidden results too."""
        call = partial(_timed, function or self.specification.reference)
        returned, away = self._returned(sample, flat, call)
        return self._received(self._listed(returned), flat, away)

    def _returned(
        self,
        sample: Sample,
        flat: Sequence[Any],
        call: Callable[[Sequence[Any], Mapping[str, Any]], Any],
        on: torch.device | None = None,
    ) -> tuple[Any, bool]:
        """Returned value of a call, and True if its arguments were moved from the CPU to a device."""
        target = on or (CPU if CPU in self.devices else sample.home)
        away = target != CPU and all(each.device == CPU for each in tensors_in([*flat]))
        with self.seeded():
            own = self._own(sample, sample.placed(flat, target) if away else flat)
            return call(*sample.arguments(own)), away

    def _received(self, results: list[Any], flat: Sequence[Any], away: bool) -> list[Any]:
        """The results; moved to the CPU if the arguments came from it, and cast to float64 likewise."""
        if away:
            results = [each.cpu() if isinstance(each, Tensor) else each for each in results]
        if self.narrow and any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in flat):
            results = [each.double() if is_inexact(each) else each for each in results]
        return results

    def _own(self, sample: Sample, flat: Sequence[Any]) -> Sequence[Any]:
        """The values, cast and made symmetric; generators are copied, so that a run advances only its own."""
        if sample.is_plain and not self.narrow and self.steady is None and not self.symmetric:
            return flat
        values: list[Any] = [v.clone_state() if isinstance(v, torch.Generator) else v for v in flat]
        if self.narrow:
            values = [v.float() if isinstance(v, Tensor) and v.dtype == torch.float64 else v for v in values]
        if self.steady is not None:
            values = self.steady.fresh(sample.labels, values)
        values = sample.objects.fresh(values)
        if not self.symmetric:
            return values
        pairs = zip(sample.labels, values, strict=True)
        return [(value + value.mH) / 2 if label in self.symmetric else value for label, value in pairs]

    def kernel(self, sample: Sample, flat: Sequence[Any], function: Callable[..., Any]) -> list[Tensor]:
        """All results of a kernel, hidden results too, checked against the contract of kernels.

        Raises:
            WrongFormError: If it returns a list whose length differs from the reference's.
        """
        values = sample.flattening.pack(self._own(sample, flat))
        self.ran.note(values)
        with self.seeded(), torch.no_grad():
            returned = Contract(self.specification).run(function, values)
        every = range(len(self.specification.schema.results))
        self._hold_count(sample, returned, every, lambda: where(function))
        return self._listed(returned, packed=True)

    def _hold_count(
        self, sample: Sample, returned: Any, positions: Sequence[int], location: Callable[[], str]
    ) -> None:
        """Raise an error if the length of a returned list differs from the reference's."""
        described = [self.specification.schema.results[position] for position in positions]
        if not any(result.sequence for result in described):
            return
        results = returned if isinstance(returned, tuple) else (returned,)
        spans = self.result_flattening(sample).spans
        for result, each in zip(described, results, strict=True):
            span = spans[result.name]
            if result.sequence and len(each) != span.stop - span.start:
                got = f"{len(each)} tensor{'s' * (len(each) != 1)} for `{result.name}`"
                raise WrongFormError(
                    result.name, got, f"the reference returns {span.stop - span.start}", location()
                )

    def _parts(self, outputs: Outputs, returned: Any, flat: Sequence[Any]) -> list[Any]:
        """The results of a class, taken out of the structure that it returns."""
        name = self.specification.schema.results[0].name
        before = "an earlier call returned {} in its place"
        try:
            found = {at: each for at, each in leaves(outputs, returned) if at is not None}
            parts = [found[at] for at in range(len(found))]
        except StructureMismatchError as error:
            got, right = structure_of(error.value), before.format(structure_of(error.outputs))
            raise WrongFormError(name, got, right, self.runs_at(flat)) from error
        for each in parts:
            if each is not None and not isinstance(each, Tensor):
                raise WrongFormError(name, structure_of(each), before.format("a tensor"), self.runs_at(flat))
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
        """The reference, or another function, from flat arguments to visible results."""
        return lambda flat: self.visible(sample, self.reference(sample, flat, function))

    def runs_at(self, flat: Sequence[Any]) -> str:
        """`file:line` of the kernel that serves a call, or of the reference."""
        accepted = choose(self.specification.kernels, list(flat))[0]
        return accepted.kernel.where if accepted else self.specification.where

    def visible(self, sample: Sample, every: list[Tensor]) -> list[Tensor]:
        """The results that callers see, out of all results."""
        if len(every) != len(self.every(sample)):
            return every  # another function may leave out the hidden results
        return [every[position] for position in self.visible_positions(sample)]

    @cached_property
    def single_precision(self) -> bool:
        """True if it computes in float32, whatever the dtype of its arguments.

        An adopted class may be declared so; for other subjects the results are examined.
        """
        declared = bool(self.narrow) or "float32" in self.specification.origin.claims
        return declared or (self.apply is not None and any(map(self._rounds_in, self.samples)))

    def _rounds_in(self, sample: Sample) -> bool:
        """True if float64 results are float32 numbers, and ignore changes of the inputs below float32's
        precision.

        A function that rounds on purpose, for example to whole numbers, also ignores larger changes.
        """
        if not sample.inexact:
            return False

        def results(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
            flat = [change(value) if is_inexact(value) else value for value in sample.in_double()]
            return [each for each in self.call(sample, flat) if is_inexact(each)]

        def rounded(value: Tensor) -> Tensor:
            single: Tensor = replica(value, torch.float32)
            return single.to(value.dtype)

        def equal(others: list[Tensor]) -> bool:
            pairs = zip(own, others, strict=False)
            return len(own) == len(others) and all(torch.equal(a.to(b.dtype), b) for a, b in pairs)

        with torch.no_grad(), Overlooking():  # the properties report what it raises
            own = results(lambda value: value)
            blind = (results(lambda value: value * (1 + 2.0**-40)), results(rounded), [*map(rounded, own)])
            coarse = partial(results, lambda value: value * (1 + 2.0**-10))
            return bool(own) and all(map(equal, blind)) and not equal(coarse())
        return False

    @property
    def linear(self) -> bool:
        """True if its backward is linear in grad_output; an adopted class may be declared as nonlinear."""
        return "nonlinear" not in self.specification.origin.claims

    def seeded(self) -> AbstractContextManager[Any]:
        """A region in which every run draws the same random numbers; the caller's state is restored."""
        if self.steady is not None:
            return self.steady.region()
        # Setting the state takes longer than most operators.
        return torch_seeded(self.seed) if self.draws else _NOTHING

    @cached_property
    def draws(self) -> bool:
        """True if the operator draws from torch's random state, declared or not, in any sample."""
        return self.specification.random or any(
            self.once("draws", sample, partial(self._draws_in, sample)) for sample in self.samples
        )

    def _draws_in(self, sample: Sample) -> bool:
        with torch_state_restored() as before:
            for function in (self.called, self.referred):
                with torch.no_grad(), Overlooking():  # the properties report what it raises
                    function(*sample.arguments(sample.at()))
            with Overlooking():
                self.called_with_gradients(sample)
            return not is_state(before)

    def called_with_gradients(self, sample: Sample) -> None:
        """Call a class on inputs that require a gradient: its forward may draw random numbers only then."""
        if self.specification.origin.kind == "class":
            record(lambda flat: self.called(*sample.arguments(flat)), sample.at(), sample.inexact)

    def generator(self, stream: int = 0) -> torch.Generator:
        """A new generator for grad_outputs; its numbers differ from the samples' numbers of the same seed.

        A grad_output equal to an input would hide faults, since much of the right gradient may vanish.

        Args:
            stream: Number of the stream; different streams have different numbers.
        """
        return torch.Generator().manual_seed(self.seed + GRAD_OUTPUT_SEED * (stream + 1))

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices to check on: the samples' devices, and those of its kernels that can run here."""
        homes = {each.type: each for each in (sample.home for sample in self.samples)} or {"cpu": CPU}
        kernels = [kernel.device for kernel in self.specification.kernels]
        types = dict.fromkeys((*kernels, *self.specification.origin.devices))
        others = [torch.device(kind) for kind in types if kind not in homes and missing_device(kind) is None]
        return (*homes.values(), *others)

    def devices_with(self, dtype: torch.dtype) -> tuple[torch.device, ...]:
        """The devices that support a dtype; not every device has float64."""
        return tuple(device for device in self.devices if missing_device(device, dtype) is None)

    def kernels_on(self, device: torch.device) -> Sequence[Kernel]:
        """The kernels attached for a device."""
        return [kernel for kernel in self.specification.kernels if kernel.device == device.type]


_NOTHING = nullcontext()


@calls_operator
def _timed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an author's function; no further call begins after the seconds of a property."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    begin_call()  # finite differences make hundreds of calls, which together may take too long
    returned = function(*args, **kwargs)
    beat(returned=True)
    return returned


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """A region with torch's random state from a seed; the caller's state is restored."""
    with torch_state_restored():
        seed_torch(seed)
        yield


def computed_once(compute: Callable[[Subject, Sample], T]) -> Callable[[Subject, Sample], T]:
    """Let `Subject.once` keep the value that a function computes from a sample."""

    @wraps(compute)
    def found(subject: Subject, sample: Sample) -> T:
        return subject.once(compute.__qualname__, sample, partial(compute, subject, sample))

    return found


@computed_once
def drawing_operations(subject: Subject, sample: Sample) -> list[tuple[str, bool]]:
    """The random operations of the reference, each with True if it draws from a generator of its own."""
    draws: list[tuple[str, bool]] = []

    def see(operator: Any, kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            draws.append((str(operator), isinstance(kwargs.get("generator"), torch.Generator)))

    args, kwargs = sample.arguments(sample.at())
    # Suppressed, since the properties report the reference's errors; operations before an error count.
    with torch_state_restored(), torch.no_grad(), capabilities.observe_operators(see), Overlooking():
        subject.referred(args, kwargs)
    return draws


def missing_device(device: torch.device | str, dtype: torch.dtype = torch.float32) -> str | None:
    """The reason why this machine cannot compute in a dtype on a device; None if it can."""
    try:
        torch.empty(1, dtype=dtype, device=device).fill_(0)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        # torch raises AssertionError ("not compiled with ..."); its first line is the reason.
        return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return None
