"""Side effects: no argument, saved tensor or setting is changed, and no memory is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import (
    Overlooking,
    Raised,
    attempt,
    attribute_exception,
    by_statement,
    first_line,
    named_by,
    refuse_own,
)
from opsmith.checking.properties.behaviour.randomness import seeds
from opsmith.checking.property import IMPORTED, Finding, Findings, Note, Property
from opsmith.checking.report import Failure, Given
from opsmith.checking.run import LiveCall, Run, copies, each_run
from opsmith.checking.samples.object_arguments import ObjectState, TensorState
from opsmith.checking.side_effects.canaries import GuardedTensor, form_of, guarded
from opsmith.checking.side_effects.global_settings import ImportChanges, import_changes, other_settings
from opsmith.checking.side_effects.liveness import (
    address,
    attribute_tensors,
    named_tensors,
    nodes,
    record_saved_tensors,
)
from opsmith.checking.side_effects.outside_state import OutsideState, short_repr
from opsmith.checking.side_effects.steady_runs import CHANGED
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import of_own_apply, through_apply
from opsmith.core.formula import listed
from opsmith.judging.compare import SavedBits, differ_beyond_rounding
from opsmith.torch_library import capabilities

NAME = "effects"


def run(subject: Subject) -> Findings:
    """Check the import, the operator, then the class of an operator adopted with a `kind=`."""
    imported = import_changes.get()
    if imported is not None and imported.changed:
        yield _of_import(imported)
    found = [*each_run(NAME, _check, subject)]
    yield from found
    causes = {finding.cause for finding in found if isinstance(finding, Failure)}
    own = through_apply(subject)
    for finding in [] if own is None else each_run(NAME, _check, own):
        if isinstance(finding, Failure) and finding.cause not in causes:
            yield of_own_apply(finding, subject)


def _of_import(imported: ImportChanges) -> Failure:
    """The failure for settings that change when the operator's file is imported."""
    source, changed = imported.source, imported.changed
    words = [f"{name} from {short_repr(was)} to {short_repr(now)}" for name, (was, now) in changed.items()]
    message = (
        f"importing `{source}` changes {', '.join(words)}, for the whole process: let the program "
        "change the setting, or restore it"
    )
    load = "runpy.run_path" if source.endswith(".py") else "importlib.import_module"
    replay = (
        "import importlib, runpy, opsmith\n"
        "from opsmith.checking.side_effects.global_settings import ImportChanges, settings\n\n"
        f"before = settings()\n{load}({source!r})\n"
        f"assert not ImportChanges.since(before, {source!r}).changed"
    )
    evidence = {IMPORTED: source, "settings": ", ".join(changed)}
    return Failure(NAME, None, "side-effect", message, None, evidence, replay=replay, given="unpromised")


@dataclass(frozen=True)
class EffectsRun(Run):
    """A sample on a device, run for side effects.

    Args:
        sliced: True if each tensor is a slice, with memory between its elements.
    """

    sliced: bool = False

    def guarded(self) -> tuple[list[Any], dict[str, GuardedTensor]]:
        """The arguments with margins around them, and their guards; without those that a call may resize."""
        flat, guards = guarded(self.flat(), sliced=self.sliced)
        named = enumerate(zip(self.sample.labels, guards, strict=True))
        return flat, {label: each for at, (label, each) in named if each and not self.sample.is_buffer(at)}

    def evidence(self) -> dict[str, Any]:
        """Evidence of every failure that it shows."""
        layout = {"layout": "every second element of a buffer"} if self.sliced else {}
        return {**super().evidence(), **layout}


