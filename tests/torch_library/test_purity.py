"""Purity, from the code of a function: it writes nowhere, and its result is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tanh

from opsmith.ops import exp
from opsmith.torch_library.capabilities.private import fast_path
from opsmith.torch_library.fast_path import purity
from opsmith.torch_library.fast_path.purity import always_new, never_writes

TABLE = [torch.ones(1)]


@pytest.fixture(autouse=True)
def _private_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means themselves, whatever is decided about them: without them nobody looks at code."""
    monkeypatch.setattr(purity, "capabilities", fast_path)


def helper(x: Tensor) -> Tensor:
    return x * 2


def writing_helper(x: Tensor) -> Tensor:
    return x.add_(2)


def subscript(x: Tensor) -> Tensor:
    x[0] = 1
    return x * 2


def in_place_operator(x: Tensor) -> Tensor:
    x += 1
    return x * 2


def early(x: Tensor, flag: bool) -> Tensor:
    if flag:
        return x
    return x * 2


def recursive(x: Tensor) -> Tensor:
    return recursive(x) * 2


def closing_over(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


def calling(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) + function(x) * 2


NEW: dict[str, Callable[..., Any]] = {
    "product": lambda x, w: x * w,
    "method": lambda x: x.exp(),
    "function": lambda x: torch.tanh(x),
    "imported": lambda x: tanh(x) * 2,
    "helper": calling(helper),
    "closure": closing_over(2.0),
    "operator": calling(exp),
    "comprehension": lambda xs: sum([x * 2 for x in xs]) * 1.0,
    "linear": lambda grad, weight: (grad @ weight) * 1.0,
    "properties": lambda x: x.mT / x.shape[-1],
}
OLD: dict[str, Callable[..., Any]] = {
    "argument": lambda x: x,
    "view": lambda x: x.mT,
    "detached": lambda x: x.detach(),
    "perhaps-a-copy": lambda x: x.contiguous(),
    "perhaps-cast": lambda x: x.to(torch.float32),
    "composed": lambda x: x.dropout(0.0),
    "choice": lambda x, w: x if w is None else x * w,
    "early": early,
    "perhaps-resized": lambda x: x.resize_as(x),
    "last-of-two": lambda x: (x * 2).mT,
    "matrix-product": lambda x, w: x @ w,
}
WRITES: dict[str, Callable[..., Any]] = {
    "in-place": lambda x, w: x.mul_(w),
    "out": lambda x, w: torch.mul(x, w, out=x),
    "subscript": subscript,
    "augmented": in_place_operator,
    "helper": lambda x: writing_helper(x) * 2,
    "statistics": lambda x, m, v: F.batch_norm(x, m, v) * 1,
    "statistics-of-torch": lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False) * 1,
    "in-place-argument": lambda x: F.relu(x, inplace=True) * 2,
    "positional-in-place-of-nn": lambda x: torch.nn.functional.relu(x, True) * 2,
    "positional-in-place": lambda x: F.relu(x, True) * 2,
    "memory": lambda x: x.numpy() * 2,
    "numpy": lambda x: np.exp(x) * 2,
    "a-global-list": lambda x: x * TABLE[0],
    "closure-over-a-list": closing_over([1]),
    "recursive": recursive,
    "builtin": print,
    "helper-that-may-be-another": lambda x: helper(x) * 2,
    "operator-that-may-be-another": lambda x: exp(x) * 2,
    "sparse": lambda x: x.to_sparse() * 2,
    "unknown-name": lambda x: not_there(x) * 2,  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("function", NEW.values(), ids=NEW)
def test_new_memory(function: Callable[..., Any]) -> None:
    assert never_writes(function)
    assert always_new(function)


@pytest.mark.parametrize("function", OLD.values(), ids=OLD)
def test_perhaps_an_alias(function: Callable[..., Any]) -> None:
    assert never_writes(function)
    assert not always_new(function)


@pytest.mark.parametrize("function", WRITES.values(), ids=WRITES)
def test_perhaps_a_write(function: Callable[..., Any]) -> None:
    assert not never_writes(function)
    assert not always_new(function)
