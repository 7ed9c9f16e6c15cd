"""torch.compile(fullgraph=True) and torch.export: one graph, the author's gradients, every kind of value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gated_variants import VARIANTS
from torch import Tensor, nn
from torch.autograd import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import opsmith

pytestmark = pytest.mark.compile

Operator = opsmith.Operator[..., Any]


CHOSEN = ("formulas", "hidden-in-one", "derived-kernel")
SOME = pytest.mark.parametrize("variant", CHOSEN, indirect=True)
MOST_ARE_SLOW = pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.slow) for name in VARIANTS],
    indirect=True,
)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    """Each test compiles for itself: no graph of another test is found, and none counts against a limit."""
    torch.compiler.reset()


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def result_and_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    fresh = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    result = function(*fresh)
    needed = [value for value in fresh if value.requires_grad]
    return [result.detach(), *(grad(result.sin().sum(), needed) if needed else [])]


def make_inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    make = opsmith.Make()
    return make(rows, columns).requires_grad_(), make(columns).requires_grad_()


def around(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator in a graph with others before and after it."""
    return lambda x, weight: torch.relu(function(x * 0.5, weight) + 1)


@pytest.mark.every(6)
def test_static(variant: Operator, reference: Any) -> None:
    inputs = make_inputs(3, 2)
    function = compiled(around(variant), dynamic=False)
    assert_close(result_and_gradients(function, inputs), result_and_gradients(around(reference), inputs))
    no_gradients = tuple(value.detach() for value in inputs)
    assert_close(function(*no_gradients), around(reference)(*no_gradients))


@pytest.mark.every(8)
@MOST_ARE_SLOW
def test_dynamic(variant: Operator, reference: Any) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    function: Any = torch.compile(around(variant), fullgraph=True, dynamic=True, backend=backend)
    for shape in ((3, 2), (4, 5), (7, 3)):
        inputs = make_inputs(*shape)
        assert_close(result_and_gradients(function, inputs), result_and_gradients(around(reference), inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("formula", "aot_eager"),
        ("stand-in", "aot_eager"),
        pytest.param("formula", "inductor", marks=pytest.mark.slow),
        pytest.param("stand-in", "inductor", marks=pytest.mark.slow),
    ],
)
def test_the_author_s_gradient_is_in_force(backend: str, way: str, name: str) -> None:
    """A factor of 3, wrong on purpose: the gradient of the reference would not have it."""

    def square(x: Tensor) -> Tensor:
        return x * x

    def triple(x: Tensor) -> Tensor:
        return 3 * x * x

    operator = opsmith.operator(name)(square)
    if way == "formula":
        operator.surrogate_gradients(x=lambda grad, x: 6 * grad * x)
    else:
        operator.surrogate_gradients(triple)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    result = compiled(lambda x: operator(x).sum(), backend=backend)(x)
    assert_close(result.detach(), torch.tensor(5.0))
    assert_close(grad(result, x)[0], torch.tensor([6.0, 12.0]))


@pytest.mark.slow
def test_inductor_with_every_variant_in_one_graph(reference: Any) -> None:
    operators = [declare(f"variants::{key.replace('-', '_')}") for key, declare in VARIANTS.items()]

    def total(each: list[Any]) -> Callable[..., Tensor]:
        return lambda x, weight: sum((i + 1) * f(x, weight) for i, f in enumerate(each))  # type: ignore[return-value]

    inputs = make_inputs(3, 2)
    expected = result_and_gradients(total([reference] * len(operators)), inputs)
    assert_close(result_and_gradients(compiled(total(operators), backend="inductor"), inputs), expected)


