"""A few lines of Python that show a failure again, run once before they are shown, so that they do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.output.calling import Calling, calling
from opsmith.checking.output.writing import MOST_ELEMENTS, drawn, imports, writable, written
from opsmith.checking.samples.layouts import Layout
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in


def replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    ending: Sequence[str],
    more: Mapping[str, Any] | None = None,
    *,
    check: str | None = None,
    fresh: bool = False,
    shows: Callable[[Exception], bool] = lambda error: True,
) -> str | None:
    """A script that sets up a call and ends in lines that fail.

    Args:
        subject: What is under check.
        sample: The sample that failed.
        flat: Its arguments, as they were when it failed.
        ending: Lines that fail, with the call as `Calling.call` writes it and every argument by its name.
        more: Other values that the ending names.
        check: Name of the property, which is run again where no such lines fail.
        fresh: Whether the lines fail for other numbers too, so that these may be rounded or drawn.
        shows: Whether what the lines raise shows the failure.

    Returns:
        The script; None where there is none, and `check` is not given.
    """
    values = {**_arguments(sample, flat), **(more or {})}
    called = calling(subject)
    if called is not None and all(map(writable, values.values())):
        for lines in _settings(values, fresh=fresh):
            if _fails(called, values, [*lines, *ending], shows):
                return "\n".join([*called.lines, *imports(list(values.values())), *lines, *ending])
    return None if check is None else check_again(subject, check)


def result_replay(
    subject: Subject, sample: Sample, flat: Sequence[Any], position: int, expected: Tensor | None, check: str
) -> str | None:
    """The script for a wrong result.

    Args:
        subject: What is under check.
        sample: The sample.
        flat: Its arguments.
        position: Which of the visible results is wrong.
        expected: What is right.
        check: Name of the property.
    """
    called = calling(subject)
    parts = called.parts(sample) if called is not None else None
    if called is None or parts is None:
        return check_again(subject, check)
    got = f"{called.call(sample)}{parts[position][0]}"
    seed = _seed(subject)
    if called.reference is not None:
        right = f"{called.reference}({_named(sample)}){parts[position][1]}"
        ending = [*seed, f"got = {got}", *seed, f"expected = {right}"]
        ending.append("torch.testing.assert_close(got, expected)")
        if not seed:
            ending = [f"torch.testing.assert_close({got}, {right})"]
        script = replay(subject, sample, flat, ending, fresh=True)
        if script is not None:
            return script
    if expected is None:
        return check_again(subject, check)
    ending = [*seed, f"torch.testing.assert_close({got}, expected)"]
    like = {"expected": _as_called(subject, sample, flat, position, expected)}
    return replay(subject, sample, flat, ending, like, check=check)


def gradient_replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    place: int,
    grads: Sequence[Tensor | None],
    expected: Tensor | None,
    *,
    subset: Sequence[int] = (),
    check: str = "gradient",
) -> str | None:
    """The script for a wrong gradient.

    Args:
        subject: What is under check.
        sample: The sample.
        flat: Its arguments.
        place: The input whose gradient is wrong.
        grads: What comes in for each visible result.
        expected: What is right.
        subset: The inputs that require a gradient; `place` alone by default.
        check: Name of the property.
    """
    called = calling(subject)
    parts = called.parts(sample) if called is not None else None
    if called is None or parts is None:
        return check_again(subject, check)
    subset = tuple(subset) or (place,)
    flat = [
        value.detach().requires_grad_(at in subset) if is_inexact(value) else value
        for at, value in enumerate(flat)
    ]
    more, names = _incoming(grads)
    inputs = [sample.labels[at] for at in subset]
    picked = _Backward(inputs, inputs.index(sample.labels[place]), names, [parts[at] for at in names])
    seed = _seed(subject)
    got = picked.lines("got", called.call(sample), 0)
    if expected is None:  # it raises
        script = replay(subject, sample, flat, [*seed, *got], more)
        if script is not None:
            return script
    if called.reference is not None:
        right = picked.lines("expected", f"{called.reference}({_named(sample)})", 1)
        ending = [*seed, *got, *seed, *right, "torch.testing.assert_close(got, expected)"]
        script = replay(subject, sample, flat, ending, more, fresh=True)
        if script is not None:
            return script
    if expected is None:
        return check_again(subject, check)
    more["expected"] = expected.to(flat[place].device, flat[place].dtype)
    ending = [*seed, *got, "torch.testing.assert_close(got, expected)"]
    return replay(subject, sample, flat, ending, more, check=check)


class _Backward:
    """Lines that take one gradient."""

    def __init__(
        self, inputs: Sequence[str], picked: int, names: Mapping[int, str], parts: Sequence[tuple[str, str]]
    ) -> None:
        self.inputs, self.picked, self.names, self.parts = list(inputs), picked, list(names.values()), parts

    def lines(self, name: str, call: str, side: int) -> list[str]:
        """The gradient under this name, of a call; 0 for the operator's, 1 for the reference's."""
        before: list[str] = []
        parts = [each[side] for each in self.parts]
        if len(parts) > 1:
            before, call = [f"results = {call}"], "results"
        outputs = _one_or_several([f"{call}{part}" for part in parts])
        taken = (
            f"torch.autograd.grad({outputs}, {_one_or_several(self.inputs)}, {_one_or_several(self.names)}"
        )
        if len(self.inputs) == 1 and len(parts) == 1:
            return [f"({name},) = {taken}, allow_unused=True)"]
        return [*before, f"{name} = {taken}, allow_unused=True)[{self.picked}]"]


def _one_or_several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _incoming(grads: Sequence[Tensor | None]) -> tuple[dict[str, Any], dict[int, str]]:
    """Incoming gradients by the name that a script gives each, and these names by position."""
    given = {at: grad for at, grad in enumerate(grads) if grad is not None}
    names = {at: "grad" if len(given) == 1 else f"grad_{at}" for at in given}
    return {names[at]: grad.detach() for at, grad in given.items()}, names


def layout_replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    grads: Sequence[Tensor | None],
    places: Sequence[int],
    odd: Sequence[tuple[int, bool, Layout]],
    output: int,
    check: str,
) -> str | None:
    """The script for an output that depends on where numbers lie in memory.

    Args:
        subject: What is under check.
        sample: The sample.
        flat: Its arguments, contiguous.
        grads: Incoming gradients, contiguous.
        places: The inputs that are differentiated by.
        odd: What is not contiguous: its place, whether it is an incoming gradient, and its layout.
        output: Which of the results and gradients differs.
        check: Name of the property.
    """
    called = calling(subject)
    parts = called.parts(sample) if called is not None else None
    if called is None or parts is None:
        return check_again(subject, check)
    more, names = _incoming(grads)
    if any("[" in sample.labels[place] for place, backward, _ in odd if not backward):
        return check_again(subject, check)  # an item of a list cannot be handed over by a name of its own
    before: list[str] = []
    laid, undone = {}, {}
    for place, backward, layout in odd:
        label = names[place] if backward else sample.labels[place]
        name = laid[label] = f"odd_{label}"
        undone[label] = f"{name}{layout.undone}"
        shown = re.sub(r"\bx\b", label, layout.code)
        before.append(f"{name} = {shown}")
    call, seed = called.call(sample), _seed(subject)
    more = more if output >= len(parts) else {}
    given = [*sample.flattening.schema.names, *more]
    body = [f"def run({', '.join(given)}):"]
    if output < len(parts):
        body.append(f"    return {call}{parts[output][0]}")
    else:
        label = sample.labels[places[output - len(parts)]]
        outputs = _one_or_several([f"results{parts[at][0]}" for at in names])
        incoming = _one_or_several(list(names.values()))
        body.append(f"    {label} = {label}.detach().requires_grad_()")
        body.append(f"    results = {call}")
        body.append(f"    return torch.autograd.grad({outputs}, {label}, {incoming})[0]")
    odd_call = f"run({', '.join(laid.get(name, name) for name in given)})"
    plain_call = f"run({', '.join(undone.get(name, name) for name in given)})"
    ending = [*before, "", *body, "", *seed, f"got = {odd_call}", *seed, f"expected = {plain_call}"]
    ending.append("torch.testing.assert_close(got, expected)")
    return replay(subject, sample, flat, ending, more, check=check, fresh=True)


def check_again(subject: Subject, check: str, *, isolate: bool = False) -> str:
    """A script that runs the property again, where its inputs cannot be written in a few lines.

    Args:
        subject: What was checked.
        check: The property.
        isolate: Whether it ends the process that runs it.
    """
    called = calling(subject)
    lines = ["import opsmith", ""] if called is None else list(called.lines)
    name = "operator" if called is None or called.reference is not None else called.checked
    options = f'only=["{check}"], seed={subject.seed}, effort="{subject.effort.name}"'
    options += ", isolate=True" * isolate
    if subject.specification.samples is None or (called is not None and called.temporary):
        options = f"samples=samples, {options}"
        lines += _given(subject)
    return "\n".join([*lines, f"report = opsmith.check({name}, {options})", _HOLDS])


def _given(subject: Subject) -> list[str]:
    """The author's samples as lines of code: only with these does a class fail again."""
    values: list[Any] = []
    lines: list[str] = []
    for sample in subject.samples:
        if sample.origin:
            continue
        args, named = sample.arguments(sample.at())
        adopted = subject.specification.adopted
        if adopted is not None and adopted.variadic:
            args = [*args[:-1], *args[-1]]
        every = [*args, *named.values()]
        values += every
        if all(map(writable, every)):
            words = [*map(written, args), *(f"{name}={written(value)}" for name, value in named.items())]
            sole = "," * (len(words) == 1)
            call = f"opsmith.Make().call({', '.join(words)})" if named else f"({', '.join(words)}{sole})"
            lines.append(f"    {call},")
    if not all(map(writable, values)) or sum(each.numel() for each in tensors_in(values)) > MOST_GIVEN:
        return ["samples = ...  # put in the samples that were given: they are too long to write here"]
    return [*imports(values), "samples = [", *lines, "]"]


