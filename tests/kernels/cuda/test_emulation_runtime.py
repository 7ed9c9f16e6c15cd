"""The runtime of emulated CUDA kernels: order of accesses, limits, processes that end, variables."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.emulation import launch
from opsmith.kernels.cuda.emulation.call import KernelEmulation
from opsmith.kernels.cuda.emulation.findings import EmulationFinding
from opsmith.kernels.cuda.emulation.launch import Order
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.on_cpu import NOTE, SKIPPED


def copied(x: Tensor) -> Tensor:
    return x.clone()


def total(x: Tensor) -> Tensor:
    return x.sum()


def declared(name: str, body: str, reference: Any = copied, **words: Any) -> Any:
    operator = opsmith.operator(f"emulation_runtime::{name}")(reference)
    result = "float, 0" if reference is total else "float"
    before, _, inside = body.rpartition("BODY")
    text = f"{before}\n__global__ void {name}(Contiguous<const float> x, Contiguous<{result}> y) {{{inside}}}"
    return operator.kernel("cuda", cuda=text, entry=name, **{"grid": 1, "block": 32, **words})


def findings(operator: Any, x: Tensor, times: int = 1) -> list[list[EmulationFinding]]:
    emulation = KernelEmulation(cuda_kernels(operator.specification)[0])
    call = emulation.prepare([x])
    assert not isinstance(call, str)
    return emulation.run([call.new_run(Order("forward")) for _ in range(times)])


def fault(operator: Any, x: Tensor, order: str = "forward") -> errors.OpsmithError:
    with pytest.raises((errors.KernelFaultError, errors.NotEmulatedError)) as caught:
        opsmith.emulate(operator, x, order=order)
    return caught.value


# ---- Order of accesses.

HALVES = """
  __shared__ float s;
  const int t = threadIdx.x;
  if (t == 0) s = x[0];
  __syncthreads();
  if (t < 16) { __syncwarp(0xffff); __syncwarp(0xffff); }
  const float v = s;  // all read
  MIDDLE
  if (t == WRITER) s = v + 1;
  y[t] = x[t] + v * 0;
"""


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_half_a_warp_may_synchronize_more_often_than_the_other(order: str) -> None:
    text = HALVES.replace("MIDDLE", "__syncwarp();").replace("WRITER", "0")
    x = torch.arange(32.0)
    assert torch.equal(opsmith.emulate(declared("ordered_halves", text), x, order=order), x)


@pytest.mark.every(5)
@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("writer", [0, 31])
def test_a_race_names_two_threads(writer: int, order: str) -> None:
    text = HALVES.replace("MIDDLE", "").replace("WRITER", str(writer))
    error = fault(declared(f"racing_halves_{writer}", text), torch.ones(32), order)
    assert error.problem == "the CUDA kernel is faulty: race"
    one, other = re.findall(r"thread \((\d+), 0, 0\)", error.got or "")
    assert one != other
    assert str(writer) in (one, other)
    assert "all read" in str(error)


def test_a_race_of_warps_names_two_threads() -> None:
    text = """
  __shared__ float s;
  if (threadIdx.x == 0) s = x[0];
  __syncthreads();
  y[threadIdx.x] = s;
  if (threadIdx.x == 63) s = 1;
