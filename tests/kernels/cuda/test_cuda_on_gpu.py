"""On a GPU, kernels in CUDA C++ compute what the reference does, on any stream and any of several GPUs."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_operators import channel_sums, pooled, row_sums, scaled, told
from device_comparison import runs_on
from kernel_cases import EVERY, LAYOUTS, SHAPES, WIDE
from torch.testing import assert_close

import opsmith

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[3] / "examples" / "involution_cuda.py"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("example")
    shutil.copy(EXAMPLE.with_name("involution.cu"), folder)
    file = folder / "involution_on_gpu.py"
    file.write_text(EXAMPLE.read_text().replace('"examples::', '"involution_on_gpu::'))
    specification = importlib.util.spec_from_file_location("involution_on_gpu", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def runs_on_gpu(operator: Any, *arguments: Any) -> bool:
    return runs_on("cuda", operator, *arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 1031)], ids=str)
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_every_dtype_layout_and_size(dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(shape, device="cuda", dtype=torch.float64).to(dtype))
    shift = torch.randn(4, device="cuda", dtype=torch.float64).to(dtype)[2:]
    assert runs_on_gpu(scaled, x, 2.0) == (dtype != torch.float64)
    assert_close(scaled(x, 2.0), scaled.reference(x, 2.0))
    assert_close(scaled(x, -0.5, shift), scaled.reference(x, -0.5, shift))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_several_results(dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(40, 6, device="cuda", dtype=dtype))
    assert runs_on_gpu(row_sums, x)
    assert_close(row_sums(x), row_sums.reference(x))


@pytest.mark.parametrize("channels_last", [True, False])
def test_channels_last(channels_last: bool) -> None:
    x = torch.randn(2, 3, 4, 5, device="cuda", dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    assert runs_on_gpu(channel_sums, x)
    assert_close(channel_sums(x), channel_sums.reference(x))


def test_every_kind_of_argument() -> None:
    x = torch.ones(1, device="cuda", dtype=torch.float64)
    others = [torch.arange(3.0, device="cuda", dtype=torch.float64), x.new_ones(4)[::2]]
    full = (x, others, [1, -2, 2**40], [0.5, 1.25], [True, False, True], "text", -7, 5, 0.75, True, (3, 4))
    for arguments in ((*full, 3, 0.25), full):
        assert runs_on_gpu(told, *arguments)
        assert_close(told(*arguments), told.reference(*told.specification.schema.call_values(arguments, {})))


@pytest.mark.parametrize(("size", "largest"), [(1, False), (2, False), (3, True), (8, True)])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_constants(dtype: torch.dtype, size: int, largest: bool) -> None:
    x = torch.randn(240, device="cuda", dtype=dtype)
    assert runs_on_gpu(pooled, x, size, largest)
    assert_close(pooled(x, size, largest), pooled.reference(x, size, largest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 1), (3, 2), (7, 1), (7, 2)])
def test_the_example_forward_and_gradients(
    example: ModuleType, size: int, stride: int, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 16, 29, 30, device="cuda")
    rows, columns = (29 - 1) // stride + 1, (30 - 1) // stride + 1
    weight = torch.randn(2, 4, size, size, rows, columns, device="cuda")
    arguments: Any = [each.to(dtype).requires_grad_() for each in (x, weight)]
    assert runs_on_gpu(example.involution, *arguments, stride, size // 2)
    y = example.involution(*arguments, stride, size // 2)
    dy = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, arguments, dy)
    wide = [each.detach().double().requires_grad_() for each in arguments]
    right = example.involution.reference(*wide, stride, size // 2)
    expected = right, *torch.autograd.grad(right, wide, dy.double())
    epsilon = torch.finfo(dtype).eps
    for one, two in zip(found, expected, strict=True):
        assert_close(
            one.double(), two, atol=16 * epsilon * float(two.detach().abs().max()), rtol=16 * epsilon
        )


def test_it_runs_on_torch_s_current_stream() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what comes before in the same stream
        x.fill_(3.0)
        y = scaled(x, 2.0)
    torch.cuda.current_stream().wait_stream(stream)
    assert bool((y == 6.0).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees one GPU")
def test_it_runs_where_its_tensors_are() -> None:
    with torch.cuda.device(0):
        y = scaled(torch.ones(5, device="cuda:1"), 2.0)
        assert torch.cuda.current_device() == 0
    assert y.device.index == 1
    assert_close(y.cpu(), torch.full((5,), 2.0))


def test_a_cuda_graph_replays_it() -> None:
    x = torch.ones(64, device="cuda")
    scaled(x, 2.0)  # compiled and loaded, which no graph captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scaled(x, 2.0)
    x.fill_(5.0)
    graph.replay()
    assert bool((y == 10.0).all())


def test_results_with_initial_values_and_several_launches() -> None:
    file = EXAMPLE.with_name("histogram_cuda.py")
    text = file.read_text().replace('"examples::', '"histogram_on_gpu::').replace('"histogram.cu"', "SOURCE")
    names: dict[str, Any] = {"SOURCE": file.with_name("histogram.cu"), "__name__": __name__}
    exec(compile(text, __file__, "exec"), names)
    histogram, total = names["histogram"], names["total"]
    numbers = torch.randint(0, 50, (100_003,), device="cuda")
    for x in (numbers, numbers[:1], numbers[:0], numbers[::3]):
        assert_close(histogram(x, 60), histogram.reference(x, 60))
    for x in torch.randn(100_003, device="cuda"), torch.randn(7, device="cuda"), torch.ones(0, device="cuda"):
        assert_close(total(x), total.reference(x), rtol=1e-4, atol=1e-2)
    assert "(2 launches)" in total.explain(torch.ones(3, device="cuda")).forward
    total(numbers.double())  # compiled and loaded, which no graph captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts, added = histogram(numbers, 60), total(numbers.double())
    for replay in range(3):
        numbers.copy_((numbers + replay) % 60)
        graph.replay()
        assert_close(counts, histogram.reference(numbers, 60))
        assert added == numbers.sum()


@pytest.mark.parametrize("operator", [scaled, row_sums, channel_sums, pooled], ids=lambda each: each.__name__)
def test_check_passes(operator: Any) -> None:
    report = opsmith.check(operator, skip=["compile", "export", "opcheck"])
    assert report.passed, str(report)
    forward = next(each for each in report.outcomes if each.property == "forward")
    assert not [note for note in forward.notes if "did not run" in note]
