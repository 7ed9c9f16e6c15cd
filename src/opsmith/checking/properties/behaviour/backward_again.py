"""Repeated backwards: `.backward()`, hooks and kept graphs give the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import LiveCall, copies, live_call
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import describe_difference, differ_beyond_rounding
from opsmith.checking.properties.numeric.differentiable import differentiated, rule_location
from opsmith.checking.property import Findings, Note, Property, Skipped, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject

NAME = "backward_again"
Gradients = tuple[Tensor | None, ...]


def run(subject: Subject) -> Findings:
    """Ask for the gradients of every sample in each way, and compare with those of `torch.autograd.grad`."""
    looked = False

    def look(subject: Subject, sample: Sample) -> Findings:
        nonlocal looked
        argnums = differentiated(subject, sample).argnums
        for device in subject.devices if argnums else ():
            ask = GradientRequest(subject, sample, argnums, device)
            if ask.call().open:
                looked = True
                yield from _ways(ask)

    failed = False
    for finding in each_sample(NAME, subject, look):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if not looked and not failed:
        yield Skipped("there is nothing to differentiate")


@dataclass(frozen=True)
class GradientRequest:
    """A sample whose gradients are asked for in several ways.

    Args:
        subject: What is under check.
        sample: The sample.
        argnums: Arguments that require a gradient.
        device: Where it runs.
    """

    subject: Subject
    sample: Sample
    argnums: tuple[int, ...]
    device: torch.device

    def call(self, *, leaf: bool = True) -> LiveCall:
        """A new call with its graph."""
        return live_call(
            self.subject, self.sample, self.sample.at(device=self.device), self.argnums, leaf=leaf
        )


def _once(ask: GradientRequest) -> Gradients:
    """The gradients that `torch.autograd.grad` gives."""
    call = ask.call()
    return copies(call.backward(call.grads(ask.subject)))


def _twice(ask: GradientRequest) -> Gradients:
    """Twice these gradients: the sum of two backwards."""
    return tuple(None if each is None else 2 * each for each in _once(ask))


def _of_doubled(ask: GradientRequest) -> Gradients:
    """The gradients for grad_outputs that are twice as large."""
    call = ask.call()
    return copies(call.backward([2 * each for each in call.grads(ask.subject)]))


def _ways(ask: GradientRequest) -> Findings:
    expected: dict[Callable[[GradientRequest], Gradients], Gradients] = {}
    for way, (cause, give, right) in WAYS.items():
        if right not in expected:
            expected[right] = right(ask)
        try:
            given = give(ask)
        except Exception as error:
            refuse_own(error)
            if way == KEEPING:  # whether there is a second order at all is another property's matter
                yield Note(f"a backward with `create_graph=True` was left out: {first_line(error)}")
                continue
            message = (
                f"{way}: it raises {type(error).__name__}: {first_line(error)}; by `torch.autograd.grad` it "
                "goes well"
            )
            yield Failure(NAME, None, "raises", message, _where(ask, 0), {"sample": str(ask.sample)})
            return
        for at, (one, other) in enumerate(zip(expected[right], given, strict=True)):
            if differ_beyond_rounding(one, other):
                label = ask.sample.labels[ask.argnums[at]]
                message = (
                    f"the gradient of `{label}` differs from that of `torch.autograd.grad`, {way}: "
                    f"{describe_difference(one, other)}"
                )
                evidence = {"sample": str(ask.sample), "way": way}
                yield Failure(NAME, label, cause, message, _where(ask, at), evidence)
                return


def _where(ask: GradientRequest, at: int) -> str:
    return rule_location(ask.subject, ask.sample.names[ask.argnums[at]])


def _results(ask: GradientRequest, call: LiveCall) -> tuple[list[Tensor], list[Tensor]]:
    return [call.results[at] for at in call.open], call.grads(ask.subject)


def _accumulated(call: LiveCall) -> Gradients:
    return copies([call.leaves[argnum].grad for argnum in call.argnums])


def _backward(ask: GradientRequest) -> Gradients:
    call = ask.call()
    torch.autograd.backward(*_results(ask, call))
    return _accumulated(call)


def _backward_twice(ask: GradientRequest) -> Gradients:
    """Two calls into the same leaves, as losses of two batches are added up."""
    call = ask.call()
    torch.autograd.backward(*_results(ask, call))
    with torch.enable_grad():
        given = call.leaves if call.given is call.leaves else [_recorded_copy(each) for each in call.leaves]
        again = LiveCall(call.sample, call.argnums, call.leaves, given, ask.subject.call(call.sample, given))
    torch.autograd.backward(*_results(ask, again))
    return _accumulated(call)


def _recorded_copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _creating(ask: GradientRequest) -> Gradients:
    call = ask.call()
    return copies(
        call.backward([each.requires_grad_() for each in call.grads(ask.subject)], create_graph=True)
    )


def _through_copies(ask: GradientRequest) -> Gradients:
    """Arguments that autograd has computed, as in the middle of a model."""
    call = ask.call(leaf=False)
    return copies(call.backward(call.grads(ask.subject)))


def _used_twice(ask: GradientRequest) -> Gradients:
    """Each result goes into two sums: torch adds up their grad_outputs."""
    call = ask.call()
    results, grads = _results(ask, call)
    leaves = [call.leaves[argnum] for argnum in ask.argnums]
    return copies(torch.autograd.grad([*results, *results], leaves, [*grads, *grads], allow_unused=True))


def _seen_by_hooks(ask: GradientRequest) -> Gradients:
    """The gradients that hooks on the arguments see."""
    call = ask.call()
    seen: dict[int, Tensor] = {}
    handles = [
        call.leaves[argnum].register_hook(partial(seen.__setitem__, argnum))
        for argnum in ask.argnums
        if call.leaves[argnum].requires_grad
    ]
    torch.autograd.backward(*_results(ask, call))
    for handle in handles:
        handle.remove()
    return copies([seen.get(argnum) for argnum in ask.argnums])


def _changed_by_hooks(ask: GradientRequest) -> Gradients:
    """Hooks on the results that double grad_output."""
    call = ask.call()
    results, grads = _results(ask, call)
    for result in {id(each): each for each in results}.values():  # a class may return one tensor twice
        result.register_hook(_doubled)
    leaves = [call.leaves[argnum] for argnum in ask.argnums]
    return copies(torch.autograd.grad(results, leaves, grads, allow_unused=True))


def _doubled(grad: Tensor) -> Tensor:
    return 2 * grad


KEEPING = "of a backward with `create_graph=True`"

Way = tuple[str, Callable[[GradientRequest], Gradients], Callable[[GradientRequest], Gradients]]
WAYS: dict[str, Way] = {
    "by `.backward()`": ("side-effect", _backward, _once),
    "by two `.backward()`s into the same `.grad`": ("side-effect", _backward_twice, _twice),
    KEEPING: ("stale-state", _creating, _once),
    "where the arguments are no leaves": ("unknown", _through_copies, _once),
    "as a hook on the argument sees it": ("side-effect", _seen_by_hooks, _once),
    "where each result is used twice": ("unknown", _used_twice, _of_doubled),
    "where hooks on the results double grad_output": ("unknown", _changed_by_hooks, _of_doubled),
}
"""For each way its cause, the gradients that it gives, and the right ones."""


BACKWARD_AGAIN = Property(
    NAME, "every way to ask for the gradients gives the same", run, subset=True, sends_gradients=True
)
