"""Replays: a few lines of Python that reproduce a failure, run once before they are shown.

Each has the same four parts: it imports or finds the operator, sets the inputs up, calls, and asserts. Short
inputs are written as code. For longer inputs random numbers in the same range are drawn, if they fail, too.
If no such lines show the failure, the replay runs the property again with the same seed. If the check of a
property made no replay for a failure, the cause decides which lines are tried.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.output.literals import MOST_ELEMENTS, drawn, imports, writable, written
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.samples.memory_layouts import Layout
from opsmith.checking.samples.sample import Sample, shown_sample
from opsmith.checking.side_effects.global_settings import torch_state_restored
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.forward_arguments import Slot
from opsmith.core.origins.function_class import class_of
from opsmith.judging.tensors import is_inexact

if TYPE_CHECKING:
    from opsmith.checking.run import Run

Shows = Callable[[Exception], bool]

TEMPORARY = ("checked", "surveyed")
"""Namespaces of the operators that exist only for the check of a Function class."""

MOST_GIVEN = 256
"""Largest number of elements of a sample that is written out."""

ASSERTION = "torch.testing.assert_close(got, expected)"


@dataclass(frozen=True)
class ReplayTarget:
    """Target of a replay: the lines that find it, and the expressions that call it.

    Args:
        subject: The operator under check.
        found: Lines that import or find the operator.
        callee: Expression that is called.
        checked: Expression that `opsmith.check` takes.
        reference: Expression of the reference; None if there is none.
        by_position: Pass arguments by position.
        bound: Values of names that these lines may be unable to find.
    """

    subject: Subject
    found: tuple[str, ...]
    callee: str
    checked: str
    reference: str | None
    by_position: bool
    bound: Mapping[str, Any]

    def call(self, sample: Sample) -> str:
        """Return the code of a call, with every argument as a variable of the argument's name."""
        specification = self.subject.specification
        if self.by_position and specification.origin.kind == "class":
            given = [_by_position(slot) for slot in class_of(specification.origin).parameters.slots]
            return f"{self.callee}({', '.join(given)})"
        given = []
        for argument in sample.flattening.schema.arguments:
            by_name = not self.by_position or argument.keyword_only
            given.append(f"{argument.name}={argument.name}" if by_name else argument.name)
        return f"{self.callee}({', '.join(given)})"

    def parts(self, sample: Sample) -> list[tuple[str, str]] | None:
        """Subscripts that select each visible result of a call: of the operator, and of the reference.

        None if a subscript cannot select them.
        """
        subject, schema = self.subject, self.subject.specification.schema
        with subject.seeded(), torch.no_grad():
            args, kwargs = sample.arguments(sample.at())
            returned = subject.called(args, kwargs)
        bare = len(schema.visible) == 1 and subject.specification.origin.outputs is None
        found: list[tuple[str, str]] = []
        for at, one in enumerate([returned] if bare or not isinstance(returned, tuple | list) else returned):
            index = "" if bare or one is returned else f"[{at}]"
            whole = "" if schema.single else f"[{schema.visible[at] if at < len(schema.visible) else at}]"
            if isinstance(one, list | tuple):
                if not all(isinstance(each, Tensor) or each is None for each in one):
                    return None
                found += [(f"{index}[{k}]", f"{whole}[{k}]") for k in range(len(one))]
            elif isinstance(one, Tensor) or one is None:
                found.append((index, whole))
        return found if len(found) == len(subject.results(sample)) else None


def _by_position(slot: Slot) -> str:
    """Write one argument of `apply`, from the variables of the operator's arguments that stand for it."""
    if slot.form == "either":
        return f"{slot.value} if {slot.name} is None else {slot.name}"
    return f"*{slot.name}" if slot.collects else slot.name


