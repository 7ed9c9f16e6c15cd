"""Compiled code and exported programs: results and gradients equal the operator's, also for other sizes."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith import errors
from opsmith.checking.exceptions import Raised, attempt
from opsmith.checking.numerics.autodiff import differentiate, has_gradient, record
from opsmith.checking.promises import of_tools
from opsmith.checking.property import Finding, Findings, Note, Property, Skipped, of_exception
from opsmith.checking.report import Failure
from opsmith.checking.run import CallValues, Run
from opsmith.checking.samples.grad_outputs import random_grad_outputs
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.checking.ways import Examples, compare_outputs
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.core.collector import importing_without_garbage_collection
from opsmith.core.tensors import nested_tensors
from opsmith.judging.compare import Difference, form_difference
from opsmith.torch_library.torch_messages import CHANCE_GUARD, RECOMPILED, has_message

COMPILING, EXPORTING = "compile", "export"

BREAKS = ("Unsupported", "UserError", "ArgsMismatchError")
"""Exceptions by which dynamo refuses a graph; operators never raise them."""

_numbers = itertools.count()

GRAPH = {True: "an autograd graph", False: "no autograd graph"}
"""Text for a result that autograd follows, and for a result that it does not follow."""


@dataclass(frozen=True)
class PlainCall(Run):
    """A call to be traced, with its results and gradients without tracing."""

    @cached_property
    def recorded(self) -> list[Any]:
        """The results with their graphs."""
        return self.call().results

    @cached_property
    def grads(self) -> list[Tensor | None]:
        """A random gradient for each result that autograd follows."""
        follows = [*map(has_gradient, self.recorded)]
        return random_grad_outputs(self.recorded, follows, self.subject.generator())

    @cached_property
    def results(self) -> Examples:
        """The right results."""
        return Examples(self, [self.flat()])

    @cached_property
    def gradients(self) -> Examples:
        """The right gradients."""
        return Examples(self, [[*self.flat(), *self.grads]], gradients=True)

    def compute(self, *, backward: bool) -> list[Tensor | None]:
        """Compute the results and gradients once."""
        return [*self.recorded, *self.results.expected, *(self.gradients.expected if backward else ())]

    def arguments(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call for a function of `step_of`."""
        kind, schema = self.subject.kind, self.sample.flattening.schema
        values = self.sample.flattening.pack(flat)
        if kind.applied:
            return tuple(self.subject.specification.origin.spread(values)), {}
        args, kwargs = schema.dispatched(values) if kind.in_library else schema.split(values)
        return tuple(args), dict(kwargs)

    def results_in(self, returned: Any) -> tuple[Any, ...]:
        """The results of the call in a traced form; None where this call returns None."""
        found: list[Tensor | None] = [*nested_tensors(returned)]
        present, rest = [each is not None for each in self.recorded], iter(found)
        if len(found) == sum(present):
            found = [next(rest) if each else None for each in present]
        return tuple(found)


def step_of(subject: Subject) -> Callable[[Any], Any]:
    """A function that makes several calls: it takes their arguments, and returns all results.

    Its code object is new each time, since torch limits how often it compiles a code object.
    """
    own = subject.kind.applied or subject.kind.in_library
    target: Any = subject.specification.origin.subject if own else subject.operator
    if subject.kind.applied:

        def step(calls: Any) -> Any:
            return [target.apply(*args) for args, _ in calls]

    else:
        if subject.kind.in_library and subject.in_place is not None:
            target = subject.apply  # on copies

        def step(calls: Any) -> Any:
            return [target(*args, **kwargs) for args, kwargs in calls]

    code = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def run_step(step: Callable[[Any], Any], calls: Sequence[PlainCall]) -> list[CallValues]:
    """Run a step, compiled or not, and one backward through all its results."""
    begins = [*itertools.accumulate((len(call.sample.flat) for call in calls), initial=0)]
    argnums = [begin + at for begin, call in zip(begins, calls, strict=False) for at in call.argnums]

    def every(given: list[Any]) -> Any:
        spans = zip(calls, itertools.pairwise(begins), strict=True)
        fresh = [(call, call.sample.objects.fresh(given[begin:end])) for call, (begin, end) in spans]
        return step([call.arguments(flat) for call, flat in fresh])

    with calls[0].subject.seeded():
        leaves, _, returned = record(every, [value for call in calls for value in call.flat()], argnums)
    results = [call.results_in(each) for call, each in zip(calls, returned, strict=True)]
    if any(len(each) != len(call.grads) for call, each in zip(calls, results, strict=True)):
        return [*map(CallValues, results)]
    inputs, grads = [leaves[argnum] for argnum in argnums], [grad for call in calls for grad in call.grads]
    found = differentiate([value for each in results for value in each], inputs, grads)
    rest = (torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, found, strict=True))
    return [
        CallValues(each, tuple(itertools.islice(rest, len(call.argnums))))
        for call, each in zip(calls, results, strict=True)
    ]


