"""Side effects: no argument, saved tensor or setting is changed, and no memory is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import LiveCall, copies, live_call
from opsmith.checking.exceptions import Overlooking, attribute_exception, by_statement, named_by, refuse_own
from opsmith.checking.numerics.compare import SavedBits, differ_beyond_rounding
from opsmith.checking.properties.behaviour.randomness import seeds
from opsmith.checking.properties.numeric.differentiable import differentiated, rule_location
from opsmith.checking.property import Findings, Note, Property, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.aliasing import shared_memory
from opsmith.checking.side_effects.canaries import GuardedTensor, guarded
from opsmith.checking.side_effects.global_settings import other_settings
from opsmith.checking.side_effects.liveness import attribute_tensors, record_saved_tensors
from opsmith.checking.side_effects.snapshot import changes_since, short_repr, take_snapshot
from opsmith.checking.subject import Subject

NAME = "effects"


def run(subject: Subject) -> Findings:
    """Run forward, backward and second order on guarded tensors, and compare every bit before and after."""
    yield from each_sample(NAME, subject, _sample)


@dataclass(frozen=True)
class EffectsRun:
    """A sample on a device, run for side effects.

    Args:
        subject: What is under check.
        sample: The sample.
        argnums: Arguments that require a gradient.
        device: Where it runs.
        sliced: Whether something lies between the elements of each tensor.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    device: torch.device
    sliced: bool = False

    @property
    def by_backward(self) -> str:
        """`file:line` of what computes the gradients."""
        return rule_location(self.subject, self.sample.names[self.argnums[0]])

    def failure(self, input: str | None, cause: str, message: str, where: str, **evidence: Any) -> Failure:
        """A failure on this sample."""
        shown = {"sample": str(self.sample), **evidence}
        if self.sliced:
            shown["layout"] = "every second element of a buffer"
        return Failure(NAME, input, cause, message, where, shown)


def _sample(subject: Subject, sample: Sample) -> Findings:
    try:
        yield from _parts(subject, sample)
    except Exception as error:
        refuse_own(error)
        if not sample.origin:  # the properties of results report what it raises for derived inputs
            raise


def _parts(subject: Subject, sample: Sample) -> Findings:
    if sample.inexact and not any(sample.flat[argnum].numel() for argnum in sample.inexact):
        return  # there is no memory to write into
    argnums = differentiated(subject, sample).argnums
    for device in subject.devices:
        look = EffectsRun(subject, sample, argnums, device)
        failed = False
        # What lies outside of a call is the same for inputs that are derived.
        for part in (_forward, _watched) if sample.origin else (_forward, _watched, _outside, _in_slices):
            for finding in part(look):
                failed = failed or isinstance(finding, Failure)
                yield finding
            if failed:  # a later part runs the same again, and would report the same
                break


def _in_slices(look: EffectsRun) -> Findings:
    """The same with tensors that are slices: a write through a pointer hits what lies between."""
    if not look.subject.effort.sliced:
        return
    sliced = replace(look, sliced=True)
    try:
        yield from _forward(sliced)
        yield from _watched(sliced)
    except Exception as error:  # whether it takes such tensors is a matter of layouts
        refuse_own(error)
        yield Note(
            f"tensors that are slices of a buffer were left out, which it does not take: {first_line(error)}"
        )


def _forward(look: EffectsRun) -> Findings:
    subject, sample = look.subject, look.sample
    flat, guards = guarded(sample.at(device=look.device), sliced=look.sliced)
    where = subject.runs_at(flat)
    forms = [_form(value) for value in flat]
    with torch.no_grad():
        first = subject.call(sample, flat)
    declared = {at for at, value in enumerate(flat) if any(value is result for result in first)}
    for at in sorted(declared):
        yield Note(f"it writes into `{sample.labels[at]}` and returns it, as it has declared")
    names = dict(enumerate(sample.labels))
    watched = [None if at in declared else guard for at, guard in enumerate(guards)]
    yield from _written(look, names, watched, "a call", "mutates-input", where)
    yield from _reformed(look, flat, forms, declared, where)
    if not look.sliced:
        yield from shared_memory(look.subject, sample, look.argnums, look.device, NAME)


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.requires_grad


