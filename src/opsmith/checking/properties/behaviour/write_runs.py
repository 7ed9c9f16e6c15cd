"""In-place calls: their arguments, laid out and guarded, and the writes into them and around them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Raised, attempt, error_words
from opsmith.checking.numerics.autodiff import differentiate, has_gradient
from opsmith.checking.properties.behaviour.layouts import LayoutCase, is_stated
from opsmith.checking.property import Finding, Findings, Note, raised
from opsmith.checking.report import Failure
from opsmith.checking.run import copies
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.memory_layouts import CHUNK, Layout, layouts_for
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.canaries import GuardedTensor, form_of
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.functional_form import all_results
from opsmith.core.operator import Operator
from opsmith.judging.attribution import calls_operator
from opsmith.judging.compare import (
    Difference,
    SavedBits,
    as_bytes,
    describe_write,
    exact_difference,
    is_close,
    is_same,
    share_of_largest,
)
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import SAVED_WRITTEN, has_message

Writer = Operator[..., Any] | LibraryWrite

LAYOUT = "wrong for"
"""Evidence of a layout in which the call is wrong."""


@dataclass(frozen=True)
class Mode:
    """A mode of torch in which a call writes.

    Args:
        name: In words.
        entered: Context manager that enters it.
    """

    name: str
    entered: Callable[[], AbstractContextManager[Any]]


NO_GRAD = Mode("under `torch.no_grad()`", torch.no_grad)
GRAD_MODE = Mode("in grad mode, without an input that requires a gradient", torch.enable_grad)
INFERENCE = Mode("under `torch.inference_mode()`", torch.inference_mode)
RECORDED = Mode("where gradients are recorded", torch.enable_grad)
"""Mode in which autograd records the call, which is also differentiated."""


@dataclass(frozen=True)
class Place:
    """A place in memory for the arguments that a call writes into.

    Unless the place has no name, each tensor is inside of a larger tensor, at an offset, between canaries.

    Args:
        name: Name in words; empty for contiguous memory of their own.
        layouts: Layout of some arguments, by their positions.
        interleaved: Positions of two tensors whose elements alternate in memory, as those of `kv.unbind(1)`.
    """

    name: str = ""
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    interleaved: tuple[int, int] | None = None


PLAIN = Place()
OFFSET = Place("at an offset inside of a larger tensor")


def places(flat: Sequence[Any], written: Sequence[int]) -> Iterator[Place]:
    """Yield places of the written arguments: each alone in each layout, two interleaved, all together."""
    layouts = {argnum: writable_layouts(flat[argnum]) for argnum in written}
    turns = [
        Place(layout.name, {argnum: layout})
        for turn in zip_longest(*layouts.values())
        for argnum, layout in zip(layouts, turn, strict=True)
        if layout is not None
    ]
    first = sum(bool(found) for found in layouts.values())
    yield from turns[:first]
    for argnum in written:
        partner = _partner(flat, argnum)
        if partner is not None:
            yield Place("interleaved", interleaved=(argnum, partner))
    yield from turns[first:]
    if len(written) > 1:
        together = {argnum: found[0] for argnum, found in layouts.items() if found}
        yield Place("in an odd layout, together with all other written arguments", together)


def writable_layouts(x: Tensor) -> list[Layout]:
    """Return the layouts of a tensor in which each element has its own memory, with its value unchanged."""
    found = (layout for layout in layouts_for(x) if not layout.repeats)
    return [layout for layout in found if not (layout.of(x).is_neg() or layout.of(x).is_conj())]


def _partner(flat: Sequence[Any], argnum: int) -> int | None:
    """Return the position of another tensor of the same form; None if there is none."""
    shape, dtype = flat[argnum].shape, flat[argnum].dtype
    tensors = ((at, value) for at, value in enumerate(flat) if at != argnum and isinstance(value, Tensor))
    alike = (at for at, value in tensors if value.numel() and (value.shape, value.dtype) == (shape, dtype))
    return next(alike, None)


@dataclass(frozen=True)
class WriteRun:
    """An in-place call, or its exception, with its effects on the arguments, by position.

    Args:
        given: The arguments, after the call.
        results: The new values and the visible results.
        outputs: Copies of `results`, then the gradient of each differentiated input.
        changed: Tensors whose bits changed.
        rose: Tensors whose version rose.
        moved: Tensors whose memory is not the memory before the call.
        unnoticed: Tensors that were written although their version did not rise, or that a node saved before
            the call and whose write its backward missed.
        guards: Guards of the memory around some arguments, by their labels.
        error: The exception.
        in_backward: True if the call succeeded and its backward raised.
    """

    given: list[Any]
    results: Sequence[Any] = ()
    outputs: tuple[Tensor | None, ...] = ()
    changed: frozenset[int] = frozenset()
    rose: frozenset[int] = frozenset()
    moved: tuple[int, ...] = ()
    unnoticed: tuple[int, ...] = ()
    guards: Mapping[str, GuardedTensor] = field(default_factory=dict)
    error: Exception | None = None
    in_backward: bool = False


def written_by(writes: Subject, sample: Sample, given: list[Any], written: Sequence[int] = ()) -> WriteRun:
    """Call in place, and compare the arguments with their state before; an exception is returned, not raised.

    Args:
        writes: A subject whose calls write in place.
        sample: The sample.
        given: Its arguments, into which the call writes.
        written: Positions of the arguments that are declared to be written.
    """
    tensors = {at: value for at, value in enumerate(given) if isinstance(value, Tensor)}
    before = {at: as_bytes(value) for at, value in tensors.items()}
    forms = {at: form_of(value) for at, value in tensors.items()}
    versions = {at: capabilities.version(value) for at, value in tensors.items()}
    made = attempt(partial(writes.call, sample, given))
    results, error = ((), made.error) if isinstance(made, Raised) else (made, None)
    changed = frozenset(at for at, x in tensors.items() if not torch.equal(before[at], as_bytes(x)))
    rose = frozenset(at for at, x in tensors.items() if versions[at] != capabilities.version(x))
    return WriteRun(
        given,
        results,
        copies(results),
        changed,
        rose,
        tuple(at for at in written if form_of(given[at]) != forms[at]),
        tuple(at for at in written if at in changed - rose and versions[at] is not None),
        error=error,
    )


def reference_write(subject: Subject, sample: Sample, flat: Sequence[Any]) -> WriteRun | None:
    """Let the reference write into copies of some arguments; None if it raises."""
    assert subject.in_place is not None
    with torch.no_grad(), without_warnings():
        run = written_by(in_place(subject, subject.in_place.reference), sample, replicas(flat))
    return run if run.error is None else None


def in_place(subject: Subject, call: Callable[..., Any]) -> Subject:
    """Return the subject whose calls write into their arguments, and return the functional form's results."""
    assert subject.in_place is not None
    schema, origin = subject.in_place.specification.schema, subject.in_place.specification.origin

    @calls_operator
    def written(*args: Any, **kwargs: Any) -> Any:
        returned = call(*args, **kwargs)
        if origin.outputs is not None and isinstance(call, Operator):
            return returned  # in the structure of the class, with the written arguments
        return origin.structured(all_results(schema, schema.call_values(args, kwargs), returned))

    return replace(subject, apply=written)