def other_sizes(call: PlainCall) -> PlainCall | None:
    """A call with an input derived from the sample whose sizes differ and are neither 0 nor 1.

    There is none if an object holds an argument, since a trace contains its tensors and their sizes.
    """
    if call.sample.objects.arguments:
        return None
    for other in call.subject.samples:
        if other.origin.startswith(f"sample {call.sample.position} ") and _resized(call.sample, other):
            return replace(call, sample=other)
    return None


def _resized(sample: Sample, other: Sample) -> bool:
    def forms(each: Sample) -> list[Any]:
        return [(v.dim(), v.dtype) if isinstance(v, Tensor) else (type(v), v) for v in each.flat]

    if other.flattening.lengths != sample.flattening.lengths or forms(sample) != forms(other):
        return False
    tensors = zip(tensors_in([*sample.flat]), tensors_in([*other.flat]), strict=True)
    pairs = [pair for one, two in tensors for pair in zip(one.shape, two.shape, strict=True)]
    changed = [min(pair) for pair in pairs if pair[0] != pair[1]]
    return bool(changed) and min(changed) > 1  # torch specializes on sizes 0 and 1


Check = Callable[[Sequence[PlainCall]], Findings]
"""Function that checks several calls together."""


class Tracing:
    """A tool of torch that traces calls of an operator.

    Attributes:
        property: Name of the property.
        done: Participle for a call that it has traced, such as `compiled`.
        words: Text in messages before an output of a traced call.
        takes_tensors: True if a call must have a tensor.
        backward: True if it also traces the backward.
        ran: True if it has traced at least one call.
    """

    property: str
    done: str
    words: str
    takes_tensors = ran = False
    backward = True

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def calls(self, generators: str) -> Generator[Finding, None, list[PlainCall]]:
        """Select the calls of the author's samples that do not raise without tracing.

        Args:
            generators: Reason to leave out a sample with a generator.
        """
        found: list[PlainCall] = []
        for sample in self.subject.samples:
            if sample.origin or (self.takes_tensors and not tensors_in([*sample.flat])):
                continue
            if any(isinstance(value, torch.Generator) for value in sample.flat):
                yield Note(f"a sample with a generator was left out: {generators}")
                continue
            call = PlainCall(self.subject, sample, self.property)
            raised = attempt(partial(call.compute, backward=self.backward))
            if isinstance(raised, Raised):
                words = f"{sample} was left out, because it raises without `torch.{self.property}`"
                see = ": see `gradient`" if self.backward else ""
                yield Note(f"{words}: {reason_of(raised.error)}{see}")
            else:
                found.append(call)
        return found

    def refused(self, calls: Sequence[PlainCall], *errors: Exception, alone: Check | None = None) -> Findings:
        """Note a refusal by torch or opsmith, and report any other exception.

        Args:
            calls: The calls.
            errors: The exception, and the exceptions that may have led to it.
            alone: Function that checks each of several calls alone, to find the call that raises.
        """
        if alone is not None and len(calls) > 1:
            for one in calls:
                yield from alone([one])
            return
        reason = refused(self.subject, *errors)
        if reason is not None:
            samples = ", ".join(f"sample {call.sample.position}" for call in calls)
            yield Note(f"{samples} cannot be {self.done}: {reason}")
            return
        message = (
            f"{self} raises, but a plain call does not: {type(errors[0]).__name__}: {reason_of(errors[0])}"
        )
        yield calls[0].failure(None, "raises", message, evidence=of_exception(errors[0], str(calls[0])))

    def judged(self, calls: Sequence[PlainCall], found: Sequence[CallValues]) -> Findings:
        """Compare results and gradients of traced calls with those of plain calls."""
        form = f"{self.words}{{}} differs from the plain call"
        for call, traced in zip(calls, found, strict=True):
            notes: list[Note] = []
            names, count = call.names(self.subject.specification.where), len(call.recorded)
            fault = partial(self._fault, call, traced, notes)
            yield from compare_outputs(call, form, names[:count], traced.results, fault, set())
            yield from notes
            alike = [*map(has_gradient, traced.results)] == [*map(has_gradient, call.recorded)]
            if alike and traced.gradients and not self.subject.draws:
                right = call.gradients.fault
                yield from compare_outputs(call, form, names[count:], traced.gradients, right, set())

    def _fault(
        self, call: PlainCall, traced: CallValues, notes: list[Note], position: int, got: Any
    ) -> Difference | None:
        """The difference of a result: only of its form if it is random; or autograd does not follow it."""
        right = call.recorded[position]
        fault = form_difference(got, right) if self.subject.draws else call.results.fault(position, got)
        if fault is not None or not traced.gradients or has_gradient(got) == has_gradient(right):
            return fault
        words = GRAPH[has_gradient(got)], GRAPH[has_gradient(right)]
        if not has_gradient(got) and self.subject.torch_operator is not None:
            return Difference((), *words, aspect="graph")
        name = self.subject.results(call.sample)[position].name
        notes.append(Note(f"{self.done}, `{name}` has {words[0]}; in the plain call, it has {words[1]}"))
        return None