@pytest.mark.slow
def test_every_kind_of_argument(name: str) -> None:
    def reference(
        xs: list[Tensor],
        maybe: Tensor | None,
        by: float,
        flag: bool,
        size: int | tuple[int, int] = 1,
        *,
        mode: str = "sum",
        weights: list[float] | None = None,
        dtype: torch.dtype = torch.float64,
        shift: int = 0,
    ) -> Tensor:
        assert isinstance(size, tuple)
        total = torch.stack(xs).sum(0) if mode == "sum" else torch.stack(xs).mean(0)
        total = total * by * size[0] / size[1] + (shift if flag else -shift)
        if weights is not None:
            total = total * weights[0]
        return (total if maybe is None else total * maybe).to(dtype)

    def formula(
        grad: Tensor, xs: list[Tensor], maybe: Tensor | None, by: float, size: Any, mode: str, weights: Any
    ) -> list[Tensor]:
        assert isinstance(size, tuple)
        each = grad.to(xs[0].dtype) * by * size[0] / size[1]
        each = each if weights is None else each * weights[0]
        each = each if maybe is None else each * maybe
        return [each if mode == "sum" else each / len(xs)] * len(xs)

    operator = opsmith.operator(name)(reference).gradients(xs=formula)
    calls: list[Callable[..., Any]] = [
        lambda f, x, y: f([x, y], None, 2.0, True),
        lambda f, x, y: f([x], y, 0.5, False, 3, shift=2),
        lambda f, x, y: f([x, y, x], x, by=2, flag=True, size=(2, 3), mode="mean", weights=[0.5, 1.0]),
        lambda f, x, y: f([x, y], None, 2.0, True, [2, 4], dtype=torch.float32),
    ]

    def all_of(function: Any) -> Callable[..., Tensor]:
        return lambda x, y: torch.stack([call(function, x, y).double() for call in calls])

    make = opsmith.Make()
    inputs = make(3).requires_grad_(), make(3).requires_grad_()
    expected = result_and_gradients(
        all_of(lambda *args, **kwargs: direct(reference, *args, **kwargs)), inputs
    )
    assert_close(result_and_gradients(compiled(all_of(operator)), inputs), expected)


