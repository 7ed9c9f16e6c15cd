"""The file of mixed Functions is what it is meant to be: torch alone says which of them are right."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import mixed_functions as mixed
import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def in_place(x: Tensor) -> Tensor:
    return mixed.LeakyReLUInPlace.apply(x.clone())


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return mixed.DropFeatures.apply(x)


def activated(x: Tensor) -> Tensor:
    return mixed.ApplyActivation.apply(x, torch.sin, torch.cos)


Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
CALLS: dict[str, Call] = {
    "Mish": (mixed.Mish.apply, (numbers(3, 4),)),
    "Affine": (mixed.Affine.apply, (numbers(4, 3), numbers(2, 3), numbers(2))),
    "ApplyActivation": (activated, (numbers(3, 4),)),
    "AverageOfMany": (mixed.AverageOfMany.apply, (numbers(3), numbers(3), numbers(3))),
    "Square": (mixed.Square.apply, (numbers(3, 4),)),
    "ScaleRows": (mixed.ScaleRows.apply, (numbers(3, 4), numbers(3))),
    "LeakyReLUInPlace": (in_place, (numbers(3, 4),)),
    "Arctangent": (mixed.Arctangent.apply, (numbers(3, 4),)),
    "DropFeatures": (seeded, (numbers(3, 4),)),
    "Binarize": (mixed.Binarize.apply, (numbers(3, 4),)),
}
WRONG = ("Square", "Binarize")


def test_it_has_ten_functions_and_needs_only_torch_and_numpy() -> None:
    source = inspect.getsource(mixed)
    classes = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert classes == [*CALLS]
    assert "opsmith" not in source


@pytest.mark.parametrize("name", [name for name in CALLS if name not in WRONG])
def test_gradcheck_passes(name: str) -> None:
    function, inputs = CALLS[name]
    assert gradcheck(function, inputs)


@pytest.mark.parametrize("name", WRONG)
def test_gradcheck_fails(name: str) -> None:
    function, inputs = CALLS[name]
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        gradcheck(function, inputs)


def gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Any:
    return torch.autograd.grad(function(*inputs), inputs, grad)


def test_what_gradcheck_cannot_see() -> None:
    """Rows are scaled rightly only where the incoming gradient is contiguous."""
    function, inputs = CALLS["ScaleRows"]
    grad = numbers(4, 3).detach().T
    strided, dense = gradients(function, inputs, grad), gradients(function, inputs, grad.contiguous())
    assert not torch.allclose(strided[0], dense[0])
    assert not torch.allclose(strided[1], dense[1])
