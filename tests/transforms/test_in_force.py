"""The author's formula is the one that runs: its factor of 3, wrong on purpose, is seen everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import opsmith

FACTOR = 3.0


@opsmith.operator("in_force::marked")
def marked(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    return x * torch.tanh(w) * scale


marked.gradients(
    x=lambda grad, w, scale: FACTOR * grad * w.tanh() * scale,
    w=lambda grad, x, w, scale: FACTOR * grad * x * (1 - w.tanh() ** 2) * scale,
)

x, w = opsmith.Make()(3, 4), opsmith.Make()(3, 4, low=0.5)
batch = opsmith.Make()(5, 3, 4, low=0.5)


def _autograd_over_vmap(q: Callable[..., Any]) -> Tensor:
    leaf = w.clone().requires_grad_()
    return torch.autograd.grad(F.vmap(lambda a: q(a, leaf))(batch).sum(), leaf)[0]


def _dual(q: Callable[..., Any]) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        return torch.autograd.forward_ad.unpack_dual(q(x, dual)).tangent


CASES: dict[str, Callable[[Callable[..., Any]], Tensor]] = {
    "grad": lambda q: F.grad(lambda b: q(x, b).sum())(w),
    "vmap-grad": lambda q: F.vmap(F.grad(lambda b: q(x, b).sum()))(batch),
    "grad-vmap": lambda q: F.grad(lambda b: F.vmap(lambda a: q(a, b))(batch).sum())(w),
    "jacrev": lambda q: F.jacrev(lambda b: q(x, b).sum())(w),
    "jacfwd": lambda q: F.jacfwd(lambda b: q(x, b).sum())(w),
    "jvp": lambda q: F.jvp(lambda b: q(x, b), (w,), (torch.ones_like(w),))[1],
    "vmap-jvp": lambda q: F.vmap(lambda b: F.jvp(lambda b: q(x, b), (b,), (torch.ones_like(w),))[1])(batch),
    "autograd-vmap": _autograd_over_vmap,
    "dual": _dual,
}


@pytest.mark.parametrize("case", CASES)
def test_eager(case: str) -> None:
    torch.testing.assert_close(CASES[case](marked), FACTOR * CASES[case](marked.reference))


@pytest.mark.every(5)
@pytest.mark.compile
@pytest.mark.parametrize("case", ["grad", "vmap-grad", "grad-vmap", "jvp"])
def test_compiled(case: str) -> None:
    compiled = torch.compile(lambda: CASES[case](marked), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), FACTOR * CASES[case](marked.reference))


@pytest.mark.slow
@pytest.mark.compile
def test_fused_into_one_kernel_with_what_stands_around_it() -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w)]
    compiled = torch.compile(lambda a, b: torch.relu(marked(a * 0.5, b) * 2 + 1), fullgraph=True)
    result, sources = run_and_get_code(compiled, *leaves)
    assert "torch.ops.in_force" not in sources[0]
    assert len(re.findall(r"^cpp_fused\w* = async_compile", sources[0], re.MULTILINE)) == 1
    plain = torch.relu(marked.reference(leaves[0] * 0.5, leaves[1]) * 2 + 1)
    expected = torch.autograd.grad(plain.sum(), leaves)
    for found, true in zip(torch.autograd.grad(result.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(found, FACTOR * true)


@pytest.mark.compile
@pytest.mark.parametrize(("inline", "kept"), [(True, False), (False, True), (None, False)])
def test_inline_is_as_the_author_says(inline: bool | None, kept: bool) -> None:
    def choice(a: Tensor) -> Tensor:
        return a.sin() * 2

    operator = opsmith.operator(f"in_force::inline_{inline}", inline=inline)(choice)
    graphs: list[torch.fx.GraphModule] = []

    def keep_graph(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=keep_graph)
    torch.testing.assert_close(torch.compile(operator, backend=backend, fullgraph=True)(x), choice(x))
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert any("in_force.inline" in target for target in targets) == kept
