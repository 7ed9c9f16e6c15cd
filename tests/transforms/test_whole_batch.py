"""`batching=`: one call of the kernel serves the whole batch under vmap, and the answer is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func as F
from torch import Tensor

import opsmith

CALLS: list[tuple[int, ...]] = []
"""Shapes of the first argument of every call of a kernel below."""


def _counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        CALLS.append(tuple(x.shape))
        return torch.from_numpy(function(x.numpy(), w.numpy()))

    return kernel


@opsmith.operator("batching::gate", batching="elementwise")
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * w + x


gate.gradients(x=lambda grad, w: grad * w + grad, w=lambda grad, x: grad * x)
gate.kernel("cpu", _counted(lambda x, w: x * w + x))


@opsmith.operator("batching::rows", shapes="x: B M, w: N M -> B N", batching="B")
def rows(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, None] - w).abs().sum(-1)


rows.kernel("cpu", _counted(lambda x, w: abs(x[:, None] - w).sum(-1)))


@opsmith.operator("batching::leading", shapes="x: ... M, w: ... M -> ...", batching="...")
def leading(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(-1)


leading.gradients(x=lambda grad, w: grad.unsqueeze(-1) * w, w=lambda grad, x: grad.unsqueeze(-1) * x)
leading.kernel("cpu", _counted(lambda x, w: (x * w).sum(-1)))


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def make(*shape: int) -> Tensor:
    return opsmith.Make(generator=torch.Generator().manual_seed(len(shape)))(*shape)


BATCHES: dict[str, tuple[Any, tuple[Tensor, Tensor], Any, tuple[int, ...] | None]] = {
    "elementwise": (gate, (make(5, 2, 3), make(5, 2, 3)), (0, 0), (5, 2, 3)),
    "elementwise-last": (gate, (make(2, 3, 5), make(2, 3, 5)), -1, (5, 2, 3)),
    "elementwise-ranks": (gate, (make(5, 2, 3), make(5, 3)), 0, (5, 2, 3)),
    "elementwise-shared": (gate, (make(2, 3), make(5, 3)), (None, 0), (2, 3)),
    "elementwise-scalars": (gate, (make(5), make(5, 3)), 0, (5, 1)),
    "elementwise-of-none": (gate, (make(0, 2, 3), make(0, 3)), 0, (0, 2, 3)),
    "letter": (rows, (make(5, 4, 3), make(2, 3)), (0, None), (20, 3)),
    "letter-inside": (rows, (make(4, 5, 3), make(2, 3)), (1, None), (20, 3)),
    "letter-of-none": (rows, (make(5, 0, 3), make(2, 3)), (0, None), (0, 3)),
    "letter-other-batched": (rows, (make(5, 4, 3), make(5, 2, 3)), (0, 0), None),
    "leading": (leading, (make(5, 2, 3), make(5, 2, 3)), (0, 0), (5, 2, 3)),
    "leading-shared": (leading, (make(2, 3), make(5, 2, 3)), (None, 0), (5, 2, 3)),
    "leading-alone": (leading, (make(5, 3), make(5, 3)), (0, 0), (5, 3)),
}


@pytest.mark.parametrize(("operator", "inputs", "dims", "called"), BATCHES.values(), ids=BATCHES)
def test_one_call(operator: Any, inputs: Any, dims: Any, called: tuple[int, ...] | None) -> None:
    F.vmap(operator, dims)(*inputs)
    expected_calls = [] if called is None else [called]
    assert expected_calls == CALLS


def _loss(f: Any) -> Callable[..., Tensor]:
    return lambda *given: f(*given).square().sum()


TRANSFORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "vmap": lambda f, dims, inputs: F.vmap(f, dims)(*inputs),
    "grad-vmap": lambda f, dims, inputs: F.grad(_loss(F.vmap(f, dims)), (0, 1))(*inputs),
    "vmap-grad": lambda f, dims, inputs: F.vmap(F.grad(_loss(f), (0, 1)), dims)(*inputs),
    "jvp-vmap": lambda f, dims, inputs: F.jvp(F.vmap(f, dims), inputs, inputs),
    "vmap-vmap": lambda f, dims, inputs: F.vmap(F.vmap(f, dims))(
        *(torch.stack([given, given + 1]) for given in inputs)
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize(("operator", "inputs", "dims", "called"), BATCHES.values(), ids=BATCHES)
def test_the_same_answer(operator: Any, inputs: Any, dims: Any, called: Any, transform: Any) -> None:
    found, expected = (transform(f, dims, inputs) for f in (operator, operator.reference))
    torch.testing.assert_close(found, expected)


def test_a_number_of_each_example_keeps_its_say_in_the_dtype() -> None:
    """A tensor without dimensions does not widen the result; with a batch dimension it would."""
    inputs = make(5, 3).float(), make(5)
    found = F.vmap(gate)(*inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.vmap(gate.reference)(*inputs))


def test_random_draws_are_one_call_only_where_they_may_differ() -> None:
    calls: list[int] = []

    @opsmith.operator("batching::noisy", batching="elementwise", random=True)
    def noisy(x: Tensor) -> Tensor:
        calls.append(x.dim())
        return x + torch.rand_like(x)

    assert F.vmap(noisy, randomness="different")(torch.zeros(4, 2)).unique().numel() == 8
    same = F.vmap(noisy, randomness="same")(torch.zeros(4, 2))
    assert same.unique().numel() == 2
    with pytest.raises(RuntimeError, match="randomness"):
        F.vmap(noisy)(torch.zeros(4, 2))


def test_hidden_results_come_with_their_batch() -> None:
    @opsmith.operator("batching::unit", hidden=("size",), shapes="x: B M -> B M, B", batching="B")
    def unit(x: Tensor) -> tuple[Tensor, Tensor]:
        size = x.norm(dim=-1)
        return x / size[:, None], size

    unit.gradients(
        x=lambda grad, result, size: (grad - result * (grad * result).sum(-1, keepdim=True)) / size[:, None]
    )
    x = make(5, 4, 3)
    torch.testing.assert_close(
        F.vmap(F.hessian(lambda x: unit(x).sin().sum()))(x),
        F.vmap(F.hessian(lambda x: unit.reference(x)[0].sin().sum()))(x),
    )


def test_an_opaque_operator_runs_once_too() -> None:
    @opsmith.operator("batching::numpy_abs", opaque=True, batching="elementwise")
    def numpy_abs(x: Tensor) -> Tensor:
        CALLS.append(tuple(x.shape))
        return torch.from_numpy(abs(x.numpy()))

    assert opsmith.check(numpy_abs, samples=lambda: [(make(4),)], only=["batching"])
    CALLS.clear()
    F.vmap(numpy_abs)(make(5, 3))
    assert CALLS == [(5, 3)]


def test_examples_without_dimensions_keep_their_say_in_the_dtype() -> None:
    @opsmith.operator("batching::scalars", shapes="x: ..., w: -> ...", batching="...")
    def scalars(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    scalars.kernel("cpu", scalars.reference)
    x, w = torch.ones(5), torch.tensor(3.0, dtype=torch.float64)
    assert F.vmap(scalars, (0, None))(x, w).dtype == F.vmap(scalars.reference, (0, None))(x, w).dtype
