"""Cost of a call of a kernel beyond the work, by each way to call it, in one run.

The first table multiplies 8 floats by a C++ kernel. The second compares the host's time in calls of kernels
in CUDA C++ with that of their twins in C++ on the CPU, below autograd: the tests' driver stands in for a
GPU's, so nothing is computed by them, and tensors on the CPU stand in for a GPU's. It needs NVRTC.

The ways take turns within each round; a figure is the median over rounds, a ratio that of the ratios within
each round, in the first table to aten, called as `torch.ops.aten.mul.Tensor`. Stated limits: 2.0 through
`torch.ops`; in the second table 1.3, and 1 us for each tensor in lists; another number in each call, twice
the same; another number of rows in each call, 4 times the same and 15 us.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith import errors, ops
from opsmith.ops.rms_norm import rms_norm_backward

KERNEL = """
template <class T>
void multiplied(Contiguous<const T> x, Contiguous<const T> w, Contiguous<T> y) {
  for (int64_t i = 0; i < y.numel(); i++) y[i] = x[i] * w[i];
}
"""


@opsmith.operator("native_overhead::multiplied")
def multiplied(x: Tensor, w: Tensor) -> Tensor:
    """Multiply tensors of one shape."""
    return x * w


@opsmith.operator("native_overhead::sized", shapes="x: N, w: N -> N")
def sized(x: Tensor, w: Tensor) -> Tensor:
    """Multiply vectors whose length is another one in each call."""
    return x * w


multiplied.kernel("cpu", cpp=KERNEL, strict=True)
sized.kernel("cpu", cpp=KERNEL, entry="multiplied", strict=True)


@torch.library.custom_op("native_overhead::custom", mutates_args=())
def custom(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def ways() -> dict[str, Callable[[], Any]]:
    x, w = torch.randn(8), torch.randn(8)
    across = torch.randn(8, 2)[:, 0]
    vectors = itertools.cycle([(torch.randn(size), torch.randn(size)) for size in range(1, 200)])
    aten, native = torch.ops.aten.mul.Tensor, torch.ops.native_overhead.multiplied.default

    def another_size() -> Any:
        return sized(*next(vectors))

    return {
        "torch.ops.aten.mul.Tensor": lambda: aten(x, w),
        "torch.mul": lambda: torch.mul(x, w),
        "opsmith, its handle": lambda: multiplied(x, w),
        "opsmith, torch.ops": lambda: native(x, w),
        "opsmith, one input copied for its layout": lambda: multiplied(across, w),
        "opsmith, another size in each call (shapes=)": another_size,
        "torch.library.custom_op, torch.ops": lambda: torch.ops.native_overhead.custom.default(x, w),
    }


def gpu_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operators with a kernel in C++ and one in CUDA C++, and arguments of a call."""
    x, weight = torch.randn(4, 64), torch.randn(64)
    rstd = ops.rms_norm.reference(x, weight)[1]
    cache, rows = torch.zeros(4, 4, 2, 8), torch.randn(4, 2, 8)

    def lists(count: int) -> tuple[Any, ...]:
        return *([torch.rand(8) for _ in range(count)] for _ in range(4)), torch.zeros(())

    return {
        "rms_norm": (ops.rms_norm, (x, weight, 1e-6)),
        "rms_norm_backward": (rms_norm_backward, (torch.randn(4, 64), x, weight, rstd)),
        "add_rms_norm_": (ops.add_rms_norm_, (x.clone(), x.clone(), weight, 1e-6)),
        "rope_": (ops.rope_, (rows.clone(), ops.rope_table(4, 8), torch.arange(4))),
        "write_kv_cache": (ops.write_kv_cache, (cache, cache.clone(), rows, rows, torch.arange(4))),
        "adamw_, 4 lists of 2": (ops.adamw_, lists(2)),
        "adamw_, 4 lists of 40": (ops.adamw_, lists(40)),
    }


def compared(calls: dict[str, Callable[[], Any]], rounds: int, number: int) -> dict[str, list[float]]:
    """The seconds of each call in each round, in which they take turns."""
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            taken[name].append(min(timer.repeat(3, number)) / number)
    return taken


def ratio(taken: list[float], base: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(taken, base, strict=True))


