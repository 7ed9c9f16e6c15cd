"""Fixtures of the core and of torch_library: names, and one function declared in every way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gated_variants import VARIANTS, gated
from torch import Tensor

import opsmith


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    module = request.node.module.__name__.rpartition(".")[2]
    return f"{module}::{re.sub(r'[^0-9a-zA-Z]+', '_', request.node.name).strip('_')}"


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> opsmith.Operator[..., Any]:
    """`gated` as an operator, its gradients given in one of all ways."""
    return VARIANTS[request.param](f"variants::{request.param.replace('-', '_')}")


@pytest.fixture
def reference() -> Callable[..., Tensor]:
    """`gated` in plain PyTorch."""
    return gated


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    """x [3, 2] and weight [2], both float64 and in need of a gradient."""
    make = opsmith.Make(torch.float64)
    return make(3, 2).requires_grad_(), make(2).requires_grad_()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
