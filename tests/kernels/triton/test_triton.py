"""Kernels in Triton, interpreted on the CPU, compute what the reference does; on a GPU they are launched."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import linecache
import os
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import EVERY, LAYOUTS
from matrices import diagonal
from torch import Tensor
from torch.testing import assert_close

import opsmith

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton_operators import OPERATORS, picked, pixel_sums, product, softmax, times, tuned  # noqa: E402

from opsmith.kernels.triton.interpreter import missing_interpreter  # noqa: E402


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    """What does not run on a GPU runs in Triton's interpreter."""
    reason = missing_interpreter()
    if reason is not None and not request.node.get_closest_marker("gpu"):
        pytest.skip(reason)


SHAPES = [(3, 5), (1, 1), (0, 3), (3, 0), (4, 129)]


def kernel_of(operator: Any) -> Any:
    return operator.specification.kernels[0].function


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "shape", "layout"), diagonal(EVERY, SHAPES, LAYOUTS, every=4))
def test_every_dtype_layout_and_size(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    x = LAYOUTS[layout](random(shape, dtype))
    result, right = kernel_of(times).interpreted(x, 1.7), times.reference(x, 1.7)
    assert_close(result, right)
    if x.numel():
        assert result.stride() == right.stride()
    if dtype != torch.float64:
        result, right = kernel_of(softmax).interpreted(x), softmax.reference(x)
        assert_close(result, right)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0,)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    for dtype in EVERY:
        x = random(shape, dtype)
        assert_close(kernel_of(times).interpreted(x, by=-3.0), x * -3.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(5, 17, 3), (1, 1, 1), (17, 2, 20), (4, 0, 3), (0, 5, 3)], ids=str)
def test_strides_of_arguments_and_results_are_given(sizes: tuple[int, int, int], layout: str) -> None:
    rows, inner, columns = sizes
    a, b = LAYOUTS[layout](torch.randn(rows, inner)), LAYOUTS[layout](torch.randn(inner, columns))
    assert_close(kernel_of(product).interpreted(a, b), a @ b)
    assert kernel_of(product).copies([a, b]) == ()


def test_options_numbers_and_two_results() -> None:
    x, index, shift = torch.randn(4, 5), torch.tensor([3, 0, 3]), torch.randn(3)
    for arguments in (
        (x, index),
        (x, index, shift),
        (x, index, None, 3, True),
        (x.mT.contiguous().mT, index),
    ):
        for result, right in zip(
            kernel_of(picked).interpreted(*arguments), picked.reference(*arguments), strict=True
        ):
            assert_close(result, right)


def test_a_layout_that_is_wanted() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert_close(kernel_of(pixel_sums).interpreted(x), x.sum(1))
    assert kernel_of(pixel_sums).copies([x]) == ("`x`, which is not channels-last",)
    assert kernel_of(pixel_sums).copies([x.contiguous(memory_format=torch.channels_last)]) == ()
    assert (
        kernel_of(pixel_sums).value_refusal([x[0]]) == "`x` has 3 dimensions, but channels-last is for 4 or 5"
    )


def test_the_first_configuration_is_interpreted_and_heuristics_are_filled() -> None:
    for size in (32, 45, 1):
        x = torch.randn(size)
        assert_close(kernel_of(tuned).interpreted(x), -x)
        assert kernel_of(tuned).programs([x]) == -(-size // 32)


def test_results_have_the_strides_of_the_reference_s_and_copies_are_told() -> None:
    x = torch.randn(3, 5).mT
    result = kernel_of(times).interpreted(x, 2.0)
    assert result.stride() == (x * 2).stride() == (1, 5)
    assert kernel_of(times).copies([x, 2.0]) == (
        "`x`, which is not contiguous",
        "`result`, which the reference does not return as contiguous",
    )
    assert kernel_of(times).copied == {}  # nothing ran on a GPU


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    x = torch.randn(1000).bfloat16()
    assert torch.equal(kernel_of(times).interpreted(x, 0.3), (x.float() * 0.3).bfloat16())


def test_floats_arrive_in_the_precision_of_a_gpu() -> None:
    """By default in 32 bits, as Triton hands them to a GPU; a parameter may ask for 64."""

    def narrow_kernel(x, by, result, result_numel):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 1)
        tl.store(result + at, tl.load(x + at) * by)

    import triton.language as tl

    @opsmith.operator("triton_kernels::narrow")
    def narrow(x: Tensor, by: float) -> Tensor:
        return x * by

    narrow.kernel("cuda", triton=narrow_kernel, grid=1, dtypes=[torch.float64])
    one = torch.ones(1, dtype=torch.float64)
    assert kernel_of(narrow).interpreted(one, 0.1).item() == torch.tensor(0.1).item() != 0.1
    assert kernel_of(times).interpreted(one, 0.1).item() == 0.1