def target_of(subject: Subject) -> ReplayTarget | None:
    """The target of a replay; None for a class whose `apply` raises, or takes containers of tensors."""
    specification = subject.specification
    if subject.kind.in_library:
        name = f"torch.ops.{specification.name.replace('::', '.')}"
        module = _registering(subject)
        found = f"# {specification.name}: {specification.where}"
        found = found if module is None else f"import {module}  {found}"
        return ReplayTarget(subject, (found, ""), name, name, None, True, {})
    if specification.origin.kind != "class" or specification.namespace not in TEMPORARY:
        finder = f'operator = opsmith.find_operator("{specification.name}"'
        if specification.module == "__main__" or "<locals>" in specification.qualname:
            line = f"{finder})  # declared at {specification.where}"
        else:
            line = f'{finder}, "{specification.module}")'
        reference = None if specification.opaque else "operator.reference"
        bound = {"operator": subject.operator}
        return ReplayTarget(subject, ("", line), "operator", "operator", reference, False, bound)
    adopted = class_of(specification.origin)
    if adopted.takes_self or any(slot.form in ("nested", "mixed") for slot in adopted.parameters.slots):
        return None
    kind = adopted.function_class
    outer, *inner = kind.__qualname__.split(".")
    if "<locals>" in inner or not _importable(kind):
        lines = [f"# with {kind.__name__} as it is at {specification.where}", ""]
    else:
        lines = [f"from {kind.__module__} import {outer}", ""]
        lines += [f"{inner[-1]} = {kind.__qualname__}", ""] if inner else []
    name = kind.__name__
    return ReplayTarget(subject, tuple(lines), f"{name}.apply", name, None, True, {name: kind})


def _registering(subject: Subject) -> str | None:
    """The module whose import registers a `torch.library.custom_op`, if it is known."""
    function = next(iter(subject.specification.origin.sources()), None)
    if function is None or "<locals>" in function.__qualname__:
        return None
    module: str = function.__module__
    return module if module in sys.modules and module != "__main__" else None


def _importable(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return kind.__module__ != "__main__" and found is kind


def script(target: ReplayTarget | None, *parts: Sequence[str]) -> str:
    """Return the code of a replay; all replays have this structure.

    Args:
        target: Target of the replay; None if it cannot be imported or found.
        parts: Lines that set the inputs up, call and assert.
    """
    head = ["import torch, opsmith", *target.found] if target is not None else ["import opsmith", ""]
    return "\n".join([*head, *(line for part in parts for line in part)])


def replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    lines: Sequence[str],
    more: Mapping[str, Any] | None = None,
    *,
    property: str | None = None,
    fresh: bool = False,
    shows: Shows = lambda error: True,
) -> str | None:
    """A replay that calls the operator and fails.

    Args:
        sample: The sample that failed.
        flat: Its arguments, with the values that they had when it failed.
        lines: Lines that fail; they contain the call as `Target.call` writes it, and each argument is a
            variable.
        more: Further values that the lines name.
        property: Name of the property, which is run again if the lines do not fail.
        fresh: True if the lines fail for other numbers, too, so that numbers may be rounded or drawn.
        shows: True if an exception of the lines shows the failure.

    Returns:
        The replay; None if no lines fail and `property` is not given.
    """
    schema = sample.flattening.schema
    values = dict(zip(schema.names, sample.flattening.pack(flat), strict=True)) | dict(more or {})
    target = target_of(subject)
    if target is not None and all(map(writable, values.values())):
        for inputs in _inputs(values, fresh=fresh):
            if _fails(target, values, [*inputs, *lines], shows):
                return script(target, imports(list(values.values())), inputs, lines)
    return None if property is None else check_again(subject, property)


def _inputs(values: Mapping[str, Any], *, fresh: bool) -> Iterator[list[str]]:
    """Yield alternative lines that set the values up, the shortest first."""
    elements = sum(value.numel() for value in tensors_in(list(values.values())))
    if elements <= MOST_ELEMENTS:
        if fresh:
            yield [f"{name} = {written(value, rounded=True)}" for name, value in values.items()]
        yield [f"{name} = {written(value)}" for name, value in values.items()]
    elif fresh:
        yield ["torch.manual_seed(0)", *(f"{name} = {_short(value)}" for name, value in values.items())]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    few = isinstance(value, Tensor) and value.numel() <= 8
    return (None if few else drawn(value)) or written(value, rounded=True)


def _fails(target: ReplayTarget, values: Mapping[str, Any], lines: Sequence[str], shows: Shows) -> bool:
    """Return True if lines fail when they are executed."""
    space: dict[str, Any] = {"torch": torch, **target.bound}
    space.update({type(each).__qualname__: type(each) for each in values.values()})
    with torch_state_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec("\n".join(lines), space)
        except (SyntaxError, NameError, SystemExit):  # not valid code, or it exits
            return False
        except Exception as error:
            return shows(error)
    return False


