"""Calls in C++ that a process has built by itself: when it does, when not, and how it attaches them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import config
from opsmith.torch_library import calls_extension as extension
from opsmith.torch_library import capabilities
from opsmith.torch_library.calls import own_build
from opsmith.torch_library.calls.own_build import OwnBuild, why_not

NAMES = iter(range(1000))


class Absent:
    """Calls in C++ that are not there until they are."""

    def __init__(self, there: Any) -> None:
        self.there, self.now = there, None

    def __call__(self) -> Any:
        return self.now

    def cache_clear(self) -> None:
        """Find them."""
        self.now = self.there()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Absent:
    """A process without them, which is free to build them."""
    if config.conservative() or config.calls_in_python():
        pytest.skip("calls in C++ are turned off")
    found = Absent(capabilities.calls_in_cpp)
    monkeypatch.setattr(capabilities, "calls_in_cpp", found)
    monkeypatch.setattr(own_build, "OWN_BUILD", OwnBuild())
    monkeypatch.setattr("opsmith.torch_library.calls.routes.OWN_BUILD", own_build.OWN_BUILD)
    monkeypatch.delenv("OPSMITH_NO_CALLS_BUILD", raising=False)
    monkeypatch.setattr(extension, "earlier_failure", lambda: "")
    return found


def declared() -> Any:
    @opsmith.operator(f"own_build::product_{next(NAMES)}")
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    return product.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("OPSMITH_PYTHON_CALLS", "1", "OPSMITH_PYTHON_CALLS turns calls in C++ off"),
        ("OPSMITH_NO_CALLS_BUILD", "1", "OPSMITH_NO_CALLS_BUILD forbids it"),
        ("LOCAL_RANK", "1", "rank 0 of this machine builds them"),
        ("LOCAL_RANK", "0", ""),
    ],
)
def test_reasons_not_to_build(
    variable: str, value: str, says: str, absent: Absent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert why_not() == says
    monkeypatch.setattr(own_build, "_spawn", lambda: pytest.fail("a build was begun"))
    if says:
        own_build.OWN_BUILD.begin()
        assert not own_build.OWN_BUILD.begun


def test_those_that_are_there_are_not_built(absent: Absent) -> None:
    if absent.there() is None:
        pytest.skip("calls in C++ are not built")
    absent.cache_clear()
    assert why_not() == "they are built"


def test_a_build_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert extension.earlier_failure() == ""
    extension.compile_unless_it_failed()
    assert extension.earlier_failure().startswith("there is no C++ compiler")
    monkeypatch.setattr(extension, "compile_calls", lambda: pytest.fail("it was tried again"))
    extension.compile_unless_it_failed()


def test_a_process_that_makes_many_calls_attaches_what_its_child_has_built(
    absent: Absent, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent.there() is None:
        pytest.skip("calls in C++ are not built")
    begun: list[int] = []

    def spawn() -> int:
        begun.append(os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}))
        return begun[-1]

    monkeypatch.setattr(own_build, "_spawn", spawn)
    monkeypatch.setattr(own_build, "MANY_CALLS", 20)
    monkeypatch.setattr(own_build, "EVERY", 5)
    product, x = declared(), torch.full((3,), 2.0, requires_grad=True)
    for _ in range(19):
        product(x, x)
    assert not begun
    build = own_build.OWN_BUILD
    while not (build.begun and build.child is None):  # the child ends by itself
        assert product(x, x).tolist() == [4.0] * 3
    assert len(begun) == 1
    for _ in range(3):
        product(x, x)
    assert product._registration._routes._accelerator._plan is not None
    (gradient,) = torch.autograd.grad(product(x, x).sum(), x)
    assert gradient.tolist() == [4.0] * 3
    for _ in range(50):
        product(x, x)
    build.begin()
    assert len(begun) == 1, "once in a process"


PROGRAM = """
import torch, opsmith
from torch import Tensor
from opsmith.torch_library import capabilities
from opsmith.torch_library.calls import own_build

own_build.MANY_CALLS, own_build.EVERY = 10, 1

@opsmith.operator("own_build::product")
def product(x: Tensor, w: Tensor) -> Tensor:
    return x * w

x, build = torch.ones(3), own_build.OWN_BUILD
assert capabilities.calls_in_cpp() is None
while not (build.begun and build.child is None):
    product(x, x)
assert capabilities.calls_in_cpp() is not None
for _ in range(3):
    product(x, x)
assert product._registration._routes._accelerator._plan is not None
print("attached")
"""


@pytest.mark.slow
def test_it_is_built_and_attached(tmp_path: Path) -> None:
    """From an empty cache to the accelerator, in one process."""
    if config.conservative() or config.calls_in_python():
        pytest.skip("calls in C++ are turned off")
    environment = {
        **os.environ,
        "OPSMITH_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(opsmith.__file__).parents[1]),
    }
    environment.pop("OPSMITH_NO_CALLS_BUILD", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("attached\n", "")
