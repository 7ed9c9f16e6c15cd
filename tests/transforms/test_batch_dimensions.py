"""vmap: where the batch lies, in arguments and results; how it is cut; and what random operators draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_subjects import DROPOUT
from torch import Tensor
from torch.func import grad, jvp, vmap
from transform_subjects import derived, gate, joint, norm, several, with_kernel

import opsmith

Operator = opsmith.Operator[..., Any]
SIZE = 5
OPERATORS = {
    "formulas": gate,
    "no-formula": derived,
    "kernel": with_kernel,
    "joint": joint,
    "ops.mul": opsmith.ops.mul,
}
make = opsmith.Make()
ONE, BATCH = make(2, 3), make(SIZE, 2, 3)

# Batch dimension of x, of w, of the result; None where one value serves every example.
DIMENSIONS = [(0, 0, 0), (0, None, 0), (None, 0, 0), (1, 0, 2), (-1, -2, -1), (None, -1, 1), (2, 1, -3)]


def _laid_out(dimension: int | None) -> Tensor:
    return ONE if dimension is None else BATCH.movedim(0, dimension)


@pytest.mark.parametrize("dimensions", DIMENSIONS, ids=lambda dims: "-".join(map(str, dims)))
@pytest.mark.parametrize("name", OPERATORS)
def test_dimensions(name: str, dimensions: tuple[int | None, int | None, int]) -> None:
    *given, out = dimensions
    inputs = [_laid_out(dimension) for dimension in given]
    for step in (
        lambda f: vmap(f, tuple(given), out)(*inputs),
        lambda f: grad(lambda *a: vmap(f, tuple(given), out)(*a).pow(2).sum(), (0, 1))(*inputs),
        lambda f: jvp(vmap(f, tuple(given), out), tuple(inputs), tuple(i.cos() for i in inputs)),
    ):
        torch.testing.assert_close(step(OPERATORS[name]), step(OPERATORS[name].reference))


@pytest.mark.parametrize("chunk_size", [1, 2, SIZE, SIZE + 1])
@pytest.mark.parametrize("name", OPERATORS)
def test_chunks(name: str, chunk_size: int) -> None:
    for step in (
        lambda f: vmap(f, chunk_size=chunk_size)(BATCH, BATCH.cos()),
        lambda f: vmap(grad(lambda *a: f(*a).pow(2).sum(), (0, 1)), (0, None), chunk_size=chunk_size)(
            BATCH, ONE
        ),
    ):
        torch.testing.assert_close(step(OPERATORS[name]), step(OPERATORS[name].reference))


def _nested_arguments(f: Callable[..., Tensor]) -> Any:
    """A dictionary and a tuple, each with batch dimensions of its own."""
    pair = {"x": BATCH.movedim(0, 1), "rest": (ONE, BATCH)}
    return vmap(lambda p, z: f(p["x"], p["rest"][0]) * f(p["rest"][1], z), ({"x": 1, "rest": (None, 0)}, -1))(
        pair, BATCH.movedim(0, -1)
    )


def _nested_results(f: Callable[..., Tensor]) -> Any:
    both = lambda x, w: {"one": f(x, w), "two": (f(w, x), f(x, x))}
    return vmap(both, out_dims={"one": 2, "two": (0, -1)})(BATCH, BATCH.cos())


def _one_dimension_for_all(f: Callable[..., Tensor]) -> Any:
    return vmap(lambda pair: f(pair[0], pair[1]), in_dims=1)((BATCH.movedim(0, 1), BATCH.movedim(0, 1)))


def _levels_that_cross(f: Callable[..., Tensor]) -> Any:
    """Each argument belongs to one of two levels: an outer product of batches."""
    return vmap(vmap(f, (None, 0)), (0, None))(BATCH, BATCH.cos())


def _empty_batch(f: Callable[..., Tensor]) -> Any:
    return vmap(f)(BATCH[:0], BATCH[:0])


def _result_without_batch(f: Callable[..., Tensor]) -> Any:
    return vmap(lambda z: (z, f(ONE, ONE)), out_dims=(0, None))(BATCH)


@pytest.mark.parametrize(
    "case",
    [
        _nested_arguments,
        _nested_results,
        _one_dimension_for_all,
        _levels_that_cross,
        _empty_batch,
        _result_without_batch,
    ],
    ids=lambda case: case.__name__.strip("_").replace("_", "-"),
)
@pytest.mark.parametrize("name", OPERATORS)
def test_structure(name: str, case: Callable[..., Any]) -> None:
    torch.testing.assert_close(case(OPERATORS[name]), case(OPERATORS[name].reference))


def test_several_results_have_dimensions_of_their_own() -> None:
    for step in (
        lambda f: vmap(lambda a, b: f([a, b], power=3), (0, None), (2, -1))(BATCH, ONE),
        lambda f: vmap(lambda a, b: f([a, b], a, power=3), (-1, 1), (1, 0))(
            BATCH.movedim(0, -1), BATCH.movedim(0, 1)
        ),
    ):
        torch.testing.assert_close(step(several), step(several.reference))


def test_hidden_results_follow_the_batch() -> None:
    weight = make(3)
    for step in (
        lambda f: vmap(lambda x: f(x, weight), -1, 1)(BATCH.movedim(0, -1)),
        lambda f: grad(lambda w: vmap(lambda x: f(x, w), 1, 2)(BATCH.movedim(0, 1)).pow(2).sum())(weight),
    ):
        torch.testing.assert_close(step(norm), step(lambda x, w: norm.reference(x, w)[0]))


@opsmith.operator("transforms::noisy", random=True)
def noisy(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@opsmith.operator("transforms::noisy_kernel", random=True)
def noisy_kernel(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


noisy_kernel.kernel("cpu", noisy_kernel.reference)
RANDOM: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "dropout": (DROPOUT, lambda x: DROPOUT.reference(x)[0]),
    "derived": (noisy, noisy.reference),
    "kernel": (noisy_kernel, noisy_kernel.reference),
}


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_draw_what_torch_draws(name: str, randomness: str) -> None:
    operator, plain = RANDOM[name]

    def drawn(function: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(3)
        return vmap(function, randomness=randomness)(torch.ones(4, 64))

    torch.testing.assert_close(drawn(operator), drawn(plain))


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_are_refused_where_vmap_does_not_say_what_to_draw(name: str) -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(RANDOM[name][0])(torch.ones(4, 64))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_the_gradient_of_a_random_operator_sees_what_was_drawn(randomness: str) -> None:
    """By a formula and a hidden mask: under `grad` inside and outside of vmap, and under autograd."""
    ones = torch.ones(4, 64)

    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        gradient, y = torch.func.grad_and_value(lambda x: DROPOUT(x).sum())(x)
        return gradient.sum(), y

    torch.testing.assert_close(*vmap(inside, randomness=randomness)(ones))
    gradient, y = torch.func.grad(
        lambda x: ((y := vmap(DROPOUT, randomness=randomness)(x)).sum(), y), has_aux=True
    )(ones)
    torch.testing.assert_close(gradient, y)
    leaf = ones.clone().requires_grad_()
    y = vmap(DROPOUT, randomness=randomness)(leaf)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaf)[0], y.detach())


def test_a_kernel_that_draws_has_no_gradient_under_vmap_without_a_formula() -> None:
    """Its reference cannot draw the same numbers again there, so it says so."""
    with pytest.raises(opsmith.errors.ForwardModeError, match="draws random numbers"):
        grad(lambda x: vmap(noisy_kernel, randomness="different")(x).sum())(torch.ones(4, 3))