def refused(subject: Subject, error: BaseException, *before: BaseException) -> str | None:
    """The reason why torch or opsmith refuses, from an error or its causes; None for a fault."""
    for each in (cause for one in (error, *before) for cause in chain(one)):
        if isinstance(each, errors.MissingFakeError):
            return f"there is no fake kernel: {each.hint}"
        if isinstance(each, errors.TransformError) or "TransformError" in str(each):
            return reason_of(each)
        if type(each).__name__ in ("InternalTorchDynamoError", "InvalidCxxCompiler", "NotImplementedError"):
            return f"{type(each).__name__}: {reason_of(each)}"
    # With symbolic sizes, integer arguments are symbols too. A line with a schema may name them as well.
    if any("SymInt" in line and "::" not in line for line in str(error).splitlines()):
        return f"the operator does not take a symbolic integer: {reason_of(error)}"
    if subject.lacks("fake"):
        return f"there is no fake kernel: {reason_of(error)}"
    if subject.torch_operator is None:  # torch supports compiling few Function classes
        return f"{type(error).__name__}: {reason_of(error)}"
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reason_of(error: BaseException) -> str:
    """The lines of torch's error that give the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explanations = [line for line in lines if line.startswith("Explanation: ")]
    return " ".join([lines[0], *explanations[:1]]) if lines else type(error).__name__


def compiled(subject: Subject) -> Findings:
    """Compile one function that calls the operator on all samples; run it forward and backward."""
    if not subject.effort.full:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    backends = ("aot_eager", "inductor") if subject.effort.exhaustive else ("aot_eager",)
    compilations = [
        Compilation(subject, backend, dynamic) for backend in backends for dynamic in (False, True)
    ]
    calls = yield from compilations[0].calls("torch does not compile a call with a generator")
    if not calls:
        yield Skipped("no sample can be compiled")
        return
    for compilation in compilations:
        found = [*compilation.compare(_resizable(calls) if compilation.dynamic else calls)]
        yield from found
        if any(isinstance(each, Failure) for each in found):
            return  # other backends would report the same fault
    if not any(compilation.ran for compilation in compilations):
        yield Skipped("no call could be compiled")


def _resizable(calls: Sequence[PlainCall]) -> Sequence[PlainCall]:
    """Calls to compile for any size: one sample that has other sizes, or all with exhaustive effort."""
    if calls[0].subject.effort.exhaustive:
        return calls
    return [call for call in calls if other_sizes(call) is not None][:1] or calls[:1]


class Compilation(Tracing):
    """A backend of `torch.compile`, with symbolic sizes if it is dynamic."""

    property, done = COMPILING, "compiled"

    def __init__(self, subject: Subject, backend: str, dynamic: bool) -> None:
        super().__init__(subject)
        self.backend, self.dynamic = backend, dynamic
        self.words = f"compiled by {self}, "

    def __str__(self) -> str:
        return f"torch.compile(..., dynamic={self.dynamic}, backend={self.backend!r})"

    def compare(self, calls: Sequence[PlainCall]) -> Findings:
        """Compile all samples together; if this fails, each alone, to find the sample that fails."""
        broken, step = None, self._compiled(fullgraph=True)
        found = attempt(partial(run_step, step, calls))
        if isinstance(found, Raised) and type(found.error).__name__ in BREAKS:
            yield Note(f"the operator breaks the graph: {reason_of(found.error)}")
            broken = found.error
            found = attempt(partial(run_step, self._compiled(fullgraph=False), calls))
        if not isinstance(found, Raised):
            self.ran = True
            judged = [*self.judged(calls, found)]
            yield from judged
            if broken is None and self.dynamic and not any(isinstance(each, Failure) for each in judged):
                yield from self._resized(step, calls)
        elif broken is None:
            yield from self.refused(calls, found.error, alone=self.compare)
        else:
            yield from self.refused(calls, found.error, broken)

    def _compiled(self, *, fullgraph: bool) -> Any:
        step = step_of(self.subject)
        return torch.compile(step, backend=self.backend, dynamic=self.dynamic, fullgraph=fullgraph)

    def _resized(self, step: Any, calls: Sequence[PlainCall]) -> Findings:
        """Run the compiled code on other sizes: results must be right without a recompilation."""
        resized = [other_sizes(call) for call in calls]
        others = [call if other is None else other for call, other in zip(calls, resized, strict=True)]
        plain = attempt(lambda: [other.compute(backward=True) for other in others if any(resized)])
        if not plain or isinstance(plain, Raised):
            return  # there are no other sizes, or `forward` and `gradient` report the error
        found = attempt(partial(_run_in, "fail_on_recompile", step, others))
        if isinstance(found, Raised) and has_message(found.error, RECOMPILED):
            why = _why_anew(found.error)
            if why is not None:
                message = f"with dynamic=True, the operator is compiled again for other sizes: {why}"
                yield others[0].failure(None, "recompiles", message)
            found = attempt(partial(_run_in, "default", step, others))
        if isinstance(found, Raised):
            yield from self.refused(others, found.error)
        else:
            yield from self.judged(others, found)


def _run_in(stance: str, step: Any, calls: Sequence[PlainCall]) -> list[CallValues]:
    with torch.compiler.set_stance(stance):
        return run_step(step, calls)


def _why_anew(error: BaseException) -> str | None:
    """The guard that failed; None if it does not concern sizes."""
    if has_message(error, CHANCE_GUARD):  # sizes or a layout were equal by chance
        return None
    lines = (line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("- "))
    return next(lines, reason_of(error))


class Calls(torch.nn.Module):
    """A model that calls an operator several times, with tensors as inputs, and constants for the rest."""

    def __init__(self, calls: Sequence[PlainCall]) -> None:
        super().__init__()
        self.step: Callable[[Any], Any] = step_of(calls[0].subject)
        self.calls, self.rows = calls, [call.flat() for call in calls]

    def forward(self, *given: Tensor) -> Any:
        """Results of each call."""
        rest = iter(given)
        rows = ([next(rest) if isinstance(value, Tensor) else value for value in row] for row in self.rows)
        return self.step([call.arguments(row) for call, row in zip(self.calls, rows, strict=True)])


def _inputs(calls: Sequence[PlainCall]) -> tuple[Tensor, ...]:
    """Copies of the tensors of several calls, since the program may write into its inputs."""
    return tuple(tensors_in([value for call in calls for value in call.flat()]))


def exported(subject: Subject) -> Findings:
    """Export a model that calls the operator on all samples, and a model that takes other sizes."""
    if not subject.effort.full:
        yield Skipped(f"the effort is `{subject.effort.name}`, which compiles nothing")
        return
    exporting = Exporting(subject)
    calls = yield from exporting.calls("no exported program takes a generator")
    if calls:
        yield from exporting.static(calls)
        yield from exporting.dynamic(calls)
    if not exporting.ran:
        yield Skipped("no call could be exported" if calls else "no sample can be exported")


class Exporting(Tracing):
    """`torch.export.export`."""

    property, done, words = EXPORTING, "exported", "in an exported program, "
    takes_tensors, backward = True, False

    def __str__(self) -> str:
        return "torch.export.export(..., strict=False)"

    def static(self, calls: Sequence[PlainCall]) -> Findings:
        """Export all samples together; if this fails, each alone, to find the sample that fails."""
        program = attempt(partial(_program, calls))
        if not isinstance(program, Raised):
            self.ran = True
            yield from self._node(program, len(calls))
            yield from self.judged(calls, _results(program, calls))
        else:
            yield from self.refused(calls, program.error, alone=self.static)

    def dynamic(self, calls: Sequence[PlainCall]) -> Findings:
        """Export a sample whose sizes vary in the derived inputs, and run the program on other sizes."""
        call, other = next(((call, other) for call in calls if (other := other_sizes(call))), (None, None))
        if call is None or other is None:
            return
        pairs = zip(_inputs([call]), _inputs([other]), strict=True)
        sizes = [enumerate(zip(one.shape, two.shape, strict=True)) for one, two in pairs]
        dims = tuple({dim: torch.export.Dim.AUTO for dim, (a, b) in each if a != b} for each in sizes)
        program = attempt(partial(_program, [call], dynamic_shapes=(dims,)))
        if isinstance(program, Raised):
            yield from self.refused([call], program.error)
            return
        self.ran = True
        found = attempt(partial(_results, program, [other]))
        if isinstance(found, Raised):
            kind, reason = type(found.error).__name__, reason_of(found.error)
            yield Note(f"the export is fixed to this size, because of {kind}: {reason}")
        else:
            yield from self.judged([other], found)

    def _node(self, program: Any, calls: int) -> Findings:
        """Check that the program contains the operator itself, so that its implementation can be replaced."""
        subject = self.subject
        if subject.torch_operator is None or subject.specification.inline:
            return
        name = str(subject.torch_operator)
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        if targets.count(name) >= calls:
            return
        others = ", ".join(dict.fromkeys(targets)) or "nothing"
        message = (
            f"the exported program calls `{name}` {targets.count(name)} times instead of {calls}; it "
            f"calls {others}"
        )
        yield Failure(EXPORTING, None, "unknown", message, subject.specification.where, {"targets": others})


def _program(calls: Sequence[PlainCall], **options: Any) -> Any:
    """Export a model without output: torch prints the whole graph of a refused model to stderr."""
    with redirect_stderr(StringIO()), torch.no_grad():
        return torch.export.export(Calls(calls), _inputs(calls), strict=False, **options)


def _results(program: Any, calls: Sequence[PlainCall]) -> list[CallValues]:
    """The results of a program for some calls."""
    with calls[0].subject.seeded(), torch.no_grad():
        returned = program.module()(*_inputs(calls))
    return [CallValues(call.results_in(each)) for call, each in zip(calls, returned, strict=True)]


def load_compiler() -> float:
    """Load the parts of torch that the properties need, and return the seconds that it took.

    Fake tensors, modes and `torch.func.vjp` load torch's compiler, a backward loads its symbolic sizes, and
    forward mode loads its rules. This takes a second or two, once in a process, and is not counted for a
    property.

    Example:
        >>> isinstance(load_compiler(), float)
        True
    """
    start = time.perf_counter()
    with without_warnings(), importing_without_garbage_collection(), forward_ad.dual_level():
        torch.compiler.disable(lambda: None)
        forward_ad.make_dual(torch.zeros(1), torch.ones(1))
    return time.perf_counter() - start


COMPILE = Property(
    COMPILING,
    "compiled code gives what the operator gives, forward and backward",
    compiled,
    inputs="every",
    traits=("compiles", "integration", "transforms"),
    given=of_tools,
)

EXPORT = Property(
    EXPORTING,
    "an exported program calls the operator, and gives the same results",
    exported,
    inputs="every",
    traits=("compiles", "integration", "transforms"),
    given=of_tools,
)
