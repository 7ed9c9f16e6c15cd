"""Adoption and calls of the corpus, for the tests of eager, compiled and exported use alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from corpus import ENTRIES, Entry, tensors
from torch import Tensor

import opsmith

NUMBERED = [(entry, index) for entry in ENTRIES.values() for index in range(len(entry.make()))]


def adopted(entry: Entry) -> Callable[..., Any]:
    """The operator, on copies where it writes in place, as `entry.apply` is."""
    operator = handle(entry)
    if not entry.in_place:
        return operator

    def on_copies(*arguments: Any, **named: Any) -> Any:
        copies = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
        return operator(*copies, **{name: value.clone() for name, value in named.items()})

    return on_copies


@functools.cache
def handle(entry: Entry) -> opsmith.Operator:
    options = dict(entry.options)
    if entry.needs_samples:
        options["samples"] = entry.make
    return opsmith.adopt(entry.cls, f"corpus::{entry.name}", **options)


def chosen(which: Callable[[Entry], Any], every: int = 1) -> Any:
    """Parametrizes over the entries of which something holds; all but one of `every` are slow."""
    entries = [entry for entry in ENTRIES.values() if which(entry)]
    cases = [
        pytest.param(entry, id=entry.name, marks=pytest.mark.slow if position % every else ())
        for position, entry in enumerate(entries)
    ]
    return pytest.mark.parametrize("entry", cases)


def sampled(which: Callable[[Entry], Any], most: int = 4) -> Any:
    """Parametrizes over the entries of which something holds, and their samples, or the first ones."""
    chosen_rows = [row for row in NUMBERED if which(row[0]) and row[1] < most]
    rows = [pytest.param(entry, index, id=f"{entry.name}-{index}") for entry, index in chosen_rows]
    return pytest.mark.parametrize(("entry", "index"), rows)


@functools.cache
def results_with_gradient(entry: Entry) -> int:
    """Number of results of the first sample that have a gradient."""
    return len(followed(run(entry.apply, sample(entry, 0))))


def has_gradient(entry: Entry) -> bool:
    return results_with_gradient(entry) > 0


def differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def places(arguments: Sequence[Any]) -> list[int]:
    """Positions of the arguments that can have a gradient."""
    return [place for place, argument in enumerate(arguments) if differentiable(argument)]


def sample(entry: Entry, index: int, wanted: Iterable[int] | None = None) -> tuple[Any, ...]:
    """Fresh arguments; those at the wanted places, or all that can, ask for their gradient."""
    arguments = entry.make()[index]
    for place in places(arguments) if wanted is None else wanted:
        arguments[place].requires_grad_()
    return arguments


def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A call under one random seed."""
    torch.manual_seed(0)
    return function(*arguments)


def followed(value: Any) -> list[Tensor]:
    """The results that have a gradient."""
    return [result for result in tensors(value) if result.requires_grad]


def incoming(results: Iterable[Tensor], *, strided: bool = False) -> list[Tensor]:
    """Random incoming gradients; strided, each lies in every second place of a larger one, backwards."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for result in results:
        grad = torch.randn(result.shape, dtype=result.dtype, generator=generator)
        if strided and grad.ndim:
            wide = grad.new_empty(*grad.shape[::-1], 2)
            wide[..., 0] = grad.permute(*range(grad.ndim)[::-1])
            grad = wide[..., 0].permute(*range(grad.ndim)[::-1])
        made.append(grad)
    return made


def gradients(results: Sequence[Tensor], arguments: Iterable[Any], grads: Sequence[Tensor]) -> list[Tensor]:
    """By every argument that asks; a gradient that is not there is zero."""
    asking = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    return list(torch.autograd.grad(results, asking, grads, materialize_grads=True))


def loss(value: Any) -> Tensor:
    """One real number of a whole result, in which each element counts differently."""
    total = torch.zeros((), dtype=torch.float64)
    for result in tensors(value):
        if not differentiable(result):
            continue
        weight = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
        parts = (result.real, result.imag) if result.is_complex() else (result,)
        for factor, part in zip((1.0, -2.0), parts, strict=False):
            total = total + factor * (weight * part.double()).sum()
    return total


ROUNDING = 32
"""Units of rounding that may pass: sums round as operands lie in memory, and a first run works on copies."""


def assert_same(found: Any, expected: Any) -> None:
    """Equal but for rounding, with structure, dtypes, shapes and what asks for a gradient."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.requires_grad == expected.requires_grad
        allowed = ROUNDING * torch.finfo(expected.dtype).eps if differentiable(expected) else 0.0
        torch.testing.assert_close(
            found.detach(), expected.detach(), rtol=allowed, atol=allowed, equal_nan=True
        )
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def refusal(error: BaseException | None) -> str:
    """The class and words of every error that led to this one."""
    told = []
    while error is not None:
        told.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(told)


def by_opsmith(error: BaseException) -> bool:
    """Return whether it is our error, or one of torch's that quotes ours."""
    ours = [name for name in dir(opsmith.errors) if name.endswith("Error")]
    return any(name in refusal(error) for name in ours)


def assert_refused(entry: Entry, use: str, call: Callable[[], Any]) -> None:
    """A use that the class's own code does not allow raises our error, and names the reason."""
    names, words = entry.refused[use]
    with pytest.raises(Exception, match=r"\S") as caught:  # where torch compiles, it wraps ours in its own
        call()
    told = refusal(caught.value)
    assert any(name in told for name in names.split("|")), told
    assert words in told, told
    assert "hint: " in told, told
    assert f"corpus::{entry.name}" in told, told