@dataclass(frozen=True)
class WriteCase(LayoutCase):
    """A sample in a dtype on a device, called in place and compared with its functional form.

    Args:
        operator: The operator that writes in place.
        found: Dict of the failures so far, by input and cause.
        referred: True to call the operator's reference instead.
    """

    operator: Writer = field(kw_only=True)
    found: dict[tuple[str | None, str], list[Failure]] = field(default_factory=dict)
    referred: bool = False

    @cached_property
    def writes(self) -> Subject:
        """The subject whose calls write in place; one object, since it keeps known values."""
        return in_place(self.subject, self.operator.reference if self.referred else self.operator)

    @cached_property
    def written(self) -> list[int]:
        """Positions of the tensors that are declared to be written."""
        positions = self.sample.flattening.positions(self.operator.specification.schema.written)
        return [argnum for argnum in positions if isinstance(self.given[argnum], Tensor)]

    def write(self, place: Place, mode: Mode, flat: Sequence[Any] | None = None) -> WriteRun:
        """One in-place call, on given arguments, or on fresh arguments laid out in a place."""
        with without_warnings(), mode.entered():
            leaves, given, guards = self._laid(place, mode) if flat is None else ([*flat], [*flat], {})
            kept = {at: given[at] * given[at] for at in self.written if has_gradient(given[at])}
            run = replace(written_by(self.writes, self.sample, given, self.written), guards=guards)
            if run.error is not None or mode is not RECORDED:
                return run
            missed = (at for at in kept if at in run.changed and _misses(kept[at], leaves[at]))
            run = replace(run, unnoticed=(*run.unnoticed, *missed))
            inputs = [leaves[argnum] for argnum in self.argnums]
            gradients = attempt(partial(differentiate, run.results, inputs, replicas(self.grads)))
            if isinstance(gradients, Raised):
                return replace(run, error=gradients.error, in_backward=True)
            return replace(run, outputs=(*run.outputs, *copies(gradients)))

    def _laid(self, place: Place, mode: Mode) -> tuple[list[Any], list[Any], dict[str, GuardedTensor]]:
        """The leaves, the arguments made from them, and the guards."""
        argnums, labels = self.argnums if mode is RECORDED else (), self.sample.labels
        leaves = [
            value.detach().requires_grad_(argnum in argnums) if is_inexact(value) else value
            for argnum, value in enumerate(replicas(self.given))
        ]
        given = [*leaves]
        for argnum in self.written:
            layout = place.layouts.get(argnum)
            given[argnum] = leaves[argnum].clone() if layout is None else layout.of(leaves[argnum])
        guards: dict[str, GuardedTensor] = {}
        if place.name and mode is not RECORDED:
            for argnum, value in enumerate(given):
                apart = argnum not in (place.interleaved or ())
                if apart and isinstance(value, Tensor):
                    guards[labels[argnum]] = GuardedTensor.of(value)
                    given[argnum] = guards[labels[argnum]].tensor
        if place.interleaved is not None:
            one, other = place.interleaved
            dim = min(1, given[one].dim())
            guard = guards[labels[one]] = GuardedTensor.of(torch.stack([given[one], given[other]], dim))
            given[one], given[other] = guard.tensor.unbind(dim)
        return leaves, given, guards

    def untouched(self) -> dict[int, Tensor]:
        """Mark the elements of written arguments that the reference does not touch, whose nan keep their
        bits.

        Integers keep their bits through arithmetic, and need no mark.
        """
        flat = [marked(value) if at in self.written else value for at, value in enumerate(self.given)]
        run = reference_write(self.subject, self.sample, flat)
        inexact = [at for at in self.written if is_inexact(flat[at])]
        return {} if run is None else {at: _same_bits(run.given[at], flat[at]) for at in inexact}

    @cached_property
    def where(self) -> str:
        """`file:line` of the code that writes."""
        kernel = self.kernel(self.given)
        return kernel.where if kernel else self.operator.specification.where

    @cached_property
    def labels(self) -> list[str]:
        """The labels of the new values, then the names of the further results."""
        positions = self.sample.flattening.positions(self.operator.specification.schema.written)
        results = self.subject.results(self.sample)[len(positions) :]
        return [*(self.sample.labels[argnum] for argnum in positions), *(each.name for each in results)]

    def check(self) -> Findings:
        """Write in contiguous memory, twice, then in each mode and layout; stop at a general fault."""
        alone = self.write(PLAIN, NO_GRAD)
        if alone.error is not None:
            yield raised(self.name, self.subject, alone.error, str(self.sample))
            return
        if not self._holds(self._elements(alone), PLAIN, NO_GRAD):
            return
        if not self._holds(self._faults(alone, PLAIN, NO_GRAD), PLAIN, NO_GRAD):
            return
        self._holds(self._again(alone), PLAIN, NO_GRAD)
        recorded = False
        for mode in (GRAD_MODE, INFERENCE, *([RECORDED] if self.argnums else [])):
            if mode is GRAD_MODE:  # a kernel in Python runs in grad mode only in the first call of a process
                self.operator.forget_calls()
            recorded = (yield from self._tried(PLAIN, mode)) and mode is RECORDED
        if not self.inputs_too:
            return  # it draws random numbers, whose order depends on the layout
        for place in [OFFSET, *places(self.given, self.written)][: self.subject.effort.layouts]:
            if place.interleaved is not None and self._label(place) in {input for input, _ in self.found}:
                continue  # a write outside of its elements hits another argument's elements
            fine = yield from self._tried(place, NO_GRAD)
            # torch refuses to write into chunks when it records, since each is one of several views.
            chunked = CHUNK in {each.name for each in place.layouts.values()}
            if fine and recorded and place.layouts and not chunked:
                yield from self._tried(place, RECORDED)

    def _tried(self, place: Place, mode: Mode) -> Generator[Finding, None, bool]:
        """Write in a place and a mode; return True if there is no fault."""
        run = self.write(place, mode)
        if run.error is None:
            return self._holds(self._faults(run, place, mode), place, mode)
        label, text = self._label(place), error_words(run.error)
        if replace(self, referred=True).write(place, mode).error is not None:
            where = f", `{label}` {place.name}," if place.name else ""
            yield Note(f"a call {mode.name}{where} was left out, because the reference raises, too: {text}")
        elif not place.name:
            yield raised(self.name, self.subject, run.error, f"{self.sample}, {mode.name}")
        elif is_stated(run.error) and not run.in_backward:
            yield Note(f"the operator refuses `{label}` ({place.name}): {text}")
        else:
            wrong = self._wrong(label, "layout", f"{self._right_elsewhere(f'`{label}`', place)}: {text}")
            self._holds([wrong], place, mode)
        return False

    def _holds(self, failures: Iterable[Failure], place: Place, mode: Mode) -> bool:
        """Note each fault of a call; return True if there is none."""
        fine = True
        shown = {"sample": ", ".join(filter(None, (str(self), mode.name, place.name)))}
        shown |= {LAYOUT: place.name} if place.name else {}
        for each in failures:
            fine, failure = False, replace(each, evidence={**each.evidence, **shown})
            self.found.setdefault((failure.input, failure.cause), []).append(failure)
        return fine

    def _wrong(
        self, input: str, cause: str, words: str, difference: Difference | None = None, where: str = ""
    ) -> Failure:
        shown = {} if difference is None else difference.evidence()
        return self.failure(input, cause, words, where or self.where, shown)

    def _faults(self, run: WriteRun, place: Place, mode: Mode) -> Iterator[Failure]:
        """Yield all faults of a call."""
        for argnum in run.moved:
            label = self.sample.labels[argnum]
            words = (
                f"a call gives `{label}` other memory or another shape (`.data = `, `resize_`), and "
                "does not write into its own memory, which other tensors may share: write into that "
                "memory, for example by `.copy_(...)`"
            )
            yield self._wrong(label, "not-written", words)
        if not run.moved:
            yield from self._values(run, place, mode)
            yield from self._beside(run, place)

    def _values(self, run: WriteRun, place: Place, mode: Mode) -> Iterator[Failure]:
        """Compare new values, results and gradients with those of the functional form."""
        wrong = False
        for position, output in enumerate(run.outputs):
            at = position - len(self.labels)
            if wrong and at >= 0:
                return  # the gradient of a wrong result would report the same fault
            fault = self.twin.fault(position, output)
            if fault is None:
                continue
            wrong = True
            if at < 0:
                label, cause, where = self.labels[position], "kernel-mismatch", self.where
                about = f"`{label}`"
            else:
                label, where = self.sample.labels[self.argnums[at]], self.backward_location(at)
                cause = "unknown" if output is not None and bool(output.any()) else "missing-gradient"
                about = f"the gradient of `{label}`"
            words = f"{about} after a call {mode.name} differs from the functional form: {fault}"
            if place.name:
                cause = "layout"
                words = (
                    f"{self._right_elsewhere(about, place)}: {fault}; use the strides and the offset of "
                    "the tensor"
                )
            yield self._wrong(label, cause, words, fault, where)

    def _beside(self, run: WriteRun, place: Place) -> Iterator[Failure]:
        """Yield writes outside of the elements that a call may write, and writes unknown to autograd."""
        labels = self.sample.labels
        # Code that ignores strides writes outside of its elements.
        faulty = {input for input, cause in self.found if cause == "layout"}
        outside: list[tuple[str, str, str | None]] = []
        for argnum, value in enumerate(run.given):
            if not isinstance(value, Tensor) or argnum in self.written:
                continue
            label, words = labels[argnum], SavedBits(value, self.given[argnum]).written()
            if argnum in (place.interleaved or ()):
                between = f"`{label}`, whose elements alternate with its elements in memory"
                outside.append((self._label(place), between, words))
            elif words is not None:
                hint = f"name it in `mutates=`, or work on a copy, `{self.sample.names[argnum]}.clone()`"
                text = f"a call wrote into `{label}`, and does not declare the write: {words}; {hint}"
                yield self._wrong(label, "mutates-input", text)
        outside += [
            (label, "memory of other tensors", guard.outside()) for label, guard in run.guards.items()
        ]
        for label, whose, words in outside:
            if words is not None and label not in faulty:
                text = (
                    f"a call writes outside of `{label}`, into {whose}: {words}; keep the indices "
                    "inside of the tensor's sizes and strides"
                )
                yield self._wrong(label, "out-of-bounds", text)
        for argnum in dict.fromkeys(run.unnoticed):
            text = (
                f"a call writes into `{labels[argnum]}` and does not raise its version counter: a "
                "backward that saved the old value silently uses the new value. Write by torch's "
                "in-place operations, not through `.data`, `.numpy()` or a pointer"
            )
            yield self._wrong(labels[argnum], "version", text)

    def _elements(self, alone: WriteRun) -> Iterator[Failure]:
        """Compare the written elements with the elements that the reference writes, bit by bit."""
        reference = None if self.subject.draws else reference_write(self.subject, self.sample, self.given)
        if reference is None:
            return
        known = self.untouched()
        for argnum in self.written:
            before, right, got = self.given[argnum], reference.given[argnum], alone.given[argnum]
            label = self.sample.labels[argnum]
            if got.shape != before.shape:
                sizes = f"{list(before.shape)} to {list(got.shape)}"
                words = f"a call changes the sizes of `{label}` from {sizes}: write only into its elements"
                yield self._wrong(label, "shape", words)
                continue
            if not before.numel() or right.shape != got.shape or right.dtype != got.dtype:
                continue
            written = compare_writes(before, right, got, known.get(argnum))
            count = int(written.left.sum())
            if count:
                at = f", the first at {written.left.nonzero()[0].tolist()}" if got.dim() else ""
                words = (
                    f"a call writes nothing into `{label}`, but the reference writes into it: write "
                    f"into the memory of `{label}`, for example by `.copy_(...)`"
                    if count == written.changed
                    else f"a call does not write {count} of the {written.changed} elements of `{label}` "
                    f"that the reference writes{at}: write all of them"
                )
                yield self._wrong(label, "not-written", words)
            if bool(written.more.any()):
                more = exact_difference(torch.where(written.more, got, before), before)
                words = f"a call writes into elements of `{label}` that the reference does not change: "
                yield self._wrong(label, "overwritten", words + describe_write(more))

    def _again(self, alone: WriteRun) -> Iterator[Failure]:
        """Call again on the written values, and compare with the functional form of these values."""
        values = [*self.contiguous]
        for argnum in self.written:
            values[argnum] = alone.given[argnum].clone()
        run = self.write(PLAIN, NO_GRAD, alone.given)
        twin = self.right(values)
        if twin.error is not None or run.error is not None:
            return  # it may not take the new values
        for label, (position, output) in zip(self.labels, enumerate(run.outputs), strict=True):
            fault = twin.fault(position, output)
            if fault is not None:
                words = (
                    f"a second call, on the values that the first call wrote, gives a `{label}` that "
                    f"differs from the functional form: {fault}; keep nothing between calls"
                )
                yield self._wrong(label, "stale-state", words, fault)

    def _label(self, place: Place) -> str:
        first = next(iter(place.layouts), place.interleaved[0] if place.interleaved else self.written[0])
        return self.sample.labels[first]

    def _right_elsewhere(self, about: str, place: Place) -> str:
        beside = ""
        if place.interleaved is not None:
            beside = f" with `{self.sample.labels[place.interleaved[1]]}` in memory"
        label = self._label(place)
        return (
            f"{about} is right where `{label}` is contiguous, and wrong where `{label}` is "
            f"{place.name}{beside}"
        )


