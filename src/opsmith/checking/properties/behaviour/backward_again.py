"""Repeated backwards: `.backward()`, hooks and kept graphs give the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import LiveCall, SampleRun, copies
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import describe_difference, differ_beyond_rounding
from opsmith.checking.property import Coverage, Findings, Note, Property, covered_samples, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.liveness import nodes
from opsmith.checking.subject import Subject

NAME = "backward_again"
Gradients = tuple[Tensor | None, ...]


def _sample(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
    """Compute the gradients of every sample by each method, and compare with `torch.autograd.grad`."""
    for run in SampleRun.of(subject, sample):
        if run.argnums and run.call().open:
            coverage.ran += 1
            yield from _compared(run)


def _once(run: SampleRun) -> Gradients:
    """The gradients of `torch.autograd.grad`."""
    return copies(run.call().backward())


def _twice(run: SampleRun) -> Gradients:
    """Twice these gradients: the sum of two backwards."""
    return tuple(None if each is None else 2 * each for each in _once(run))


def _of_doubled(run: SampleRun) -> Gradients:
    """The gradients for grad_outputs that are twice as large."""
    call = run.call()
    return copies(call.backward([2 * each for each in call.grads()]))


def _compared(run: SampleRun) -> Findings:
    expected: dict[Callable[[SampleRun], Gradients], Gradients] = {}
    for method, (cause, compute, right) in METHODS.items():
        if right not in expected:
            expected[right] = right(run)
        try:
            given = compute(run)
        except Exception as error:
            refuse_own(error)
            if method == CREATE_GRAPH:  # `second_order` reports a missing second order
                yield Note(f"a backward with `create_graph=True` was left out: {first_line(error)}")
                continue
            message = (
                f"{method}: it raises {type(error).__name__}: {first_line(error)}; by `torch.autograd.grad` "
                "it succeeds"
            )
            yield Failure(NAME, None, "raises", message, run.backward_location(), {"sample": str(run.sample)})
            return
        for at, (one, other) in enumerate(zip(expected[right], given, strict=True)):
            if differ_beyond_rounding(one, other):
                label = run.sample.labels[run.argnums[at]]
                message = (
                    f"the gradient of `{label}` differs from that of `torch.autograd.grad`, {method}: "
                    f"{describe_difference(one, other)}"
                )
                evidence = {"sample": str(run.sample), "method": method}
                yield Failure(NAME, label, cause, message, run.backward_location(at), evidence)
                return


def _results(call: LiveCall) -> tuple[list[Tensor], list[Tensor]]:
    return [call.results[at] for at in call.open], call.grads()


def _accumulated(call: LiveCall) -> Gradients:
    return copies([call.leaves[argnum].grad for argnum in call.argnums])


def _backward(run: SampleRun) -> Gradients:
    call = run.call()
    torch.autograd.backward(*_results(call))
    return _accumulated(call)


def _backward_twice(run: SampleRun) -> Gradients:
    """Accumulate the gradients of two calls in the same leaves, as for two batches."""
    call = run.call()
    torch.autograd.backward(*_results(call))
    with torch.enable_grad():
        given = call.leaves if call.given is call.leaves else [_recorded_copy(each) for each in call.leaves]
        again = replace(call, given=given, results=run.subject.call(call.sample, given))
    torch.autograd.backward(*_results(again))
    return _accumulated(call)


def _recorded_copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _creating(run: SampleRun) -> Gradients:
    call = run.call()
    return copies(call.backward([each.requires_grad_() for each in call.grads()], create_graph=True))


def _through_copies(run: SampleRun) -> Gradients:
    """Pass arguments that autograd has computed, as in the middle of a model."""
    return copies(run.call(leaf=False).backward())


def _used_twice(run: SampleRun) -> Gradients:
    """Use each result in two sums, so that torch adds up their grad_outputs."""
    call = run.call()
    results, grads = _results(call)
    leaves = [call.leaves[argnum] for argnum in run.argnums]
    return copies(torch.autograd.grad([*results, *results], leaves, [*grads, *grads], allow_unused=True))


def _seen_by_hooks(run: SampleRun) -> Gradients:
    """The gradients that hooks on the arguments see."""
    call = run.call()
    seen: dict[int, Tensor] = {}
    handles = [
        call.leaves[argnum].register_hook(partial(seen.__setitem__, argnum))
        for argnum in run.argnums
        if call.leaves[argnum].requires_grad
    ]
    torch.autograd.backward(*_results(call))
    for handle in handles:
        handle.remove()
    return copies([seen.get(argnum) for argnum in run.argnums])


def _changed_by_hooks(run: SampleRun) -> Gradients:
    """Double grad_output by hooks on the results; pass it doubled to one that another is computed from."""
    call = run.call()
    results, grads = _results(call)
    inner = {node for each in results for node in nodes([each]) if node is not each.grad_fn}
    hooked = [each.grad_fn is None or each.grad_fn not in inner for each in results]
    grads = [grad if by_hook else 2 * grad for grad, by_hook in zip(grads, hooked, strict=True)]
    outer = (each for each, by_hook in zip(results, hooked, strict=True) if by_hook)
    for result in {id(each): each for each in outer}.values():  # a class may return one tensor twice
        result.register_hook(_doubled)
    leaves = [call.leaves[argnum] for argnum in run.argnums]
    return copies(torch.autograd.grad(results, leaves, grads, allow_unused=True))


def _doubled(grad: Tensor) -> Tensor:
    return 2 * grad


CREATE_GRAPH = "of a backward with `create_graph=True`"

Method = tuple[str, Callable[[SampleRun], Gradients], Callable[[SampleRun], Gradients]]
METHODS: dict[str, Method] = {
    "by `.backward()`": ("side-effect", _backward, _once),
    "by two `.backward()`s into the same `.grad`": ("side-effect", _backward_twice, _twice),
    CREATE_GRAPH: ("stale-state", _creating, _once),
    "where the arguments are not leaves": ("unknown", _through_copies, _once),
    "as a hook on the argument sees it": ("side-effect", _seen_by_hooks, _once),
    "where each result is used twice": ("unknown", _used_twice, _of_doubled),
    "where hooks on the results double grad_output": ("unknown", _changed_by_hooks, _of_doubled),
}
"""The cause, the tested gradients and the right ones of each method, by its description."""


BACKWARD_AGAIN = Property(
    NAME,
    "every method of computing the gradients gives the same",
    partial(covered_samples, NAME, _sample, "there is nothing to differentiate"),
    subset=True,
    sends_gradients=True,
    reruns=True,
)
