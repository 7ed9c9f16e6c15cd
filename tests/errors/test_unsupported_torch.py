"""The error where a private name of torch that opsmith needs does not do what it did."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from opsmith import errors
from opsmith.torch_library.capabilities import capability
from opsmith.torch_library.capabilities.capability import CAPABILITIES


def test_what_is_required_and_fails(says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise AssertionError("a write was not counted")

    private = import_module("opsmith.torch_library.capabilities.private.dispatch")
    monkeypatch.setattr(private, "self_test", fails)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(capability, "_decided", {})
    with says(
        errors.UnsupportedTorchError,
        """
        opsmith cannot work with torch 2.99.0: compute below autograd, see writes, replace an operator
          expected: torch 2.11, 2.13, 2.14 or 2.15, which opsmith is tested with
          got: AssertionError: a write was not counted
          hint: pip install 'torch==2.15.*'; `opsmith doctor` lists what works here
        """,
    ):
        capability.implementation(CAPABILITIES["dispatch"])