def check_again(subject: Subject, property: str, *, isolate: bool = False) -> str:
    """A replay that runs a property again.

    Args:
        isolate: True if the property ends the process that runs it.
    """
    if subject.in_place is None or isinstance(subject.in_place, LibraryWrite):
        target = target_of(subject)
    else:  # the call itself fails; the call of its functional form does not
        declared = subject.in_place.specification
        target = target_of(replace(subject, specification=declared, operator=subject.in_place))
    options = f'only=["{property}"], seed={subject.seed}, effort="{subject.effort.name}"'
    options += ", isolate=True" * isolate
    samples: list[str] = []
    if subject.specification.samples is None or subject.specification.namespace in TEMPORARY:
        options, samples = f"samples=samples, {options}", _given(subject)
    name = "operator" if target is None else target.checked
    checked = [f"report = opsmith.check({name}, {options})", "assert not report.failures, report"]
    return script(target, samples, checked)


def _given(subject: Subject) -> list[str]:
    """The author's samples as lines of code: a class may fail on these samples only."""
    values: list[Any] = []
    lines: list[str] = []
    for sample in (each for each in subject.samples if not each.origin):
        args, named = sample.arguments(sample.at())
        if not named:
            args = subject.specification.origin.spread(args)
        every = [*args, *named.values()]
        values += every
        if all(map(writable, every)):
            words = [*map(written, args), *(f"{name}={written(value)}" for name, value in named.items())]
            sole = "," * (len(words) == 1)
            call = f"opsmith.Make().call({', '.join(words)})" if named else f"({', '.join(words)}{sole})"
            lines.append(f"    {call},")
    if not all(map(writable, values)) or sum(each.numel() for each in tensors_in(values)) > MOST_GIVEN:
        return ["samples = ...  # insert the samples of the check, which are too long to write here"]
    return [*imports(values), "samples = [", *lines, "]"]


Lines = Callable[[str, str, Sequence[str]], list[str]]
"""Lines that assign the value of a call to a name; `places` are the subscripts of its results."""


def result_replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    position: int,
    expected: Tensor | None,
    property: str,
) -> str | None:
    """The replay of a wrong result.

    Args:
        position: Position of the wrong result among the visible ones.
        expected: The right result.
    """

    def lines(name: str, call: str, parts: Sequence[str]) -> list[str]:
        return [f"{name} = {call}{parts[position]}"]

    def like() -> Tensor:
        with torch.no_grad():
            return subject.visible(sample, subject.reference(sample, flat))[position]

    return _against_truth(subject, sample, flat, lines, expected, like, {}, property)


def gradient_replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    argnum: int,
    grads: Sequence[Tensor | None],
    expected: Tensor | None,
    *,
    subset: Sequence[int],
) -> str | None:
    """The replay of a wrong gradient.

    Args:
        argnum: Position of the input whose gradient is wrong.
        grads: The grad_output of each visible result.
        expected: The right gradient; None if the backward raises.
        subset: The inputs that require a gradient.
    """
    flat = [
        value.detach().requires_grad_(at in subset) if is_inexact(value) else value
        for at, value in enumerate(flat)
    ]
    more, names = _incoming(grads)
    inputs = [sample.labels[at] for at in subset]

    def lines(name: str, call: str, parts: Sequence[str]) -> list[str]:
        taken = _taken(call, [parts[at] for at in names], inputs, list(names.values()))
        return [*taken[:-1], f"{name} = {taken[-1]}[{subset.index(argnum)}]"]

    return _against_truth(subject, sample, flat, lines, expected, lambda: flat[argnum], more, "gradient")


def _incoming(grads: Sequence[Tensor | None]) -> tuple[dict[str, Any], dict[int, str]]:
    """Gradients of results by their names in a replay, and these names by position."""
    given = {at: grad for at, grad in enumerate(grads) if grad is not None}
    names = {at: "grad" if len(given) == 1 else f"grad_{at}" for at in given}
    return {names[at]: grad.detach() for at, grad in given.items()}, names


def _taken(call: str, parts: Sequence[str], inputs: Sequence[str], grads: Sequence[str]) -> list[str]:
    """Lines of code; the last one computes the gradients of some results."""
    before = [f"results = {call}"] if len(parts) > 1 else []
    outputs = [f"results{part}" for part in parts] if before else [f"{call}{parts[0]}"]
    several = (each[0] if len(each) == 1 else f"[{', '.join(each)}]" for each in (outputs, inputs, grads))
    return [*before, f"torch.autograd.grad({', '.join(several)}, allow_unused=True)"]


