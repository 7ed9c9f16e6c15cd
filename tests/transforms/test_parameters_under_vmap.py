"""Ensembles and per-sample gradients: modules that hold operators, under `functional_call` and `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from transform_subjects import DECLARED, norm

import opsmith

DOUBLE = torch.float64
_plain_involution = next(subject for subject in DECLARED if subject.name == "ops.involution").plain


class Perceptron(nn.Module):
    """Two affine maps with a norm in between."""

    def __init__(self, linear: Callable[..., Tensor], normalise: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.normalise = linear, normalise
        self.first = nn.Parameter(torch.randn(4, 3, dtype=DOUBLE))
        self.bias = nn.Parameter(torch.randn(4, dtype=DOUBLE))
        self.scale = nn.Parameter(torch.randn(4, dtype=DOUBLE))
        self.second = nn.Parameter(torch.randn(2, 4, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.normalise(self.linear(x, self.first, self.bias), self.scale)
        return self.linear(hidden.tanh(), self.second)


class Involution(nn.Module):
    """An image weighed by its own pixels, and a running mean in a buffer."""

    mean: Tensor

    def __init__(self, involution: Callable[..., Tensor]) -> None:
        super().__init__()
        self.involution = involution
        self.weight = nn.Parameter(torch.randn(9, 2, dtype=DOUBLE))
        self.register_buffer("mean", torch.randn(2, 1, 1, dtype=DOUBLE))

    def forward(self, image: Tensor) -> Tensor:
        kernels = torch.einsum("kc,bchw->bkhw", self.weight, image)
        B, _, H, W = kernels.shape
        return self.involution(image, kernels.view(B, 1, 3, 3, H, W)) - self.mean


def _perceptron(*, plain: bool) -> nn.Module:
    if plain:
        return Perceptron(F.linear, lambda x, weight: norm.reference(x, weight)[0])
    return Perceptron(opsmith.ops.linear, norm)


def _involution(*, plain: bool) -> nn.Module:
    return Involution(_plain_involution if plain else lambda x, w: opsmith.ops.involution(x, w, padding=1))


MODULES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "linear-and-norm": (_perceptron, (5, 3)),
    "involution": (_involution, (5, 2, 3, 3)),
}


def _loss(module: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, (parameters, buffers), (x[None],)).pow(2).sum()


def _state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {n: p.detach() for n, p in module.named_parameters()}, dict(module.named_buffers())


def _stacked(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    modules = [make() for _ in range(3)]
    return modules[0], *stack_module_state(modules)


def ensemble(make: Callable[[], nn.Module], x: Tensor) -> Any:
    """Each model sees the same data; gradients of all of them at once, by autograd."""
    module, parameters, buffers = _stacked(make)
    results = vmap(lambda p, b, x: functional_call(module, (p, b), (x,)), (0, 0, None))(
        parameters, buffers, x
    )
    return results.detach(), torch.autograd.grad(results.pow(2).sum(), list(parameters.values()))


def ensemble_of_own_data(make: Callable[[], nn.Module], x: Tensor) -> Any:
    """Each model sees its own minibatch."""
    module, parameters, buffers = _stacked(make)
    data = torch.stack([x, x.sin(), x.cos()])
    return vmap(lambda p, b, x: functional_call(module, (p, b), (x,)))(parameters, buffers, data).detach()


def per_sample(make: Callable[[], nn.Module], x: Tensor) -> Any:
    module, parameters, buffers = _stacked(make)
    parameters, buffers = _state(module)
    return vmap(lambda x: grad(lambda p: _loss(module, p, buffers, x))(parameters))(x)


def per_sample_in_chunks(make: Callable[[], nn.Module], x: Tensor) -> Any:
    module = _stacked(make)[0]
    parameters, buffers = _state(module)
    gradient = grad(lambda p, x: _loss(module, p, buffers, x))
    return vmap(gradient, (None, 0), chunk_size=2)(parameters, x)


def per_sample_of_an_ensemble(make: Callable[[], nn.Module], x: Tensor) -> Any:
    module, parameters, buffers = _stacked(make)
    parameters = {name: parameter.detach() for name, parameter in parameters.items()}
    gradient = grad(lambda p, b, x: _loss(module, p, b, x))
    return vmap(vmap(gradient, (None, None, 0)), (0, 0, None))(parameters, buffers, x)


def hessian_of_one_parameter(make: Callable[[], nn.Module], x: Tensor) -> Any:
    module = _stacked(make)[0]
    parameters, buffers = _state(module)
    first = next(iter(parameters))
    rest = {name: value for name, value in parameters.items() if name != first}
    return hessian(lambda value: _loss(module, {first: value, **rest}, buffers, x[0]))(parameters[first])


def tangent_kernel(make: Callable[[], nn.Module], x: Tensor) -> Any:
    """The empirical neural tangent kernel: per-sample Jacobians, and a product of them."""
    module = _stacked(make)[0]
    parameters, buffers = _state(module)

    def jacobian(x: Tensor) -> dict[str, Tensor]:
        flat = lambda p: functional_call(module, (p, buffers), (x[None],)).flatten()
        return jacrev(flat)(parameters)

    rows = [value.flatten(2) for value in vmap(jacobian)(x).values()]
    return sum(torch.einsum("nop,mop->nm", row, row) for row in rows)


def pushed_forward(make: Callable[[], nn.Module], x: Tensor) -> Any:
    module = _stacked(make)[0]
    parameters, buffers = _state(module)
    moved = {name: value.cos() for name, value in parameters.items()}
    return vmap(lambda x: jvp(lambda p: _loss(module, p, buffers, x), (parameters,), (moved,)))(x)


CASES = [
    ensemble,
    ensemble_of_own_data,
    per_sample,
    per_sample_in_chunks,
    per_sample_of_an_ensemble,
    hessian_of_one_parameter,
    tangent_kernel,
    pushed_forward,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
@pytest.mark.parametrize("module", MODULES)
def test_module(module: str, case: Callable[..., Any]) -> None:
    make, shape = MODULES[module]
    x = opsmith.Make()(*shape)
    found, expected = (case(lambda plain=plain: make(plain=plain), x) for plain in (False, True))
    torch.testing.assert_close(found, expected)
