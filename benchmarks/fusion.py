"""Fusion around an operator: relu(op(x * .5, y) * 2 + 1) on 2M floats under torch.compile.

Beside the operator, in the same run: the expression without one, and an opaque torch.library.custom_op. The
generated kernels are counted in the code that Inductor writes. Stated limit: 1.1 times the plain expression.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import opsmith

SIZE = 2_000_000
ROUNDS = 40


def gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.tanh(y)


ours = opsmith.operator("fusion::gate")(gate)
ours.gradients(x=lambda grad, y: grad * y.tanh(), y=lambda grad, x, y: grad * x * (1 - y.tanh() ** 2))

custom_op = torch.library.custom_op("fusion::opaque_gate", gate, mutates_args=())
custom_op.register_fake(gate)
custom_op.register_autograd(
    lambda ctx, grad: (
        grad * ctx.saved_tensors[1].tanh(),
        grad * ctx.saved_tensors[0] * (1 - ctx.saved_tensors[1].tanh() ** 2),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def expression(operator: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda x, y: torch.relu(operator(x * 0.5, y) * 2 + 1), fullgraph=True)


def kernels(source: str) -> int:
    return len(re.findall(r"^cpp_fused\w* = async_compile|^triton_\w+ = async_compile", source, re.MULTILINE))


def training_step(function: Callable[..., Tensor], x: Tensor, y: Tensor, grad: Tensor) -> Any:
    return torch.autograd.grad(function(x, y), (x, y), grad)


def main() -> None:
    torch._inductor.config.force_disable_caches = (
        True  # the code that is counted has to be written in this run
    )
    x, y, grad = (torch.randn(SIZE) for _ in range(3))
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    ways = {"no operator": gate, "opsmith": ours, "torch.library.custom_op": custom_op}
    compiled, counted = {}, {}
    for name, operator in ways.items():
        function = expression(operator)
        _, sources = run_and_get_code(lambda f=function: training_step(f, a, b, grad))
        function(x, y)
        compiled[name], counted[name] = function, [kernels(source) for source in sources]
    actions: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
        "forward": lambda f: f(x, y),
        "training step": lambda f: training_step(f, a, b, grad),
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {SIZE} floats, {ROUNDS} rounds")
    print(f"{'':26s}{'forward, ms':>20s}{'training step, ms':>22s}   kernels (forward, backward)")
    measured = {action: measure(compiled, run) for action, run in actions.items()}
    for name in ways:
        cells = [f"{column[name][0]:9.2f} (x{column[name][1]:5.2f})" for column in measured.values()]
        print(f"{name:26s}{cells[0]:>20s}{cells[1]:>22s}   {', '.join(map(str, counted[name]))}")


def measure(compiled: dict[str, Any], run: Callable[[Any], Any]) -> dict[str, tuple[float, float]]:
    """Median milliseconds and median ratio to the plain expression; the ways take turns in every round."""
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        taken = {}
        for name, function in compiled.items():
            start = time.perf_counter()
            run(function)
            taken[name] = (time.perf_counter() - start) * 1e3
        rounds.append(taken)
    return {
        name: (
            statistics.median(each[name] for each in rounds),
            statistics.median(each[name] / each["no operator"] for each in rounds),
        )
        for name in compiled
    }


if __name__ == "__main__":
    main()
