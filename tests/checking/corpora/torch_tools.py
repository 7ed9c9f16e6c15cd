"""torch's own checks of an operator, run on an entry of the corpus as its users would run them.

`gradcheck` is given the class's `apply` (or the operator), and the samples in float64 with every floating
tensor requiring its gradient, each sample by itself. opcheck takes operators alone: a class is registered
as the composite implementation of one, unchanged, so that opcheck sees its forward and its backward.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, gradcheck, gradgradcheck

from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of

Verdict = str | None
"""What a tool says is wrong; empty where nothing is, None where it does not apply."""

LIBRARY = torch.library.Library("check_power", "DEF")
COUNT = itertools.count()
ONCE = "marked with @once_differentiable"
LEAF = "a leaf Variable that requires grad"


def by_gradcheck(operator: Any, samples: Any, *, fast: bool = False) -> Verdict:
    """Run gradcheck as its documentation shows it."""
    return _first(_by_gradcheck(*each, fast_mode=fast) for each in _calls(operator, samples))


def by_gradgradcheck(operator: Any, samples: Any) -> Verdict:
    """Run gradgradcheck, and gradcheck with all options that the class supports."""
    options = {"check_batched_grad": True}
    if _defines(operator, "jvp"):
        options["check_forward_ad"] = True
    every = list(_calls(operator, samples))
    first = _first(_by_gradcheck(*each, **options) for each in every)
    return first or _first(_by_gradgradcheck(*each) for each in every)


def by_opcheck(operator: Any, samples: Any) -> Verdict:
    """Run opcheck; None where the class cannot be an operator of torch.library."""
    subject = _subject(operator, samples)
    try:
        target = _registered(operator, subject)
    except NotImplementedError:
        return None
    return _first(_by_opcheck(target, subject, sample) for sample in subject.samples)


def _first(verdicts: Iterator[Verdict]) -> Verdict:
    return next((each for each in verdicts if each), "")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _subject(operator: Any, samples: Any) -> Subject:
    return subject_of(operator, samples, 0, EFFORTS["default"])


def _defines(operator: Any, method: str) -> bool:
    return isinstance(operator, type) and getattr(operator, method) is not getattr(Function, method)


def _calls(operator: Any, samples: Any) -> Iterator[tuple[Callable[..., Any], Sample]]:
    """A function of flat arguments, for each sample that has something to differentiate."""
    subject = _subject(operator, samples)
    return ((_called(subject, sample), sample) for sample in subject.samples if sample.inexact)


def _requiring(sample: Sample, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Fresh arguments, of which every floating tensor requires its gradient."""
    flat = sample.at(dtype)
    for place in sample.inexact:
        flat[place].requires_grad_()
    return tuple(flat)


def _called(subject: Subject, sample: Sample) -> Callable[..., Any]:
    def function(*flat: Any) -> Any:
        args, kwargs = sample.arguments(flat)
        returned = subject.called(args, kwargs)
        many = returned if isinstance(returned, tuple | list) else (returned,)
        kept = [each for one in many for each in (one if isinstance(one, list) else [one])]
        return tuple(each for each in kept if isinstance(each, Tensor) and each.requires_grad) or tuple(kept)

    return function


def _by_gradcheck(function: Callable[..., Any], sample: Sample, **options: Any) -> Verdict:
    try:
        with _quiet():
            gradcheck(function, _requiring(sample, torch.float64), **options)
    except Exception as error:  # whatever it raises, the author sees
        if LEAF in str(error):  # of what writes in place and says so, gradcheck's users give it a copy
            return _by_gradcheck(_on_copies(function), sample, **options)
        return _said(error)
    return ""


def _by_gradgradcheck(function: Callable[..., Any], sample: Sample) -> Verdict:
    try:
        with _quiet():
            gradgradcheck(function, _requiring(sample, torch.float64))
    except Exception as error:  # whatever it raises, the author sees
        if ONCE in str(error):  # it says that it has no second order, and nobody would ask for it
            return ""
        if LEAF in str(error):
            return _by_gradgradcheck(_on_copies(function), sample)
        return _said(error)
    return ""


def _on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    def copied(*flat: Any) -> Any:
        return function(*(each.clone() if isinstance(each, Tensor) else each for each in flat))

    return copied


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


TYPES: Mapping[type, str] = {Tensor: "Tensor", bool: "bool", int: "int", float: "float", str: "str"}


def _registered(operator: Any, subject: Subject) -> Any:
    """The operator that opcheck is given."""
    if subject.torch_operator is not None:
        return subject.torch_operator
    flat = [sample.flat for sample in subject.samples]
    if "mark_dirty" in inspect.getsource(operator) or len({len(each) for each in flat}) > 1:
        raise NotImplementedError("it writes in place, or takes any number of arguments")
    kinds = []
    for values in zip(*flat, strict=True):
        found = {TYPES.get(Tensor if isinstance(value, Tensor) else type(value)) for value in values}
        optional = {type(None)} & {type(value) for value in values}
        found -= {None}
        if len(found) != 1:
            raise NotImplementedError("an argument has no type that a schema has")
        kinds.append(f"{found.pop()}{'?' if optional else ''}")
    with torch.no_grad():
        returned = operator.apply(*subject.samples[0].at())
    results = f"({', '.join(['Tensor'] * len(returned))})" if isinstance(returned, tuple) else "Tensor"
    name = f"operator_{next(COUNT)}"
    LIBRARY.define(f"{name}({', '.join(f'{kind} a{at}' for at, kind in enumerate(kinds))}) -> {results}")
    LIBRARY.impl(name, operator.apply, "CompositeImplicitAutograd")
    return getattr(torch.ops.check_power, name).default


def _by_opcheck(target: Any, subject: Subject, sample: Sample) -> Verdict:
    flat = _requiring(sample)
    if subject.torch_operator is None:
        args, kwargs = flat, {}
    else:
        positional, kwargs = sample.arguments(flat)
        args = tuple(positional)
    try:
        with _quiet():
            torch.library.opcheck(target, args, kwargs)
    except Exception as error:  # whatever it raises, the author sees
        return _said(error)
    return ""