MOST_GIVEN = 256
"""Samples with more numbers than this are not written out."""

_HOLDS = "assert report.passed_as_asked, report"


def _named(sample: Sample) -> str:
    """The arguments of a call of the reference, as code: every one by its name."""
    return ", ".join(f"{name}={name}" for name in sample.flattening.schema.names)


def _seed(subject: Subject) -> list[str]:
    return [f"torch.manual_seed({subject.seed})"] if subject.draws else []


def _arguments(sample: Sample, flat: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(sample.flattening.schema.names, sample.flattening.pack(flat), strict=True))


def _as_called(
    subject: Subject, sample: Sample, flat: Sequence[Any], position: int, expected: Tensor
) -> Tensor:
    """The right result in the dtype in which the reference gives it."""
    with torch.no_grad():
        every = subject.visible(sample, subject.reference(sample, flat))
    like = every[position]
    return expected.to(like.device, like.dtype)


def _settings(values: Mapping[str, Any], *, fresh: bool) -> Iterator[list[str]]:
    """Lines that set the values up, the shortest first."""
    elements = sum(value.numel() for value in tensors_in(list(values.values())))
    if elements <= MOST_ELEMENTS:
        if fresh:
            yield [f"{name} = {written(value, rounded=True)}" for name, value in values.items()]
        yield [f"{name} = {written(value)}" for name, value in values.items()]
    elif fresh:
        yield ["torch.manual_seed(0)", *(f"{name} = {_short(value)}" for name, value in values.items())]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    few = isinstance(value, Tensor) and value.numel() <= 8
    return (None if few else drawn(value)) or written(value, rounded=True)


def _fails(
    called: Calling,
    values: Mapping[str, Any],
    lines: Sequence[str],
    shows: Callable[[Exception], bool],
) -> bool:
    """Whether lines fail, run as a reader would run them."""
    space: dict[str, Any] = {"torch": torch, **called.bound}
    space.update({type(each).__qualname__: type(each) for each in values.values()})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec("\n".join(lines), space)
        except (SyntaxError, NameError):  # what has no form in code, such as an infinite complex number
            return False
        except SystemExit:  # a script that leaves shows nothing
            return False
        except Exception as error:
            return shows(error)
    return False
