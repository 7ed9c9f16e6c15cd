"""`Make` and samples: the same numbers from the same seed, in every dtype; each sample is a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import Make
from opsmith.core.call_arguments import CallArguments
from opsmith.core.samples import samples_of


def scaled(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor:
    return x * by + shift


def test_same_seed_same_numbers() -> None:
    assert_close(Make()(2, 3), Make()(2, 3))
    make = Make()
    assert not torch.equal(make(3), make(3))


def test_numbers_do_not_depend_on_the_global_state() -> None:
    torch.manual_seed(1)
    first = Make()(3)
    torch.manual_seed(2)
    assert_close(Make()(3), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_gets_the_same_numbers(dtype: torch.dtype) -> None:
    assert_close(Make(dtype)(50), Make(torch.float64)(50).to(dtype))


def test_complex_numbers() -> None:
    made = Make(torch.complex64)(50)
    assert made.dtype is torch.complex64
    assert made.real.std() > 0.5
    assert made.imag.std() > 0.5


def test_range_and_shape() -> None:
    made = Make()(100, low=3.0, high=4.0)
    assert made.shape == (100,)
    assert made.min() >= 3.0
    assert made.max() < 4.0
    assert Make()().shape == Make()(()).shape == ()
    for shape in ((2, 3), [2, 3], torch.Size([2, 3])):
        assert torch.equal(Make()(shape), Make()(2, 3))
        assert torch.equal(Make().integers(shape), Make().integers(2, 3))
    whole = Make().integers(100, low=-2, high=2)
    assert whole.dtype is torch.int64
    assert set(whole.tolist()) == {-2, -1, 0, 1}


def test_device() -> None:
    assert Make(device=torch.device("meta"))(2).device.type == "meta"


def calls(operator: opsmith.Operator[..., Any], function: Any) -> list[CallArguments]:
    operator.samples(function)
    return samples_of(function, Make(), operator.specification.schema, operator.name)


def test_forms_of_a_sample(name: str) -> None:
    x = torch.ones(2)

    def samples(make: Make) -> Any:
        yield x
        yield (x,)
        yield [x, 3.0]
        yield make.call(x, shift=1)
        yield make.call(x=x, by=4.0)

    assert calls(opsmith.operator(name)(scaled), samples) == [
        CallArguments((x,)),
        CallArguments((x,)),
        CallArguments((x, 3.0)),
        CallArguments((x,), {"shift": 1}),
        CallArguments((), {"x": x, "by": 4.0}),
    ]


def test_list_instead_of_a_generator(name: str) -> None:
    found = calls(opsmith.operator(name)(scaled), lambda make: [(make(2),), (make(3), 0.5)])
    assert [call.args[0].shape for call in found] == [(2,), (3,)]


def test_samples_without_make(name: str) -> None:
    """`make` is optional, where a plain tuple does as well."""
    found = calls(opsmith.operator(name)(scaled), lambda: [(torch.ones(2),)])
    assert len(found) == 1


def test_samples_are_part_of_the_specification(name: str) -> None:
    operator = opsmith.operator(name)(scaled)

    @operator.samples
    def some(make: Make) -> Any:
        yield make(2)

    assert operator.specification.samples is some
