"""Entries of the runtime: operators share a limited number of them, and a reload takes none."""

from __future__ import annotations

import gc
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.core import missing_kernels
from opsmith.kernels.runtime import dispatch

HALVED = """
template <class T>
void halved(Contiguous<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] / 2;
}
"""


def declare(name: str = "halved", **source: Any) -> Any:
    @opsmith.operator(f"entries::{name}")
    def halved(x: Tensor) -> Tensor:
        return x / 2

    return halved.kernel("cpu", entry="halved", **(source or {"cpp": HALVED}))


def own_operators(name: str) -> list[Any]:
    found = [each for key, each in dispatch._places.items() if key[0] == f"entries::{name}"]
    return list(itertools.chain(*found))


def test_an_operator_that_is_declared_again_takes_the_place_of_the_one_before() -> None:
    x = torch.ones(3)
    for _ in range(5):
        operator = declare()
        for _ in range(2):
            assert torch.equal(operator(x), x / 2)
            assert torch.equal(torch.ops.entries.halved(x), x / 2)
        del operator
        gc.collect()
    assert len(own_operators("halved")) <= 2  # routes of calls may hold the last one


def test_two_kernels_of_an_operator_that_live_have_a_place_each() -> None:
    operator = declare("both")
    both = [operator.specification.kernels[0].function, declare("both").specification.kernels[0].function]
    x = torch.ones(3)
    for kernel in (*both, *both):
        assert torch.equal(kernel(x), x / 2)
        assert kernel.cached_plans == 1
    assert len(own_operators("both")) == 2


@pytest.mark.slow
def test_a_reload_takes_no_entry(tmp_path: Path) -> None:
    file = tmp_path / "halved.cpp"
    file.write_text(HALVED)
    operator = declare("reloaded", cpp_file=file)
    x = torch.ones(3)
    for divisor in (2, 4, 8):
        file.write_text(HALVED.replace("/ 2", f"/ {divisor}"))
        operator.reload()
        assert torch.equal(operator(x), x / divisor)
        assert torch.equal(torch.ops.entries.reloaded(x), x / divisor)
    assert len(own_operators("reloaded")) == 1


def test_without_an_entry_that_is_free_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    most = dispatch.runtime().opsmith_most_entries()
    monkeypatch.setattr(dispatch, "_used", itertools.count(most))
    monkeypatch.setattr(dispatch, "_free", [])
    monkeypatch.setattr(missing_kernels, "_warned", False)
    operator = declare("too_many")
    full = f"no entry is free for another kernel that is called without Python: {most}, all in use"
    with pytest.warns(RuntimeWarning, match=re.escape(full)):
        assert torch.equal(operator(torch.ones(3)), torch.ones(3) / 2)
    assert full in operator.explain(torch.ones(3)).rejected[0]
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    operator.forget_calls()
    with pytest.raises(errors.KernelRefusedError, match="no entry is free for another kernel"):
        operator(torch.ones(3))


def test_with_one_entry_left_the_kernel_computes_and_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    most = dispatch.runtime().opsmith_most_entries()
    number = dispatch._free.pop() if dispatch._free else next(dispatch._used)
    monkeypatch.setattr(dispatch, "_used", itertools.count(most))
    monkeypatch.setattr(dispatch, "_free", [number])
    operator = declare("the_last")
    for _ in range(3):
        assert torch.equal(operator(torch.ones(3)), torch.ones(3) / 2)
        assert torch.equal(torch.ops.entries.the_last(torch.ones(3)), torch.ones(3) / 2)
    assert operator.explain(torch.ones(3)).kernel is not None
    assert operator.specification.kernels[0].function.cached_plans == 1
