"""Compiled for dynamic sizes, the code of an operator keeps symbols wherever a plain function does."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import opsmith
from opsmith.torch_library import capabilities

pytestmark = [pytest.mark.compile, pytest.mark.xdist_group("symbolic sizes")]

SIZES = ((2, 3), (4, 5), (6, 7))


def inverse_root(x: Tensor) -> float:
    return 1 / sqrt(x.size(-1))


@functools.cache
def cached_root(size: int) -> float:
    return math.sqrt(size)


def scaled(x: Tensor, scale: float) -> Tensor:
    return x * scale


AS_A_PLAIN_FUNCTION: dict[str, Callable[[Tensor], Tensor]] = {
    "math.sqrt": lambda x: x / math.sqrt(x.shape[-1]),
    "len": lambda x: x * len(x),
    "int": lambda x: x[: int(x.shape[0] * 0.5)] * 1,
    "isinstance": lambda x: x * (2 if isinstance(x.shape[0], int) else 3),
    "torch.tensor": lambda x: x / torch.sqrt(torch.tensor(x.shape[0])),
    "in a helper": lambda x: x * inverse_root(x),
    "min": lambda x: x / min(x.shape[0], 4),
    "x.shape[0] // 2": lambda x: x[: x.shape[0] // 2] * 1,
    "range": lambda x: sum((x[i] * i for i in range(x.shape[0])), torch.zeros(())),
    "from math import sqrt": lambda x: x / sqrt(x.shape[-1]),
    "float": lambda x: x * float(x.shape[0]),
    "math.log2": lambda x: x * math.log2(x.shape[0]),
    "math.cos": lambda x: x * math.cos(x.shape[0]),
    "math.log": lambda x: x * math.log(x.shape[0]),
    "math.floor": lambda x: x[: math.floor(x.shape[0] / 2)] * 1,
    "math.ceil": lambda x: x[: math.ceil(x.shape[0] / 2)] * 1,
    "math.prod": lambda x: x / math.prod(x.shape),
    "power": lambda x: x / x.shape[-1] ** 0.5,
    "round": lambda x: x * round(x.shape[0] / 3),
    "max": lambda x: x / max(x.shape[0] - 1, x.shape[1], 1),
    "max of a shape": lambda x: x / max(x.shape),
    "sum of a shape": lambda x: x / sum(x.shape),
    "type": lambda x: x * (2 if type(x.shape[0]) is int else 3),
    "map": lambda x: x * sum(map(float, x.shape)),
    "comparison": lambda x: x * (1 if x.shape[0] > 1 else 2),
    "assert": lambda x: assert_larger(x) * 2,
    "text that nobody reads": lambda x: (f"{x.shape[0]}", x * 1)[1],
    "torch.tensor of a float": lambda x: x / torch.tensor(float(x.shape[0])),
    "in a closure": lambda x: (lambda: x / math.sqrt(x.shape[-1]))(),
    "in a comprehension": lambda x: x / sum([math.sqrt(size) for size in x.shape]),
    "by keyword": lambda x: x.new_full((x.shape[0],), fill_value=math.sqrt(x.shape[-1])),
}
"""Functions that compile to as many graphs as an operator as without one."""

BETTER: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "divmod": (lambda x: x * divmod(x.shape[0], 2)[0] + divmod(x.shape[0], 2)[1], 1),
    "math.pow": (lambda x: x * math.pow(x.shape[0], 0.5), 1),
    "math.fabs": (lambda x: x * math.fabs(x.shape[0]), 1),
    "torch.as_tensor": (lambda x: x / torch.as_tensor(x.shape[0], dtype=torch.float64), 1),
    "functools.cache": (lambda x: x / cached_root(x.shape[0]), 1),
    "max of a list": (lambda x: x / max([*x.shape, 3]), 1),
    "rows of tensors": (lambda x: x.sum() * torch.tensor([[x.shape[0], 2], [3.5, len(x)]]), 1),
    "text": (lambda x: x * len(str(x.shape[0])) + float(repr(x.shape[1])), 3),
    "operator.index": (lambda x: x * operator.index(x.shape[0]), 3),
}
"""Functions that Dynamo refuses, or compiles for each size, and the number of graphs of the operator."""


def assert_larger(x: Tensor) -> Tensor:
    assert x.shape[0] > 1, f"{x.shape}"
    return x


def declared(function: Callable[..., Tensor], name: str) -> Any:
    """An operator with the code of a function of one tensor."""
    own = types.FunctionType(function.__code__, function.__globals__, "own", None, function.__closure__)
    own.__annotations__ = {"x": Tensor, "return": Tensor}
    return opsmith.operator(name)(own)


def graphs(function: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor]) -> int:
    """Compile for dynamic sizes, hold the results to those expected, and count the graphs that AOT made."""
    from torch._dynamo.backends.common import aot_autograd

    made: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=compiler)
    compiled = torch.compile(lambda x: function(x), fullgraph=True, dynamic=True, backend=backend)
    for size in SIZES:
        x = torch.randn(size)
        assert_close(compiled(x), expected(x))
    return len(made)


QUICK = 7
"""The number of cases that are not slow; the others are of the same kinds."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if number < QUICK else pytest.mark.slow)
        for number, case in enumerate(AS_A_PLAIN_FUNCTION)
    ],
)
def test_as_many_graphs_as_a_plain_function(case: str, name: str) -> None:
    function = AS_A_PLAIN_FUNCTION[case]
    assert graphs(declared(function, name), function) == graphs(function, function)


