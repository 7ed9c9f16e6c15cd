"""Memory: no tensor stays alive that the backward does not need, or after the backward."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from opsmith.checking.property import Findings, Note, Property
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, each_run
from opsmith.checking.side_effects.liveness import (
    WatchedMemory,
    address,
    attribute_tensors,
    await_autograd,
    holders,
    named_tensors,
    nodes,
    record_saved_tensors,
)
from opsmith.checking.subject import Subject
from opsmith.core.collector import without_garbage_collection
from opsmith.core.formula import Formula

NAME = "memory"
CALLS = 3
"""Number of calls; memory that only one call leaves behind is a constant."""


def _check(run: Run) -> Findings:
    """Drop the graph of a call, and check that memory is freed, without and with the cycle collector."""
    leaks = [*_leaks(run)]
    yield from leaks
    if run.argnums:
        yield from () if leaks else _on_context(run)
        yield from _saved(run)


def _leaks(run: Run) -> Findings:
    """Check for memory that stays after several calls when all of their tensors are dropped."""
    with without_garbage_collection():
        each_call = [_watched(run) for _ in range(CALLS)]
        await_autograd(run.device)
        left = [each for call in each_call for each in call if each.stays]
        if not left:
            return  # a collection takes longer than the calls
        gc.collect()
        kept = [each for each in left if each.stays]
        circle = [each for each in left if not each.stays]
        run.flat()  # restored objects release their caches
        by_objects = [each for each in kept if not each.stays and each.words]
        kept = [each for each in kept if each.stays]
        stays = [each for each in kept if each.words]
        saved = {each.address: each for each in kept if not each.words}
        first = {each.address for each in each_call[0]}
        where = run.backward_location() if run.argnums else run.subject.specification.where
        if stays or any(address not in first for address in saved):  # else they are constants
            yield _kept_for_ever(run, stays or list(saved.values()), where)
        elif by_objects:
            names = " and ".join(f"`{run.sample.labels[at]}`" for at in run.sample.objects)
            message = (
                f"the memory of {_what(by_objects)} of a call is kept by {names}, for the lifetime of "
                "the object"
            )
            yield _failure("held", run, by_objects, message, where)
        elif circle:
            yield _in_a_circle(run, circle, where)


def _watched(run: Run) -> list[WatchedMemory]:
    """Make a call and its backward, drop both, and return the watched memory.

    A saved tensor that is not an argument, result or gradient has no description: it may be a constant.
    """
    with record_saved_tensors() as saved:
        call = run.call()
    grads = call.grads()
    labels = [run.sample.labels[argnum] for argnum in run.argnums]
    gradients = zip(labels, call.backward(grads), strict=True)
    named = [
        *named_tensors(call),
        *(("a grad_output", None, grad) for grad in grads),
        *((f"the gradient of `{label}`", label, each) for label, each in gradients if each is not None),
        *(("", None, tensor) for tensor in (*saved, *(each for _, each in attribute_tensors(call.results)))),
    ]
    held = _of_objects(run)
    watched: dict[int, WatchedMemory] = {}
    for words, name, tensor in named:
        watched.setdefault(address(tensor), WatchedMemory.of(words, name, tensor))
    return [each for each in watched.values() if each.name not in held or each.words != f"`{each.name}`"]


def _of_objects(run: Run) -> set[str]:
    """Labels of the arguments that an object argument holds, and that are kept if the object is kept."""
    return {run.sample.labels[at] for at in run.sample.objects.arguments}


def _kept_for_ever(run: Run, stays: Sequence[WatchedMemory], where: str) -> Failure:
    who = holders(run.subject, stays[0])
    attributes = [f"`ctx.{name}`" for name in ([] if who else _circular(run))]
    if attributes:
        by = f" by {', '.join(attributes)}, in a reference cycle through C++"
    else:
        by = f" by {', '.join(who)}" if who else " by an object that Python cannot list, such as a C++ object"
    message = (
        f"the memory of {_what(stays)} of a call is kept for ever{by}: it is not freed when the results and "
        f"the graph are gone. Keep tensors only by `ctx.save_for_backward`; a cache must hold constants, not "
        f"arguments or results of calls"
    )
    return _failure("leak", run, stays, message, where)


def _what(stays: Sequence[WatchedMemory]) -> str:
    return " and ".join(dict.fromkeys(each.words or "the saved tensors" for each in stays))


def _failure(
    cause: str, run: Run, kept: Sequence[WatchedMemory], message: str, where: str, **shown: str
) -> Failure:
    evidence = {"kept": _what(kept), "bytes": sum(each.nbytes for each in kept) // CALLS, **shown}
    return run.failure(kept[0].name, cause, message, where, evidence)


def _in_a_circle(run: Run, circle: Sequence[WatchedMemory], where: str) -> Failure:
    attributes = _circular(run)
    by = f" (`ctx.{attributes[0]}` holds it)" if attributes else ""
    circle = sorted(circle, key=lambda each: "result" not in each.words)
    message = (
        f"the memory of {_what(circle)} of a call stays alive in a reference cycle{by} until "
        "Python's cycle collector runs: until then, memory fills up. Keep results by "
        "`ctx.save_for_backward`, which creates no cycle"
    )
    shown = {"attributes": ", ".join(f"ctx.{name}" for name in attributes)} if attributes else {}
    return _failure("held", run, circle, message, where, **shown)


def _circular(run: Run) -> list[str]:
    """The attributes of a context that lead back to it."""
    call = run.call()
    own = set(nodes(call.results))
    found = [name for name, tensor in attribute_tensors(call.results) if tensor.grad_fn in own]
    return list(dict.fromkeys(found))


def _on_context(run: Run) -> Findings:
    """Report arguments and results that a context keeps after the backward has freed the saved tensors."""
    call = run.call(leaf=False)
    if not call.open:
        return
    labels = {address(tensor): name for _, name, tensor in reversed(named_tensors(call)) if tensor.numel()}
    call.backward()
    held = _of_objects(run)
    for attribute, tensor in attribute_tensors(call.results):
        label = labels.get(address(tensor))
        if label is None or label in held:
            continue
        message = (
            f"`{label}` stays on the context as `ctx.{attribute}` after the backward, and in memory "
            "as long as the graph exists. Autograd does not detect writes into it either. Keep it "
            f"by `ctx.save_for_backward({label})`, which frees it after the backward"
        )
        evidence = {"bytes": tensor.untyped_storage().nbytes()}
        yield run.failure(label, "held", message, run.backward_location(), evidence)
        return


def _saved(run: Run) -> Findings:
    """Compare the tensors saved for the backward with the tensors that its formulas name."""
    subject, sample = run.subject, run.sample
    with record_saved_tensors() as saved:
        call = run.call()
    if not call.open:
        return
    names = {
        address(value): name
        for name, value in zip(sample.names, call.given, strict=True)
        if isinstance(value, Tensor) and value.numel()
    }
    needed = _named_by_formulas(subject)
    if subject.kind.applied:
        left_over = {
            address(tensor): tensor.untyped_storage().nbytes()
            for tensor in (*saved, *(tensor for _, tensor in attribute_tensors(call.results)))
        }
        outside = sum(size for at, size in left_over.items() if at not in names)
        if sample is subject.samples[0]:
            every = _bytes(sum(left_over.values()))
            rest = f"{_bytes(outside)} of them are not" if outside else "all of them are"
            yield Note(f"{sample}: {every} saved for the backward; {rest} memory of the arguments")
        for at, count in Counter(map(address, saved)).items():
            if count > 1 and at in names:
                yield Note(
                    f"`{names[at]}` is saved twice; both share the same memory, and saving it once is enough"
                )
    elif needed is not None:
        for tensor in saved:
            name = names.get(address(tensor))
            if name is not None and name not in needed:
                size = _bytes(tensor.untyped_storage().nbytes())
                yield Note(f"`{name}` is kept for the backward ({size}), and no formula names it")


def _named_by_formulas(subject: Subject) -> set[str] | None:
    """The arguments that formulas name; None if a gradient is derived, which may need any argument."""
    rules = subject.specification.gradients.rules
    if subject.operator is None or set(subject.specification.schema.tensor_names) - set(rules):
        return None
    return {name for rule in rules.values() if isinstance(rule, Formula) for name in rule.parameters}


def _bytes(count: int) -> str:
    return f"{count} bytes" if count < 10_000 else f"{count / 1e6:.3g} MB"


MEMORY = Property(
    NAME,
    "memory that is no longer needed is freed",
    partial(each_run, NAME, _check, devices=True),
    inputs="few",
    traits=("about-results",),
)
