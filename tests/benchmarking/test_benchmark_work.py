"""Bytes that have to be moved, floating-point operations, and memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opsmith
from opsmith.benchmarking import cost
from opsmith.benchmarking.cost import (
    OperationCount,
    bytes_of,
    count_operations,
    peak_bytes,
    saved_bytes,
)

x, y = torch.ones(4, 3), torch.ones(4, 3)
CASES: dict[str, tuple[Callable[[], object], int]] = {
    "matrix product": (lambda: x @ y.mT, 2 * 4 * 3 * 4),
    "batched product": (lambda: torch.einsum("bij,bkj->bik", x[None], y[None]), 2 * 4 * 3 * 4),
    "elementwise": (lambda: (x * y).exp(), 12 + 12),
    "broadcast": (lambda: x + y[0], 12),
    "by a number": (lambda: x * 2, 12),
    "reduction": (lambda: x.sum(0), 12),
    "largest": (lambda: x.amax(1), 12),
    "in place": (lambda: x.clone().add_(1), 12),
    "softmax": (lambda: x.softmax(0), 5 * 12),
    "layer norm": (lambda: F.layer_norm(x, [3]), 7 * 12),
    "convolution": (lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(4, 2, 3, 3)), 2 * 4 * 2 * 9 * 9),
    "moves": (lambda: torch.cat([x.mT.contiguous(), y.view(3, 4).clone(), x.new_zeros(3, 4)]).flip(0), 0),
    "views": (lambda: x.view(3, 4).T.unsqueeze(0).expand(2, 4, 3)[..., 1:], 0),
    "casts": (lambda: x.to(torch.float64), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operations_are_counted(name: str) -> None:
    run, expected = CASES[name]
    _, count, words = count_operations(run)
    assert (count, "nothing for" in words) == (expected, False)


def test_a_backward_is_counted_too() -> None:
    leaf = x.clone().requires_grad_()
    result = (leaf @ y.mT).sum()
    (gradient,), count, _ = count_operations(lambda: torch.autograd.grad(result, leaf))
    assert gradient.shape == x.shape
    assert count == 2 * 4 * 3 * 4


def test_what_nothing_is_known_of_is_named() -> None:
    _, count, words = count_operations(lambda: torch.linalg.cholesky_ex(torch.eye(3)))
    assert count == 0
    assert words.endswith("; not counted: aten.linalg_cholesky_ex")


def test_without_watching_it_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperationCount, "see", lambda self, operator, args: None)
    _, count, words = count_operations(lambda: (x @ y.mT).exp())
    assert count == 2 * 4 * 3 * 4
    assert words == (
        "of the reference: torch.utils.flop_counter alone, because the capability `dispatch_mode` is off"
    )


def test_bytes_count_each_storage_once_and_what_is_read_of_it() -> None:
    base = torch.ones(8, 4)
    assert bytes_of([base]) == 128
    assert bytes_of([base, base, base.mT, base[2:]]) == 128
    assert bytes_of([base[:2]]) == 32
    assert bytes_of([base[:2], base[2:4]]) == 64
    assert bytes_of([base[:1].expand(99, 4)]) == 16
    assert bytes_of([torch.ones(0), None]) == 0
    assert bytes_of([base, torch.ones(2)], beside=[base.mT]) == 8


def test_saved_bytes_are_those_of_tensors_and_of_attributes() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            ctx.save_for_backward(x)
            ctx.factor = torch.ones(100)
            return x * 2

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            return grad * 2

    leaf = torch.ones(10, requires_grad=True)
    assert saved_bytes(lambda: [Keeps.apply(leaf)], [leaf]) == (440, 400)
    assert saved_bytes(lambda: [leaf * leaf], [leaf]) == (40, 0)
    assert saved_bytes(lambda: [leaf + leaf], [leaf]) == (0, 0)
    with torch.no_grad():
        assert saved_bytes(lambda: [leaf.exp()], [leaf]) == (40, 40)


def alone(program: str) -> str:
    """Run a program in a process of its own: what other tests left in the heap may hold its pages."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read on Linux")
def test_the_peak_is_what_a_call_holds_at_most_and_not_what_it_returns() -> None:
    program = """
import torch
from opsmith.benchmarking.cost import peak_bytes
large = torch.ones(4 << 20)  # 16 MiB
def run():
    return (large + 1).add_(large + 2).sum()
run()
for call in (run, lambda: large[:9] + 1):
    print(*peak_bytes(call, torch.device("cpu")), sep=", ")
"""
    found, small = alone(program).splitlines()
    size, _, remark = found.partition(", ")
    assert remark == "growth of the resident memory"
    assert int(size) == pytest.approx(2 * 16 << 20, rel=0.1)
    assert small == "None, under 1 MiB"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read on Linux")
def test_memory_that_was_freed_before_is_not_used_again_unseen() -> None:
    program = """
import torch
from opsmith.benchmarking.cost import resident_growth
# They lie in the heap, and each has whole pages, which others of the heap do not hold.
held = [torch.ones(16_000) for _ in range(250)]
held.clear()
print(resident_growth(lambda: [torch.ones(16_000) for _ in range(250)]))
"""
    assert int(alone(program)) > 0.8 * 250 * 64_000


def test_where_it_cannot_be_measured_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(cost, "CLEAR", tmp_path / "none" / "clear_refs")
    if sys.platform.startswith("linux"):
        found, remark = peak_bytes(lambda: None, device)
        assert found is None
        assert remark.startswith("not measured: [Errno 2] No such file or directory")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_bytes(lambda: None, device) == (None, "only measured on Linux and on CUDA GPUs")


def test_an_operator_in_a_reference_is_counted_by_its_own_formula() -> None:
    linear = opsmith.ops.linear  # torch's counter knows the operators that are declared before it begins
    _, count, words = count_operations(lambda: linear(x, y))
    assert count == 2 * 4 * 3 * 4
    assert "nothing for" not in words


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_its_allocators() -> None:
    large = torch.ones(4 << 20, device="cuda")
    found, remark = peak_bytes(lambda: (large + 1).add_(large + 2), large.device)
    assert (found, remark) == (32 << 20, "torch's allocator of the GPU")
