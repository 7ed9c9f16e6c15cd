"""Repeated backwards: `.backward()`, hooks, kept graphs and packed saved tensors give the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.causes import UNKNOWN
from opsmith.checking.exceptions import Raised, attempt, first_line
from opsmith.checking.numerics.autodiff import differentiate
from opsmith.checking.property import Findings, Property
from opsmith.checking.run import Coverage, LiveCall, Run, copies, covered_runs
from opsmith.checking.side_effects.liveness import nodes
from opsmith.checking.ways import Outputs, Way, another_output, compare, differs_from

NAME = "backward_again"
SAVED = "saved_hooks"
Method = Callable[[Run], Outputs]


def _check(run: Run, coverage: Coverage) -> Findings:
    """Compute the gradients of every sample by each method, and compare them with `torch.autograd.grad`."""
    for each in Run.of(run.subject, run.sample, run.name):
        if each.argnums and each.call().open and (run.name == NAME or _succeeds(each)):
            coverage.ran += 1
            yield from compare(_ways(each, coverage))


def _succeeds(run: Run) -> bool:
    """True if there is a backward that does not raise; the property `gradient` reports its exceptions."""
    return not isinstance(attempt(lambda: run.call().backward()), Raised)


def _ways(run: Run, coverage: Coverage) -> Iterator[Way]:
    methods, gradients = METHODS[run.name], [each for each in run.names() if each.kind == "gradient"]
    known = {right: right(run) for _, _, right in methods.values()}
    for name, (cause, method, right) in methods.items():
        failure = partial(another_output, run.name, run, name, cause, **WORDS[run.name])
        ask, fault = partial(_gradients, method, run), partial(differs_from, known[right])
        excused = partial(_is_left_out, method, coverage)
        yield Way(name, gradients, ask, fault, failure, excused=excused)


def _gradients(method: Method, run: Run) -> Outputs:
    return copies(method(run))


def _is_left_out(method: Method, coverage: Coverage, error: Exception) -> bool:
    """True for a backward with `create_graph=True`, whose exceptions `second_order` reports."""
    if method is _creating:
        text = f"a backward with `create_graph=True` was left out: {first_line(error)}"
        coverage.refused[text] = None
    return method is _creating


def _once(run: Run) -> Outputs:
    """The gradients of `torch.autograd.grad`."""
    return copies(run.call().backward())


def _twice(run: Run) -> Outputs:
    """Twice the gradients of `torch.autograd.grad`: the sum of two backwards."""
    return tuple(None if each is None else 2 * each for each in _once(run))


def _of_doubled(run: Run) -> Outputs:
    """The gradients for grad_outputs that are twice as large."""
    call = run.call()
    return copies(call.backward([2 * each for each in call.grads()]))


def _accumulated(call: LiveCall) -> Outputs:
    """The tensors that `.backward()` adds to the gradients of the leaves."""
    torch.autograd.backward(call.outputs, call.grads())
    return [leaf.grad for leaf in call.inputs]


def _backward_twice(run: Run) -> Outputs:
    """Accumulate the gradients of two calls in the same leaves, as for two batches."""
    call = run.call()
    _accumulated(call)
    return _accumulated(call.again())


def _creating(run: Run) -> Outputs:
    call = run.call()
    return call.backward([each.requires_grad_() for each in call.grads()], create_graph=True)


def _used_twice(run: Run) -> Outputs:
    """Use each result in two sums, so that torch adds up two grad_outputs of it."""
    call = run.call()
    return differentiate(2 * call.outputs, call.inputs, 2 * call.grads())


def _seen_by_hooks(run: Run) -> Outputs:
    """The gradients that hooks on the arguments see."""
    call = run.call()
    seen: dict[int, Tensor] = {}
    for argnum, leaf in zip(call.argnums, call.inputs, strict=True):
        leaf.register_hook(partial(seen.__setitem__, argnum))
    _accumulated(call)
    return [seen.get(argnum) for argnum in call.argnums]


def _changed_by_hooks(run: Run) -> Outputs:
    """Double grad_output by hooks on the results; a result that a later one uses gets it doubled as well."""
    call = run.call()
    results = call.outputs
    inner = {node for each in results for node in nodes([each]) if node is not each.grad_fn}
    hooked = [each.grad_fn is None or each.grad_fn not in inner for each in results]
    grads = [grad if by_hook else 2 * grad for grad, by_hook in zip(call.grads(), hooked, strict=True)]
    outer = (each for each, by_hook in zip(results, hooked, strict=True) if by_hook)
    for result in {id(each): each for each in outer}.values():  # a class may return one tensor twice
        result.register_hook(lambda grad: 2 * grad)
    return call.backward(grads)


def _packed(run: Run) -> Outputs:
    """Return every saved tensor as a contiguous copy, by hooks."""
    with torch.autograd.graph.saved_tensors_hooks(_copied, lambda packed: packed):
        call = run.call()
    return call.backward()


def _copied(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    return tensor.detach().clone(memory_format=torch.contiguous_format)


WORDS = {
    NAME: {"differs": "differs from the gradient of `torch.autograd.grad`,", "raises": ": the call raises"},
    SAVED: {},
}
"""Texts for messages."""

METHODS: Mapping[str, Mapping[str, tuple[str, Method, Method]]] = {
    NAME: {
        "by `.backward()`": ("side-effect", lambda run: _accumulated(run.call()), _once),
        "by two `.backward()`s into the same `.grad`": ("side-effect", _backward_twice, _twice),
        "of a backward with `create_graph=True`": ("stale-state", _creating, _once),
        "where the arguments are not leaves": (UNKNOWN, lambda run: run.call(leaf=False).backward(), _once),
        "as a hook on the argument sees it": ("side-effect", _seen_by_hooks, _once),
        "where each result is used twice": (UNKNOWN, _used_twice, _of_doubled),
        "where hooks on the results double grad_output": (UNKNOWN, _changed_by_hooks, _of_doubled),
    },
    SAVED: {
        "where hooks pack the saved tensors (`torch.autograd.graph.saved_tensors_hooks`), as "
        "offloading does": (
            UNKNOWN,
            _packed,
            _once,
        )
    },
}
"""For each property and description of a method: the cause, the tested gradients and the right gradients."""


BACKWARD_AGAIN = Property(
    NAME,
    "every way to compute the gradients gives the same gradients",
    partial(covered_runs, NAME, _check, "there is nothing to differentiate"),
    inputs="few",
    traits=("sends-gradients", "reruns"),
)

SAVED_HOOKS = Property(
    SAVED,
    "the gradients are the same where hooks replace the saved tensors",
    partial(covered_runs, SAVED, _check, "there is nothing to differentiate"),
    inputs="few",
    traits=("sends-gradients",),
)