def test_triton_s_language_is_put_back() -> None:
    import triton.language as tl

    places = (tl, tl.core, tl.math, tl.tensor, tl.core.dtype)
    before = [dict(vars(place)) for place in places]
    functions = dict(vars(triton.JITFunction))
    module = set(vars(__import__("triton_operators")))
    kernel_of(softmax).interpreted(torch.randn(3, 5))
    with pytest.raises(opsmith.errors.KernelError):
        kernel_of(_raising()).interpreted(torch.ones(3))
    for place, names in zip(places, before, strict=True):
        assert {name: vars(place)[name] for name in names} == names
        assert set(vars(place)) - set(names) <= {"__annotations__"}
    assert dict(vars(triton.JITFunction)) == functions
    assert set(vars(__import__("triton_operators"))) == module


def _raising() -> Any:
    import triton.language as tl

    def raising_kernel(x, result):  # type: ignore[no-untyped-def]
        tl.store(result + tl.arange(0, 3), tl.load(x + tl.arange(0, 3)))

    @opsmith.operator("triton_kernels::raising")
    def raising(x: Tensor) -> Tensor:
        return x.clone()

    return raising.kernel("cuda", triton=raising_kernel, grid=1)


def test_the_source_is_that_which_was_declared_though_its_file_was_edited(tmp_path: Path) -> None:
    file = tmp_path / "edited_kernels.py"
    text = """
        import triton
        import triton.language as tl

        @triton.jit
        def one(x):
            return x + 1

        def edited_kernel(x, result):
            number = one(tl.load(x))
            tl.store(result, number)
    """
    file.write_text(textwrap.dedent(text))
    specification = importlib.util.spec_from_file_location("edited_kernels", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    @opsmith.operator("triton_kernels::edited")
    def edited(x: Tensor) -> Tensor:
        return x + 1

    edited.kernel("cuda", triton=module.edited_kernel, grid=1)
    x = torch.zeros(())
    assert kernel_of(edited).interpreted(x) == 1
    file.write_text(
        file.read_text().replace("x + 1", "x + 2").replace("(result, number)", "(result, number * 9)")
    )
    os.utime(file, (1, 1))
    assert kernel_of(edited).interpreted(x) == 1
    assert "number * 9" not in kernel_of(edited).source.compiled_by().src
    linecache.checkcache(str(file))
    assert "number * 9" in "".join(linecache.getlines(str(file)))


def test_several_threads_interpret_one_after_the_other() -> None:
    x = torch.randn(8, 9)
    found: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(kernel_of(softmax).interpreted(x))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        assert_close(each, x.softmax(1))


def test_calls_on_the_cpu_do_not_see_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("interpreted")

    monkeypatch.setattr("opsmith.kernels.triton.kernel.interpret", refuse)
    x = torch.randn(3, 4)
    assert torch.equal(times(x, 2.0), x * 2)
    assert times.explain(x, 2.0).rejected[0].endswith("a tensor is on cpu")
    assert "reference" in times.explain(x, 2.0).forward


def test_what_it_does_not_take_is_refused_with_a_reason() -> None:
    kernel = kernel_of(softmax)
    assert kernel.refusal([torch.ones(2, 3)]) is None
    assert (
        kernel.refusal([torch.ones(2, 3, dtype=torch.float64)])
        == "`x` is float64, but the kernel takes bfloat16 or float16 or float32"
    )
    assert kernel.refusal([torch.ones(3)]) == "`x` has 1 dimension, but the kernel takes 2"
    wide = torch.empty_strided((2, 2), (2**31, 1), device="meta")
    assert (
        kernel.refusal([wide])
        == "`x` extends over more than 2**31 elements, which the kernel's indices cannot count"
    )
    assert (
        kernel_of(picked).refusal([torch.ones(2, 2), torch.ones(2, dtype=torch.int32), None, 1, False])
        is None
    )
    apart = [torch.ones(2, 2), torch.ones(2, dtype=torch.int32, device="meta"), None, 1, False]
    assert kernel_of(picked).refusal(apart) == "its tensors are on cpu, meta"


class Recorder:
    """Takes the place of a decorated kernel, and keeps what it is launched with."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.launches: list[tuple[Any, dict[str, Any]]] = []
        self.raises: Exception | None = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            if self.raises is not None:
                raise self.raises
            self.launches.append((grid, arguments))

        return launch


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder, list[Any]]:
    """A kernel whose launches are recorded in the place of a GPU, with the devices that are made current."""
    recorder = Recorder(times_source())
    devices: list[Any] = []

    @contextlib.contextmanager
    def device(which: Any) -> Iterator[None]:
        devices.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)

    @opsmith.operator("triton_kernels::recorded")
    def recorded_operator(x: Tensor, by: float) -> Tensor:
        return x * by

    recorded_operator.kernel(
        "cuda",
        triton=recorder,
        grid=lambda result, BLOCK: triton.cdiv(result.numel(), BLOCK),
        constants={"BLOCK": 4, "num_warps": 1},
    )
    return kernel_of(recorded_operator), recorder, devices


def times_source() -> Any:
    return kernel_of(times).source.function


def test_a_launch(recorded: tuple[Any, Recorder, list[Any]]) -> None:
    kernel, recorder, devices = recorded
    x = torch.randn(3, 5)
    result = kernel(x, 2.0)
    assert devices == [x.device]
    [(grid, arguments)] = recorder.launches
    assert grid == (4,)
    assert arguments.pop("x_ptr") is x
    assert arguments.pop("result_ptr") is result
    fused = {"enable_fp_fusion": True}  # Triton 3.9 warns if it has to choose
    assert arguments == {"result_numel": 15, "by": 2.0, "BLOCK": 4, "num_warps": 1, **fused}
    assert kernel.copied == {}


def test_copies_are_counted(recorded: tuple[Any, Recorder, list[Any]]) -> None:
    kernel, recorder, _ = recorded
    x = torch.randn(3, 5).mT
    assert kernel(x, 2.0).stride() == x.stride()
    assert kernel.copied == {"x": 1, "result": 1}
    assert recorder.launches[0][1]["x_ptr"].is_contiguous()
    kernel.reload()
    assert kernel.copied == {}


def test_empty_tensors_launch_nothing(recorded: tuple[Any, Recorder, list[Any]]) -> None:
    kernel, recorder, _ = recorded
    assert kernel(torch.ones(0, 3), 2.0).shape == (0, 3)
    assert recorder.launches == []


def test_what_a_launch_raises_is_told(recorded: tuple[Any, Recorder, list[Any]]) -> None:
    kernel, recorder, _ = recorded
    recorder.raises = OutOfResources(300_000, 232_448, "shared memory")
    with pytest.raises(opsmith.errors.KernelError) as caught:
        kernel(torch.ones(3), 2.0)
    assert caught.value.message().splitlines() == [
        "triton_kernels::recorded: the Triton kernel needs more shared memory than the GPU has",
        "  expected: at most 232448",
        "  got: 300000",
        f"  where: {kernel.where}",
        "  hint: make its blocks smaller, or lower `num_stages` in `constants=`",
    ]
    recorder.raises = CompilationError(None, ast.parse("f(1)").body[0], "no such thing")
    with pytest.raises(opsmith.errors.CompileError, match="no such thing"):
        kernel(torch.ones(3), 2.0)
    recorder.raises = ValueError("another matter")
    with pytest.raises(ValueError, match="another matter"):
        kernel(torch.ones(3), 2.0)


def test_a_kernel_that_is_declared_again_takes_the_place_of_the_one_before() -> None:
    @opsmith.operator("triton_kernels::again")
    def again(x: Tensor, by: float) -> Tensor:
        return x * by

    for block in (16, 32):
        again.kernel("cuda", triton=times_source(), grid=1, constants={"BLOCK": block})
    assert len(again.specification.kernels) == 1
    assert kernel_of(again).programs([torch.ones(3), 2.0]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_on_a_gpu(name: str) -> None:
    report = opsmith.check(OPERATORS[name], only=["forward", "layouts"])
    assert not report.failures, report
    assert "did not run" not in str(report)


@pytest.mark.gpu
def test_a_launch_on_a_gpu_s_own_stream() -> None:
    x = torch.randn(1000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = times(x, 3.0)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(result, x * 3.0)
    assert "kernel for cuda" in times.explain(x, 3.0).forward


def unmasked_kernel(x_ptr, result_ptr, result_numel, READS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < result_numel
    x = tl.load(x_ptr + at, mask=there | READS)  # reads
    tl.store(result_ptr + at, x * 2, mask=there)
    if not READS:
        tl.store(result_ptr - 1, 1.0)  # writes


@pytest.mark.every(5)
@pytest.mark.parametrize("reads", [True, False], ids=["reads", "writes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_beyond_the_arguments_is_not_touched(dtype: torch.dtype, reads: bool) -> None:
    @opsmith.operator(f"triton_kernels::unmasked_{reads}_{str(dtype)[6:]}")
    def unmasked(x: Tensor) -> Tensor:
        return x * 2

    grid = lambda result, BLOCK: triton.cdiv(result.numel(), BLOCK)
    unmasked.kernel("cuda", triton=unmasked_kernel, grid=grid, constants={"READS": reads, "BLOCK": 8})
    unmasked.samples(lambda make: [(make(5),)])
    with pytest.raises(opsmith.errors.KernelError) as caught:
        kernel_of(unmasked).interpreted(torch.ones(5, dtype=dtype))
    way, parameter, place = ("reads", "x_ptr", "just after its end")
    if not reads:
        way, parameter, place = ("writes", "result_ptr", "4 bytes before it")
    assert f"the Triton kernel {way} 4 bytes outside of `{parameter}`: {place}" in str(caught.value)
    line = next(
        at for at, each in enumerate(Path(__file__).read_text().splitlines(), 1) if f"# {way}" in each
    )
    assert caught.value.where == f"{__file__}:{line}"
    report = opsmith.check(unmasked, only=["triton"], effort="quick")
    assert {failure.cause for failure in report.failures} == {"out-of-bounds"}
