"""Operators with side effects, or with randomness that they do not declare."""

import itertools
import random
from typing import Any

import numpy as np
import torch
from mutants import square, wrong
from torch import Tensor

import opsmith


@wrong("effects", "mutates-input", "x", "a call wrote into `x`: at [0, 0] it is 0 where")
def kernel_writes_into_its_input() -> Any:
    def kernel(x: Tensor) -> Tensor:
        result = x * x
        x.numpy()[0] = 0  # torch does not see it
        return result

    return square("kernel_writes").kernel("cpu", kernel)


@wrong("effects", "mutates-grad-output", "grad", "a backward wrote into `grad`: at [0, 0] it is 0 where")
def formula_writes_into_grad() -> Any:
    def formula(grad: Tensor, x: Tensor) -> Tensor:
        answer = 2 * grad * x
        grad.detach().numpy()[...] = 0
        return answer

    return square("formula_writes").gradients(x=formula)


@wrong("determinism", "nondeterministic", "result", "two calls give different `result`: at")
def nondeterministic() -> Any:
    calls = itertools.count()

    @opsmith.operator("wrong::nondeterministic", opaque=True)
    def drifting(x: Tensor) -> Tensor:
        return x + next(calls)

    drifting.fake(lambda x: torch.empty_like(x))
    drifting.samples(lambda make: [(make(3),)])
    return drifting.gradients(x=lambda grad: grad.clone())


@wrong(
    "randomness",
    "nondeterministic",
    None,
    "draws from torch's random state (by `aten.randn_like.default`) and does not declare it",
)
def undeclared_randomness() -> Any:
    @opsmith.operator("wrong::undeclared_randomness")
    def noise(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    noise.samples(lambda make: [(make(3),)])
    return noise


@wrong("randomness", "nondeterministic", None, "draws from torch's random state (somewhere in its kernel)")
def undeclared_randomness_in_a_kernel() -> Any:
    return square("undeclared_in_a_kernel").kernel("cpu", lambda x: x * x + 0 * torch.rand_like(x))


@wrong(
    "randomness",
    "not-exercised",
    None,
    "operator is declared `random=True`, but it drew from torch's random state in no sample",
)
def never_draws() -> Any:
    return square("never_draws", random=True)


@wrong(
    "randomness",
    "nondeterministic",
    None,
    "draws from the global state of NumPy, which `torch.manual_seed` does not set",
)
def numpy_randomness() -> Any:
    @opsmith.operator("wrong::numpy_randomness", opaque=True)
    def noise(x: Tensor) -> Tensor:
        return x + float(np.random.rand())

    noise.fake(lambda x: torch.empty_like(x))
    noise.samples(lambda make: [(make(3),)])
    return noise.gradients(x=lambda grad: grad.clone())


@wrong("randomness", "nondeterministic", None, "draws from the global state of Python's `random`")
def python_randomness() -> Any:
    @opsmith.operator("wrong::python_randomness")
    def noise(x: Tensor) -> Tensor:
        return x + random.random()

    noise.samples(lambda make: [(make(3),)])
    return noise