def _against_truth(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    lines: Lines,
    expected: Tensor | None,
    like: Callable[[], Tensor],
    more: dict[str, Any],
    property: str,
) -> str | None:
    """Compare the operator with its reference, or without one with the right value, written as code."""
    target, seed = target_of(subject), _seed(subject)
    parts = target.parts(sample) if target is not None else None
    if target is None or parts is None:
        return check_again(subject, property)
    of_operator, of_reference = ([pair[side] for pair in parts] for side in (0, 1))
    got = [*seed, *lines("got", target.call(sample), of_operator)]
    found = replay(subject, sample, flat, got, more) if expected is None else None
    if found is None and target.reference is not None:
        given = ", ".join(f"{name}={name}" for name in sample.flattening.schema.names)
        right = [*seed, *lines("expected", f"{target.reference}({given})", of_reference)]
        found = replay(subject, sample, flat, [*got, *right, ASSERTION], more, fresh=True)
    if found is None and expected is not None:
        expected = expected.to(like().device, like().dtype)
        found = replay(subject, sample, flat, [*got, ASSERTION], {**more, "expected": expected})
    return found or check_again(subject, property)


def _seed(subject: Subject) -> list[str]:
    return [f"torch.manual_seed({subject.seed})"] if subject.draws else []


def layout_replay(
    run: Run, contiguous: Sequence[Any], odd: Sequence[tuple[int, Layout]], output: int
) -> str | None:
    """The replay of an output that depends on the layout of a tensor.

    Args:
        run: The run that shows the failure. contiguous: Its arguments, then the gradients of results.
        odd: Positions of the tensors that are not contiguous in the run, with their layouts.
        output: Position of the differing output among results and gradients.
    """
    subject, sample, count = run.subject, run.sample, len(run.sample.flat)
    flat, grads = contiguous[:count], contiguous[count:]
    target = target_of(subject)
    parts = target.parts(sample) if target is not None else None
    # An item of a list has no name of its own.
    items = any("[" in sample.labels[position] for position, _ in odd if position < count)
    if target is None or parts is None or items:
        return check_again(subject, run.name)
    more, names = _incoming(grads)
    call, seed = target.call(sample), _seed(subject)
    if output < len(parts):
        more, body = {}, [f"return {call}{parts[output][0]}"]
    else:
        label = sample.labels[run.argnums[output - len(parts)]]
        taken = _taken(call, [parts[at][0] for at in names], [label], list(names.values()))
        taken = [f"{label} = {label}.detach().requires_grad_()", *taken]
        body = [*taken[:-1], f"return {taken[-1]}[0]"]
    given = [*sample.flattening.schema.names, *more]
    lines: list[str] = []
    laid, undone = {}, {}
    for position, layout in odd:
        label = sample.labels[position] if position < count else names[position - count]
        laid[label], undone[label] = f"odd_{label}", f"odd_{label}{layout.undone}"
        code = re.sub(r"\bx\b", label, layout.code)
        lines.append(f"odd_{label} = {code}")
    lines += ["", f"def run({', '.join(given)}):", *(f"    {line}" for line in body), ""]
    for name, values in (("got", laid), ("expected", undone)):
        lines += [*seed, f"{name} = run({', '.join(values.get(each, each) for each in given)})"]
    return replay(subject, sample, flat, [*lines, ASSERTION], more, property=run.name, fresh=True)


def with_replays(outcomes: Sequence[Outcome], subject: Subject, *, run: bool) -> list[Outcome]:
    """Add a replay to each failure that no other failure explains.

    Args:
        outcomes: An outcome for each property.
        subject: The operator under check, with all inputs of the check.
        run: True if lines may be run here, because they do not end the process.
    """

    def with_replay(failure: Failure) -> Failure:
        if failure.replay is not None or not failure.is_whole():
            return failure
        found = _by_cause(failure, subject) if run else None
        again = found or check_again(subject, failure.property, isolate=failure.ends_process())
        return replace(failure, replay=again)

    return [replace(each, failures=tuple(map(with_replay, each.failures))) for each in outcomes]