"""
    got = fault(declared("racing_warps", text, block=64), torch.ones(64)).got or ""
    assert "thread (63, 0, 0) of block (0, 0, 0) writes" in got
    assert "; thread (62, 0, 0) of the same block reads the same memory" in got


@pytest.mark.slow
def test_a_volatile_read_is_no_write() -> None:
    text = "__threadfence(); const volatile float* p = x.data; y[threadIdx.x] = p[threadIdx.x];"
    x = torch.arange(32.0)
    assert torch.equal(opsmith.emulate(declared("volatile_read", text), x), x)
    text = "__threadfence(); volatile float* p = y.data; if (p[threadIdx.x] == 3) y[threadIdx.x] = x[0];"
    error = fault(declared("volatile_unwritten", text), x)
    assert "reads 4 bytes of `result` [32] at element [0], which no thread has written" in (error.got or "")


@pytest.mark.parametrize(("name", "between", "notes"), [("ordered", "__syncthreads();", 0), ("loose", "", 1)])
def test_a_sum_between_barriers_has_an_order(name: str, between: str, notes: int) -> None:
    turns = "".join(f"if (threadIdx.x == {at}) atomicAdd(&y[0], x[{at}]); {between}\n" for at in range(4))
    operator = declared(f"sum_{name}", turns, total, initial={"result": 0})
    (found,) = findings(operator, torch.arange(4.0))
    assert len({each.cause for each in found}) == notes
    assert all(each.cause == NOTE for each in found)


# ---- Barriers behind an exit.


@pytest.mark.every(8)
@pytest.mark.parametrize("place", ["in the kernel", "above", "in a header"])
@pytest.mark.parametrize("returns", [True, False])
def test_a_return_before_a_barrier_is_a_note_wherever_the_barrier_stands(
    place: str, returns: bool, tmp_path: Path
) -> None:
    name = f"exit_{place.split()[-1]}_{returns}".lower()
    both = "__device__ void both() {\n  __syncthreads();\n}\n"
    (tmp_path / "both.cuh").write_text(both)
    before = {"in the kernel": "", "above": both, "in a header": '#include "both.cuh"\n'}[place]
    barrier = "__syncthreads()" if place == "in the kernel" else "both()"
    y = "y[threadIdx.x] = x[threadIdx.x];"
    body = (
        f"if (threadIdx.x >= 20) return;\n{y}\n{barrier};"
        if returns
        else f"if (threadIdx.x < 20) {{ {y} {barrier}; }}"
    )
    path = tmp_path / f"{name}.cu"
    path.write_text(
        f"{before}__global__ void {name}(Contiguous<const float> x, Contiguous<float> y) {{\n{body}\n}}\n"
    )
    operator = opsmith.operator(f"emulation_runtime::{name}")(copied)
    operator.kernel("cuda", cuda_file=path, entry=name, grid=1, block=32)
    ((found,),) = findings(operator, torch.ones(20))
    assert found.cause == (NOTE if returns else "divergent-barrier")
    if returns:
        assert found.message == "12 threads of block (0, 0, 0) returned before this barrier"
    else:
        assert "and 11 other threads end without reaching this barrier; thread (0, 0, 0)" in found.message


# ---- Long and endless kernels.


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "THREAD_STEPS", 20_000)


@pytest.mark.usefixtures("few_steps")
def test_a_long_kernel_is_not_judged() -> None:
    text = "float s = 0; for (int i = 0; i < x.numel(); i++) s += x[i]; y[0] = s;"
    error = fault(declared("lengthy", text, total, block=1), torch.ones(60_000))
    assert isinstance(error, errors.NotEmulatedError)
    assert (error.got or "").startswith("the launch takes more steps than the emulation runs")
    assert error.hint == "try smaller tensors"


@pytest.mark.every(5)
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("alone", "while (x[0] == 1) {}"),
        ("written", "for (int j = 0; j < 4;) y[i] = x[i];"),
        ("together", "while (true) __syncthreads();"),
        ("beside", "if (i < 31) __syncthreads(); else while (x[0] == 1) {}"),
    ],
)
def test_a_loop_that_repeats_itself_is_endless(name: str, loop: str) -> None:
    error = fault(
        declared(f"endless_{name}", f"const int i = threadIdx.x; {loop} y[i] = x[i];"), torch.ones(32)
    )
    assert error.problem == "the CUDA kernel is faulty: endless"


def test_all_steps_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STEPS", 1000)
    error = fault(
        declared("all_steps", "y[blockIdx.x] = x[blockIdx.x];", grid=1000, block=1), torch.ones(1000)
    )
    assert (error.got or "").startswith("the launch takes more steps than the emulation runs")


def test_a_turn_that_warps_hand_over_by_atomics_is_progress() -> None:
    text = """
  __shared__ int turn;
  if (threadIdx.x == 0) turn = 0;
  __syncthreads();
  const int me = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < 50; i++) {
      while (atomicAdd(&turn, 0) != me) {}
      atomicExch(&turn, 1 - me);
    }
  y[threadIdx.x] = x[threadIdx.x];
"""
    x = torch.arange(64.0)
    assert torch.equal(opsmith.emulate(declared("turns", text, block=64), x), x)


# ---- Processes that end.

ENDING = """
extern "C" void abort();
extern "C" void _exit(int);
extern "C" int raise(int);
BODY
  if (threadIdx.x >= 16) return;
  __syncthreads();  // a note
  if (x[0] == 1) END;
  y[threadIdx.x] = x[threadIdx.x];
