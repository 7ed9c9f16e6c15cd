"""Side effects: no argument, saved tensor or setting is changed, and no memory is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import LiveCall, SampleRun, copies, rule_location
from opsmith.checking.exceptions import Overlooking, attribute_exception, by_statement, named_by, refuse_own
from opsmith.checking.numerics.compare import SavedBits, differ_beyond_rounding
from opsmith.checking.properties.behaviour.randomness import seeds
from opsmith.checking.property import IMPORTED, Findings, Note, Property, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.aliasing import shared_memory
from opsmith.checking.side_effects.canaries import GuardedTensor, guarded
from opsmith.checking.side_effects.global_settings import ImportChanges, import_changes, other_settings
from opsmith.checking.side_effects.liveness import attribute_tensors, nodes, record_saved_tensors
from opsmith.checking.side_effects.reachable_state import changes_since, short_repr, take_snapshot
from opsmith.checking.side_effects.steady_runs import CHANGED
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import of_own_apply, through_apply
from opsmith.core.formula import listed

NAME = "effects"


def run(subject: Subject) -> Findings:
    """Check the import, the operator, then the class of an operator that was adopted with a `kind=`."""
    imported = import_changes.get()
    if imported is not None and imported.changed:
        yield _of_import(imported)
    causes: set[str] = set()
    for finding in each_sample(NAME, _sample, subject):
        causes.update([finding.cause] if isinstance(finding, Failure) else [])
        yield finding
    own = through_apply(subject)
    for finding in [] if own is None else each_sample(NAME, _sample, own):
        if isinstance(finding, Failure) and finding.cause not in causes:
            yield of_own_apply(finding, subject)


def _of_import(imported: ImportChanges) -> Failure:
    """The failure for settings that the file of the operator changes when it is imported."""
    source, changed = imported.source, imported.changed
    words = [f"{name} from {short_repr(was)} to {short_repr(now)}" for name, (was, now) in changed.items()]
    message = (
        f"importing `{source}` changes {', '.join(words)}, for the whole process: leave that to the program, "
        "or put it back"
    )
    load = "runpy.run_path" if source.endswith(".py") else "importlib.import_module"
    replay = [
        "import importlib, runpy, opsmith",
        "from opsmith.checking.side_effects.global_settings import ImportChanges, settings",
        "",
        "before = settings()",
        f"{load}({source!r})",
        f"assert not ImportChanges.since(before, {source!r}).changed",
    ]
    return Failure(
        NAME,
        None,
        "side-effect",
        message,
        None,
        {IMPORTED: source, "settings": ", ".join(changed)},
        replay="\n".join(replay),
        given="unpromised",
    )


@dataclass(frozen=True)
class EffectsRun(SampleRun):
    """A sample on a device, run for side effects.

    Args:
        sliced: True if each tensor is a slice, with memory between its elements.
    """

    sliced: bool = False

    def guarded(self) -> tuple[list[Any], list[GuardedTensor | None]]:
        """The arguments with margins around them, and their guards; none of what a call may resize."""
        flat, guards = guarded(self.flat(), sliced=self.sliced)
        return flat, [None if self.sample.is_buffer(at) else guard for at, guard in enumerate(guards)]

    def failure(self, input: str | None, cause: str, message: str, where: str, **evidence: Any) -> Failure:
        """A failure on this sample."""
        shown = {"sample": str(self.sample), **evidence}
        if self.sliced:
            shown["layout"] = "every second element of a buffer"
        return Failure(NAME, input, cause, message, where, shown)


def _sample(subject: Subject, sample: Sample) -> Findings:
    """Run forward, backward and second order on guarded tensors, and compare every bit before and after."""
    try:
        yield from _parts(subject, sample)
    except Exception as error:
        refuse_own(error)
        if not sample.origin:  # the properties of results report what it raises for derived inputs
            raise


def _parts(subject: Subject, sample: Sample) -> Findings:
    if sample.inexact and not any(sample.flat[argnum].numel() for argnum in sample.inexact):
        return  # there is no memory to write into
    for observed in EffectsRun.of(subject, sample):
        failed = False
        # State outside of a call does not depend on derived inputs.
        for part in (
            (_forward, _backwards) if sample.origin else (_forward, _backwards, _outside_call, _in_slices)
        ):
            for finding in part(observed):
                failed = failed or isinstance(finding, Failure)
                yield finding
            if failed:  # a later part runs the same again, and would report the same
                break


def _in_slices(observed: EffectsRun) -> Findings:
    """Run forward and backward on slices: a write through a pointer hits the elements between."""
    if not observed.subject.effort.sliced:
        return
    sliced = replace(observed, sliced=True)
    try:
        yield from _forward(sliced)
        yield from _backwards(sliced)
    except Exception as error:  # whether it takes such tensors is a matter of layouts
        refuse_own(error)
        yield Note(
            f"tensors that are slices of a buffer were left out, which it does not take: {first_line(error)}"
        )


def _forward(observed: EffectsRun) -> Findings:
    subject, sample = observed.subject, observed.sample
    flat, guards = observed.guarded()
    where = subject.runs_at(flat)
    forms = [_form(value) for value in flat]
    with torch.no_grad():
        first = subject.call(sample, flat)
    declared = {at for at, value in enumerate(flat) if any(value is result for result in first)}
    for at in sorted(declared):
        yield Note(f"it writes into `{sample.labels[at]}` and returns it, as it has declared")
    names = dict(enumerate(sample.labels))
    watched = [None if at in declared else guard for at, guard in enumerate(guards)]
    yield from _written(observed, names, watched, "a call", "mutates-input", where)
    yield from _reformed(observed, flat, forms, declared, where)
    if not observed.sliced:
        yield from shared_memory(observed, NAME)


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.requires_grad


def _reformed(
    observed: EffectsRun, flat: Sequence[Any], forms: Sequence[Any], declared: set[int], where: str
) -> Findings:
    """Report arguments whose memory, shape or flags were replaced without a write into their memory."""
    for at, (value, form) in enumerate(zip(flat, forms, strict=True)):
        if at in declared or form is None or _form(value) == form:
            continue
        label = observed.sample.labels[at]
        if value.requires_grad != form[-1]:
            message = f"a call changed `{label}.requires_grad` from {form[-1]} to {value.requires_grad}"
            hint = "take a copy that requires what it should: `x.detach().requires_grad_()`"
            yield observed.failure(label, "side-effect", f"{message}; {hint}", where)
        else:
            message = f"a call laid other memory, or another shape, under `{label}` (`.data = `, `resize_`)"
            found = observed.failure(label, "mutates-input", f"{message}; work on a new tensor", where)
            buffer = observed.sample.is_buffer(at)
            yield replace(found, given="unpromised" if buffer else "usual")


def _written(
    observed: EffectsRun,
    names: dict[int, str],
    guards: Sequence[GuardedTensor | None],
    what: str,
    cause: str,
    where: str,
) -> Findings:
    for at, guard in enumerate(guards):
        written = None if guard is None else guard.written()
        if written is None:
            continue
        words, outside = written
        if outside:
            message = (
                f"{what} writes outside of `{names[at]}`, into memory that belongs to others: {words}; hold "
                "its indices to the tensor's sizes and strides"
            )
        else:
            message = f"{what} wrote into `{names[at]}`: {words}; work on a copy, `.clone()`"
        yield observed.failure(names[at], cause, message, where)


def _backwards(observed: EffectsRun) -> Findings:
    """Recorded call, backward, again through the same graph, and second order, each tensor watched."""
    if not observed.argnums:
        return
    subject, sample = observed.subject, observed.sample
    flat, guards = observed.guarded()
    with record_saved_tensors() as saved:
        call = observed.call(flat)
    argument_guards = [
        guard if value is leaf and not any(value is result for result in call.results) else None
        for guard, value, leaf in zip(guards, call.given, call.leaves, strict=True)
    ]
    arguments = dict(enumerate(sample.labels))
    what = "a call whose arguments require gradients"
    found = [*_written(observed, arguments, argument_guards, what, "mutates-input", subject.runs_at(flat))]
    if found or not call.open:
        yield from found
        return
    labels = _labels(observed, call)
    saved_bits = [
        SavedBits.of(tensor) for tensor in (*saved, *(r.detach() for r in call.results if r is not None))
    ]
    on_context = [(name, SavedBits.of(tensor.detach())) for name, tensor in attribute_tensors(call.results)]
    grads, grad_guards = guarded(call.grads(), sliced=observed.sliced)
    names = [subject.results(sample)[at].gradient_name() for at in call.open]
    first = copies(call.backward(grads, retain_graph=True))
    where = observed.backward_location()
    found = [*_written(observed, arguments, argument_guards, "a backward", "mutates-input", where)]
    found += _written(
        observed, dict(enumerate(names)), grad_guards, "a backward", "mutates-grad-output", where
    )
    if not found:
        found = [*_saved_written(observed, saved_bits, labels)]
    if not found and not observed.sliced:
        found = [*_second_backward(observed, call, first, on_context)]
    if not found:
        found = [*_second_order(observed, call, saved_bits, labels, argument_guards)]
    yield from found


def _labels(observed: EffectsRun, call: LiveCall) -> dict[int, str]:
    """Names of arguments and results by the address of their memory, for messages."""
    labels: dict[int, str] = {}
    for result, described in zip(call.results, observed.subject.results(observed.sample), strict=True):
        if isinstance(result, Tensor):
            labels[result.untyped_storage().data_ptr()] = f"the result `{described.name}`"
    for value, label in zip(call.given, observed.sample.labels, strict=True):
        if isinstance(value, Tensor):
            labels[value.untyped_storage().data_ptr()] = f"`{label}`"
    return labels


def _saved_written(
    observed: EffectsRun, saved_bits: Sequence[SavedBits], labels: dict[int, str], what: str = "a backward"
) -> Findings:
    for each in saved_bits:
        words = each.written()
        if words is None:
            continue
        shape = list(each.tensor.shape)
        who = labels.get(each.tensor.untyped_storage().data_ptr(), f"a tensor of the shape {shape}")
        message = (
            f"{what} wrote into {who}, which is kept for it or was returned: {words}; another backward "
            "through the same graph may go wrong. Work on a copy, `.clone()`"
        )
        yield observed.failure(None, "mutates-saved", message, observed.backward_location())
        return


REPEATS = 8
"""Number of new calls that must repeat both gradients: by chance they do once in 4**8 times."""


def _second_backward(
    observed: EffectsRun,
    call: LiveCall,
    first: Sequence[Tensor | None],
    on_context: Sequence[tuple[str, SavedBits]],
) -> Findings:
    """A second backward through the same graph, with the same grad_outputs."""
    subject, sample = observed.subject, observed.sample
    try:
        second = copies(call.backward(retain_graph=True))
    except Exception as error:
        refuse_own(error)
        if _refused(error, lambda: call.backward(retain_graph=True)):
            yield Note(f"a second backward through the same graph is refused: {first_line(error)}")
            return
        message = (
            f"a second backward through the same graph (`retain_graph=True`) raises {type(error).__name__}: "
            f"{first_line(error)}; the first one has removed or changed what was kept. Leave it as it is"
        )
        yield observed.failure(None, "mutates-saved", message, observed.backward_location())
        return
    changed = [f"`ctx.{name}`" for name, saved_bits in on_context if saved_bits.written() is not None]
    by = f": the first one wrote into {', '.join(changed)}" if changed else ""
    # Hooks unpack a new tensor each time, so that what the first backward adds to a saved one is lost.
    (unhooked, collecting), (repeated, _) = _two_backwards(observed), _two_backwards(observed)
    by = by or collecting
    for at, argnum in enumerate(observed.argnums):
        hooked, plain, anew = ([each[at] for each in pair] for pair in ((first, second), unhooked, repeated))
        # A new call must repeat both gradients; otherwise the difference is between runs, not in the graph.
        if not (_change_alike(hooked, plain) or _change_alike(plain, anew)):
            continue
        again = ([each[at] for each in _two_backwards(observed)[0]] for _ in range(REPEATS))
        if not all(_change_alike(plain, pair) for pair in again):
            continue  # a backward that draws gives two values by chance; `determinism` reports it
        label = sample.labels[argnum]
        message = (
            f"a second backward through the same graph gives another gradient of `{label}` than the first, "
            f"and so it does in a new call{by}. Leave what is kept as it is"
        )
        yield observed.failure(label, "mutates-saved", message, rule_location(subject, sample.names[argnum]))


def _two_backwards(observed: EffectsRun) -> tuple[list[tuple[Tensor | None, ...]], str]:
    """The gradients of two backwards through the graph of a new call, and the tensors that collect them."""
    call = observed.call()
    found = [copies(call.backward(retain_graph=True)) for _ in range(2)]
    own = {id(each) for each in call.given}
    kept: list[tuple[str, Tensor | None]] = [
        (f"ctx.{name}", tensor) for name, tensor in attribute_tensors(call.results)
    ]
    for node in nodes(call.results):
        kept += [("a saved tensor", each) for each in getattr(node, "saved_tensors", ())]
    names = [
        f"`.grad` of {name if name.startswith('a ') else f'`{name}`'}"
        for name, tensor in kept
        if tensor is not None and id(tensor) not in own and tensor.is_leaf and tensor.grad is not None
    ]
    return found, f": {', '.join(dict.fromkeys(names))} adds up those of all of them" if names else ""


def _change_alike(pair: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """True if two gradients differ, and the two of another call are the same two."""
    return differ_beyond_rounding(*pair) and not any(map(differ_beyond_rounding, pair, other))


def _refused(error: Exception, again: Callable[[], Any]) -> bool:
    """True if a statement raises an exception, and not an operation that failed.

    An exception that torch raises by a statement is a refusal only if the operator passed valid values to
    torch, and not, for example, None instead of a saved tensor.
    """
    return (
        by_statement(error) and named_by(error).cause != "mutates-saved" and attribute_exception(error, again)
    )


def _second_order(
    observed: EffectsRun,
    call: LiveCall,
    saved_bits: Sequence[SavedBits],
    labels: dict[int, str],
    argument_guards: Sequence[GuardedTensor | None],
) -> Findings:
    """Run a backward of the backward; the property `second_order` compares its numbers."""
    grads = [grad.requires_grad_() for grad in call.grads()]
    try:
        found = call.backward(grads, create_graph=True)
        roots = [each for each in found if each is not None and each.requires_grad]
        if roots:
            leaves = [*grads, *(call.leaves[argnum] for argnum in observed.argnums)]
            outer = [torch.ones_like(each) for each in roots]
            torch.autograd.grad(roots, leaves, outer, allow_unused=True)
    except Exception as error:
        refuse_own(error)
        yield Note(f"second order was left out: {first_line(error)}")
        return
    what = "a backward of the backward"
    names = dict(enumerate(observed.sample.labels))
    found_there = [
        *_written(observed, names, argument_guards, what, "mutates-input", observed.backward_location())
    ]
    yield from found_there or _saved_written(observed, saved_bits, labels, what)


def _outside_call(observed: EffectsRun) -> Findings:
    """Check for changes outside of a call; without hooks on saved tensors, torch's own checks apply too."""
    subject, sample = observed.subject, observed.sample
    subject.restore_outside()  # earlier calls may have made nan of running statistics
    before = take_snapshot(subject)
    call = observed.call()
    argnums = observed.argnums if call.open else ()
    marks = {argnum: torch.full_like(call.leaves[argnum], 3) for argnum in argnums[1:] or argnums}
    for argnum, mark in marks.items():
        call.leaves[argnum].grad = mark
    flags = [_form(value) for value in call.given]
    written = [*_objects_written(observed, call, "a call", subject.runs_at(call.given))]
    if argnums:
        call.backward(retain_graph=True)
        with Overlooking():  # what it refuses is reported already
            call.backward()
    for argnum in argnums:
        grad: Tensor | None = call.leaves[argnum].grad
        if not _untouched(grad, marks.get(argnum)):
            label = sample.labels[argnum]
            message = (
                f"a backward wrote into `{label}.grad`, though `torch.autograd.grad` asked it to return the "
                "gradient: return it, and leave `.grad` to torch"
            )
            yield observed.failure(label, "side-effect", message, observed.backward_location())
    where = observed.backward_location() if argnums else subject.specification.where
    yield from _reformed(observed, call.given, flags, set(), where)
    yield from written
    if not written:
        yield from _objects_written(observed, call, "a backward", where)
    yield from _objects_changed(observed, call, where)
    for name, what in changes_since(before):
        message = f"a call and its backward change {name}: {what}; take what it needs as an argument"
        yield observed.failure(None, "side-effect", message, where, **{CHANGED: name})
    yield from _settings(observed)


