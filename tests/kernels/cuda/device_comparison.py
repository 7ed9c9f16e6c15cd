"""Calls of CUDA kernels on a device beside their emulation."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
import opsmith.ops
from opsmith.core.call_arguments import tensors_in
from opsmith.core.tensors import map_tensors
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.cuda.kernel import cuda_kernels

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative and absolute tolerance of each dtype: a GPU contracts products and sums, and has its own `exp`."""


def bundled_operators() -> list[opsmith.Operator[..., Any]]:
    """The operators of opsmith.ops that have a kernel in CUDA C++."""
    for module in pkgutil.walk_packages(opsmith.ops.__path__, "opsmith.ops."):
        importlib.import_module(module.name)
    every = opsmith.declared_operators()
    return [each for each in every if each.name.startswith("opsmith::") and cuda_kernels(each.specification)]


def bundled_calls(operator: opsmith.Operator[..., Any]) -> Iterator[tuple[torch.dtype, list[Any]]]:
    """The samples of an operator in each dtype that its kernel takes."""
    (kernel, *_) = cuda_kernels(operator.specification)
    for dtype in kernel.dtypes or (torch.float32,):
        for values in sample_values(operator, dtype):
            yield dtype, values


def runs_on(device: str, operator: opsmith.Operator[..., Any], *values: Any) -> bool:
    """True if a kernel for a device takes a call."""
    kernel = operator.explain(*values).kernel
    return kernel is not None and kernel.device == device


def compare_with_emulation(operator: opsmith.Operator[..., Any], values: list[Any], device: str) -> bool:
    """Compare a call on a device with its emulation: the results, and what is written in place.

    Returns:
        True if the kernel takes the call.
    """
    there = map_tensors(lambda tensor: on_device(tensor, device), values)
    here = map_tensors(lambda tensor: on_device(tensor, "cpu"), values)
    if not runs_on(device, operator, *there):
        return False
    found, expected = [operator(*there)], [opsmith.emulate(operator, *here)]
    for argument, one, other in zip(operator.specification.schema.arguments, there, here, strict=False):
        if argument.alias:
            found.append(one)
            expected.append(other)
    bound = max((BOUNDS.get(each.dtype, 0.0) for each in tensors_in(values)), default=0.0)
    for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
        assert_close(one.cpu(), other, rtol=bound, atol=bound)
    return True


def on_device(tensor: Tensor, device: str) -> Tensor:
    """A copy of a tensor on a device, with its strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)
