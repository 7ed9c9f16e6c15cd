"""Agreement along random directions: it settles what is right, and never what is not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from opsmith.checking.numerics.directional import PackedTensors
from opsmith.checking.numerics.finite_differences import Claim, agrees_along

X = torch.tensor([0.3, -1.2, 2.0, 0.7, -0.4], dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cube": lambda x: x**3,
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: x / x.norm(),
    "sum": lambda x: x.sum(),
    "constant": lambda x: torch.ones(3, dtype=x.dtype) + 0 * x.sum(),
    "product": lambda x: x.prod(),
}


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, grad)[0]


def agrees(function: Callable[[Tensor], Tensor], x: Tensor, change: Callable[[Tensor], Tensor]) -> bool:
    """The answer for autograd's gradient after a change."""
    grad = torch.randn(function(x).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = change(gradient(function, x, grad))
    generator = torch.Generator().manual_seed(0)
    return agrees_along(lambda flat: [function(flat[0])], [x], 0, [grad], got, generator=generator)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_right_gradient_is_settled(name: str) -> None:
    assert agrees(FUNCTIONS[name], X, lambda got: got)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("at", range(len(X)))
def test_one_element_that_is_off_by_a_millionth_is_not(name: str, at: int) -> None:
    def off(got: Tensor) -> Tensor:
        return got.index_add(0, torch.tensor([at]), got.abs().max()[None].clamp(min=1e-3) * 1e-6)

    assert not agrees(FUNCTIONS[name], X, off)


def test_errors_that_cancel_in_a_sum_are_seen() -> None:
    """Two elements of the same size whose errors have the same size."""
    ones = torch.ones(4, dtype=torch.float64)
    off = torch.tensor([1e-3, -1e-3, 0.0, 0.0], dtype=torch.float64)
    assert not agrees(FUNCTIONS["cube"], ones, lambda got: got + off)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(torch.relu, id="relu"),
        pytest.param(torch.abs, id="abs, whose central difference is autograd's"),
        pytest.param(lambda x: torch.maximum(x, -x), id="maximum"),
        pytest.param(lambda x: x.sqrt(), id="edge"),
        pytest.param(lambda x: (x.float() ** 2).double(), id="float32"),
        pytest.param(lambda x: x * torch.nan, id="nan"),
    ],
)
def test_at_a_kink_an_edge_or_in_noise_nothing_is_settled(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([0.0, 0.3, 1.1], dtype=torch.float64)
    assert not agrees(function, x, lambda got: got)


def test_without_elements_nothing_is_settled() -> None:
    assert not agrees(FUNCTIONS["cube"], X[:0], lambda got: got)


def test_complex_arguments_move_in_both_parts() -> None:
    z = torch.complex(X, X.flip(0))
    grad = torch.complex(X.flip(0), X)

    def squared(flat: list[Tensor]) -> list[Tensor]:
        return [flat[0] ** 2]

    leaf = z.clone().requires_grad_()
    right = torch.autograd.grad(leaf**2, leaf, grad)[0]
    verdicts = [
        agrees_along(squared, [z], 0, [grad], got, generator=torch.Generator().manual_seed(0))
        for got in (right, right.conj())
    ]
    assert verdicts == [True, False]


def claim(got: dict[int, Tensor | None], elements: int = 64) -> Claim:
    """Derivatives of `x y**2` by both."""
    x, y = X.clone(), X.flip(0) + 2

    def function(flat: Sequence[Tensor]) -> list[Tensor]:
        return [flat[0] * flat[1] ** 2]

    packed = PackedTensors([x, y], (0, 1))
    return Claim(function, packed, [torch.ones(5)], got, elements, torch.Generator)


def test_a_claim_by_several_arguments_names_the_wrong_one_and_its_element() -> None:
    x, y = X.clone(), X.flip(0) + 2
    right: dict[int, Tensor | None] = {0: y**2, 1: 2 * x * y}
    assert claim(right).is_settled()
    assert claim(right).worst() is None
    wrong = right | {1: 2 * x * y * torch.tensor([1.0, 1.0, 1.0, 1.001, 1.0])}
    assert not claim(wrong).is_settled()
    found = claim(wrong).worst()
    assert found is not None
    assert (found[0], found[1].index) == (1, (3,))
    assert claim(wrong).by(0).worst() is None
    assert claim(wrong).worst(rounding=1.0) is None
    assert claim(right | {0: None}, elements=1).worst() is not None