def _objects_written(observed: EffectsRun, call: LiveCall, what: str, where: str) -> Findings:
    """Report tensors within an object among the arguments, such as a module, whose numbers change."""
    for argnum, label in _objects(observed):
        state = observed.sample.objects.state(argnum, call.given)
        written = state.written()
        meant = [name for name, tensor in written.items() if id(tensor) in state.statistics]
        if meant:
            yield Note(
                f"{what} changes {listed(meant)} of `{label}`, which is in training: each call began with a "
                "fresh copy"
            )
        others = [name for name in written if name not in meant]
        if others:
            message = f"{what} wrote into {listed(others)} of `{label}`; work on a copy, `.clone()`"
            yield observed.failure(label, "mutates-input", message, where)


def _objects_changed(observed: EffectsRun, call: LiveCall, where: str) -> Findings:
    """Report flags, and `.grad` of tensors, that change within an object among the arguments."""
    for argnum, label in _objects(observed):
        state = observed.sample.objects.state(argnum, call.given)
        if flags := state.flags():
            message = f"a call or its backward changes {', '.join(flags)} of `{label}`; work on a copy"
            yield observed.failure(label, "side-effect", message, where)
        if names := state.with_gradients():
            message = (
                f"a backward adds to the `.grad` of {listed(names)} of `{label}`, "
                "for which `torch.autograd.grad` did not ask, and which has none where no other input "
                "requires a gradient: pass parameters as arguments of their own, and return their gradients"
            )
            found = observed.failure(label, "side-effect", message, where)
            yield replace(found, given="unpromised")