def _misses(kept: Tensor, leaf: Tensor) -> bool:
    """Return True if a backward that needs the value before a write runs without an error."""
    try:
        torch.autograd.grad(kept, leaf, torch.ones_like(kept))
    except RuntimeError as error:
        if not has_message(error, SAVED_WRITTEN):
            raise
        return False
    return True


@dataclass(frozen=True)
class Written:
    """Elements of an argument that only the call, or only the reference, wrote, according to their bits.

    Args:
        left: Mask of the elements that the call did not change, but the reference writes.
        more: Mask of the elements that the call wrote, but the reference does not change.
        changed: Number of the elements that the reference changes.
    """

    left: Tensor
    more: Tensor
    changed: int


def compare_writes(before: Tensor, right: Tensor, got: Tensor, untouched: Tensor | None) -> Written:
    """Compare the elements that a call wrote with the elements that the reference writes.

    An element that the reference computes may equal its old value, within rounding. An element that the
    reference does not touch keeps each bit.

    Args:
        before: The contiguous argument before the call.
        right: The argument after the reference.
        got: The argument after the call.
        untouched: Mask of the elements that the reference is known not to touch.
    """
    same = _same_bits(got, before)
    moved, kept = ~near(right, before), _same_bits(right, before)
    certain = ~near(got, before)
    if untouched is not None:
        certain |= untouched
    return Written(moved & same, kept & ~same & certain, int(moved.sum()))