@pytest.mark.every(8)
@pytest.mark.parametrize("case", BETTER)
def test_graphs_where_a_plain_function_does_not_compile(case: str, name: str) -> None:
    function, expected = BETTER[case]
    assert graphs(declared(function, name), function) == expected


def attention(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) * len(k)


def scores_gradient(grad: Tensor, q: Tensor, k: Tensor) -> Tensor:
    scale = math.sqrt(q.shape[-1])
    weights, grad = (q @ k.mT / scale).softmax(-1), grad * len(k)
    return weights * (grad - (grad * weights).sum(-1, keepdim=True)) / scale


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) * len(k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k = ctx.saved_tensors
        through = scores_gradient(grad, q, k)
        return through @ k, through.mT @ q


def derived(name: str) -> Any:
    return opsmith.operator(name)(attention)


def with_formulas(name: str) -> Any:
    made = derived(name)
    made.gradients(
        q=lambda grad, q, k: scores_gradient(grad, q, k) @ k,
        k=lambda grad, q, k: scores_gradient(grad, q, k).mT @ q,
    )
    return made


def adopted(name: str) -> Any:
    return opsmith.adopt(Attention, name)


def recomputed(name: str) -> Any:
    """Two operators in one function, one of them with a size as an argument."""

    @opsmith.operator(name)
    def times(x: Tensor, size: int) -> Tensor:
        return x * (math.sqrt(size) if isinstance(size, int) else 1 / 0)

    scores = derived(f"{name}_scores")
    return lambda q, k: times(scores(q, k), q.shape[-1]) / math.sqrt(q.shape[-1])


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "declare", [with_formulas, derived, adopted, recomputed], ids=lambda each: each.__name__
)
def test_gradients_keep_symbols(declare: Callable[[str], Any], name: str) -> None:
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    ours = declare(name)
    compiled = torch.compile(lambda q, k: ours(q, k), fullgraph=True, dynamic=True, backend=backend)
    for rows, columns in SIZES:
        q, k = (torch.randn(n, columns).requires_grad_() for n in (rows, rows + 1))
        found, wanted = compiled(q, k), attention(q, k)
        assert_close((found, *grad(found.sum(), (q, k))), (wanted, *grad(wanted.sum(), (q, k))))
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("declare", [derived, with_formulas, adopted], ids=lambda each: each.__name__)
def test_as_many_kernels_as_a_plain_function(declare: Callable[[str], Any], name: str) -> None:
    from torch._inductor import metrics

    def kernels(function: Callable[..., Tensor]) -> int:
        torch.compiler.reset()
        metrics.reset()
        compiled = torch.compile(lambda q, k: function(q, k).sin(), fullgraph=True, dynamic=True)
        for rows, columns in SIZES:
            q, k = (torch.randn(n, columns).requires_grad_() for n in (rows, rows + 1))
            compiled(q, k).sum().backward()
        return int(metrics.generated_kernel_count)

    plain = kernels(attention)
    assert plain > 0
    assert kernels(declare(name)) == plain


def test_sizes_that_depend_on_data_stay_symbols(name: str) -> None:
    assert capabilities.on("inlining"), "an operator that is opaque has no such sizes"

    def reference(x: Tensor) -> Tensor:
        found = x.nonzero()
        return found.float() / math.sqrt(len(found))

    ours = opsmith.operator(name)(reference)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: ours(x), fullgraph=True, backend="aot_eager")
        for x in (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 2.0])):
            assert_close(compiled(x), reference(x))


def test_calls_on_real_tensors_run_the_author_s_own_function(name: str) -> None:
    seen: list[bool] = []
    builtin = id(len)

    @opsmith.operator(name)
    def looks(x: Tensor) -> Tensor:
        seen.append(id(len) == builtin)
        return x * len(x)

    looks(torch.ones(2))
    assert seen == [True]
    symbolic = capabilities.symbolic_mode()
    assert symbolic is not None
    with symbolic as mode:
        looks(mode.from_tensor(torch.ones(2)))
    assert seen == [True, False]
