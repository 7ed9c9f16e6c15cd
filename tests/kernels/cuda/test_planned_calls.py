"""Calls of CUDA kernels by plans: without Python where the form is known; errors in words elsewhere."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_driver import OnCpu, driver_library, forget, on_cpu, record
from kernel_cases import frames_in
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build import packaged
from opsmith.core import missing_kernels
from opsmith.kernels.runtime import library
from opsmith.kernels.runtime.driver import Driver
from opsmith.torch_library import capabilities

SCALED = """
template <class T>
__global__ void scaled(Contiguous<const T> x, double by, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * T(by);
}
"""


def declare(name: str, **options: Any) -> Any:
    @opsmith.operator(f"planned_calls::{name}")
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    scaled.kernel("cuda", cuda=SCALED, entry="scaled", grid="ceil(x.numel / 256)", **options)
    on_cpu(scaled)
    return scaled


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget(dry=False)
    yield
    assert record().depth == 0, "a context is left behind"
    forget()


def test_no_python_runs_for_a_form_that_is_known() -> None:
    operator = declare("known")
    overload = operator.torch_operator
    call = capabilities.direct_call(overload) if capabilities.on("known_calls") else overload
    x = torch.arange(6.0)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(call(x, 3.0), x * 3)
        forget()  # nothing is emulated, which is in Python
        assert frames_in(lambda: call(x, 3.0)) == []
        assert frames_in(lambda: call(x[:4], 3.0))
        assert frames_in(lambda: call(x[:4], 3.0)) == []
    assert record().launches == 3


def test_threads_launch_by_the_same_plans() -> None:
    operator = declare("threads")
    kernel = on_cpu(operator)
    operator(torch.ones(3))
    forget()
    inputs = [torch.ones(size) for size in (3, 4, 5)]

    def work() -> None:
        for _ in range(20):
            for x in inputs:
                assert kernel(x, 2.0).shape == x.shape

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert record().launches == 4 * 20 * 3
    assert kernel.cached_plans == 3


def test_a_reload_loads_the_kernel_anew() -> None:
    operator = declare("reloaded")
    x = torch.arange(3.0)
    for loads in (1, 2):
        for _ in range(2):
            assert torch.equal(operator(x), x * 2)
        assert record().loads == loads
        operator.reload()


def test_a_gpu_that_was_lost_is_an_error_that_names_the_kernel() -> None:
    operator = declare("lost")
    x = torch.ones(3)
    operator(x)
    driver_library().fake_lose(1)
    try:
        with pytest.raises(errors.KernelError) as caught:
            operator(x)
    finally:
        driver_library().fake_lose(0)
    assert caught.value.problem == "the CUDA kernel is not launched: cuCtxPushCurrent_v2 returns status 3"
    assert caught.value.operator == "planned_calls::lost"
    assert caught.value.got == "grid (1, 1, 1), block (256, 1, 1), 0 bytes of shared memory, on sm_90"
    assert torch.equal(operator(x), x * 2)


class Lacking:
    """The driver, without a function, or without the one that torch's part for CUDA has."""

    def __init__(self, absent: str) -> None:
        self.absent = absent

    def __getattr__(self, name: str) -> Any:
        if name == self.absent:
            raise AttributeError(name)
        return getattr(driver_library(), name)


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("cuGetErrorString", "the driver has no function `cuGetErrorString`"),
        pytest.param(
            "aoti_torch_get_current_cuda_stream",
            "torch's part for CUDA is not loaded",
            marks=pytest.mark.skipif(
                torch.version.cuda is not None, reason="this torch has its part for CUDA"
            ),
        ),
    ],
)
def test_a_driver_or_a_torch_without_a_function(absent: str, said: str) -> None:
    with pytest.raises(errors.ToolchainError, match="no CUDA kernel can be launched") as caught:
        _ = Driver(Lacking(absent)).opened
    assert caught.value.got == f"torch {torch.__version__}; {said}"
    assert caught.value.hint == (
        "install a torch that is built for CUDA; until then the reference computes the operator"
    )


class Without(OnCpu):
    """A machine with that driver."""

    def driver(self) -> Driver:
        return Driver(Lacking("cuLaunchKernel"))


def test_where_it_lacks_one_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_kernels, "_warned", False)
    operator = declare("lacking")
    on_cpu(operator).machine = Without()
    x = torch.ones(3)
    with pytest.warns(RuntimeWarning, match="no CUDA kernel can be launched"):
        assert torch.equal(operator(x), x * 2)
    assert record().launches == 0


MISSING = "the library between torch and all kernels is missing"


@pytest.fixture
def _no_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without the runtime, without built kernels and without a compiler."""
    monkeypatch.setattr(missing_kernels, "_warned", False)
    monkeypatch.setattr(library, "_file", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    token = packaged._search.set(packaged._Search({}))
    yield
    packaged._search.reset(token)


@pytest.mark.usefixtures("_no_runtime")
def test_without_the_runtime_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declare("no_runtime")
    x = torch.ones(3)
    with pytest.warns(RuntimeWarning, match=re.escape(MISSING)):
        assert torch.equal(operator(x), x * 2)
    assert record().launches == 0
    (rejected, _) = operator.explain(x).rejected
    assert f"{MISSING}: the kernel fits, and is in CUDA C++, which needs no C++ compiler; " in rejected
    assert "there is no C++ compiler: no `no-such-compiler` in PATH" in rejected
    monkeypatch.setenv("OPSMITH_REQUIRE_KERNELS", "1")
    operator.forget_calls()
    with pytest.raises(errors.KernelRefusedError, match=MISSING):
        operator(x)


@pytest.mark.usefixtures("_no_runtime")
def test_without_the_runtime_a_strict_kernel_is_an_error() -> None:
    operator = declare("strict", strict=True)
    with pytest.raises(errors.ToolchainError, match=MISSING):
        operator(torch.ones(3))
