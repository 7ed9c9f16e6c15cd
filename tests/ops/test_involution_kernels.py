"""Involution's kernels in C++ give what its references give: every size, step, layout and dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as some
from torch import Tensor

import opsmith
from opsmith.checking.side_effects.global_settings import thread_count
from opsmith.ops.involution import involution, involution_input_gradient, involution_weight_gradient

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="C++ kernels are built on Linux"),
    pytest.mark.xdist_group("involution_kernels"),
]

OPERATORS: Any = (involution, involution_input_gradient, involution_weight_gradient)
TOLERANCE = {torch.float32: 4e-6, torch.float64: 2e-14, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest element, a few units in the last place: 16 bits are rounded once, after sums in float32."""

FEW, MANY = int(os.environ.get("OPSMITH_TEST_CASES", "10")), 1000
"""How many random cases there are of a dtype, in every run of the suite and in the slow one."""


@dataclass(frozen=True)
class Case:
    """One involution, and how its tensors lie."""

    batch: int
    groups: int
    channels: int  # of a group
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    image_lies: str = "contiguous"
    weight_lies: str = "contiguous"
    threads: int = 1  # with more, none has a whole image of a small batch, and so its weights

    @property
    def steps(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation

    @property
    def result(self) -> tuple[int, ...]:
        """Ho and Wo."""
        sizes = zip(self.size, self.kernel, *self.steps, strict=True)
        return tuple((n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in sizes)


def with_layout(tensor: Tensor, how: str) -> Tensor:
    """The same numbers in other strides."""
    if how == "channels last":  # a pixel's channels, or its kernel, side by side
        order = (0, *range(tensor.dim() - 2, tensor.dim()), *range(1, tensor.dim() - 2))
        back = (0, *range(3, tensor.dim()), 1, 2)
        return tensor.permute(order).contiguous().permute(back)
    if how == "transposed":
        return tensor.mT.contiguous().mT
    if how == "a part":
        wider = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
        wider[..., 1:-2] = tensor
        return wider[..., 1:-2]
    if how == "expanded":  # one image for all of a batch
        return tensor[:1].expand_as(tensor)
    return tensor


LAYOUTS = some.sampled_from(["contiguous", "contiguous", "channels last", "transposed", "a part", "expanded"])


@some.composite
def cases(draw: Any) -> Case:
    """Sizes for which kernels have a path of their own, on both sides of their tiles, and any others."""
    pair = lambda strategy: draw(some.tuples(strategy, strategy))
    kernel = pair(some.sampled_from([3, 5, 7]) | some.integers(1, 8))
    case = Case(
        batch=draw(some.integers(1, 3)),
        groups=draw(some.integers(1, 3)),
        channels=draw(some.sampled_from([16, 8, 3, 1]) | some.integers(1, 35)),
        size=pair(some.sampled_from([7, 14, 28]) | some.integers(1, 33)),
        kernel=kernel,
        stride=pair(some.sampled_from([1, 1, 2]) | some.integers(1, 4)),
        padding=(draw(some.integers(0, kernel[0])), draw(some.integers(0, kernel[1]))),
        dilation=pair(some.sampled_from([1, 1, 1, 2]) | some.integers(1, 3)),
        image_lies=draw(LAYOUTS),
        weight_lies=draw(LAYOUTS),
        threads=draw(some.sampled_from([1, 1, 2, 3])),
    )
    assume(min(case.result) >= 1)
    return case


def tensors(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Image, weight and what came back, as they lie in the case."""
    generator = torch.Generator().manual_seed(0)

    def numbers(how: str, *shape: int) -> Tensor:
        return with_layout(torch.randn(*shape, generator=generator).to(dtype), how)

    channels = case.groups * case.channels
    image = numbers(case.image_lies, case.batch, channels, *case.size)
    weight = numbers(case.weight_lies, case.batch, case.groups, *case.kernel, *case.result)
    return image, weight, numbers(case.image_lies, case.batch, channels, *case.result)


def calls(case: Case, image: Tensor, weight: Tensor, came: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    yield involution, (image, weight, *case.steps)
    yield involution_input_gradient, (came, weight, case.size, *case.steps)
    yield involution_weight_gradient, (came, image, case.groups, case.kernel, *case.steps)


def in_float64(operator: Any, arguments: tuple[Any, ...]) -> Tensor:
    """Call the reference in float64: torch's products in bfloat16 have a nan beside an infinity."""
    wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
    return operator.reference(*wide)


def hold(case: Case, dtype: torch.dtype) -> None:
    """Hold the three kernels to their references in float64."""
    for operator, arguments in calls(case, *tensors(case, dtype)):
        with thread_count(case.threads):
            found = operator(*arguments)
        right = in_float64(operator, arguments)
        assert (found.dtype, found.shape) == (dtype, right.shape)
        within = TOLERANCE[dtype] * max(1.0, right.abs().max().item())
        torch.testing.assert_close(found.double(), right, rtol=0, atol=within, msg=f"{operator.name}, {case}")


def sweep(count: int) -> Any:
    """Random cases, the same in each run."""
    return settings(
        max_examples=count,
        deadline=None,  # the first compiles
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def with_whole_rows(**others: Any) -> Any:
    """Beside random cases, rows as wide as an unrolled block, and narrower ones, several in a vector."""

    def give(test: Any) -> Any:
        for kernel in (3, 5, 7):
            for size in [(7, 7), (4, 7), (14, 14), (5, 3), (3, 9)]:
                case = Case(1, 2, 16, size, (kernel, kernel), padding=(kernel // 2, kernel // 2))
                test = example(case=case, **others)(test)
        return test

    return give


# Building the kernels of a dtype takes ten seconds; those of the wide ones are built for other tests, too.
each_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(each, marks=pytest.mark.slow if each.itemsize == 2 else ()) for each in TOLERANCE],
    ids=str,
)


@pytest.mark.slow
@each_dtype
@sweep(FEW)
@given(case=cases())
@with_whole_rows()
@example(case=Case(1, 2, 16, (14, 28), (7, 7), (1, 1), (3, 3)))
@example(case=Case(1, 1, 16, (14, 15), (3, 5), (2, 2), (1, 2), image_lies="channels last"))
@example(case=Case(1, 2, 2, (70, 81), (7, 7), (2, 1), (9, 3), (2, 2)))  # few channels, in several bands
@example(case=Case(2, 2, 16, (100, 112), (7, 7), padding=(3, 3)))  # more than caches hold, save in 16 bits
@example(case=Case(2, 2, 16, (101, 113), (7, 7), padding=(3, 3)))  # with planes that begin anywhere
@example(case=Case(2, 1, 17, (9, 47), (3, 4), (1, 1), (3, 1), weight_lies="expanded"))  # one is left of 17
@example(case=Case(1, 1, 16, (5, 300), (3, 3), padding=(1, 1)))  # a row at a time
@example(case=Case(1, 1, 3, (5, 300), (3, 3), padding=(1, 1)))
@example(case=Case(1, 1, 16, (13, 4), (3, 5), (3, 2), (3, 5)))  # rows of which no tap lies on the image
@example(case=Case(1, 1, 16, (5, 2000), (3, 3), padding=(9, 1)))  # bands of which no tap lies on the image
@example(case=Case(1, 2, 16, (7, 9), (7, 9), (10**9, 10**9)))  # steps that are never taken
@example(case=Case(1, 2, 3, (7, 9), (1, 1), (2, 1), (0, 0), (10**9, 10**9)))
@pytest.mark.every(4)
def test_random_cases(case: Case, dtype: torch.dtype) -> None:
    hold(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@sweep(MANY)
@given(case=cases())
def test_many_random_cases(case: Case, dtype: torch.dtype) -> None:
    hold(case, dtype)


@each_dtype
def test_a_kernel_takes_the_call_and_not_the_reference(dtype: torch.dtype) -> None:
    case = Case(1, 2, 3, (5, 4), (3, 3), image_lies="channels last")
    for operator, arguments in calls(case, *tensors(case, dtype)):
        said = operator.explain(*arguments)
        assert "src/opsmith/ops/involution/cpu/" in said.forward.replace(os.sep, "/")
        assert said.copies == ()


ODD = [float("inf"), float("-inf"), float("nan")]
WHERE = ["first", "last", "left", "right"]


def place(tensor: Tensor, where: str) -> tuple[int, ...]:
    """A corner, or the middle of a side, of which taps look beyond the image in one dimension alone."""
    index = [0 if where in ("first", "left") else size - 1 for size in tensor.shape]
    if where in ("left", "right"):
        for rows in range(2, tensor.dim(), 2):
            index[rows] = tensor.shape[rows] // 2
    return tuple(index)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("odd", ODD, ids=str)
@sweep(FEW)
@given(
    case=cases(),
    which=some.sampled_from([(0,), (1,), (2,), (0, 1, 2)]),
    where=some.sampled_from(WHERE),
)
@with_whole_rows(which=(1,), where="left")
@with_whole_rows(which=(0, 1), where="right")
def test_what_is_not_finite_goes_where_the_reference_has_it(
    odd: float, dtype: torch.dtype, case: Case, which: tuple[int, ...], where: str
) -> None:
    given = [each.clone() for each in tensors(case, dtype)]
    for at in which:
        given[at][place(given[at], where)] = odd
    for operator, arguments in calls(case, *given):
        with thread_count(case.threads):
            found = operator(*arguments)
        right = in_float64(operator, arguments)
        assert torch.equal(found.isfinite(), right.isfinite()), (operator, case)
        assert torch.equal(found.isnan(), right.isnan()), (operator, case)


@pytest.mark.parametrize("several", [2, 3])
def test_the_same_numbers_with_any_number_of_threads(several: int) -> None:
    case = Case(2, 3, 16, (30, 29), (7, 7), padding=(3, 3))
    found = []
    for count in (1, several):
        with thread_count(count):
            found.append([operator(*given) for operator, given in calls(case, *tensors(case, torch.float32))])
    assert all(map(torch.equal, *found))


def test_empty_batches() -> None:
    case = Case(0, 1, 16, (5, 5), (3, 3), padding=(1, 1))
    for operator, arguments in calls(case, *tensors(case, torch.float32)):
        assert operator(*arguments).shape == operator.reference(*arguments).shape


# Every byte that the kernels and torch are given is 0xff: nan in every dtype.
POISON = """
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  static const auto real = reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(RTLD_NEXT, "aligned_alloc"));
  void* const memory = real(alignment, size);
  return memory == nullptr ? nullptr : std::memset(memory, 0xff, size);
}
extern "C" int posix_memalign(void** memory, size_t alignment, size_t size) {
  static const auto real =
      reinterpret_cast<int (*)(void**, size_t, size_t)>(dlsym(RTLD_NEXT, "posix_memalign"));
  const int failed = real(memory, alignment, size);
  if (!failed) std::memset(*memory, 0xff, size);
  return failed;
}
"""
POISONED = """
import ctypes, torch
assert torch.empty(1000).isnan().all()
libc = ctypes.CDLL(None)
libc.aligned_alloc.restype = ctypes.c_void_p
assert ctypes.string_at(libc.aligned_alloc(64, 1 << 20), 1 << 20) == bytes([255]) * (1 << 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("without", ["", "-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_on_processors_that_can_less_in_memory_full_of_nan(without: str, tmp_path: Path) -> None:
    (tmp_path / "poison.cpp").write_text(POISON)
    library = tmp_path / "poison.so"
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "poison.cpp", "-o", library, "-ldl"], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["CXX"] = f"g++ {without}"
    environment["OPSMITH_TEST_CASES"] = "40"
    environment["LD_PRELOAD"] = str(library)
    subprocess.run([sys.executable, "-c", POISONED], env=environment, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).name]
    chosen = ["-k", "test_random_cases or not_finite"]
    done = subprocess.run(
        [*command, *chosen], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TOLERANCE) + 2 * len(ODD)} passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: str(operator.name))
def test_nothing_is_read_or_written_outside(operator: Any) -> None:
    report = opsmith.check(operator, only=["sanitized"], effort="quick", sanitize=True)
    assert report.passed_as_asked, str(report)
    assert [outcome.status for outcome in report.outcomes if outcome.property == "sanitized"] == ["passed"]


# Each tensor ends, or begins, at a page that may not be touched: sanitizers do not see masked loads.
AT_THE_EDGE = """
import ctypes, mmap, sys, torch
from test_involution_kernels import Case, calls, tensors
libc = ctypes.CDLL(None, use_errno=True)
held = []

def at_the_edge(tensor, behind):
    data = tensor.contiguous().numpy().tobytes()
    pages = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    held.append(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = mmap.PAGESIZE + (pages - len(data) if behind else 0)
    memory[start : start + len(data)] = data
    for page in (begin, begin + mmap.PAGESIZE + pages):
        assert libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)

for size in [(7, 7), (5, 3), (14, 14), (9, 17), (1, 1), (20, 33)]:
    for kernel in (7, 3):
        for dtype in (torch.float32, torch.float64):
            for padding in (0, kernel // 2):
                if min(size) + 2 * padding < kernel:
                    continue  # the result has no pixel
                case = Case(1, 2, 3, size, (kernel, kernel), padding=(padding, padding))
                given = tensors(case, dtype)
                right = [operator(*arguments) for operator, arguments in calls(case, *given)]
                for behind in (False, True):
                    moved = [at_the_edge(each, behind) for each in given]
                    found = [operator(*arguments) for operator, arguments in calls(case, *moved)]
                    assert all(map(torch.equal, found, right)), case
print("read")
"""


@pytest.mark.slow
def test_no_page_beyond_a_tensor_is_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_EDGE], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
