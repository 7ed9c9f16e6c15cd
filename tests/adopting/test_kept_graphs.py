"""Graphs that are kept go on as before when a later call of a class shows other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import opsmith


def measured(x: Any) -> Any:
    return x if isinstance(x, int | float) else len(x)


class Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Any) -> Tensor:
        ctx.n = measured(n)
        return x * ctx.n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.n, None


class RepeatInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Any) -> Tensor:
        ctx.mark_dirty(x)
        ctx.n = measured(n)
        return x.mul_(ctx.n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.n, None


def exported(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x)

    return torch.export.export(Model(), (x,)).module()  # type: ignore[no-any-return]


def kept_by_aot(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    from functorch.compile import aot_function

    kept: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        kept.append(graph)
        return graph

    aot_function(f, fw_compiler=keep)(x)
    return lambda x: kept[0](x)[0]  # type: ignore[no-any-return]


KEEPERS: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "export": exported,
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx-fake": lambda f, x: make_fx(f, tracing_mode="fake")(x),
    "aot": kept_by_aot,
}


@pytest.mark.xdist_group("kept graphs")
@pytest.mark.parametrize(("before", "after"), [(3, "abcd"), ("ab", 2.5), (1.5, [1, 2])], ids=str)
@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("kind", [Repeat, RepeatInPlace], ids=["new", "in place"])
def test_a_kept_graph_goes_on(kind: Any, keeper: str, before: Any, after: Any) -> None:
    name = f"kept_graphs::{kind.__name__}_{keeper}_{type(before).__name__}".replace("-", "_")
    operator = opsmith.adopt(kind, name)
    x = torch.ones(2)
    right = [float(measured(before))] * 2
    operator(x.clone(), before)
    graph = KEEPERS[keeper](lambda x: operator(x * 1, before), x)
    assert graph(x).tolist() == right
    assert operator(x.clone(), after).tolist() == [float(measured(after))] * 2
    assert graph(x).tolist() == right
    assert operator(x.clone(), before).tolist() == right
    assert KEEPERS[keeper](lambda x: operator(x * 1, after), x)(x).tolist() == [float(measured(after))] * 2
    if not (isinstance(before, int) and keeper == "aot"):
        leaf = x.clone().requires_grad_()
        graph(leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == right


def test_the_names_of_all_types_are_listed() -> None:
    operator = opsmith.adopt(Repeat, "kept_graphs::listed")
    x = torch.ones(2)
    operator(x, 3)
    assert str(operator.torch_operator) == "kept_graphs.listed.default"
    graph = make_fx(lambda x: operator(x, 3))(x)
    operator(x, "abcd")
    names = [str(each) for each in operator.torch_operators]
    assert names == ["kept_graphs.listed_types1.default", "kept_graphs.listed.default"]
    assert {str(node.target) for node in graph.graph.nodes} & set(names) == {names[1]}


def test_types_of_a_call_that_fails_are_forgotten_and_a_new_adoption_begins_anew() -> None:
    operator = opsmith.adopt(Repeat, "kept_graphs::forgotten")
    x = torch.ones(2)
    operator(x, 3)
    graph = make_fx(lambda x: operator(x, 3))(x)
    with pytest.raises(TypeError, match=r"object of type 'object|has no len"):
        operator(x, object())
    assert str(operator.torch_operator) == "kept_graphs.forgotten.default"
    operator(x, "abcd")
    assert graph(x).tolist() == operator(x, 3).tolist() == [3.0, 3.0]
    again = opsmith.adopt(Repeat, "kept_graphs::forgotten", signature="(x: Tensor, n: int) -> Tensor")
    assert again is operator
    assert str(operator.torch_operator) == "kept_graphs.forgotten.default"
    assert operator(x, 5).tolist() == [5.0, 5.0]