def direct(reference: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The reference, called with its `size` as the operator hands it on."""
    args = list(args)  # type: ignore[assignment]
    size = args[4] if len(args) > 4 else kwargs.pop("size", 1)
    return reference(*args[:4], size=(size, size) if isinstance(size, int) else tuple(size), **kwargs)


def test_several_and_hidden_results(name: str) -> None:
    def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rstd = (x.var(-1, unbiased=False) + 1.0).rsqrt()
        return x * rstd[:, None], x.argmax(-1), rstd

    operator = opsmith.operator(
        name, results={"y": ..., "where": opsmith.non_differentiable, "rstd": ...}, hidden=("rstd",)
    )(statistics)

    def formula(grad_y: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        inner = (grad_y * x).sum(-1, keepdim=True) * rstd[:, None] ** 3 / x.shape[-1]
        return grad_y * rstd[:, None] - centred * inner

    operator.gradients(x=formula)

    def both(function: Any) -> Callable[..., Tensor]:
        def of(x: Tensor) -> Tensor:
            results = function(x)
            return results[0] * (1 + results[1][:, None])

        return of

    x = (opsmith.Make()(3, 4).requires_grad_(),)
    assert_close(result_and_gradients(compiled(both(operator)), x), result_and_gradients(both(statistics), x))


def test_shapes_that_formulas_ask_for(name: str) -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(0)

    operator = opsmith.operator(name)(total).gradients(
        x=lambda grad, x_shape: grad.expand(x_shape) * x_shape[0]
    )
    function = compiled(operator, dynamic=True)
    for rows in (3, 5):
        x = torch.ones(rows, 2, requires_grad=True)
        assert_close(grad(function(x).sum(), x)[0], torch.full((rows, 2), float(rows)))


def test_opaque(name: str) -> None:
    def cumulated(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().cumsum())

    operator = opsmith.operator(name, opaque=True)(cumulated)
    operator.fake(torch.empty_like)
    operator.gradients(x=lambda grad: grad.flip(0).cumsum(0).flip(0))
    for dynamic in (False, True):
        function = compiled(lambda x: operator(x) * 2, dynamic=dynamic)
        for size in (3, 5):
            x = (opsmith.Make()(size).requires_grad_(),)
            expected = result_and_gradients(lambda x: x.cumsum(0) * 2, x)
            assert_close(result_and_gradients(function, x), expected)


@pytest.mark.parametrize("way", ["ordinary", "hidden"])
def test_random(way: str, name: str) -> None:
    """The backward of compiled code sees the numbers of its own forward, in each call."""

    def noisy(x: Tensor) -> Any:
        factor = torch.rand_like(x)
        return (x * factor, factor) if way == "hidden" else x * factor

    noisy.__annotations__["return"] = tuple[Tensor, Tensor] if way == "hidden" else Tensor
    roles: Any = {"y": ..., "factor": opsmith.non_differentiable} if way == "hidden" else None
    operator = opsmith.operator(name, random=True, results=roles, hidden=("factor",) if roles else ())(noisy)
    if way == "hidden":
        operator.kernel("cpu", noisy).gradients(x=lambda grad, factor: grad * factor)
    function = compiled(lambda x: operator(x) * 1)
    seen = []
    for _ in range(3):
        x = torch.ones(50, requires_grad=True)
        result = function(x)
        torch.rand(7)
        assert_close(grad(result.sum(), x)[0], result.detach())
        seen.append(result.detach())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("own", [False, True], ids=["declared", "generator"])
def test_numbers_drawn_in_a_kernel_are_refused(own: bool, name: str) -> None:
    """A trace would remember the random state of its own moment: a backward that is silently wrong."""

    def noisy(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x * torch.rand(x.shape, generator=generator)

    operator = opsmith.operator(name, random=not own)(noisy).kernel("cpu", noisy)
    x = torch.ones(3, requires_grad=True)
    if own:
        with pytest.raises(opsmith.errors.TransformError):
            make_fx(lambda x: grad(operator(x, torch.Generator()).sum(), x))(x)
    else:
        with pytest.raises(Exception, match="a traced backward cannot draw the same numbers again"):
            compiled(operator)(x)
        assert compiled(operator)(x.detach()).shape == (3,)


@pytest.mark.slow
def test_autocast_inside(name: str) -> None:
    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    rules = ["promote", "lower", "float32"]
    operators = [opsmith.operator(f"{name}_{rule}", autocast=rule)(matmul) for rule in rules]  # type: ignore[call-overload]
    for operator in operators:
        operator.gradients(x=lambda grad, weight: grad @ weight.mT, weight=lambda grad, x: x.mT @ grad)

    def under_autocast(x: Tensor, weight: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [operator(x, weight) for operator in operators]

    x, weight = torch.eye(2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    found = compiled(under_autocast)(x, weight)
    expected = under_autocast(x, weight)
    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16, torch.float32]
    assert_close(found, expected)
    weighed = [sum((i + 1) * each.float().sum() for i, each in enumerate(some)) for some in (found, expected)]
    assert_close(grad(weighed[0], (x, weight)), grad(weighed[1], (x, weight)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_new_formula_is_used_after_compiling(backend: str, name: str) -> None:
    def cell(reference_factor: float, formula_factor: float) -> Operator:
        def scaled(x: Tensor) -> Tensor:
            return x * reference_factor

        operator = opsmith.operator(name)(scaled)
        return operator.surrogate_gradients(x=lambda grad: grad * formula_factor)

    operator = cell(2.0, 5.0)
    function = compiled(lambda x: operator(x) + 1, backend=backend)
    x = torch.ones(2, requires_grad=True)

    def seen() -> tuple[float, float]:
        result = function(x)
        return result[0].item(), grad(result.sum(), x)[0][0].item()

    assert seen() == (3.0, 5.0)
    cell(2.0, 7.0)
    assert seen() == (3.0, 7.0)
    operator.surrogate_gradients(x=lambda grad: grad * 9.0)
    assert seen() == (3.0, 9.0)
    cell(4.0, 9.0)
    assert seen() == (5.0, 9.0)
    cell(2.0, 5.0)
    assert seen() == (3.0, 5.0)


def test_a_new_kernel_is_used_after_compiling(name: str) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    operator = opsmith.operator(name)(scaled)
    function = compiled(lambda x: operator(x) + 1)
    assert function(torch.ones(1)).item() == 3.0
    operator.kernel("cpu", lambda x: x * 10)
    assert function(torch.ones(1)).item() == 11.0


@pytest.mark.every(8)
@SOME
def test_a_module_with_operators_in_a_loop(variant: Operator, reference: Any) -> None:
    class Stack(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function
            self.weights = nn.ParameterList([torch.full((2,), 0.3 + i / 10) for i in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = self.function(x, weight, by=0.7)
            return x

    x = torch.linspace(0.5, 1.5, 6).reshape(3, 2)
    modules = [Stack(variant), Stack(reference)]
    modules[0].compile(fullgraph=True, backend="aot_eager")
    results = [module(x) for module in modules]
    assert_close(results[0], results[1])
    gradients = [
        grad(result.sum(), list(module.parameters())) for result, module in zip(results, modules, strict=True)
    ]
    assert_close(gradients[0], gradients[1])


def test_wrong_arguments_are_refused_while_compiling(name: str) -> None:
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    operator = opsmith.operator(name)(scaled)
    with pytest.raises(Exception, match="by"):
        compiled(lambda x: operator(x, "twice"))(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="by"):
        compiled(lambda x, by: operator(x, by))(torch.ones(2), torch.tensor(2.0, requires_grad=True))


class Exported(nn.Module):
    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(self.operator(x, weight, by=2.0))


@pytest.mark.slow
@pytest.mark.every(8)
@MOST_ARE_SLOW
def test_export_keeps_the_operator_as_one_node(variant: Operator, reference: Any) -> None:
    check_export(variant, reference, strict=False)


@pytest.mark.slow
@pytest.mark.every(8)
@SOME
def test_strict_export_keeps_the_operator_as_one_node(variant: Operator, reference: Any) -> None:
    check_export(variant, reference, strict=True)


def check_export(variant: Operator, reference: Any, *, strict: bool) -> None:
    inputs = tuple(value.detach() for value in make_inputs(3, 2))
    rows = torch.export.Dim("rows")
    program = torch.export.export(Exported(variant), inputs, dynamic_shapes=({0: rows}, None), strict=strict)
    for exported in (program, program.run_decompositions()):
        targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert targets.count(str(variant.torch_operator)) == 1
        other = make_inputs(5, 2)[0].detach()
        assert_close(exported.module()(other, inputs[1]), torch.relu(reference(other, inputs[1], 2.0)))


@SOME
def test_export_is_saved_and_loaded(variant: Operator, tmp_path: Any) -> None:
    inputs = tuple(value.detach() for value in make_inputs(3, 2))
    program = torch.export.export(Exported(variant), inputs)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert_close(loaded.module()(*inputs), Exported(variant)(*inputs))


# Dynamo warns of what it reads on the way, for plain torch functions too.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name == "formulas" else pytest.mark.slow) for name in CHOSEN],
    indirect=True,
)
def test_compiled_autograd(variant: Operator, reference: Any) -> None:
    """The backward of an eager forward, compiled: with breaks in its graph, and right."""
    inputs = make_inputs(3, 2)

    def gradients(function: Any) -> list[Tensor | None]:
        leaves = [value.detach().clone().requires_grad_() for value in inputs]
        function(*leaves).sum().backward()
        return [leaf.grad for leaf in leaves]

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = gradients(variant)
    assert_close(found, gradients(reference))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_a_known_call_in_a_frame_that_torch_does_not_compile(name: str) -> None:
    """Its calls are made in eager code, while Dynamo looks at every frame in Python."""
    doubled: Any = opsmith.operator(name, opaque=True)(_by_numpy)
    x = torch.ones(3)
    for _ in range(3):
        doubled(x)

    def broken(x: Tensor) -> list[Tensor]:
        results = []
        for _ in range(2):
            with contextlib.nullcontext():
                torch._dynamo.graph_break()
                results.append(doubled(x))
        return results

    for result in torch.compile(broken, backend="eager")(x):
        assert_close(result, torch.full((3,), 2.0))


def _by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)