@dataclass
class Watched:
    """Memory that a call and its backwards must not write into.

    Args:
        run: The run.
        arguments: Guards of the arguments, by their labels.
        grads: Guards of the grad_outputs, by their names.
        kept: Tensors that were saved for a backward or returned, each with its name.
    """

    run: EffectsRun
    arguments: Mapping[str, GuardedTensor]
    grads: Mapping[str, GuardedTensor] = field(default_factory=dict)
    kept: Sequence[tuple[str, SavedBits]] = ()

    def written(self, during: str, where: str) -> Iterator[Failure]:
        """Yield tensors that were written into; saved tensors only if no other write explains it."""
        guards = [("mutates-input", *each) for each in self.arguments.items()]
        guards += [("mutates-grad-output", *each) for each in self.grads.items()]
        found = [(cause, name, *seen) for cause, name, guard in guards if (seen := guard.written())]
        for cause, name, words, outside in found:
            message = f"{during} wrote into `{name}`: {words}; work on a copy, `.clone()`"
            if cause == "mutates-input" and self.run.subject.kind.own_forward:
                message += f", or call `ctx.mark_dirty({name})` and return `{name}`"
            if outside:
                message = (
                    f"{during} writes outside of `{name}`, into memory of other tensors: {words}; "
                    "keep the indices inside of the tensor's sizes and strides"
                )
            state = cause == "mutates-input" and not outside and self.run.keeps_state(name)
            given: Given = "unpromised" if state else "usual"
            yield self.run.failure(name, cause, message + STATE * state, where, given=given)
        for who, bits in () if found else self.kept:
            what = bits.written()
            if what is not None:
                message = (
                    f"{during} wrote into {who}, which the call saved or returned: {what}; another "
                    "backward through the same graph may be wrong. Work on a copy, `.clone()`"
                )
                yield self.run.failure(None, "mutates-saved", message, self.run.backward_location())
                return


STATE = "; if the argument keeps state for later calls, `accept` the finding"


def _check(run: Run) -> Findings:
    """Run forward, backward and second order on guarded tensors, and compare every bit before and after."""
    sample, derived = run.sample, bool(run.sample.origin)
    if sample.inexact and not any(sample.flat[argnum].numel() for argnum in sample.inexact):
        return  # there is no memory to write into
    # State outside of a call does not depend on derived inputs.
    parts = (_forward, _backwards) if derived else (_forward, _backwards, _outside_call, _in_slices)
    with Overlooking() if derived else nullcontext():  # `forward` reports its exceptions
        for observed in EffectsRun.of(run.subject, sample, NAME):
            failed = False
            for finding in chain.from_iterable(part(observed) for part in parts if not failed):
                failed = failed or isinstance(finding, Failure)  # later parts would report the same fault
                yield finding


def _in_slices(observed: EffectsRun) -> Findings:
    """Run forward and backward on slices: a write that ignores strides hits the elements between them."""
    if not observed.subject.effort.full:
        return
    sliced = replace(observed, sliced=True)
    try:
        yield from _forward(sliced)
        yield from _backwards(sliced)
    except Exception as error:  # the property `layouts` tests if it takes such tensors
        refuse_own(error)
        yield Note(
            f"slices of a buffer were left out, because the operator does not take them: {first_line(error)}"
        )


def _forward(observed: EffectsRun) -> Findings:
    subject, labels = observed.subject, observed.sample.labels
    flat, guards = observed.guarded()
    where = subject.runs_at(flat)
    forms = [*map(_form, flat)]
    with torch.no_grad():
        first = subject.call(observed.sample, flat)
    for at, value in enumerate(flat):
        if any(value is result for result in first):
            yield Note(f"the operator writes into `{labels[at]}` and returns it, as declared")
            guards.pop(labels[at], None)
            forms[at] = _form(value)
    yield from Watched(observed, guards).written("a call", where)
    yield from _reformed(observed, flat, forms, where)
    if not observed.sliced:
        yield from _shared_memory(observed)


def _form(value: Any) -> Any:
    return (*form_of(value), value.requires_grad) if isinstance(value, Tensor) else None


def _reformed(observed: EffectsRun, flat: Sequence[Any], forms: Sequence[Any], where: str) -> Findings:
    """Report arguments whose memory, shape or flags were replaced, although their memory was not written."""
    for at, (value, form) in enumerate(zip(flat, forms, strict=True)):
        label = observed.sample.labels[at]
        if _form(value) == form:
            continue
        if value.requires_grad != form[-1]:
            message = f"a call changed `{label}.requires_grad` from {form[-1]} to {value.requires_grad}"
            hint = "set the flag on a copy: `x.detach().requires_grad_()`"
            yield observed.failure(label, "side-effect", f"{message}; {hint}", where)
        else:
            message = f"a call gave `{label}` other memory or another shape (`.data = `, `resize_`)"
            found = observed.failure(label, "mutates-input", f"{message}; work on a new tensor", where)
            buffer = observed.sample.is_buffer(at)
            yield replace(found, given="unpromised" if buffer else "usual")