def near(one: Tensor, other: Tensor) -> Tensor:
    """Mark the elements that are equal except for rounding."""
    if not is_inexact(other):
        return is_same(one, other)
    share = torch.finfo(other.dtype).eps ** 0.5
    return is_close(one, other, share_of_largest(share, other[one.isfinite()], other))


def _same_bits(one: Tensor, other: Tensor) -> Tensor:
    if not one.numel():
        return torch.ones_like(one, dtype=torch.bool)
    pairs = [as_bytes(each).view(one.numel(), -1) for each in (one, other)]
    return (pairs[0] == pairs[1]).all(1).view(one.shape)


SIGNALLING = {
    torch.float64: (torch.int64, 0x7FF0000000000001),
    torch.float32: (torch.int32, 0x7F800001),
    torch.bfloat16: (torch.int16, 0x7F81),
    torch.float16: (torch.int16, 0x7C01),
}
"""Bits of a signalling nan, which arithmetic changes and a copy does not (IEEE 754, 6.2)."""


def marked(value: Tensor) -> Tensor:
    """A contiguous tensor of signalling nan with the form of another; integers are copied unchanged.

    Example:
        >>> bool(marked(torch.ones(2)).isnan().all())
        True
    """
    real = torch.view_as_real(value) if value.is_complex() else value
    if real.dtype not in SIGNALLING:
        return value.clone()
    whole, bits = SIGNALLING[real.dtype]
    made = torch.full(real.shape, bits, dtype=whole, device=value.device).view(real.dtype)
    return torch.view_as_complex(made) if value.is_complex() else made
