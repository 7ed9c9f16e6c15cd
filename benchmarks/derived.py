"""Derived kernels beside the reference, torch.compile and kernels by hand: forward, and with backward.

Each row is one reference on tensors of about a million elements. Figures are ratios to the reference. What is
compared takes turns within each round; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import opsmith
import opsmith.ops

References = dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]]


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Divide rows by their root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def kl(x: Tensor, y: Tensor) -> Tensor:
    """Divergence of the softmax of rows."""
    return (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1).mean()


REFERENCES: References = {
    "rms norm": (rms_norm, ((1024, 1024), (1024,))),
    "layer norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), ((1024, 1024), (1024,), (1024,))),
    "softmax": (lambda x: x.softmax(-1), ((1024, 1024),)),
    "gelu": (lambda x: F.gelu(x), ((1024, 1024),)),
    "tanh gelu by hand": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
        ((1024, 1024),),
    ),
    "swiglu": (lambda x, y: F.silu(x) * y, ((1024, 1024), (1024, 1024))),
    "huber": (lambda x, y: F.huber_loss(x, y), ((1024, 1024), (1024, 1024))),
    "kl": (kl, ((1024, 1024), (1024, 1024))),
    "top k mask": (lambda x: x * (x >= x.topk(8, -1).values[..., -1:]), ((1024, 1024),)),
    "cumulative sum": (lambda x: x.cumsum(-1), ((1024, 1024),)),
    "attention": (F.scaled_dot_product_attention, ((4, 4, 256, 64),) * 3),
}
BY_HAND: dict[str, Callable[..., Tensor]] = {"rms norm": opsmith.ops.rms_norm}


def declared(name: str, function: Callable[..., Tensor], count: int) -> Any:
    """An operator with a derived kernel."""

    def reference(*given: Tensor) -> Tensor:
        return function(*given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(f"x{at}", kind, annotation=Tensor) for at in range(count)]
    made: Any = reference
    made.__signature__ = inspect.Signature(parameters, return_annotation=Tensor)
    made.__annotations__ = {**{each.name: Tensor for each in parameters}, "return": Tensor}
    return opsmith.operator(f"bench_derived::{name.replace(' ', '_')}")(reference).kernel("cpu", derived=True)


def measured(ways: dict[str, Callable[[], Any]], options: argparse.Namespace) -> dict[str, float]:
    """Median time of each way, in ratios to the first."""
    counts = {}
    for name, run in ways.items():
        run()
        start = time.perf_counter()
        run()
        counts[name] = max(1, int(options.seconds / max(time.perf_counter() - start, 1e-7)))
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        times = {}
        for name, run in ways.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                run()
            times[name] = (time.perf_counter() - start) / counts[name]
        first = next(iter(times.values()))
        for name, each in times.items():
            ratios[name].append(each / first)
    return {name: statistics.median(each) for name, each in ratios.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[*REFERENCES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each way in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'ratios to the reference':<41}{'compiled':>10}{'derived':>10}{'by hand':>10}")
    derived_ratios = []
    for name in options.only:
        function, shapes = REFERENCES[name]
        ways: dict[str, Callable[..., Tensor]] = {
            "reference": function,
            "compiled": torch.compile(function, dynamic=True),
            "derived": declared(name, function, len(shapes)),
        }
        if name in BY_HAND:
            ways["by hand"] = BY_HAND[name]
        given = [torch.randn(shape) for shape in shapes]
        leaves = [each.clone().requires_grad_() for each in given]
        grad = torch.randn_like(function(*given))

        def backward(
            way: Callable[..., Tensor], leaves: list[Tensor] = leaves, grad: Tensor = grad
        ) -> tuple[Tensor, ...]:
            return torch.autograd.grad(way(*leaves), leaves, grad)

        def forward(way: Callable[..., Tensor], given: list[Tensor] = given) -> Tensor:
            return way(*given)

        for title, run in (("forward", forward), ("with backward", backward)):
            found = measured({each: partial(run, way) for each, way in ways.items()}, options)
            derived_ratios.append(found["derived"])
            columns = [found.get(each) for each in ("compiled", "derived", "by hand")]
            cells = ["" if each is None else f"{each:.2f}" for each in columns]
            print(f"{name:<24} {title:<16}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    print(f"median of derived: {statistics.median(derived_ratios):.2f}")


if __name__ == "__main__":
    main()