def _shared_memory(observed: EffectsRun) -> Findings:
    """Detect results that share memory with an argument, with each other, or with a different call's results.

    A Function class may return a view of an argument if autograd records it, since autograd then refuses to
    differentiate after a write into one of the two. Otherwise a write into one silently changes the other.
    """
    subject, sample, flat = observed.subject, observed.sample, observed.flat()
    call, hint = observed.call(flat, leaf=False), "return a copy, `.clone()`"
    names = [result.name for result in subject.results(sample)]
    where = subject.runs_at(flat)
    bare = subject.apply is not None and not subject.kind.in_library
    for at, result in enumerate(call.results):
        others = [(f"`{label}`", value) for label, value in zip(sample.labels, call.given, strict=True)]
        others += [(f"the result `{names[before]}`", call.results[before]) for before in range(at)]
        for label, other in others:
            if result is other or not _shares_memory(result, other):
                continue
            if bare and _is_recorded_view(result, other):
                yield Note(f"`{names[at]}` is a view of {label}, and autograd tracks the view")
                break
            why = (
                ", and autograd does not track this: a write into one tensor silently changes the other"
                if bare
                else ""
            )
            message = f"`{names[at]}` shares memory with {label}{why}; {hint}"
            yield observed.failure(names[at], "aliases-input", message, where)
            break
    again = observed.call(leaf=False)
    for name, one, other in zip(names, call.results, again.results, strict=True):
        if _shares_memory(one, other):
            message = (
                f"two calls return the same memory as `{name}`, which the operator keeps: the second "
                "call overwrites the result of the first call, or a write into one result changes "
                f"the other; {hint}"
            )
            yield observed.failure(name, "stale-state", message, where)


