"""An operator that fails without elements has a fault, unless it refuses them itself or has no answer."""

from __future__ import annotations

import cProfile
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.exceptions import attribute_exception
from opsmith.checking.samples.variations import Variations, variations
from opsmith.checking.subject_kinds import subject_of


def refusing(value: int) -> None:
    if not value:
        raise ValueError("nothing")


def asserting(value: int) -> None:
    assert value, "nothing"


def checking(value: int) -> None:
    torch._check(value > 0, lambda: "nothing")


OWN = {
    "raise": lambda: refusing(0),
    "assert": lambda: asserting(0),
    "torch._check": lambda: checking(0),
    "an error of ours": lambda: opsmith.check(3),
}
OTHERS = {
    "an operation of torch": lambda: torch.stack([]),
    "a method of a tensor": lambda: torch.empty(0).max(),
    "an index": lambda: torch.empty(0)[0],
    "an operator between tensors": lambda: torch.empty(2, 3) @ torch.empty(2),
    "Python inside of torch": lambda: torch.nn.functional.pad(torch.empty(2), (1, 1, 1, 1), mode="circular"),
    "a built-in function": lambda: max([]),
    "a function of C": lambda: math.sqrt(-1),
    "NumPy": lambda: np.empty(0).max(),
    "a division": lambda: 1 // 0,
}


def raised(call: Any) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was to raise")


