"""Runs of a call in place: its arguments laid out and guarded, and what was written into and beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import copies
from opsmith.checking.exceptions import Overlooking, calls_operator, refuse_own
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.numerics.compare import as_bytes, is_close, is_same, share_of_largest
from opsmith.checking.properties.behaviour.layouts import LayoutCase
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.memory_layouts import Layout, layouts_for
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.canaries import GuardedTensor
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import LibraryWrite, Subject
from opsmith.core.functional_form import all_results
from opsmith.core.operator import Operator
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import SAVED_WRITTEN, has_message

Modes = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mode:
    """A mode of torch in which a call writes.

    Args:
        name: In words.
        entered: Enters it.
        recorded: True if autograd records the call, so that it is differentiated, too.
    """

    name: str
    entered: Modes
    recorded: bool = False


NO_GRAD = Mode("under `torch.no_grad()`", torch.no_grad)
GRAD_MODE = Mode("in grad mode without a gradient", torch.enable_grad)
INFERENCE = Mode("under `torch.inference_mode()`", torch.inference_mode)
RECORDED = Mode("where gradients are recorded", torch.enable_grad, recorded=True)


@dataclass(frozen=True)
class Place:
    """A place in memory for the arguments that are written.

    Args:
        name: In words; empty for contiguous memory of their own.
        layouts: Layout of some arguments, by their positions.
        guarded: True if each tensor lies inside of a larger one, at an offset, with canaries around it.
        interleaved: Positions of two tensors whose elements alternate in memory, as those of `kv.unbind(1)`.
    """

    name: str = ""
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    guarded: bool = False
    interleaved: tuple[int, int] | None = None


PLAIN = Place()
OFFSET = Place("at an offset inside of a larger tensor", guarded=True)


def places(flat: Sequence[Any], written: Sequence[int]) -> Iterator[Place]:
    """Yield the places of the written arguments: each alone in each layout, two interleaved, all together.

    Args:
        flat: Contiguous arguments.
        written: Positions of those that are written.
    """
    layouts = {argnum: writable_layouts(flat[argnum]) for argnum in written}
    turns = [
        Place(found[turn].name, {argnum: found[turn]}, guarded=True)
        for turn in range(max(map(len, layouts.values()), default=0))
        for argnum, found in layouts.items()
        if turn < len(found)
    ]
    first = sum(bool(found) for found in layouts.values())
    yield from turns[:first]
    for argnum in written:
        partner = _partner(flat, argnum)
        if partner is not None:
            yield Place("interleaved", guarded=True, interleaved=(argnum, partner))
    yield from turns[first:]
    if len(written) > 1:
        together = {argnum: found[0] for argnum, found in layouts.items() if found}
        yield Place("in an odd layout, and so all others that are written", together, guarded=True)


def writable_layouts(x: Tensor) -> list[Layout]:
    """Return the layouts of a tensor in which each element has memory of its own, which holds its value."""
    found = (layout for layout in layouts_for(x) if not layout.repeats)
    return [layout for layout in found if not (layout.of(x).is_neg() or layout.of(x).is_conj())]


def _partner(flat: Sequence[Any], argnum: int) -> int | None:
    """Return the position of another tensor of the same form; None where there is none."""
    value = flat[argnum]
    for other, tensor in enumerate(flat):
        alike = isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
        if other != argnum and alike and value.numel():
            return other
    return None


@dataclass(frozen=True)
class WriteRun:
    """A call in place, or its exception.

    Args:
        given: The arguments, after the call.
        outputs: The new values and the visible results, then the gradient of each differentiated input.
        guards: Guards of the memory around some arguments, by their labels.
        unversioned: Positions of the tensors that were written, and whose version did not rise.
        moved: Positions of the tensors that lie in other memory than before.
        unnoticed: Positions of the tensors that a node saved before, and whose write its backward missed.
        error: The exception.
        in_backward: True if the call succeeded and its backward raised.
    """

    given: list[Any]
    outputs: tuple[Tensor | None, ...] = ()
    guards: Mapping[str, GuardedTensor] = field(default_factory=dict)
    unversioned: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    unnoticed: tuple[int, ...] = ()
    error: Exception | None = None
    in_backward: bool = False


def in_place(subject: Subject, call: Callable[..., Any]) -> Subject:
    """Return the subject whose calls write into their arguments, and return what the functional form does.

    Args:
        subject: The functional form of an operator that writes in place.
        call: Writes in place: that operator, or its reference.
    """
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
class WriteCase:
    """A sample in a dtype on a device, written in place, beside its functional form on contiguous memory.

    Args:
        case: The functional form's contiguous call.
        operator: The operator that writes in place.
        referred: True to call its reference instead.
    """

    case: LayoutCase
    operator: Operator[..., Any] | LibraryWrite
    referred: bool = False

    @property
    def sample(self) -> Sample:
        """The sample."""
        return self.case.runner.sample

    @cached_property
    def writes(self) -> Subject:
        """The subject whose calls write in place."""
        call = self.operator.reference if self.referred else self.operator
        return in_place(self.case.runner.subject, call)

    @cached_property
    def written(self) -> list[int]:
        """Positions of the tensors that are declared to be written."""
        positions = self.sample.flattening.positions(self.operator.specification.schema.written)
        return [argnum for argnum in positions if isinstance(self.case.flat[argnum], Tensor)]

    def run(self, place: Place, mode: Mode, flat: Sequence[Any] | None = None) -> WriteRun:
        """One call in place; an exception is returned, not raised.

        Args:
            place: Where the arguments lie.
            mode: The mode of torch.
            flat: Arguments to write into as they are; fresh ones, laid out, by default.
        """
        with without_warnings(), mode.entered():
            leaves, given, guards = self._laid(place, mode) if flat is None else ([*flat], [*flat], {})
            before = [_State.of(value) for value in given]
            kept = {at: given[at] * given[at] for at in self.written if mode.recorded and _follows(given[at])}
            try:
                results = self.writes.call(self.sample, given)
            except Exception as error:
                refuse_own(error)
                return WriteRun(given, guards=guards, error=error)
            now = [_State.of(value) for value in given]
            changed = [at for at in self.written if not torch.equal(now[at].bits, before[at].bits)]
            versions = [at for at in changed if before[at].version is not None]
            run = WriteRun(
                given,
                copies(results),
                guards,
                tuple(at for at in versions if now[at].version == before[at].version),
                tuple(at for at in self.written if now[at].form != before[at].form),
                tuple(at for at in changed if at in kept and _misses(kept[at], leaves[at])),
            )
            return self._differentiated(run, leaves, results) if mode.recorded else run

    def _laid(self, place: Place, mode: Mode) -> tuple[list[Any], list[Any], dict[str, GuardedTensor]]:
        """The leaves, the arguments that are made of them, and the guards."""
        argnums, labels = self.case.runner.argnums if mode.recorded else (), self.sample.labels
        leaves = [
            value.detach().requires_grad_(argnum in argnums) if is_inexact(value) else value
            for argnum, value in enumerate(replicas(self.case.flat))
        ]
        given = [*leaves]
        for argnum in self.written:
            layout = place.layouts.get(argnum)
            given[argnum] = leaves[argnum].clone() if layout is None else layout.of(leaves[argnum])
        guards: dict[str, GuardedTensor] = {}
        if place.guarded and not mode.recorded:
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

    def _differentiated(self, run: WriteRun, leaves: Sequence[Any], results: Sequence[Any]) -> WriteRun:
        """The run with its gradients."""
        inputs = [leaves[argnum] for argnum in self.case.runner.argnums]
        try:
            gradients = differentiate(results, inputs, replicas(self.case.grads))
        except Exception as error:
            refuse_own(error)
            return replace(run, error=error, in_backward=True)
        return replace(run, outputs=(*run.outputs, *copies(gradients)))


@dataclass(frozen=True)
class ReferenceWrite:
    """Writes of the reference into copies of some arguments.

    Args:
        after: The arguments after it.
        rose: Positions of those whose version rose.
    """

    after: list[Any]
    rose: frozenset[int]

    @classmethod
    def of(cls, subject: Subject, sample: Sample, flat: Sequence[Any]) -> ReferenceWrite | None:
        """Run the reference; None where it raises."""
        assert subject.in_place is not None
        given = replicas(flat)
        versions = [_State.of(value).version for value in given]
        with torch.no_grad(), without_warnings(), Overlooking():
            in_place(subject, subject.in_place.reference).call(sample, given)
            rose = (at for at, value in enumerate(given) if _State.of(value).version != versions[at])
            return cls(given, frozenset(rose))
        return None


@dataclass(frozen=True)
class _State:
    """Elements of a tensor that a write may change; none of other values."""

    bits: Tensor
    version: int | None
    form: Any

    @classmethod
    def of(cls, value: Any) -> _State:
        if not isinstance(value, Tensor):
            return cls(torch.empty(0), None, None)
        form = value.data_ptr(), value.shape, value.stride(), value.dtype
        return cls(as_bytes(value), capabilities.version(value), form)


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


def untouched(case: WriteCase) -> dict[int, Tensor]:
    """Mark the elements of written arguments that the reference does not touch: it keeps a nan's bits there.

    Whole numbers keep their bits through arithmetic, and need no mark.
    """
    flat = [marked(value) if at in case.written else value for at, value in enumerate(case.case.flat)]
    found = ReferenceWrite.of(case.case.runner.subject, case.sample, flat)
    if found is None:
        return {}
    inexact = [at for at in case.written if is_inexact(flat[at])]
    return {at: _same_bits(found.after[at], flat[at]) for at in inexact}
