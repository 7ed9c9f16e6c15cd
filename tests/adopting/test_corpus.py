"""Every Function of the corpus, adopted: the values and gradients are those of cls.apply."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from adopted_corpus import (
    NUMBERED,
    adopted,
    assert_refused,
    assert_same,
    chosen,
    differentiable,
    followed,
    gradients,
    handle,
    has_gradient,
    incoming,
    places,
    results_with_gradient,
    run,
    sample,
    sampled,
)
from corpus import ENTRIES, Entry, tensors
from torch import Tensor

import opsmith


def everything(entry: Entry) -> bool:
    return True


@pytest.mark.every(8)
@chosen(everything)
def test_the_class_is_left_as_it_was(entry: Entry) -> None:
    before = {cls: dict(vars(cls)) for cls in entry.cls.__mro__}
    arguments = sample(entry, 0)
    expected = run(entry.apply, arguments)
    operator = handle(entry)
    run(adopted(entry), sample(entry, 0))
    assert isinstance(operator, opsmith.Operator)
    assert operator.name == f"corpus::{entry.name}"
    assert {cls: dict(vars(cls)) for cls in entry.cls.__mro__} == before
    assert_same(run(entry.apply, arguments), expected)


@pytest.mark.every(8)
@sampled(everything)
def test_values(entry: Entry, index: int) -> None:
    arguments = sample(entry, index)
    found = run(adopted(entry), arguments)
    assert_same(found, run(entry.apply, sample(entry, index)))
    for one, other in zip(tensors(arguments), tensors(entry.make()[index]), strict=True):
        assert torch.equal(one, other), "an input was written into"
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(arguments) if tensor.numel()}
    assert not storages & {result.untyped_storage().data_ptr() for result in tensors(found) if result.numel()}


@pytest.mark.every(8)
@sampled(everything, most=1)
def test_values_of_inputs_that_ask_for_nothing(entry: Entry, index: int) -> None:
    assert_same(run(adopted(entry), sample(entry, index, ())), run(entry.apply, sample(entry, index, ())))


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("entry", "index", "strided"),
    [
        pytest.param(entry, index, strided, id=f"{entry.name}-{index}-{'strided' if strided else 'dense'}")
        for entry, index in NUMBERED
        for strided in (False, True)
        if has_gradient(entry) and (index == 0 or not strided)
    ],
)
def test_gradients(entry: Entry, index: int, strided: bool) -> None:
    every = places(entry.make()[index])
    for wanted in [every, *([place] for place in every if len(every) > 1)]:
        arguments, others = sample(entry, index, wanted), sample(entry, index, wanted)
        results, expected = followed(run(adopted(entry), arguments)), followed(run(entry.apply, others))
        assert len(results) == len(expected)
        if results:
            grads = incoming(expected, strided=strided)
            assert_same(gradients(results, arguments, grads), gradients(expected, others, grads))


@sampled(lambda entry: results_with_gradient(entry) > 1)
def test_gradients_of_each_result_alone(entry: Entry, index: int) -> None:
    for which in range(len(followed(run(entry.apply, sample(entry, index))))):
        arguments, others = sample(entry, index), sample(entry, index)
        result, expected = (
            followed(run(adopted(entry), arguments))[which],
            followed(run(entry.apply, others))[which],
        )
        grads = incoming([expected])
        assert_same(gradients([result], arguments, grads), gradients([expected], others, grads))


@pytest.mark.every(8)
@chosen(has_gradient)
def test_hooks(entry: Entry) -> None:
    def hook_gradients(function: Any) -> list[Any]:
        """Gradients that hooks of results and inputs receive, and those that they change."""
        seen: list[Any] = []

        def doubled(grad: Tensor | None) -> Tensor | None:
            if grad is None:  # torch calls the hook of a leaf whose gradient was left out
                return None
            seen.append(grad.detach().clone())
            return grad * 2

        arguments = sample(entry, 0)
        results = followed(run(function, arguments))
        for tensor in (*results, *(arguments[place] for place in places(arguments))):
            tensor.register_hook(doubled)
        torch.autograd.backward(results, incoming(results))
        seen.sort(key=lambda grad: (str(grad.shape), str(grad.sum())))
        return [*seen, *(arguments[place].grad for place in places(arguments))]

    assert_same(hook_gradients(adopted(entry)), hook_gradients(entry.apply))


@pytest.mark.every(8)
@chosen(lambda entry: "any number of arguments" not in entry.covers)
def test_by_keyword(entry: Entry) -> None:
    operator, arguments = adopted(entry), sample(entry, 0)
    names = [*inspect.signature(entry.cls.forward).parameters]
    if entry.cls.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]  # ctx
    by_keyword = dict(zip(names, arguments, strict=False))
    assert_same(run(lambda: operator(**by_keyword), ()), run(entry.apply, sample(entry, 0)))


SECOND = ("own", "truth", "never-wrong")


def twice(entry: Entry, function: Any, index: int) -> list[Tensor]:
    """The gradients of a gradient, by the inputs and by the incoming gradients."""
    arguments = sample(entry, index)
    results = followed(run(function, arguments))
    grads = [grad.requires_grad_() for grad in incoming(results)]
    asking = [arguments[place] for place in places(arguments)]
    first = torch.autograd.grad(results, asking, grads, create_graph=True, materialize_grads=True)
    first = [one for one in first if one.requires_grad]
    if not first:
        return [torch.zeros_like(tensor) for tensor in (*asking, *grads)]
    return list(torch.autograd.grad(first, [*asking, *grads], incoming(first), materialize_grads=True))


@pytest.mark.every(8)
@sampled(lambda entry: entry.second in SECOND)
def test_second_derivatives(entry: Entry, index: int) -> None:
    """Against the truth where there is one, else against cls.apply, which gradgradcheck has found right."""
    arguments = sample(entry, index)
    expected = twice(entry, entry.truth or entry.apply, index)
    del arguments
    try:
        found = twice(entry, adopted(entry), index)
    except opsmith.errors.OpsmithError:
        if entry.second != "never-wrong":
            raise
        return
    torch.testing.assert_close(found, expected)


@pytest.mark.every(8)
@chosen(lambda entry: entry.second in ("own", "truth"))
def test_second_derivatives_numerically(entry: Entry) -> None:
    operator = adopted(entry)
    assert torch.autograd.gradgradcheck(
        lambda *arguments: tuple(followed(operator(*arguments))),
        sample(entry, 0),
        check_undefined_grad=False,
        fast_mode=not any(tensor.is_complex() for tensor in tensors(sample(entry, 0))),
    )


@chosen(lambda entry: entry.second == "refused")
def test_second_derivatives_refused(entry: Entry) -> None:
    assert_refused(entry, "second", lambda: twice(entry, adopted(entry), 0))


def test_every_refusal_is_tested() -> None:
    uses = {use for entry in ENTRIES.values() for use in entry.refused}
    assert uses == {"second", "grad"}
    assert all(differentiable(tensor) for tensor in tensors(ENTRIES["exp"].make()))