@pytest.mark.parametrize("name", OWN)
def test_who_raises_says_it_himself(name: str) -> None:
    assert attribute_exception(raised(OWN[name]), OWN[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_raise_is_no_word_of_his(name: str) -> None:
    assert not attribute_exception(raised(OTHERS[name]), OTHERS[name])


def test_an_operator_of_an_author_speaks_for_himself_from_compiled_code() -> None:
    from torch.library import Library

    library = Library("empties_compiled", "DEF")
    library.define("pick(Tensor x) -> Tensor")
    library.impl("pick", torch.ops.aten.max.default, "CPU")  # compiled code, without a frame of Python

    def call() -> Any:
        return torch.ops.empties_compiled.pick(torch.empty(0))

    assert attribute_exception(raised(call), call)


def test_whoever_profiles_goes_on() -> None:
    error = raised(OTHERS["an operation of torch"])
    with cProfile.Profile() as profile:
        assert not attribute_exception(error, OTHERS["an operation of torch"])
        math.sqrt(4)
    names = {entry.code for entry in profile.getstats()}
    assert "<built-in method math.sqrt>" in names


class RowSoftmax(Function):
    """A loop over rows, and nothing to stack where there are none."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.stack([row.softmax(0) for row in x])
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class Refusing(RowSoftmax):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if not len(x):
            raise ValueError("Refusing: there are no rows")
        return RowSoftmax.forward(ctx, x)


class StableSoftmax(RowSoftmax):
    """A row without elements has no largest one."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        e = (x - x.amax(-1, keepdim=True)).exp()
        y = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y


class Cheapest(Function):
    """Each place sees the others, though with the numbers of the sample nobody takes from another."""

    @staticmethod
    def forward(ctx: Any, cost: Any) -> Any:
        places = torch.arange(len(cost), dtype=cost.dtype)
        return ((places[:, None] - places) ** 2 + cost).min(1).values

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Depthwise(Function):
    """Torch says of a convolution without channels that it does not support it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        return torch.nn.functional.conv1d(x, weight[:, None], padding=1, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise NotImplementedError


class MaxPool(Function):
    """Torch pools images of no examples, and none without channels."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y, index = torch.nn.functional.max_pool1d(x, 2, return_indices=True)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.new_zeros(ctx.shape).scatter(-1, ctx.saved_tensors[0], grad)


class Norm(Function):
    """The classic sum over all but the last dimension, which no reshape takes where that has no elements."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        inner = (grad * weight * x).mean(-1, keepdim=True)
        by_weight = (grad * x * scale).reshape(-1, weight.shape[0]).sum(0)
        return scale * (grad * weight - x * scale**2 * inner), by_weight


class Stacked(Function):
    """A backward with a loop over rows, of which there may be none."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.stack([row * 2 for row in grad])


class LowPass(Function):
    """Torch means to transform a batch of none, and the library that it calls fails."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        waves = torch.fft.rfft(x)
        gain = torch.linspace(1, 0, waves.shape[-1], dtype=x.dtype, device=x.device)
        return torch.fft.irfft(waves * gain, n=x.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return LowPass.forward(ctx, grad)


def test_a_library_of_torchs_that_fails_is_no_fault_of_the_operator() -> None:
    assert not derived(LowPass, (rows(),)).unserved


def derived(checked: Any, *samples: tuple[Tensor, ...]) -> Variations:
    return variations(subject_of(checked, list(samples), 0, EFFORTS["default"]))


def rows() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_batch_of_none_that_fails_is_a_fault_and_told_once(effort: Any) -> None:
    report = opsmith.check(RowSoftmax, samples=[(rows(),), (rows() * 2,)], only=["forward"], effort=effort)
    (failure,) = report.failures
    assert (failure.property, failure.input, failure.cause) == ("forward", "x", "empty")
    assert "where `x` has the shape [0, 4]: RuntimeError: stack expects a non-empty" in failure.message
    assert failure.where is not None
    assert failure.where.startswith(f"{__file__}:")
    assert failure.replay is not None
    assert "RowSoftmax.apply(x)" in failure.replay
    assert not [text for text in report.rejected if "stack expects" in text]
    assert opsmith.check(RowSoftmax, samples=[(rows(),)], only=["gradient"]).passed_as_asked


def test_an_operator_of_torch_library_is_held_to_it_too() -> None:
    @torch.library.custom_op("empties::largest_first", mutates_args=())
    def largest_first(x: Tensor) -> Tensor:
        return torch.stack([row.sort(descending=True).values for row in x])

    (found,) = derived(largest_first, (rows(),)).unserved
    assert "Each index of `x.shape[0]` is computed alone" in found.message


@pytest.mark.parametrize(
    ("checked", "samples", "words"),
    [
        (Refusing, [(rows(),)], "ValueError: Refusing: there are no rows"),
        (StableSoftmax, [(rows(),)], "IndexError: amax()"),
        (Cheapest, [(torch.linspace(0.1, 0.3, 5),)], "IndexError: min()"),
        (MaxPool, [(rows(),)], "(batch mode) tensor with optional 0 dim batch size"),
        (Depthwise, [(rows()[None], rows()[:, :3]), (rows()[None, :2], rows()[:2, :3])], "not supported"),
    ],
    ids=["refused", "reduced", "not a batch", "pooled", "not supported"],
)
def test_what_is_refused_or_has_no_answer_is_listed(checked: Any, samples: Any, words: str) -> None:
    found = derived(checked, *samples)
    assert not found.unserved
    assert any(words in text for text in found.rejected)


def test_a_backward_without_an_answer_for_rows_without_elements_is_no_fault() -> None:
    samples = [(rows(), rows()[0]), (rows()[:, :3], rows()[0, :3])]
    report = opsmith.check(Norm, samples=samples, skip=["compile", "second_order"])
    assert report.failures == (), report
    (gradient,) = [each for each in report.outcomes if each.property == "gradient"]
    assert any("may raise for them: RuntimeError: cannot reshape" in note for note in gradient.notes)


def test_a_formula_that_raises_where_the_reference_has_a_gradient_is_a_fault() -> None:
    def refused(grad: Tensor, result: Tensor) -> Tensor:
        assert result.shape[-1], "nothing"
        return result * (grad - (grad * result).sum(-1, keepdim=True))

    operator = opsmith.operator("empties::softmax")(_softmax)
    operator.gradients(x=refused)
    (failure,) = opsmith.check(operator, samples=[(rows(),)], only=["gradient"]).failures
    assert (failure.property, failure.cause) == ("gradient", "empty")


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def test_a_backward_that_fails_for_a_batch_of_none_is_a_fault() -> None:
    (failure,) = opsmith.check(Stacked, samples=[(rows(),)], only=["gradient"]).failures
    assert (failure.property, failure.cause) == ("gradient", "empty")
    assert "stack expects a non-empty TensorList" in failure.message


def test_a_reference_decides_what_an_operator_of_ours_takes() -> None:
    def stacked(x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])

    operator = opsmith.operator("empties::stacked")(stacked)
    operator.samples(lambda: [(rows(),)])
    found = derived(operator, (rows(),))
    assert not found.unserved
    assert any("stack expects a non-empty TensorList" in text for text in found.rejected)
