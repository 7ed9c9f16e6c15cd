"""Registrations that Ctrl+C interrupts: the next declaration, or the next replacement, is right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.torch_library import registration
from opsmith.torch_library.registration import DispatcherRegistration

X = torch.arange(3.0)


def interrupting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Make the next call of a function an interrupt."""
    before: Callable[..., Any] = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, before)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def declared(number: int) -> Any:
    @opsmith.operator("interrupted::added")
    def added(x: Tensor) -> Tensor:
        return x + number

    return added


def test_an_interrupted_declaration_leaves_the_name_free(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, DispatcherRegistration, "_register_transforms")
    with pytest.raises(KeyboardInterrupt):
        declared(1)
    assert not hasattr(torch.ops.interrupted, "added")
    torch.testing.assert_close(declared(2)(X), X + 2)


def test_an_interrupted_replacement_leaves_the_operator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared(1)
    interrupting(monkeypatch, DispatcherRegistration, "_register_transforms")

    def other(x: Tensor, by: float) -> Tensor:
        return x * by

    other.__qualname__ = operator.reference.__qualname__
    with pytest.raises(KeyboardInterrupt):
        opsmith.operator("interrupted::added")(other)
    torch.testing.assert_close(operator(X), X + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux")
def test_a_kernel_that_was_replaced_after_an_interrupt_runs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "void add(Contiguous<const float> x, Contiguous<float> y) {{\n"
        "  for (int i = 0; i < 3; i++) y[i] = x[i] + {};\n}}\n"
    )
    operator = declared(1)
    for number in (1, 2):
        if number == 2:
            interrupting(monkeypatch, registration, "_withdraw")
            with pytest.raises(KeyboardInterrupt):
                operator.kernel("cpu", entry="add", cpp=text.format(number))
        operator.kernel("cpu", entry="add", cpp=text.format(number))
        for _ in range(2):
            torch.testing.assert_close(operator(X), X + number)
            torch.testing.assert_close(operator(X.clone().requires_grad_()).detach(), X + number)
