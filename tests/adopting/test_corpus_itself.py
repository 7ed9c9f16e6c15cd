"""The corpus is right: torch runs every Function of it, and each says truly what it covers and gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corpus import ENTRIES, FEATURES, Entry, structure, tensors
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

NUMBERED = [
    pytest.param(entry, index, id=f"{entry.name}-{index}")
    for entry in ENTRIES.values()
    for index in range(len(entry.make()))
]
TRUE = [param for param in NUMBERED if param.values[0].kinds == ("true",)]


def ready(entry: Entry, index: int) -> tuple[Any, ...]:
    """One sample, every tensor of which that can have a gradient asks for it."""
    return tuple(
        argument.requires_grad_() if isinstance(argument, Tensor) and _floating(argument) else argument
        for argument in entry.make()[index]
    )


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def followed(entry: Entry) -> Any:
    """cls.apply, of which only the results that have a gradient are given."""
    return lambda *arguments: tuple(
        result for result in tensors(entry.apply(*arguments)) if result.requires_grad
    )


def test_the_corpus_is_large_and_its_classes_are_distinct() -> None:
    assert len(ENTRIES) >= 36
    assert len({entry.cls for entry in ENTRIES.values()}) == len(ENTRIES)


def test_every_feature_is_covered_and_every_one_covered_is_listed() -> None:
    assert {feature for entry in ENTRIES.values() for feature in entry.covers} == FEATURES


@pytest.mark.every(8)
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_samples_are_equal_each_time(entry: Entry) -> None:
    first, second = entry.make(), entry.make()
    for one, other in zip(first, second, strict=True):
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert a is not b
            assert torch.equal(a, b)


@pytest.mark.every(8)
@pytest.mark.parametrize(("entry", "index"), NUMBERED)
def test_torch_runs_it(entry: Entry, index: int) -> None:
    torch.manual_seed(0)
    result = entry.apply(*ready(entry, index))
    found = structure(result)
    if entry.name == "optional_weights" and index == 1:  # asked for
        assert found == ("float64", "float64")
    else:
        assert found == entry.expected
    if entry.truth is not None:
        truth = entry.truth(*ready(entry, index))
        torch.testing.assert_close(list(tensors(result)), list(tensors(truth)))


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "index"), TRUE)
def test_its_gradients_are_the_derivatives(entry: Entry, index: int) -> None:
    assert torch.autograd.gradcheck(followed(entry), ready(entry, index), check_undefined_grad=False)


OWN = [param for param in TRUE if param.values[0].second == "own"]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "index"), OWN)
def test_its_own_second_derivatives_are_right(entry: Entry, index: int) -> None:
    assert torch.autograd.gradgradcheck(followed(entry), ready(entry, index), check_undefined_grad=False)


@pytest.mark.parametrize(
    "entry",
    [e for e in ENTRIES.values() if e.second == "truth" and "reference" not in e.covers],
    ids=lambda e: e.name,
)
def test_its_own_second_derivatives_are_wrong(entry: Entry) -> None:
    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(followed(entry), ready(entry, 0))


def test_torch_refuses_an_instance_of_what_is_not_static() -> None:
    """As the oldest documents call it; torch does take `apply` of such a class."""
    entry = ENTRIES["linear_not_static"]
    with pytest.warns(DeprecationWarning, match="should not be instantiated"):
        instance = entry.cls()
    with pytest.raises(RuntimeError, match="non-static forward method"):
        instance(*entry.make()[0])
