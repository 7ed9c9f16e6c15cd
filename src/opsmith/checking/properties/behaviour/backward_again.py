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
    """Compute the gradients of every sample by each method, and compare with `torch.autograd.grad`."""
    ran = False

    def check_sample(subject: Subject, sample: Sample) -> Findings:
        nonlocal ran
        argnums = differentiated(subject, sample).argnums
        for device in subject.devices if argnums else ():
            request = GradientRequest(subject, sample, argnums, device)
            if request.call().open:
                ran = True
                yield from _compared(request)

    failed = False
    for finding in each_sample(NAME, subject, check_sample):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if not ran and not failed:
        yield Skipped("there is nothing to differentiate")


@dataclass(frozen=True)
class GradientRequest:
    """A sample whose gradients are computed by several methods.

    Args:
        subject: The subject of the check.
        sample: The sample.
        argnums: Arguments that require a gradient.
        device: The device.
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


def _once(request: GradientRequest) -> Gradients:
    """The gradients of `torch.autograd.grad`."""
    call = request.call()
    return copies(call.backward(call.grads(request.subject)))


def _twice(request: GradientRequest) -> Gradients:
    """Twice these gradients: the sum of two backwards."""
    return tuple(None if each is None else 2 * each for each in _once(request))


def _of_doubled(request: GradientRequest) -> Gradients:
    """The gradients for grad_outputs that are twice as large."""
    call = request.call()
    return copies(call.backward([2 * each for each in call.grads(request.subject)]))


def _compared(request: GradientRequest) -> Findings:
    expected: dict[Callable[[GradientRequest], Gradients], Gradients] = {}
    for method, (cause, compute, right) in METHODS.items():
        if right not in expected:
            expected[right] = right(request)
        try:
            given = compute(request)
        except Exception as error:
            refuse_own(error)
            if method == CREATE_GRAPH:  # `second_order` reports a missing second order
                yield Note(f"a backward with `create_graph=True` was left out: {first_line(error)}")
                continue
            message = (
                f"{method}: it raises {type(error).__name__}: {first_line(error)}; by `torch.autograd.grad` "
                "it succeeds"
            )
            yield Failure(NAME, None, "raises", message, _where(request, 0), {"sample": str(request.sample)})
            return
        for at, (one, other) in enumerate(zip(expected[right], given, strict=True)):
            if differ_beyond_rounding(one, other):
                label = request.sample.labels[request.argnums[at]]
                message = (
                    f"the gradient of `{label}` differs from that of `torch.autograd.grad`, {method}: "
                    f"{describe_difference(one, other)}"
                )
                evidence = {"sample": str(request.sample), "way": method}
                yield Failure(NAME, label, cause, message, _where(request, at), evidence)
                return


def _where(request: GradientRequest, at: int) -> str:
    return rule_location(request.subject, request.sample.names[request.argnums[at]])


def _results(request: GradientRequest, call: LiveCall) -> tuple[list[Tensor], list[Tensor]]:
    return [call.results[at] for at in call.open], call.grads(request.subject)


def _accumulated(call: LiveCall) -> Gradients:
    return copies([call.leaves[argnum].grad for argnum in call.argnums])


def _backward(request: GradientRequest) -> Gradients:
    call = request.call()
    torch.autograd.backward(*_results(request, call))
    return _accumulated(call)


def _backward_twice(request: GradientRequest) -> Gradients:
    """Accumulate the gradients of two calls in the same leaves, as for two batches."""
    call = request.call()
    torch.autograd.backward(*_results(request, call))
    with torch.enable_grad():
        given = call.leaves if call.given is call.leaves else [_recorded_copy(each) for each in call.leaves]
        again = LiveCall(
            call.sample, call.argnums, call.leaves, given, request.subject.call(call.sample, given)
        )
    torch.autograd.backward(*_results(request, again))
    return _accumulated(call)


def _recorded_copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _creating(request: GradientRequest) -> Gradients:
    call = request.call()
    return copies(
        call.backward([each.requires_grad_() for each in call.grads(request.subject)], create_graph=True)
    )


def _through_copies(request: GradientRequest) -> Gradients:
    """Pass arguments that autograd has computed, as in the middle of a model."""
    call = request.call(leaf=False)
    return copies(call.backward(call.grads(request.subject)))


def _used_twice(request: GradientRequest) -> Gradients:
    """Use each result in two sums, so that torch adds up their grad_outputs."""
    call = request.call()
    results, grads = _results(request, call)
    leaves = [call.leaves[argnum] for argnum in request.argnums]
    return copies(torch.autograd.grad([*results, *results], leaves, [*grads, *grads], allow_unused=True))


def _seen_by_hooks(request: GradientRequest) -> Gradients:
    """The gradients that hooks on the arguments see."""
    call = request.call()
    seen: dict[int, Tensor] = {}
    handles = [
        call.leaves[argnum].register_hook(partial(seen.__setitem__, argnum))
        for argnum in request.argnums
        if call.leaves[argnum].requires_grad
    ]
    torch.autograd.backward(*_results(request, call))
    for handle in handles:
        handle.remove()
    return copies([seen.get(argnum) for argnum in request.argnums])


def _changed_by_hooks(request: GradientRequest) -> Gradients:
    """Double grad_output by hooks on the results."""
    call = request.call()
    results, grads = _results(request, call)
    for result in {id(each): each for each in results}.values():  # a class may return one tensor twice
        result.register_hook(_doubled)
    leaves = [call.leaves[argnum] for argnum in request.argnums]
    return copies(torch.autograd.grad(results, leaves, grads, allow_unused=True))


def _doubled(grad: Tensor) -> Tensor:
    return 2 * grad


CREATE_GRAPH = "of a backward with `create_graph=True`"

Method = tuple[str, Callable[[GradientRequest], Gradients], Callable[[GradientRequest], Gradients]]
METHODS: dict[str, Method] = {
    "by `.backward()`": ("side-effect", _backward, _once),
    "by two `.backward()`s into the same `.grad`": ("side-effect", _backward_twice, _twice),
    CREATE_GRAPH: ("stale-state", _creating, _once),
    "where the arguments are no leaves": ("unknown", _through_copies, _once),
    "as a hook on the argument sees it": ("side-effect", _seen_by_hooks, _once),
    "where each result is used twice": ("unknown", _used_twice, _of_doubled),
    "where hooks on the results double grad_output": ("unknown", _changed_by_hooks, _of_doubled),
}
"""The cause, the tested gradients and the right ones of each method, by its description."""


BACKWARD_AGAIN = Property(
    NAME, "every way to ask for the gradients gives the same", run, subset=True, sends_gradients=True
)
