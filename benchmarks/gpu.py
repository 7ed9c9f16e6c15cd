"""Everything that a GPU must confirm, in ten minutes: one script whose output goes into RESULTS.md.

    python benchmarks/gpu.py [--output FOLDER] [--minutes 10]

1. Launches by C++ while a CUDA graph is captured: a graph of a call is replayed on other numbers, and must
   give what the reference gives. `replay` is the GPU's time of a graph by that of a call. One kernel is in
   Triton, and must run by a plan.
2. `bundled_cuda.py`: the operators of a language model and `adamw_` beside torch, with the host's time.
3. `involution_cuda.py`: involution beside a plain kernel and `unfold`, two stages.
4. The tests with the mark `gpu`, as `make gpu-test` runs them, in the time that is left.

Each part is a process of its own, has a limit of time, and writes a file in the folder. If one fails or is
cut off, the last lines say so, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parent
PARTS: dict[str, tuple[Sequence[str], float]] = {
    "graphs": ([str(HERE / "gpu.py"), "--graphs"], 60),
    "bundled": ([str(HERE / "bundled_cuda.py"), "--rounds", "9"], 150),
    "involution": ([str(HERE / "involution_cuda.py"), "--rounds", "5", "--stages", "64x56", "256x14"], 120),
    "tests": (["-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")], 600),
}
"""Arguments of Python and the most seconds of each part."""


def graphs() -> None:
    """Capture a call of each operator in a CUDA graph, replay it on other numbers, and print the ratios."""
    from timing_cuda import is_ours, milliseconds

    from opsmith import ops

    x, weight = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, device="cuda")
    image, taps = torch.randn(16, 64, 56, 56, device="cuda"), torch.randn(16, 4, 7, 7, 56, 56, device="cuda")
    heads = torch.randn(4096, 32, 128, device="cuda")
    table, positions = ops.rope_table(4096, 128, device="cuda"), torch.arange(4096, device="cuda")
    lists = [[torch.rand(512, 512, device="cuda") for _ in range(40)] for _ in range(4)]
    count = torch.zeros((), device="cuda")
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rms_norm": (ops.rms_norm, (x, weight)),
        "involution": (ops.involution, (image, taps, 1, 3)),
        "rope_": (ops.rope_, (heads, table, positions)),
        "adamw_": (ops.adamw_, (*lists, count, 0.1)),  # a step beyond the tolerance
    }
    in_triton = scaled()
    calls["in Triton"] = (in_triton, (x, 1.5))
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{'operator':12}{'replay':>8}")
    for name, (operator, arguments) in calls.items():
        is_ours(operator, *arguments)
        replay = captured(operator, arguments)
        ratio = milliseconds(replay, 9, scratch) / milliseconds(
            lambda o=operator, a=arguments: o(*a), 9, scratch
        )
        print(f"{name:12}{ratio:8.2f}")
    kernel: Any = in_triton.specification.kernels[0].given
    assert kernel.cached_plans, f"Triton launches the kernel in Triton: {kernel.by_triton}"


def scaled() -> Any:
    """An operator with a kernel in Triton."""
    import triton
    import triton.language as tl

    import opsmith

    def scaled_kernel(x_ptr, result_ptr, result_numel, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < result_numel)
        tl.store(result_ptr + at, x * by, mask=at < result_numel)

    @opsmith.operator("gpu::scaled")
    def operator(x: Tensor, by: float) -> Tensor:
        return x * by

    grid = lambda result, BLOCK: triton.cdiv(result.numel(), BLOCK)
    return operator.kernel("cuda", triton=scaled_kernel, grid=grid, constants={"BLOCK": 1024})


def captured(operator: Any, arguments: Sequence[Any]) -> Callable[[], object]:
    """Capture a call, hold its replay on other numbers to the reference, and return the replay."""
    with torch.no_grad():
        for _ in range(2):  # planned, and its kernels are loaded: one in Triton in the second call
            operator(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = operator(*arguments)
        for each in tensors(arguments):
            if each.is_floating_point() and each.numel() > 1:
                each.uniform_(0.5, 1.5)
        written = operator.specification.schema.written
        copies = [
            [each.clone() for each in value]
            if isinstance(value, list)
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for value in arguments
        ]
        right = operator.reference(*copies)
        graph.replay()
        torch.cuda.synchronize()
    found, expected = (
        (tensors(arguments), tensors(copies)) if written else (tensors([result]), tensors([right]))
    )
    for one, other in zip(found, expected, strict=False):  # a reference may return more, as saved tensors
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    return graph.replay


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors of values and of the lists and tuples among them."""
    several = (value if isinstance(value, list | tuple) else [value] for value in values)
    return [each for value in several for each in value if isinstance(each, Tensor)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--graphs", action="store_true", help="the first part alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py measures a GPU, and torch sees none here")
    if options.graphs:
        graphs()
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + 60 * options.minutes, []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)])}
    for name, (arguments, most) in PARTS.items():
        path = options.output / f"{name}.txt"
        seconds = max(1.0, min(most, end - time.monotonic()))
        with path.open("w") as output:
            try:
                done = subprocess.run(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                )
                failed += [f"{name}: exit status {done.returncode}"] if done.returncode else []
            except subprocess.TimeoutExpired:
                failed.append(f"{name}: cut off after {seconds:.0f} s")
        print(f"== {name}\n{path.read_text()}")
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
