"""Detect results that share memory with an argument, with one another, or with those of another call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.calls import SampleRun
from opsmith.checking.property import Findings, Note
from opsmith.checking.report import Failure
from opsmith.torch_library import capabilities

HINT = "return a copy, `.clone()`"


def shared_memory(run: SampleRun, property: str) -> Findings:
    """Detect memory that the results of a call share.

    A Function class may return a view of an argument if autograd records it, since autograd then refuses to
    differentiate after a write into either. Otherwise a write changes the other one unnoticed.
    """
    subject, sample, flat = run.subject, run.sample, run.flat()
    call = run.call(flat, leaf=False)
    names = [result.name for result in subject.results(sample)]
    where = subject.runs_at(flat)
    failed = partial(Failure, property, where=where, evidence={"sample": str(sample)})
    bare = subject.apply is not None and not subject.kind.in_library
    for at, result in enumerate(call.results):
        others = [(f"`{label}`", value) for label, value in zip(sample.labels, call.given, strict=True)]
        others += [(f"the result `{names[before]}`", call.results[before]) for before in range(at)]
        for label, other in others:
            if result is other or not _shared(result, other):
                continue
            if bare and _is_recorded_view(result, other):
                yield Note(f"`{names[at]}` is a view of {label}, and autograd knows it")
                break
            why = ", and autograd does not know it: a write into one changes the other unseen" if bare else ""
            message = f"`{names[at]}` shares memory with {label}{why}; {HINT}"
            yield failed(names[at], "aliases-input", message)
            break
    again = run.call(leaf=False)
    for name, one, other in zip(names, call.results, again.results, strict=True):
        if _shared(one, other):
            message = (
                f"two calls return the same memory as `{name}`, which it keeps: the second overwrites what "
                f"the first returned, or a write into one changes the other; {HINT}"
            )
            yield failed(name, "stale-state", message)


def _shared(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not one.numel() or not other.numel():
        return False
    return one is other or capabilities.shares_memory(one, other) or _same_place(one, other)


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Return True if two storages overlap: each NumPy array gets a storage of its own."""
    first, second = one.untyped_storage(), other.untyped_storage()
    return (
        one.device == other.device
        and first.data_ptr() < second.data_ptr() + second.nbytes()
        and second.data_ptr() < first.data_ptr() + first.nbytes()
    )


def _is_recorded_view(result: Tensor, other: Tensor) -> bool:
    """Return True if autograd records that a write into one changes the other."""
    before = capabilities.version(result)
    with torch.no_grad():
        element = other.detach().as_strided((1,), (1,), other.storage_offset())
        element.copy_(element.clone())
    if capabilities.version(result) == before:
        return False  # the version counter does not notice the write
    if not (result.requires_grad and other.requires_grad):
        return True
    try:
        with torch.enable_grad():
            other.mul_(1)
        return result.grad_fn is None
    except RuntimeError:
        return True  # a view made inside of a Function
