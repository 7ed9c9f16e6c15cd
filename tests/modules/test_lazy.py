"""Sizes that are learnt from the first call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from generated_layers import Affine, Convolution, FromLetters, Swish, affine
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.testing import assert_close

import opsmith
from opsmith import errors


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = Affine(None, 3), FromLetters(in_features=None, out_features=2, bias=False)
    return nn.Sequential(first, Swish(), second).double()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


def test_it_becomes_the_class_that_it_was_made_as(x: Tensor) -> None:
    model = network()
    assert repr(model[0]) == "LazyAffine(in_features=None, out_features=3, bias=True)"
    assert isinstance(model[0], Affine)
    assert [is_lazy(each) for each in model.parameters()] == [True, False, True]
    assert model(x).shape == (5, 2)
    assert [type(each) for each in model] == [Affine, Swish, FromLetters]
    assert repr(model[0]) == "Affine(in_features=4, out_features=3, bias=True)"
    assert [(each.shape, each.dtype) for each in model.parameters()] == [
        ((3, 4), torch.float64),
        ((3,), torch.float64),
        ((2, 3), torch.float64),
    ]
    assert 0 < model[0].weight.abs().max() <= 0.1
    assert_close(pickle.loads(pickle.dumps(model))(x), model(x))
    with pytest.raises(errors.ShapeError):
        model(x[:, :3])


def test_it_trains_as_one_whose_size_was_given(x: Tensor) -> None:
    lazy = network()
    lazy(x)
    given = nn.Sequential(Affine(4, 3), Swish(), FromLetters(3, 2, bias=False)).double()
    given.load_state_dict(lazy.state_dict())
    for model in (lazy, given):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert_close(lazy.state_dict(), given.state_dict())


def test_a_copy_learns_by_itself(x: Tensor) -> None:
    model = network()
    twin = copy.deepcopy(model)
    twin(x)
    assert is_lazy(model[0].weight)
    assert model(x[:, :2]).shape == (5, 2)
    assert (model[0].in_features, twin[0].in_features) == (2, 4)


def test_it_takes_a_state_dict_before_its_first_call(x: Tensor) -> None:
    done, fresh = network(), network()
    done(x)
    fresh.load_state_dict(done.state_dict())
    assert_close(fresh(x), done(x))
    assert repr(fresh) == repr(done)


def test_on_the_meta_device() -> None:
    layer = Affine(None, 3, device="meta")
    assert layer(torch.empty(5, 4, device="meta")).shape == (5, 3)
    assert layer.weight.shape == (3, 4)


def test_a_size_that_no_call_tells() -> None:
    with pytest.raises(errors.SizeError, match="`out_features` is not a size"):
        Affine(4, None)
    with pytest.raises(errors.SizeError, match="`in_channels` is not a size"):
        Convolution(None, 4, 3)  # its operator has no `shapes=`
    assert Convolution.Lazy is None


def test_a_subclass_is_not_lazy() -> None:
    """Its constructor may take other things, of which None may be one."""

    class Wide(affine.module(sizes=("i", "o"), parameters={"weight": ("o", "i")}, init=opsmith.init.ones)):  # type: ignore[misc]
        def __init__(self, size: int | None) -> None:
            super().__init__(size or 2, 3)

    assert Wide(None).weight.shape == (3, 2)