def _objects(observed: EffectsRun) -> list[tuple[int, str]]:
    return [(argnum, observed.sample.labels[argnum]) for argnum in observed.sample.objects]


def _settings(observed: EffectsRun) -> Findings:
    """Check for global settings that a call and its backward change."""
    subject, sample = observed.subject, observed.sample
    # Suppressed, since exceptions under other settings are not checked.
    with other_settings() as changed, Overlooking():
        observed.call().backward()
    if seeds(subject, sample):
        message = (
            "a call sets torch's random state for the whole process (`torch.manual_seed`): whoever draws "
            "next draws the same numbers each time; draw from a `torch.Generator` of its own"
        )
        yield observed.failure(None, "side-effect", message, subject.specification.where)
    for name, (was, now) in changed.items():
        message = (
            f"a call or its backward sets {name} for the whole process, to {short_repr(now)} where it was "
            f"{short_repr(was)}: take it as an argument, or put it back"
        )
        yield observed.failure(None, "side-effect", message, subject.specification.where, setting=name)


def _untouched(grad: Tensor | None, mark: Tensor | None) -> bool:
    """True if a `.grad` is what was put there before: nothing, or threes."""
    return grad is None if mark is None else grad is mark and bool((mark == 3).all())


EFFECTS = Property(
    NAME,
    "no argument, saved tensor or setting is changed, and no memory is shared",
    run,
    varied=True,
    first=True,
    compares_runs=False,
)