"""


@pytest.mark.parametrize(
    ("name", "end", "cause", "words"),
    [
        ("alarm", f"raise({int(signal.SIGALRM)})", "out-of-bounds", "ended by SIGALRM"),
        pytest.param(  # which prints where Python was
            *("abort", "abort()", "raises", "ended by SIGABRT"), marks=pytest.mark.slow
        ),
        ("exit", "_exit(7)", "out-of-bounds", "ended with exit code 7"),
        ("kill", f"raise({int(signal.SIGKILL)})", SKIPPED, "was killed, for example because memory ran out"),
    ],
)
def test_a_process_that_ends_behind_a_note(name: str, end: str, cause: str, words: str) -> None:
    (found,) = findings(declared(f"ending_{name}", ENDING.replace("END;", f"{end};")), torch.ones(16))
    assert [each.cause for each in found if each.cause != NOTE] == [cause]
    assert found[0].message == f"the process that ran the kernel {words}"


@pytest.mark.parametrize(("name", "count", "block"), [("stacks", 1024, 1024), ("shadow", 2_000_000, 32)])
def test_a_machine_without_memory_is_not_the_kernel_s_fault(
    name: str, count: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = os.fork

    def fork_with_little_memory() -> int:
        child = fork()
        if not child:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limits = size + (40 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, limits)
        return child

    operator = declared(f"no_{name}", "OPSMITH_EACH(i, y.numel()) y[i] = x[i];", block=block)
    x = torch.ones(count)
    monkeypatch.setattr(os, "fork", fork_with_little_memory)
    error = fault(operator, x)
    assert isinstance(error, errors.NotEmulatedError)
    assert (error.got or "").startswith("this machine has too little memory for the launch")


def test_what_a_kernel_prints_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    opsmith.emulate(
        declared("printing", 'if (threadIdx.x == 3) printf("here\\n"); y[threadIdx.x] = x[threadIdx.x];'),
        torch.ones(32),
    )
    assert capfd.readouterr().out == "here\n"


# ---- Variables of a kernel.

COUNTING = """
__device__ int calls = 40;
__device__ int others;
BODY
  if (threadIdx.x == 0) calls++, others++;
  y[threadIdx.x] = float(calls + others);
"""


@pytest.mark.slow
def test_variables_of_a_kernel_begin_anew_in_each_call() -> None:
    operator = declared("counting", COUNTING, copied, block=1)
    for in_process in (True, True, False):
        assert opsmith.emulate(operator, torch.ones(1), in_process=in_process).tolist() == [42.0]
    emulation = KernelEmulation(cuda_kernels(operator.specification)[0])
    call = emulation.prepare([torch.ones(1)])
    assert not isinstance(call, str)
    runs = [call.new_run(Order("forward")) for _ in range(3)]
    emulation.run(runs)
    assert [launch.tensors[1].tensor.tolist() for (launch, *_) in runs] == [[42.0]] * 3


def test_a_barrier_of_the_grid_is_never_found_full() -> None:
    text = """
__device__ int arrived;
BODY
  atomicAdd(&arrived, 1);
  while (atomicAdd(&arrived, 0) < 2) {}
  y[blockIdx.x] = x[blockIdx.x];
"""
    found = findings(declared("grid_barrier", text, copied, grid=2, block=1), torch.ones(2), times=3)
    assert [[each.cause for each in of_call] for of_call in found] == [[SKIPPED]] * 3


# ---- Limits of a launch.


@pytest.mark.parametrize(
    ("name", "declaration", "words", "argument", "got"),
    [
        ("dynamic", "", {"shared": 300 * 1024}, "shared", "0 bytes of static and 307200 bytes of dynamic"),
        (
            "static",
            "__shared__ float a[100000]; a[threadIdx.x] = x[0]; y[0] = a[threadIdx.x ^ 1];",
            {},
            "shared",
            "400000 bytes of static and 0 bytes of",
        ),
        (
            "both",
            "__shared__ float a[50000]; a[threadIdx.x] = x[threadIdx.x]; y[0] = a[threadIdx.x ^ 1];",
            {"shared": 40000},
            "shared",
            "200000 bytes of",
        ),
    ],
)
def test_shared_memory_that_no_gpu_has(
    name: str, declaration: str, words: dict[str, Any], argument: str, got: str
) -> None:
    operator = declared(f"shared_{name}", f"{declaration} y[threadIdx.x] = x[threadIdx.x];", **words)
    with pytest.raises(errors.LaunchError) as caught:
        opsmith.emulate(operator, torch.ones(32))
    assert caught.value.problem.endswith("needs more shared memory than the GPU has for one block")
    assert (caught.value.argument, got in (caught.value.got or "")) == (argument, True)
    assert caught.value.expected == "at most 232448 bytes on any GPU, static and dynamic together"


@pytest.mark.parametrize(("block", "taken"), [(16, True), (32, False)])
def test_launch_bounds(block: int, taken: bool) -> None:
    text = """
__global__ void __launch_bounds__(32) other(float* x) { x[0] = 1; }
__global__ void __launch_bounds__(16, 2) bounded(Contiguous<const float> x, Contiguous<float> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i];
}
"""
    operator = opsmith.operator("emulation_runtime::bounded")(copied)
    operator.kernel("cuda", cuda=text, entry="bounded", grid=1, block=block)
    if taken:
        assert opsmith.emulate(operator, torch.ones(4)).tolist() == [1.0] * 4
        return
    with pytest.raises(errors.LaunchError) as caught:
        opsmith.emulate(operator, torch.ones(4))
    assert (
        caught.value.problem == "a block has more threads than `__launch_bounds__` of the CUDA kernel allows"
    )
    assert (caught.value.expected, caught.value.got) == ("at most 16 threads", "32 threads, 32 x 1 x 1")