def _by_cause(failure: Failure, subject: Subject) -> str | None:
    """A replay that shows the cause; None if no lines show it."""
    sample = shown_sample(failure, subject.samples)
    target = target_of(subject)
    if sample is None or target is None:
        return None
    for lines, differentiated in _lines(failure, target, sample):
        wide = lines[-1].startswith(("torch.autograd.gradcheck", "torch.autograd.gradgradcheck"))
        flat = sample.at(torch.float64 if wide else None)  # gradcheck takes float64
        if differentiated:
            flat = [value.requires_grad_() if is_inexact(value) else value for value in flat]
        found = replay(subject, sample, flat, lines, shows=partial(_shows, failure))
        if found is not None:
            return found
    return None


def _shows(failure: Failure, error: Exception) -> bool:
    """True if an exception shows a failure: the same exception, a failed assertion, or unequal numbers."""
    named = failure.evidence.get("exception")
    if isinstance(named, str):
        first = failure.message.removeprefix(f"{named}: ").splitlines()[0]
        lines = str(error).splitlines()
        return type(error).__name__ == named and bool(lines) and first.startswith(lines[0])
    refused = isinstance(error, GradcheckError) and "mismatch" in str(error)
    return refused or isinstance(error, AssertionError)


def _lines(failure: Failure, target: ReplayTarget, sample: Sample) -> Iterator[tuple[list[str], bool]]:
    """Lines that may show a failure, and True if the inputs require gradients."""
    call = target.call(sample)
    parts = _parts(target, sample, failure)
    if isinstance(failure.evidence.get("exception"), str):
        yield [call], False
        if parts is not None:
            yield _backward(call, parts), True
        return
    label = failure.input
    if failure.cause == "mutates-input" and label in sample.labels and "[" not in label:
        before = f"before = {label}.detach().clone()"
        held = f"assert torch.equal({label}, before), {label}"
        yield [before, call, held], False
        if parts is not None:
            yield [before, *_backward(call, parts), held], True
    if failure.cause == "nondeterministic":
        for part in parts or ():
            yield [f"assert torch.equal({call}{part}, {call}{part})"], False
    labels = [label] if label in sample.labels else [sample.labels[at] for at in sample.inexact]
    pairs = [(each, part) for each in labels for part in parts or () if each and "[" not in each]
    for each, part in pairs:
        begin = [f"y = {call}{part}", "grad = torch.ones_like(y)"]
        if failure.cause == "mutates-grad-output":
            taken = f"torch.autograd.grad(y, {each}, grad)"
            yield [*begin, taken, "assert torch.equal(grad, torch.ones_like(y)), grad"], True
        elif failure.property == "linearity":
            one = f"(one,) = torch.autograd.grad(y, {each}, grad, retain_graph=True)"
            two = f"(two,) = torch.autograd.grad(y, {each}, 2 * grad)"
            yield [*begin, one, two, "torch.testing.assert_close(two, 2 * one)"], True
    gradcheck = GRADCHECKS.get(failure.property)
    if target.subject.specification.gradients.surrogate:
        return  # it compares with finite differences, with which a surrogate gradient never agrees
    if gradcheck and failure.cause in (failure.property.replace("_", "-"), UNKNOWN):
        names = ", ".join(sample.labels[at] for at in sample.inexact if sample.flat[at].numel())
        if names and "[" not in names:
            yield [gradcheck.format(names=names, call=call)], True


GRADCHECKS = {
    "forward_mode": "torch.autograd.gradcheck(lambda {names}: {call}, ({names},), check_forward_ad=True, "
    "check_backward_ad=False, check_undefined_grad=False, check_batched_grad=False)",
    "second_order": "torch.autograd.gradgradcheck(lambda {names}: {call}, ({names},))",
}
"""Calls of torch that show a wrong derivative; `{names}` are the inputs, `{call}` is the call."""


def _parts(target: ReplayTarget, sample: Sample, failure: Failure) -> list[str] | None:
    """Subscripts that select each result of a call; None if the call raises."""
    try:
        found = target.parts(sample)
    except (Exception, SystemExit):  # the failure is about this exception
        found = [("", "")] if failure.cause == "raises" else None
    return None if found is None else [lines for lines, _ in found]


def _backward(call: str, parts: Sequence[str]) -> list[str]:
    if len(parts) == 1:
        return [f"{call}{parts[0]}.sum().backward()"]
    every = ", ".join(f"results{part}" for part in parts)
    return [f"results = {call}", f"sum(each.sum() for each in ({every}) if each.requires_grad).backward()"]
