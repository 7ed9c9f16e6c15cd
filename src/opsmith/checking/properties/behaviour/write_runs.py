"""Runs of a call in place: its arguments laid out and guarded, and what was written into and beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Raised, attempt
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.properties.behaviour.layouts import LayoutCase
from opsmith.checking.run import copies
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.memory_layouts import Layout, layouts_for
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.canaries import GuardedTensor, form_of
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.functional_form import all_results
from opsmith.core.operator import Operator
from opsmith.judging.attribution import calls_operator
from opsmith.judging.compare import as_bytes, is_close, is_same, share_of_largest
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import SAVED_WRITTEN, has_message

Writer = Operator[..., Any] | LibraryWrite


@dataclass(frozen=True)
class Mode:
    """A mode of torch in which a call writes.

    Args:
        name: In words.
        entered: Enters it.
        recorded: True if autograd records the call, so that it is differentiated, too.
    """

    name: str
    entered: Callable[[], AbstractContextManager[Any]]
    recorded: bool = False


NO_GRAD = Mode("under `torch.no_grad()`", torch.no_grad)
GRAD_MODE = Mode("in grad mode without a gradient", torch.enable_grad)
INFERENCE = Mode("under `torch.inference_mode()`", torch.inference_mode)
RECORDED = Mode("where gradients are recorded", torch.enable_grad, recorded=True)


@dataclass(frozen=True)
class Place:
    """A place in memory for the arguments that are written.

    Each tensor lies inside of a larger one, at an offset, with canaries around it, unless it has no name.

    Args:
        name: In words; empty for contiguous memory of their own.
        layouts: Layout of some arguments, by their positions.
        interleaved: Positions of two tensors whose elements alternate in memory, as those of `kv.unbind(1)`.
    """

    name: str = ""
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    interleaved: tuple[int, int] | None = None


PLAIN = Place()
OFFSET = Place("at an offset inside of a larger tensor")


def places(flat: Sequence[Any], written: Sequence[int]) -> Iterator[Place]:
    """Yield the places of the written arguments: each alone in each layout, two interleaved, all together."""
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
        yield Place("in an odd layout, and so all others that are written", together)


def writable_layouts(x: Tensor) -> list[Layout]:
    """Return the layouts of a tensor in which each element has memory of its own, which holds its value."""
    found = (layout for layout in layouts_for(x) if not layout.repeats)
    return [layout for layout in found if not (layout.of(x).is_neg() or layout.of(x).is_conj())]


def _partner(flat: Sequence[Any], argnum: int) -> int | None:
    """Return the position of another tensor of the same form; None where there is none."""
    shape, dtype = flat[argnum].shape, flat[argnum].dtype
    tensors = ((at, value) for at, value in enumerate(flat) if at != argnum and isinstance(value, Tensor))
    alike = (at for at, value in tensors if value.numel() and (value.shape, value.dtype) == (shape, dtype))
    return next(alike, None)


@dataclass(frozen=True)
class WriteRun:
    """A call in place, or its exception, with what it did to its arguments, by their positions.

    Args:
        given: The arguments, after the call.
        results: The new values and the visible results.
        outputs: Copies of these, then the gradient of each differentiated input.
        changed: Tensors with other bits than before.
        rose: Tensors whose version rose.
        moved: Tensors that lie in other memory than before.
        unnoticed: Tensors that were written, and whose version did not rise, or that a node saved before, and
            whose write its backward missed.
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
    """Call in place, and compare the arguments with those before; an exception is returned, not raised.

    Args:
        writes: A subject whose calls write in place.
        sample: The sample.
        given: Its arguments, which are written into.
        written: Positions of those that are declared.
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
    """Let the reference write into copies of some arguments; None where it raises."""
    assert subject.in_place is not None
    with torch.no_grad(), without_warnings():
        run = written_by(in_place(subject, subject.in_place.reference), sample, replicas(flat))
    return run if run.error is None else None


def in_place(subject: Subject, call: Callable[..., Any]) -> Subject:
    """Return the subject whose calls write into their arguments, and return what the functional form does."""
    assert subject.in_place is not None
    schema, origin = subject.in_place.specification.schema, subject.in_place.specification.origin

    @calls_operator
    def written(*args: Any, **kwargs: Any) -> Any:
        returned = call(*args, **kwargs)
        if origin.outputs is not None and isinstance(call, Operator):
            return returned  # in the structure of the class, and with what it writes
        return origin.structured(all_results(schema, schema.call_values(args, kwargs), returned))

    return replace(subject, apply=written)


@dataclass(frozen=True)
class WriteCase(LayoutCase):
    """A sample in a dtype on a device, written in place, beside its functional form on contiguous memory.

    Args:
        operator: The operator that writes in place.
        referred: True to call its reference instead.
    """

    operator: Writer = field(kw_only=True)
    referred: bool = False

    @cached_property
    def writes(self) -> Subject:
        """The subject whose calls write in place; the same for all, since what is known of it is kept."""
        return in_place(self.subject, self.operator.reference if self.referred else self.operator)

    @cached_property
    def written(self) -> list[int]:
        """Positions of the tensors that are declared to be written."""
        positions = self.sample.flattening.positions(self.operator.specification.schema.written)
        return [argnum for argnum in positions if isinstance(self.given[argnum], Tensor)]

    def write(self, place: Place, mode: Mode, flat: Sequence[Any] | None = None) -> WriteRun:
        """One call in place, of some arguments as they are, or of fresh ones that are laid out."""
        with without_warnings(), mode.entered():
            leaves, given, guards = self._laid(place, mode) if flat is None else ([*flat], [*flat], {})
            kept = {at: given[at] * given[at] for at in self.written if mode.recorded and _follows(given[at])}
            run = replace(written_by(self.writes, self.sample, given, self.written), guards=guards)
            if run.error is not None or not mode.recorded:
                return run
            missed = (at for at in kept if at in run.changed and _misses(kept[at], leaves[at]))
            run = replace(run, unnoticed=(*run.unnoticed, *missed))
            inputs = [leaves[argnum] for argnum in self.argnums]
            gradients = attempt(partial(differentiate, run.results, inputs, replicas(self.grads)))
            if isinstance(gradients, Raised):
                return replace(run, error=gradients.error, in_backward=True)
            return replace(run, outputs=(*run.outputs, *copies(gradients)))

    def _laid(self, place: Place, mode: Mode) -> tuple[list[Any], list[Any], dict[str, GuardedTensor]]:
        """The leaves, the arguments that are made of them, and the guards."""
        argnums, labels = self.argnums if mode.recorded else (), self.sample.labels
        leaves = [
            value.detach().requires_grad_(argnum in argnums) if is_inexact(value) else value
            for argnum, value in enumerate(replicas(self.given))
        ]
        given = [*leaves]
        for argnum in self.written:
            layout = place.layouts.get(argnum)
            given[argnum] = leaves[argnum].clone() if layout is None else layout.of(leaves[argnum])
        guards: dict[str, GuardedTensor] = {}
        if place.name and not mode.recorded:
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
        """Mark the elements of written arguments that the reference does not touch: it keeps a nan's bits.

        Whole numbers keep their bits through arithmetic, and need no mark.
        """
        flat = [marked(value) if at in self.written else value for at, value in enumerate(self.given)]
        run = reference_write(self.subject, self.sample, flat)
        inexact = [at for at in self.written if is_inexact(flat[at])]
        return {} if run is None else {at: _same_bits(run.given[at], flat[at]) for at in inexact}


def _follows(value: Tensor) -> bool:
    return is_inexact(value) and value.requires_grad


def _misses(kept: Tensor, leaf: Tensor) -> bool:
    """Return True if a backward that needs a value from before a write is computed all the same."""
    try:
        torch.autograd.grad(kept, leaf, torch.ones_like(kept))
    except RuntimeError as error:
        if not has_message(error, SAVED_WRITTEN):
            raise
        return False
    return True


@dataclass(frozen=True)
class Written:
    """Elements of an argument that a call wrote otherwise than the reference, told by their bits.

    Args:
        left: Mask of the elements that it left as they were, where the reference writes.
        more: Mask of the elements that it wrote, where the reference leaves them as they are.
        every: Number of the elements that the reference changes.
    """

    left: Tensor
    more: Tensor
    every: int


def compare_writes(before: Tensor, right: Tensor, got: Tensor, untouched: Tensor | None) -> Written:
    """Compare what was written with what the reference writes.

    An element that the reference computes anew may come out as it was, within rounding. One that it does not
    touch keeps each bit.

    Args:
        before: The contiguous argument before the call.
        right: After the reference.
        got: After the call.
        untouched: Mask of the elements that the reference is known not to touch.
    """
    same = _same_bits(got, before)
    moved, kept = ~near(right, before), _same_bits(right, before)
    certain = ~near(got, before)
    if untouched is not None:
        certain |= untouched
    return Written(moved & same, kept & ~same & certain, int(moved.sum()))


def near(one: Tensor, other: Tensor) -> Tensor:
    """Mark the elements that are the same but for rounding."""
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
    """A contiguous tensor of signalling nans like another; whole numbers as they are.

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
