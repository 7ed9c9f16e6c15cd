"""Incoming gradients, samples and their copies keep the layout that they are meant to have."""

import pytest
import torch

from opsmith.checking.layouts import LAYOUTS, incoming
from opsmith.checking.sample import Sample, replica
from opsmith.core.calls import Call
from opsmith.core.schema import schema_of

SHAPES = [(3, 4), (5,), (), (2, 3, 4), (1,), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_has_the_form_of_its_result(
    layout: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = incoming(torch.empty(shape, dtype=dtype), layout, torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype) == (torch.Size(shape), dtype)


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        ("contiguous", (3, 4), (4, 1)),
        ("expanded", (3, 4), (0, 0)),
        ("transposed", (3, 4), (1, 3)),
        ("transposed", (5,), (2,)),
        ("transposed", (2, 3, 4), (1, 2, 6)),
    ],
)
def test_a_gradient_has_its_layout(layout: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert incoming(torch.empty(shape), layout, torch.Generator()).stride() == strides


X = torch.arange(24.0).view(4, 6)
Z = torch.view_as_complex(X.view(4, 3, 2))


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.mT,
        X[:, ::2],
        X[1:],
        X[0].expand(3, 6),
        X[0].unfold(0, 3, 1),
        torch.view_as_complex(X.view(4, 3, 2)).conj(),
    ],
    ids=["contiguous", "transposed", "sliced", "offset", "expanded", "overlapping", "conjugate"],
)
def test_a_copy_has_the_same_numbers_and_strides_and_its_own_memory(tensor: torch.Tensor) -> None:
    copy = replica(tensor, torch.float64)
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor.to(copy.dtype).resolve_conj())
    copy.untyped_storage().fill_(0)
    assert tensor.any()


def test_other_values_and_integers_stay_as_they_are() -> None:
    assert replica("same", torch.float64) == "same"
    assert replica(torch.tensor([1, 2]), torch.float64).dtype is torch.int64
    assert replica(torch.tensor([1j]), torch.float32).dtype is torch.complex64


def test_a_generator_is_copied_in_its_state() -> None:
    generator = torch.Generator().manual_seed(5)
    copy = replica(generator)
    assert torch.equal(torch.rand(3, generator=copy), torch.rand(3, generator=generator))


def weighted(xs: list[torch.Tensor], weight: torch.Tensor | None = None, *, power: int = 2) -> torch.Tensor:
    return xs[0]


def test_a_sample_names_every_tensor() -> None:
    schema = schema_of(weighted, "demo::weighted")
    sample = Sample.of(3, Call(([torch.ones(2), torch.ones(1, 3)],), {"power": 5}), schema)
    assert sample.labels == ("xs[0]", "xs[1]", "weight", "power")
    assert sample.names == ("xs", "xs", "weight", "power")
    assert sample.inexact == (0, 1)
    assert str(sample) == "sample 3 (xs[0] [2], xs[1] [1, 3], weight=None, power=5)"
    args, kwargs = sample.arguments(sample.at(torch.float64))
    assert [tensor.dtype for tensor in args[0]] == [torch.float64] * 2
    assert (args[1], kwargs) == (None, {"power": 5})