def _reformed(
    look: EffectsRun, flat: Sequence[Any], forms: Sequence[Any], declared: set[int], where: str
) -> Findings:
    """Report arguments whose memory, shape or flags were replaced, though nobody wrote into their memory."""
    for at, (value, form) in enumerate(zip(flat, forms, strict=True)):
        if at in declared or form is None or _form(value) == form:
            continue
        label = look.sample.labels[at]
        if value.requires_grad != form[-1]:
            message = f"a call changed `{label}.requires_grad` from {form[-1]} to {value.requires_grad}"
            hint = "take a copy that requires what it should: `x.detach().requires_grad_()`"
            yield look.failure(label, "side-effect", f"{message}; {hint}", where)
        else:
            message = f"a call laid other memory, or another shape, under `{label}` (`.data = `, `resize_`)"
            yield look.failure(label, "mutates-input", f"{message}; work on a new tensor", where)


def _written(
    look: EffectsRun,
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
        yield look.failure(names[at], cause, message, where)


def _watched(look: EffectsRun) -> Findings:
    """Backward, again through the same graph, and second order, each tensor watched."""
    if not look.argnums:
        return
    subject, sample = look.subject, look.sample
    flat, guards = guarded(sample.at(device=look.device), sliced=look.sliced)
    with record_saved_tensors() as saved:
        call = live_call(subject, sample, flat, look.argnums)
    if not call.open:
        return
    labels = _labels(look, call)
    kept = [SavedBits.of(tensor) for tensor in (*saved, *(r.detach() for r in call.results if r is not None))]
    on_context = [(name, SavedBits.of(tensor.detach())) for name, tensor in attribute_tensors(call.results)]
    grads, grad_guards = guarded(call.grads(subject), sliced=look.sliced)
    names = [subject.results(sample)[at].gradient_name() for at in call.open]
    first = copies(call.backward(grads, retain_graph=True))
    where = look.by_backward
    mine = [guard if value is leaf else None for guard, value, leaf in _triples(guards, call)]
    found = [*_written(look, dict(enumerate(sample.labels)), mine, "a backward", "mutates-input", where)]
    found += _written(look, dict(enumerate(names)), grad_guards, "a backward", "mutates-grad-output", where)
    if not found:
        found = [*_kept(look, kept, labels)]
    if not found and not look.sliced:
        found = [*_again(look, call, first, on_context)]
    if not found:
        found = [*_second_order(look, call, kept, labels, guards)]
    yield from found


def _triples(guards: Sequence[GuardedTensor | None], call: LiveCall) -> Any:
    return zip(guards, call.given, call.leaves, strict=True)


def _labels(look: EffectsRun, call: LiveCall) -> dict[int, str]:
    """Names of arguments and results by the address of their memory, for messages."""
    labels: dict[int, str] = {}
    for result, described in zip(call.results, look.subject.results(look.sample), strict=True):
        if isinstance(result, Tensor):
            labels[result.untyped_storage().data_ptr()] = f"the result `{described.name}`"
    for value, label in zip(call.given, look.sample.labels, strict=True):
        if isinstance(value, Tensor):
            labels[value.untyped_storage().data_ptr()] = f"`{label}`"
    return labels


def _kept(
    look: EffectsRun, kept: Sequence[SavedBits], labels: dict[int, str], what: str = "a backward"
) -> Findings:
    for each in kept:
        words = each.written()
        if words is None:
            continue
        shape = list(each.tensor.shape)
        who = labels.get(each.tensor.untyped_storage().data_ptr(), f"a tensor of the shape {shape}")
        message = (
            f"{what} wrote into {who}, which is kept for it or was returned: {words}; another backward "
            "through the same graph goes wrong. Work on a copy, `.clone()`"
        )
        yield look.failure(None, "mutates-saved", message, look.by_backward)
        return


def _again(
    look: EffectsRun,
    call: LiveCall,
    first: Sequence[Tensor | None],
    on_context: Sequence[tuple[str, SavedBits]],
) -> Findings:
    """A second backward through the same graph, with the same grad_outputs."""
    subject, sample = look.subject, look.sample
    try:
        second = copies(call.backward(call.grads(subject), retain_graph=True))
    except Exception as error:
        refuse_own(error)
        if _refused(error, lambda: call.backward(call.grads(subject), retain_graph=True)):
            yield Note(f"a second backward through the same graph is refused: {first_line(error)}")
            return
        message = (
            f"a second backward through the same graph (`retain_graph=True`) raises {type(error).__name__}: "
            f"{first_line(error)}; the first one has removed or changed what was kept. Leave it as it is"
        )
        yield look.failure(None, "mutates-saved", message, look.by_backward)
        return
    fresh = live_call(subject, sample, sample.at(device=look.device), look.argnums)
    anew = [copies(fresh.backward(fresh.grads(subject), retain_graph=True)) for _ in range(2)]
    for argnum, one, again, *others in zip(look.argnums, first, second, *anew, strict=True):
        # Of a new call the first must be the first again, and the second the second: else it is no matter of
        # the graph, but of what differs from run to run.
        if (
            not differ_beyond_rounding(one, again)
            or differ_beyond_rounding(one, others[0])
            or differ_beyond_rounding(again, others[1])
        ):
            continue
        label = sample.labels[argnum]
        changed = [f"`ctx.{name}`" for name, kept in on_context if kept.written() is not None]
        by = f": the first one wrote into {', '.join(changed)}" if changed else ""
        message = (
            f"a second backward through the same graph gives another gradient of `{label}` than the first, "
            f"and so it does in a new call{by}. Leave what is kept as it is"
        )
        yield look.failure(label, "mutates-saved", message, rule_location(subject, sample.names[argnum]))


def _refused(error: Exception, again: Callable[[], Any]) -> bool:
    """True if a statement raises an exception, and not an operation that failed.

    What torch raises by a statement is a refusal only where the operator has not handed it something wrong,
    such as the None that it has put in the place of what was kept.
    """
    return (
        by_statement(error) and named_by(error).cause != "mutates-saved" and attribute_exception(error, again)
    )


def _second_order(
    look: EffectsRun,
    call: LiveCall,
    kept: Sequence[SavedBits],
    labels: dict[int, str],
    guards: Sequence[GuardedTensor | None],
) -> Findings:
    """Run a backward of the backward; the property `second_order` compares its numbers."""
    grads = [grad.requires_grad_() for grad in call.grads(look.subject)]
    try:
        found = call.backward(grads, create_graph=True)
        roots = [each for each in found if each is not None and each.requires_grad]
        if roots:
            leaves = [*grads, *(call.leaves[argnum] for argnum in look.argnums)]
            outer = [torch.ones_like(each) for each in roots]
            torch.autograd.grad(roots, leaves, outer, allow_unused=True)
    except Exception as error:
        refuse_own(error)
        yield Note(f"second order was left out: {first_line(error)}")
        return
    what = "a backward of the backward"
    names = dict(enumerate(look.sample.labels))
    mine = [guard if value is leaf else None for guard, value, leaf in _triples(guards, call)]
    found_there = [*_written(look, names, mine, what, "mutates-input", look.by_backward)]
    yield from found_there or _kept(look, kept, labels, what)


def _outside(look: EffectsRun) -> Findings:
    """Look for changes outside of a call, without hooks on saved tensors: torch watches these itself."""
    subject, sample = look.subject, look.sample
    before = take_snapshot(subject)
    call = live_call(subject, sample, sample.at(device=look.device), look.argnums)
    argnums = look.argnums if call.open else ()
    marks = {argnum: torch.full_like(call.leaves[argnum], 3) for argnum in argnums[1:] or argnums}
    for argnum, mark in marks.items():
        call.leaves[argnum].grad = mark
    flags = [_form(value) for value in call.given]
    if argnums:
        call.backward(call.grads(subject), retain_graph=True)
        with Overlooking():  # what it refuses is reported already
            call.backward(call.grads(subject))
    for argnum in argnums:
        grad: Tensor | None = call.leaves[argnum].grad
        if not _untouched(grad, marks.get(argnum)):
            label = sample.labels[argnum]
            message = (
                f"a backward wrote into `{label}.grad`, though `torch.autograd.grad` asked it to return the "
                "gradient: return it, and leave `.grad` to torch"
            )
            yield look.failure(label, "side-effect", message, look.by_backward)
    where = look.by_backward if argnums else subject.specification.where
    yield from _reformed(look, call.given, flags, set(), where)
    for name, what in changes_since(before):
        message = f"a call and its backward change {name}: {what}; take what it needs as an argument"
        yield look.failure(None, "side-effect", message, where, changed=name)
    yield from _settings(look)


def _settings(look: EffectsRun) -> Findings:
    """Look for settings of the process that a call and its backward change."""
    subject, sample = look.subject, look.sample
    # Suppressed, since how it does under other settings is not looked at.
    with other_settings() as changed, Overlooking():
        call = live_call(subject, sample, sample.at(device=look.device), look.argnums)
        if call.open:
            call.backward(call.grads(subject))
    if seeds(subject, sample):
        message = (
            "a call sets torch's random state for the whole process (`torch.manual_seed`): whoever draws "
            "next draws the same numbers each time; draw from a `torch.Generator` of its own"
        )
        yield look.failure(None, "side-effect", message, subject.specification.where)
    for name, (was, now) in changed.items():
        message = (
            f"a call or its backward sets {name} for the whole process, to {short_repr(now)} where it was "
            f"{short_repr(was)}: take it as an argument, or put it back"
        )
        yield look.failure(None, "side-effect", message, subject.specification.where, changed=name)


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
