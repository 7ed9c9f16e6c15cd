"""The operators of a language model on a GPU: opsmith's CUDA kernels beside torch's own of the same work.

`rms_norm`, its gradients, `add_rms_norm_`, `rope_` and `write_kv_cache` of 4096 tokens and a model of width
4096 in 32 heads, and a step of AdamW over 40 tensors. `torch` is `F.rms_norm`, the optimizer's fused kernel,
or the reference. `copy` is how long the GPU takes to copy as many bytes as an operator has to read and write,
each once; its part of our time is how much of the bandwidth of a copy we reach. Times are medians of what the
GPU needs, in milliseconds, by events; before each call the L2 cache is written over. `host` is how long a
call takes until it returns, in microseconds. Run it with nothing else on the GPU:
`python benchmarks/bundled_cuda.py [--rounds 30] [--dtypes float32 bfloat16]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from timing_cuda import is_ours, microseconds_of_host, milliseconds
from torch import Tensor

from opsmith import ops
from opsmith.ops.rms_norm import rms_norm_backward

TOKENS, HEADS, WIDTH, SLOTS = 4096, 32, 128, 16
Call = Callable[[], object]
Row = tuple[str, Call, Call, int]
"""An operator, our call, torch's, and the bytes that it has to read and write."""


def norms(dtype: torch.dtype) -> Iterator[Row]:
    x, grad, residual = (torch.randn(TOKENS, HEADS * WIDTH, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(HEADS * WIDTH, device="cuda").to(dtype)
    size = x.numel() * x.element_size()

    def by_torch(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    is_ours(ops.rms_norm, x, weight)
    torch.testing.assert_close(ops.rms_norm(x, weight), by_torch(x, weight))
    yield "rms_norm", lambda: ops.rms_norm(x, weight), lambda: by_torch(x, weight), 2 * size
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    y, rstd = by_torch(*leaves), ops.rms_norm.reference(x, weight)[1]
    is_ours(rms_norm_backward, grad, x, weight, rstd)
    yield (
        "its gradients",
        lambda: rms_norm_backward(grad, x, weight, rstd),
        lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True),
        3 * size,
    )
    is_ours(ops.add_rms_norm_, x.clone(), residual, weight)
    yield (
        "add_rms_norm_",
        lambda: ops.add_rms_norm_(x, residual, weight),
        lambda: by_torch(residual.add_(x), weight),
        4 * size,
    )


def attention(dtype: torch.dtype) -> Iterator[Row]:
    key, value = (torch.randn(TOKENS, HEADS, WIDTH, device="cuda").to(dtype) for _ in range(2))
    size = key.numel() * key.element_size()
    positions = torch.arange(TOKENS, device="cuda")
    table = ops.rope_table(TOKENS, WIDTH, device="cuda")
    is_ours(ops.rope_, key, table, positions)
    yield (
        "rope_",
        lambda: ops.rope_(key, table, positions),
        lambda: ops.rope_.reference(key, table, positions),
        2 * size,
    )
    caches = [torch.zeros(TOKENS // SLOTS, SLOTS, HEADS, WIDTH, device="cuda", dtype=dtype) for _ in range(2)]
    slots = torch.randperm(TOKENS, device="cuda")
    is_ours(ops.write_kv_cache, *caches, key, value, slots)
    yield (
        "write_kv_cache",
        lambda: ops.write_kv_cache(*caches, key, value, slots),
        lambda: ops.write_kv_cache.reference(*caches, key, value, slots),
        4 * size,
    )


def step(dtype: torch.dtype) -> Iterator[Row]:
    shapes = [(2048, 2048)] * 20 + [(2048,)] * 20
    four = [[torch.rand(shape, device="cuda").to(dtype) for shape in shapes] for _ in range(4)]
    theirs = [each.clone().requires_grad_() for each in four[0]]
    for parameter, gradient in zip(theirs, four[1], strict=True):
        parameter.grad = gradient
    optimizer, count = torch.optim.AdamW(theirs, fused=True), torch.zeros((), device="cuda")
    is_ours(ops.adamw_, *four, count)
    size = sum(each.numel() * each.element_size() for each in four[0])
    yield "adamw_", lambda: ops.adamw_(*four, count), optimizer.step, 7 * size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/bundled_cuda.py measures a GPU, and torch sees none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
    print(f"{'dtype':9} {'':16}{'ours':>9}{'torch':>9}{'copy':>9}{'to torch':>10}{'of copy':>9}", end="")
    print(f"{'host us':>10}{'torch':>9}")
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for name in options.dtypes:
        for rows in (norms, attention, step):
            with torch.no_grad() if rows is not norms else torch.enable_grad():
                for operator, ours, theirs, moved in rows(getattr(torch, name)):
                    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
                    target = torch.empty_like(source)
                    calls: tuple[Call, ...] = (ours, theirs, lambda a=target, b=source: a.copy_(b))
                    mine, other, copy = (milliseconds(call, options.rounds, scratch) for call in calls)
                    print(
                        f"{name:9} {operator:16}{mine:9.3f}{other:9.3f}{copy:9.3f}"
                        f"{other / mine:9.1f}x{copy / mine:9.0%}"
                        f"{microseconds_of_host(ours, options.rounds):10.0f}"
                        f"{microseconds_of_host(theirs, options.rounds):9.0f}"
                    )


if __name__ == "__main__":
    main()