def against_cpp(rounds: int) -> None:
    """Print the second table."""
    sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("kernels/cuda", "")]
    from fake_driver import OnCpu  # the tests' own

    from opsmith.kernels.cpp.kernel import CppKernel
    from opsmith.kernels.cuda.kernel import CudaKernel

    print(f"\n{'below autograd':46} {'C++, CPU':>9} {'CUDA C++':>12} {'of C++':>8}")
    figures: dict[str, dict[str, float]] = {}
    numbered: list[tuple[str, Any, tuple[Any, ...]]] = []
    for name, (operator, arguments) in gpu_calls().items():
        kernels = [each.given for each in operator.specification.kernels]
        on_cpu = next(each for each in kernels if isinstance(each, CppKernel))
        on_gpu = next(each for each in kernels if isinstance(each, CudaKernel))
        on_gpu.machine = OnCpu()
        ways: dict[str, Callable[[], Any]] = {}
        for way, kernel in (("C++", on_cpu), ("CUDA", on_gpu)):
            assert kernel.refusal(list(arguments)) is None, (name, way)
            ways[way] = partial(kernel.direct, *arguments)
            if "of 40" in name:
                numbered.append((way, kernel.direct, arguments))
        with torch.no_grad():
            taken = compared(ways, rounds, 200 if "40" in name else 2000)
        figures[name] = {way: statistics.median(each) * 1e6 for way, each in taken.items()}
        of_cpp = ratio(taken["CUDA"], taken["C++"])
        print(f"{name:46} {figures[name]['C++']:6.2f} us {figures[name]['CUDA']:9.2f} us {of_cpp:7.2f}x")
    few, many = (figures[f"adamw_, 4 lists of {count}"] for count in (2, 40))
    each = {way: (many[way] - few[way]) / (4 * 38) for way in few}
    for way, call, arguments in numbered:
        fixed, rates = partial(call, *arguments, 1e-3), itertools.count(1)
        with torch.no_grad():
            ways = {"same": fixed, "another": lambda: call(*arguments, next(rates) * 1e-9)}  # noqa: B023
            taken = compared(ways, rounds, 200)
        of_same = ratio(taken["another"], taken["same"])
        name = f"adamw_, 4 lists of 40, another rate in each, {way}"
        print(f"{name:46} {statistics.median(taken['another']) * 1e6:6.2f} us {of_same:7.2f}x of the same")
    for name, way, kernel, calls in rows_of():
        first, others = next(calls), list(itertools.islice(calls, 40))
        for arguments in (first, *others):
            kernel.direct(*arguments)
        planned, others_again = kernel.cached_plans, itertools.cycle(others)
        ways = {
            "same": partial(kernel.direct, *first),
            "another": lambda: kernel.direct(*next(others_again)),  # noqa: B023
        }
        with torch.no_grad():
            taken = compared(ways, rounds, 2000)
        of_same = ratio(taken["another"], taken["same"])
        name = f"{name}, other rows in each, {way}; plans: {planned}"
        print(f"{name:58} {statistics.median(taken['another']) * 1e6:6.2f} us {of_same:7.2f}x of the same")
    print(f"{'each tensor in lists':46} {each['C++']:6.2f} us {each['CUDA']:9.2f} us")


def rows_of() -> Iterator[tuple[str, str, Any, Iterator[tuple[Any, ...]]]]:
    """An operator's name, a language, the kernel, and arguments with another number of rows each."""
    from opsmith.kernels.runtime.planned_kernel import PlannedKernel

    weight = torch.randn(64)

    def forward() -> Iterator[tuple[Any, ...]]:
        return ((torch.randn(rows, 64), weight, 1e-6) for rows in itertools.count(2))

    def backward() -> Iterator[tuple[Any, ...]]:
        for x, *_ in forward():
            yield torch.randn_like(x), x, weight, ops.rms_norm.reference(x, weight)[1]

    for operator, calls in ((ops.rms_norm, forward), (rms_norm_backward, backward)):
        kernels = dict.fromkeys(each.given for each in operator.specification.kernels)
        for kernel in kernels:
            if isinstance(kernel, PlannedKernel):
                kernel.withdraw()
                yield operator.name.partition("::")[2], kernel.language, kernel, calls()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    taken = compared(ways(), rounds, 5000)
    aten = next(iter(taken.values()))
    print(f"{'8 floats, no gradient':46} {'median':>9} {'of aten':>8}")
    for name, figures in taken.items():
        print(f"{name:46} {statistics.median(figures) * 1e6:6.2f} us {ratio(figures, aten):7.2f}x")
    kernel: Any = multiplied.specification.kernels[0].function
    print(f"copied for their layout: {kernel.copied}; forms that are known: {kernel.cached_plans}")
    try:
        against_cpp(rounds)
    except errors.ToolchainError as error:
        print(f"\nkernels in CUDA C++: {error.problem}: {error.got}")


if __name__ == "__main__":
    main()
