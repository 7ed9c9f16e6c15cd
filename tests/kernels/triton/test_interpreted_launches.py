"""Code that launches kernels in Triton itself is checked on the CPU, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opsmith
from opsmith.kernels.triton.interpreter import missing_interpreter

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from opsmith.kernels.launches_on_cpu import launches_on_cpu  # noqa: E402

pytestmark = pytest.mark.skipif(missing_interpreter() is not None, reason=str(missing_interpreter()))


def tripled(x, result, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < numel)
    tl.store(result + at, numbers * 3, mask=at < numel)


jitted = triton.jit(tripled)
interpreted = InterpretedFunction(tripled)  # what `triton.jit` gives under TRITON_INTERPRET=1
tuned = triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["numel"])(jitted)


def launched(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    x, result = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    blocks = {} if kernel is tuned else {"BLOCK": 8}
    kernel[lambda meta: (triton.cdiv(meta["numel"], meta["BLOCK"]),)](x, result, x.numel(), **blocks)
    return result


class Jitted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return launched(jitted, x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        return launched(jitted, grad)


class Interpreted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return launched(interpreted, x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        return launched(interpreted, grad)


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("function", [Jitted, Interpreted])
def test_a_right_class_passes_in_threads_and_frees_its_memory(function: Any) -> None:
    asked = ["state", "memory"]
    report = opsmith.check(function, samples=[(torch.randn(2, 3),)], only=asked, effort="quick")
    assert {each.property for each in report.outcomes if each.status == "passed"} == {*asked}
    assert report.remarks == (
        "kernels in Triton ran in Triton's interpreter on the CPU, not on a GPU: `tripled`",
    )


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def squared(x, result, numel, dtype: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < numel).to(tl.float32)
    tl.store(result + at, (numbers * numbers).to(dtype), mask=at < numel)


class NotInFloat64(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        given, result = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        squared[(triton.cdiv(x.numel(), 8),)](given, result, x.numel(), DTYPES[x.dtype], BLOCK=8)
        return result

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.slow
def test_a_kernel_that_takes_no_float64_is_checked_in_float32() -> None:
    report = opsmith.check(
        NotInFloat64,
        samples=lambda make: [(make(2).float(),)],
        only=["forward", "gradient"],
        effort="quick",
    )
    assert report.passed, report
    assert report.remarks[1] == (
        "the operator takes float32, but not float64 (KeyError: torch.float64), so it was checked in float32"
    )


@pytest.mark.slow
def test_a_wrong_gradient_is_found_in_float32() -> None:
    class Wrong(NotInFloat64):
        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
            (x,) = ctx.saved_tensors
            return -2 * x * grad

    report = opsmith.check(
        Wrong, samples=lambda make: [(make(2),)], only=["forward", "gradient"], effort="quick"
    )
    assert {(failure.property, failure.input) for failure in report.failures} == {("gradient", "x")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [jitted, interpreted, tuned], ids=["jitted", "interpreted", "tuned"])
def test_every_launch_on_the_cpu_is_interpreted(kernel: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    with launches_on_cpu():
        assert torch.equal(launched(kernel, x), x * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_writes_into_its_argument(dtype: torch.dtype) -> None:
    whole = torch.tensor([1.0, -float("nan"), 3.0, 4.0]).to(dtype)
    bits = whole.clone().view(torch.uint8)
    part = whole[2:]
    with launches_on_cpu():
        jitted[(1,)](part, part, 2, BLOCK=8)
    assert part.tolist() == [9.0, 12.0]
    half = bits.numel() // 2
    assert torch.equal(whole.view(torch.uint8)[:half], bits[:half])  # also the bits of a nan


def test_memory_outside_of_a_storage_is_not_touched() -> None:
    x = torch.ones(4)
    with launches_on_cpu(), pytest.raises(opsmith.errors.KernelError) as caught:
        jitted[(1,)](x, torch.empty(2), 4, BLOCK=4)
    assert caught.value.problem == "the Triton kernel writes 4 bytes outside of `result`: just after its end"


@pytest.mark.filterwarnings(
    "ignore:.*data pointer of FakeTensor:UserWarning"
)  # torch warns once in a process
def test_tensors_without_data_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = FakeTensorMode().from_tensor(torch.ones(4))
    with launches_on_cpu(), pytest.raises(RuntimeError) as caught:
        jitted[(1,)](x, x, 4, BLOCK=4)
    assert str(caught.value) == "`x` is a tensor without data, such as a fake, and a kernel needs data"


def test_outside_of_a_check_triton_launches_itself() -> None:
    run = type(jitted).run
    with launches_on_cpu():
        assert type(jitted).run is not run
    assert type(jitted).run is run


@pytest.mark.slow
def test_an_isolated_check_tries_float64_in_a_child_process() -> None:
    report = opsmith.check(
        NotInFloat64, samples=lambda make: [(make(2),)], only=["determinism"], effort="quick", isolate=True
    )
    assert report.passed_as_asked, report
    assert report.remarks[-1].startswith("it takes float32 and not float64")


class InFloat32(NotInFloat64):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        given, result = x.contiguous(), torch.empty(x.shape, dtype=torch.float32)
        squared[(triton.cdiv(x.numel(), 8),)](given, result, x.numel(), tl.float32, BLOCK=8)
        return result


@pytest.mark.slow
def test_results_in_float32_for_float64_are_checked_in_float32() -> None:
    report = opsmith.check(
        InFloat32, samples=lambda make: [(make(2),)], only=["forward"], effort="quick", skip=["gradient"]
    )
    assert not report.errors, report
    assert "it takes float32 and not float64 (a result is float32 then)" in report.remarks[1]


@triton.jit
def by_assembler(x, result, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < numel).to(tl.float32)
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], tl.float32, True, 1)
    tl.store(result + at, same * 3, mask=at < numel)


class Assembler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return launched(by_assembler, x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        return launched(by_assembler, grad)


class Untyped(torch.autograd.Function):
    """A class that asks for the GPU; its types are learnt from a call."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        triton.runtime.driver.active.utils.get_device_properties(0)
        return launched(jitted, x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def,override]
        return launched(jitted, grad)