def _shares_memory(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not one.numel() or not other.numel():
        return False
    return one is other or capabilities.shares_memory(one, other)


def _is_recorded_view(result: Tensor, other: Tensor) -> bool:
    """Return True if autograd records that a write into one of two tensors changes the other."""
    before = capabilities.version(result)
    with torch.no_grad():
        element = other.detach().as_strided((1,), (1,), other.storage_offset())
        element.copy_(element.clone())
    if capabilities.version(result) == before:
        return False  # the version counter does not notice the write
    if not (result.requires_grad and other.requires_grad):
        return True
    try:
        with torch.enable_grad():
            other.mul_(1)
        return result.grad_fn is None
    except RuntimeError:
        return True  # a view made inside of a Function


def _backwards(observed: EffectsRun) -> Findings:
    """A recorded call, a backward, a second backward, and second order, with all tensors watched."""
    if not observed.argnums:
        return
    subject, sample = observed.subject, observed.sample
    flat, guards = observed.guarded()
    with record_saved_tensors() as saved:
        call = observed.call(flat)
    for label, value, leaf in zip(sample.labels, call.given, call.leaves, strict=True):
        if value is not leaf or any(value is result for result in call.results):
            guards.pop(label, None)  # it is a copy, or a declared argument that the call writes into
    watched = Watched(observed, guards)
    written = [*watched.written("a call whose arguments require gradients", subject.runs_at(flat))]
    if written or not call.open:
        yield from written
        return
    names = {address(tensor): words for words, _, tensor in reversed(named_tensors(call))}
    watched.kept = [
        (names.get(address(tensor), f"a tensor of the shape {list(tensor.shape)}"), SavedBits.of(tensor))
        for tensor in (*saved, *(each.detach() for each in call.results if each is not None))
    ]
    on_context = [(name, SavedBits.of(tensor.detach())) for name, tensor in attribute_tensors(call.results)]
    grads, grad_guards = guarded(call.grads(), sliced=observed.sliced)
    results = (subject.results(sample)[at].gradient_name() for at in call.open)
    watched.grads = {name: guard for name, guard in zip(results, grad_guards, strict=True) if guard}
    call.backward(grads, retain_graph=True)
    found: list[Finding] = [*watched.written("a backward", observed.backward_location())]
    if not found and not observed.sliced:
        found = [*_second_backward(observed, call, on_context)]
    yield from found or _second_order(observed, call, watched)


REPEATS = 8
"""Number of new calls that must repeat both gradients; by chance, they do so once in 4**8 times."""


def _second_backward(
    observed: EffectsRun, call: LiveCall, on_context: Sequence[tuple[str, SavedBits]]
) -> Findings:
    """A second backward through the same graph, with the same grad_outputs."""
    again = partial(call.backward, retain_graph=True)
    second = attempt(again)
    if isinstance(second, Raised):
        if _refused(second.error, again):
            yield Note(f"a second backward through the same graph is refused: {first_line(second.error)}")
            return
        message = (
            f"a second backward through the same graph (`retain_graph=True`) raises {second}; the "
            "first backward has removed or changed saved values: do not change them"
        )
        yield observed.failure(None, "mutates-saved", message, observed.backward_location())
        return
    changed = [f"`ctx.{name}`" for name, saved_bits in on_context if saved_bits.written() is not None]
    by = f": the first backward wrote into {', '.join(changed)}" if changed else ""
    # Hooks unpack a new tensor each time, so that a write of the first backward into a saved tensor is lost.
    both, collecting = _two_backwards(observed)
    for at, argnum in enumerate(observed.argnums):
        pair, label = [each[at] for each in both], observed.sample.labels[argnum]
        # New calls must repeat both gradients; else runs differ in any case, as if random numbers are drawn.
        anew = ([each[at] for each in _two_backwards(observed)[0]] for _ in range(REPEATS))
        if not differ_beyond_rounding(*pair) or not all(_alike(pair, other) for other in anew):
            continue
        message = (
            f"a second backward through the same graph gives a gradient of `{label}` that differs "
            f"from the first gradient, also in a new call{by or collecting}. Do not change saved "
            "values"
        )
        yield observed.failure(argnum, "mutates-saved", message)


def _alike(pair: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """True if a pair of gradients equals that of another call."""
    return not any(map(differ_beyond_rounding, pair, other))


def _two_backwards(observed: EffectsRun) -> tuple[list[tuple[Tensor | None, ...]], str]:
    """The gradients of two backwards through the graph of a new call, and the tensors that collect them."""
    call = observed.call()
    found = [copies(call.backward(retain_graph=True)) for _ in range(2)]
    own = {id(each) for each in call.given}
    kept = [(f"`ctx.{name}`", tensor) for name, tensor in attribute_tensors(call.results)]
    saved = (getattr(node, "saved_tensors", ()) for node in nodes(call.results))
    kept += [("a saved tensor", each) for tensors in saved for each in tensors if each is not None]
    names = [
        f"`.grad` of {name}"
        for name, tensor in kept
        if id(tensor) not in own and tensor.is_leaf and tensor.grad is not None
    ]
    return (
        found,
        f": {', '.join(dict.fromkeys(names))} adds up the gradients of all backwards" if names else "",
    )


def _refused(error: Exception, again: Callable[[], Any]) -> bool:
    """True if a statement raises an exception, and not an operation that failed.

    An exception that torch raises by a statement is a refusal only if the operator passed valid values to
    torch, and not, for example, None instead of a saved tensor.
    """
    return (
        by_statement(error) and named_by(error).cause != "mutates-saved" and attribute_exception(error, again)
    )


def _second_order(observed: EffectsRun, call: LiveCall, watched: Watched) -> Findings:
    """Run a backward of the backward; the property `second_order` compares its numbers."""
    grads = [grad.requires_grad_() for grad in call.grads()]

    def outer() -> None:
        found = call.backward(grads, create_graph=True)
        roots = [each for each in found if each is not None and each.requires_grad]
        if roots:
            ones = [torch.ones_like(each) for each in roots]
            torch.autograd.grad(roots, [*grads, *call.inputs], ones, allow_unused=True)

    made = attempt(outer)
    if isinstance(made, Raised):
        yield Note(f"second order was left out: {first_line(made.error)}")
        return
    yield from watched.written("a backward of the backward", observed.backward_location())


def _outside_call(observed: EffectsRun) -> Findings:
    """Check for changes outside of a call, without hooks on saved tensors, so that torch's checks apply."""
    subject, sample = observed.subject, observed.sample
    subject.restore_outside()  # earlier calls may have made running statistics nan
    before = OutsideState.of(subject.functions)
    with sample.objects.followed() as states:
        call = observed.call()
    argnums = observed.argnums if call.open else ()
    for argnum in argnums[1:] or argnums:
        call.leaves[argnum].grad = torch.full_like(call.leaves[argnum], 3)
    leaves = {argnum: TensorState.of(call.leaves[argnum]) for argnum in argnums}
    forms = [*map(_form, call.given)]
    objects = {sample.labels[at]: state for at, state in states.items()}
    written = [*_objects_written(observed, objects, "a call", subject.runs_at(call.given))]
    if argnums:
        call.backward(retain_graph=True)
        with Overlooking():  # its refusals are reported already
            call.backward()
    for argnum, leaf in leaves.items():
        if leaf.other_grad():
            label = sample.labels[argnum]
            message = (
                f"a backward wrote into `{label}.grad`, but `torch.autograd.grad` asks it to return "
                "the gradient: return the gradient, and let torch write `.grad`"
            )
            yield observed.failure(label, "side-effect", message, observed.backward_location())
    where = observed.backward_location() if argnums else subject.specification.where
    yield from _reformed(observed, call.given, forms, where)
    yield from written or _objects_written(observed, objects, "a backward", where)
    yield from _objects_changed(observed, objects, where)
    for name, what in before.changes():
        message = f"a call and its backward change {name}: {what}; take the value as an argument"
        yield observed.failure(None, "side-effect", message, where, evidence={CHANGED: name})
    yield from _settings(observed)


def _objects_written(
    observed: EffectsRun, objects: Mapping[str, ObjectState], what: str, where: str
) -> Findings:
    """Report tensors within an object among the arguments, such as a module, whose numbers change."""
    for label, state in objects.items():
        written = state.written()
        meant = [name for name, tensor in written.items() if id(tensor) in state.statistics]
        if meant:
            yield Note(
                f"{what} changes {listed(meant)} of `{label}`, which is in training mode: each call "
                "of this check began with a fresh copy"
            )
        others = [name for name in written if name not in meant]
        if others:
            message = f"{what} wrote into {listed(others)} of `{label}`; work on a copy, `.clone()`"
            yield observed.failure(label, "mutates-input", message, where)


def _objects_changed(observed: EffectsRun, objects: Mapping[str, ObjectState], where: str) -> Findings:
    """Report flags, and `.grad` of tensors, that change within an object among the arguments."""
    for label, state in objects.items():
        if flags := state.flags():
            message = f"a call or its backward changes {', '.join(flags)} of `{label}`; work on a copy"
            yield observed.failure(label, "side-effect", message, where)
        if names := state.with_gradients():
            message = (
                f"a backward adds to the `.grad` of {listed(names)} of `{label}`, but "
                "`torch.autograd.grad` did not ask for these gradients. They are missing if no "
                "other input requires a gradient. Pass parameters as separate arguments, and return "
                "their gradients"
            )
            found = observed.failure(label, "side-effect", message, where)
            yield replace(found, given="unpromised")


def _settings(observed: EffectsRun) -> Findings:
    """Check for global settings that a call and its backward change."""
    subject, sample = observed.subject, observed.sample
    # Suppressed, since exceptions under other settings are not checked.
    with other_settings() as changed, Overlooking():
        observed.call().backward()
    if seeds(subject, sample):
        message = (
            "a call sets torch's random state for the whole process (`torch.manual_seed`): the next "
            "draw in the process gives the same numbers each time; draw from a separate "
            "`torch.Generator`"
        )
        yield observed.failure(None, "side-effect", message)
    for name, (was, now) in changed.items():
        message = (
            f"a call or its backward changes {name} from {short_repr(was)} to {short_repr(now)}, for "
            "the whole process: take the setting as an argument, or restore it"
        )
        yield observed.failure(None, "side-effect", message, evidence={"setting": name})


EFFECTS = Property(
    NAME,
    "no argument, saved tensor or setting is changed, and results share no memory with arguments",
    run,
    inputs="every",
    traits=("first", "compares-no-runs"),
)
