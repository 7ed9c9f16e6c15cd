"""The corpus under torch.func: what an old-style Function lacked, its operator has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adopted_corpus import (
    adopted,
    assert_refused,
    chosen,
    followed,
    gradients,
    has_gradient,
    incoming,
    loss,
    places,
    run,
    sample,
    sampled,
)
from corpus import Entry, tensors
from torch import Tensor

import opsmith


def expected_gradients(entry: Entry, index: int) -> list[Tensor]:
    arguments = sample(entry, index)
    total = loss(followed(run(entry.apply, arguments)))
    return gradients([total], arguments, [torch.ones_like(total)])


@pytest.mark.every(8)
@sampled(lambda entry: has_gradient(entry) and "grad" not in entry.refused, most=2)
def test_func_grad(entry: Entry, index: int) -> None:
    operator, arguments = adopted(entry), entry.make()[index]
    which = [
        i for i, result in enumerate(tensors(run(entry.apply, sample(entry, index)))) if result.requires_grad
    ]

    def counted(*given: Any) -> Tensor:
        results = list(tensors(operator(*given)))
        return loss([results[i] for i in which])

    try:
        found = run(torch.func.grad(counted, argnums=tuple(places(arguments))), arguments)
    except opsmith.errors.OpsmithError:
        if entry.second != "never-wrong":
            raise
        return
    torch.testing.assert_close(list(found), expected_gradients(entry, index))


def batched(
    entry: Entry, index: int
) -> tuple[list[tuple[Any, ...]], tuple[Any, ...], tuple[int | None, ...]]:
    """Three calls with different numbers, the same calls as one batch, and where the batch lies."""
    rows = []
    for factor in (1.0, 0.5, 1.25):
        arguments = entry.make()[index]
        scaled = (a * factor if i in places(arguments) else a for i, a in enumerate(arguments))
        rows.append(tuple(scaled))
    together = tuple(
        torch.stack(column) if isinstance(column[0], Tensor) else column[0]
        for column in zip(*rows, strict=True)
    )
    return rows, together, tuple(0 if isinstance(a, Tensor) else None for a in rows[0])


@pytest.mark.every(8)
@sampled(lambda entry: entry.vmaps, most=2)
def test_vmap(entry: Entry, index: int) -> None:
    operator = adopted(entry)
    rows, together, dims = batched(entry, index)
    found = torch.vmap(lambda *given: tuple(tensors(operator(*given))), in_dims=dims)(*together)
    each = [list(tensors(entry.apply(*row))) for row in rows]
    torch.testing.assert_close(list(found), [torch.stack(column) for column in zip(*each, strict=True)])


@pytest.mark.every(8)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for unfold's
@chosen(lambda entry: entry.vmaps and has_gradient(entry))
def test_vmap_of_grad(entry: Entry) -> None:
    operator = adopted(entry)
    rows, together, dims = batched(entry, 0)
    which = [
        i for i, result in enumerate(tensors(run(entry.apply, sample(entry, 0)))) if result.requires_grad
    ]

    def counted(function: Any) -> Any:
        def total(*given: Any) -> Tensor:
            results = list(tensors(function(*given)))
            return loss([results[i] for i in which])

        return total

    argnums = tuple(places(rows[0]))
    found = torch.vmap(torch.func.grad(counted(operator), argnums=argnums), in_dims=dims)(*together)
    each = []
    for row in rows:
        asking = [row[place].detach().requires_grad_() for place in argnums]
        given = list(row)
        for place, tensor in zip(argnums, asking, strict=True):
            given[place] = tensor
        total = counted(entry.apply)(*given)
        each.append(gradients([total], asking, [torch.ones_like(total)]))
    torch.testing.assert_close(list(found), [torch.stack(column) for column in zip(*each, strict=True)])


@pytest.mark.every(8)
@chosen(lambda entry: entry.vmaps and entry.kinds == ("true",) and not {"NumPy", "complex"} & {*entry.covers})
def test_jacrev(entry: Entry) -> None:
    operator, arguments = adopted(entry), entry.make()[0]
    place = places(arguments)[0]

    def of(function: Any) -> Any:
        def followed_alone(tensor: Tensor) -> Tensor:
            return next(tensors(function(*arguments[:place], tensor, *arguments[place + 1 :])))

        return followed_alone

    found = torch.func.jacrev(of(operator))(arguments[place])
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(of(entry.apply), arguments[place]))


@pytest.mark.every(8)
@sampled(lambda entry: entry.jvp, most=2)
def test_jvp(entry: Entry, index: int) -> None:
    """With the gradients, which are right: <u, jvp(v)> = <vjp(u), v>."""
    operator, arguments = adopted(entry), entry.make()[index]
    moved = places(arguments)
    tangents = incoming([arguments[place] for place in moved])
    asked = sample(entry, index)
    results = run(entry.apply, asked)
    which = [i for i, result in enumerate(tensors(results)) if result.requires_grad]

    def alone(*given: Tensor) -> tuple[Tensor, ...]:
        full = list(arguments)
        for place, tensor in zip(moved, given, strict=True):
            full[place] = tensor
        outcome = list(tensors(operator(*full)))
        return tuple(outcome[i] for i in which)

    _, found = torch.func.jvp(alone, tuple(arguments[place] for place in moved), tuple(tangents))
    grads = incoming(followed(results))
    back = gradients(followed(results), asked, grads)

    def inner(left: Any, right: Any) -> Tensor:
        return sum(((a.conj() * b).sum().real for a, b in zip(left, right, strict=True)), torch.zeros(()))

    torch.testing.assert_close(inner(grads, found), inner(back, tangents))


@chosen(lambda entry: "grad" in entry.refused)
def test_func_grad_refused(entry: Entry) -> None:
    operator, arguments = adopted(entry), entry.make()[0]
    assert_refused(
        entry, "grad", lambda: torch.func.grad(lambda x: loss(operator(x, *arguments[1:])))(arguments[0])
    )