class OnGpuAlone(Jitted):
    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        if grad.is_cuda:
            blocks = 8
        return launched(jitted, grad) * blocks


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_code_around_a_kernel_that_raises_on_the_cpu_is_a_limit() -> None:
    report = opsmith.check(
        OnGpuAlone, samples=[(torch.randn(3),)], only=["forward", "gradient"], effort="quick"
    )
    assert not report.errors, report
    assert report.verdict() == "OnGpuAlone: NOT PASSED: gradient could not be checked; 1 limit"
    assert report.failures[0].evidence["missing here"] == (
        "a GPU, which the code that launches the kernels may need"
    )


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (
            Assembler,
            "Triton's interpreter cannot run the kernel: NotImplementedError: inline_asm not supported",
        ),
        (Untyped, "a GPU"),
    ],
)
def test_what_cannot_run_here_is_unchecked_and_no_error(function: Any, missing: str) -> None:
    if function is Untyped and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    report = opsmith.check(
        function, samples=[(torch.randn(3),)], only=["forward", "gradient"], effort="quick"
    )
    assert not report.errors, report
    assert not report.passed_as_asked
    assert "NOT PASSED: forward and gradient could not be checked; 1 limit" in report.verdict()
    [failure] = report.failures
    assert (failure.property, failure.severity) == ("forward", "limit")
    assert str(failure.evidence["missing here"]).startswith(missing)


@triton.jit
def through_descriptor(x, result, BLOCK: tl.constexpr):
    result.store([0], x.load([0]) * 3)


def test_tensor_descriptors() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, result = torch.randn(16), torch.zeros(16)
    with launches_on_cpu():
        through_descriptor[(1,)](
            TensorDescriptor.from_tensor(x, [16]), TensorDescriptor.from_tensor(result, [16]), BLOCK=16
        )
    assert torch.equal(result, x * 3)
