"""A kernel takes nothing away from DTensors, and a reference may look at numbers there, as a function may."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from torch.testing import assert_close

import opsmith
from opsmith import config, errors

X = torch.tensor([[1.0, -1.0, 2.0], [0.5, 3.0, -2.0]])
PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]
runs: list[tuple[int, ...]] = []
MESHES = count()


@pytest.fixture(scope="module")
def place() -> Iterator[Callable[..., DTensor]]:
    """Distribute a copy of `X` over a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # torch keeps placements by equal meshes; compiled code fails with the mesh of another test.
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=(f"lists_{next(MESHES)}",))

    def placed(placement: Placement, *, requires: bool = False) -> DTensor:
        return DTensor.from_local(X.clone(), mesh, [placement], run_check=False).requires_grad_(requires)

    yield placed
    dist.destroy_process_group()


def flat(results: Any) -> list[Tensor]:
    if results is None or isinstance(results, Tensor):
        return [] if results is None else [results]
    return [tensor for each in results for tensor in flat(each)]


def told(function: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Whole results, and the whole gradient where one is required."""
    results = flat(function(x))
    assert all(isinstance(each, DTensor) == isinstance(x, DTensor) for each in results)
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in results]
    found = [each.detach() for each in whole]
    if x.requires_grad:
        weights = [torch.arange(1.0, 1 + each.numel()).view(each.shape) for each in whole]
        ends = [(each * weight).sum() for each, weight in zip(whole, weights, strict=True)]
        (gradient,) = torch.autograd.grad(torch.stack(ends).sum(), x)
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return found


@contextmanager
def expect_gathering(gathers: bool) -> Iterator[None]:
    """Context in which an operator warns that it gathers its DTensors, or does not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught]
    assert all(
        "gathers its DTensors on every rank, because torch cannot derive placements" in each for each in said
    )
    assert bool(said) is gathers, said


def heads(x: Tensor) -> list[Tensor]:
    return [x * 2, x.sin()]


def with_list(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x.cos(), [x * 2, x.sin(), x + 1]


def perhaps(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return x * 3, None


def by_row(x: Tensor) -> list[Tensor]:
    return [row * 2 for row in x.unbind(0)]


LISTS = [heads, with_list, perhaps, by_row]


@pytest.mark.every(8)
@pytest.mark.parametrize("requires", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("reference", LISTS, ids=lambda f: f.__name__)
def test_a_kernel_of_lists(
    reference: Callable[..., Any], placement: Placement, requires: bool, place: Any
) -> None:
    operator = opsmith.operator(f"lists::{reference.__name__}")(reference)

    @operator.kernel("cpu")
    def _(x: Tensor) -> Any:
        runs.append(tuple(x.shape))
        return reference(x)

    runs.clear()
    expected = told(reference, X.clone().requires_grad_(requires))
    with expect_gathering(reference is by_row and placement == Shard(0)):
        for _ in range(3):  # the later calls are known ones
            assert_close(told(operator, place(placement, requires=requires)), expected)
    if placement == Replicate():
        assert runs == [X.shape] * 3


def test_a_kernel_of_a_hidden_result_and_a_list_with_a_formula(place: Any) -> None:
    @opsmith.operator("lists::normal", hidden=("scale",))
    def normal(x: Tensor) -> tuple[list[Tensor], Tensor]:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        return [x * scale, x + 1], scale

    @normal.gradients("x")
    def _(grad: list[Tensor], x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        first, second = grad
        return {"x": scale * (first - x * scale.square() * (first * x).mean(-1, keepdim=True)) + second}

    def visible(x: Tensor) -> list[Tensor]:
        return normal.reference(x)[0]

    @normal.kernel("cpu")
    def _(x: Tensor) -> Any:
        runs.append(tuple(x.shape))
        return normal.reference(x)

    runs.clear()
    expected = told(visible, X.clone().requires_grad_())
    for placement in (Replicate(), Shard(0), Shard(1), Partial()):
        assert_close(told(normal, place(placement, requires=True)), expected)
    assert runs[0] == (2, 3)


def test_a_kernel_that_returns_another_number_of_tensors_is_refused(place: Any) -> None:
    @opsmith.operator("lists::pair")
    def pair(x: Tensor) -> list[Tensor]:
        return [x * 2, x * 3]

    counts = [3]
    pair.kernel("cpu", lambda x: [x * (2 + i) for i in range(counts[0])])
    if config.conservative():
        assert_close(told(pair, place(Shard(0))), [X * 2, X * 3])
        return
    with pytest.raises(errors.ResultCountError) as caught:
        pair(place(Shard(0)))
    assert caught.value.message().splitlines()[:4] == [
        "lists::pair: the length of `result` differs from the length of the reference",
        "  argument: result",
        "  expected: 2",
        "  got: 3",
    ]
    counts[0] = 2  # as the hint says
    assert_close(told(pair, place(Shard(0))), [X * 2, X * 3])


def test_an_opaque_operator_returns_a_list(place: Any) -> None:
    @opsmith.operator("lists::halves", opaque=True)
    def halves(x: Tensor) -> list[Tensor]:
        return [torch.from_numpy(x.numpy() / 2), torch.from_numpy(x.numpy() * 2)]

    assert_close(told(halves, place(Replicate())), [X / 2, X * 2])


def scaled(x: Tensor) -> Tensor:
    return x / x.detach().max().item()


def truncated(x: Tensor) -> Tensor:
    return x * int(x.detach().sum()) + float(x.detach().min())


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def told_alike(x: Tensor) -> Tensor:
    return x.sin() if torch.allclose(x, x.abs()) or torch.equal(x, x.abs()) else x.cos()


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


def places(x: Tensor) -> Tensor:
    return (x > 0).nonzero().to(x.dtype) * x.sum()


def selected(x: Tensor) -> Tensor:
    return torch.masked_select(x, x > 0) * 2


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[x < 0] = 0
    return y * 2


def windows(x: Tensor) -> Tensor:
    return x.unfold(0, 2, 1).sum(-1)


def through_numpy(x: Tensor) -> Tensor:
    return x * torch.as_tensor(x.detach().numpy().max()) + sum(x.detach().flatten().tolist())


NUMBERS = [scaled, truncated, branching]
GATHERED = [told_alike, positive, places, selected, windows, through_numpy]


def is_placed_by_torch(reference: Callable[..., Any], x: Tensor) -> bool:
    """Whether torch has placements for all that a reference does with a DTensor: versions of torch differ."""
    try:
        reference(x)
    except RuntimeError:
        return False
    return True


@pytest.mark.every(8)
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("reference", [*NUMBERS, *GATHERED, assigned], ids=lambda f: f.__name__)
def test_a_reference_that_looks_at_numbers(
    reference: Callable[..., Any], placement: Placement, kernel: bool, place: Any
) -> None:
    """What the plain function gives on whole tensors, with a warning where torch has no placements."""
    operator = opsmith.operator(f"numbers::{reference.__name__}")(reference)
    if kernel:
        operator.kernel("cpu", lambda x: reference(x))
    gathers = reference in GATHERED or (
        reference is assigned and not is_placed_by_torch(assigned, place(placement))
    )
    with expect_gathering(gathers and placement != Replicate()):
        for requires in (False, True):
            expected = told(reference, X.clone().requires_grad_(requires))
            for _ in range(3):
                assert_close(told(operator, place(placement, requires=requires)), expected)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_formula_that_looks_at_numbers(placement: Placement, place: Any) -> None:
    @opsmith.operator("numbers::square")
    def square(x: Tensor) -> Tensor:
        return x.square()

    @square.gradients("x")
    def _(grad: Tensor, x: Tensor) -> dict[str, Tensor]:
        found = torch.zeros_like(x)
        found[x != 0] = (grad * x)[x != 0] * (2 if bool(x.sum() > 0) else -2) * x.max().item()
        return {"x": found / x.max().item()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert_close(
                told(square, place(placement, requires=True)), told(torch.square, X.clone().requires_grad_())
            )
            x = place(placement, requires=True)
            (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            assert_close(second.full_tensor(), 8 * X)


def test_inference_mode(place: Any) -> None:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reference in (scaled, branching, positive):
            operator = opsmith.operator(f"inferred::{reference.__name__}")(reference)
            for placement in PLACEMENTS:
                assert_close(told(operator, place(placement)), told(reference, X.clone()))


def test_a_write_that_looks_at_numbers(place: Any) -> None:
    @opsmith.operator("numbers::normalise_", mutates=("x",))
    def normalise_(x: Tensor) -> None:
        x.div_(x.max().item())

    replicated = place(Replicate())
    normalise_(replicated)
    assert_close(replicated.full_tensor(), X / 3)
    sharded = place(Shard(0))
    with pytest.raises(errors.PlacementError) as caught:
        normalise_(sharded)
    assert "numbers::normalise_: it is not proved that `x` can be written" in str(caught.value)
    assert "placed as [Shard(dim=0)]" in str(caught.value)
    assert_close(sharded.full_tensor(), X)
    assert caught.value.hint == "call it with `x.redistribute(placements=[Replicate()] * mesh.ndim)`"
    whole = sharded.redistribute(placements=[Replicate()])
    normalise_(whole)
    assert_close(whole.full_tensor(), X / 3)


def test_an_error_of_torch_names_the_operator_and_the_placement(place: Any) -> None:
    @opsmith.operator("numbers::ambiguous")
    def ambiguous(x: Tensor) -> Tensor:
        return x * 2 if x > 0 else x

    with pytest.raises(RuntimeError, match="ambiguous") as caught:
        ambiguous(place(Shard(0)))
    assert caught.value.__notes__ == [
        f"raised in numbers::ambiguous, {ambiguous.specification.where}, called with a DTensor of shape "
        "[2, 3], placed as [Shard(dim=0)]"
    ]


@pytest.mark.slow
def test_code_without_opsmith_is_as_before() -> None:
    """Values, errors and what a mode sees, also on a rank that is not in the mesh."""
    program = Path(__file__).with_name("plain_numbers.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert before == after
    assert {"5.0", "True"} < {*before.values()}
    assert any("Cannot cast None to number" in each for each in before.values())


def raising(part: str, x: Tensor) -> None:
    if x.detach().sum().item() > 100:
        runs.append((0,))
        raise NotImplementedError(f"the author's {part} takes no large numbers")


@pytest.mark.parametrize("known", [False, True], ids=["first call", "known call"])
@pytest.mark.parametrize("part", ["reference", "kernel", "formula", "reference with a kernel"])
def test_an_error_of_the_author_s_own_is_raised_once(part: str, known: bool, place: Any) -> None:
    """The class of the error is that of an operation without placements, which runs on whole tensors."""

    @opsmith.operator(f"numbers::raising_{part.replace(' ', '_')}_{known}")
    def operator(x: Tensor) -> Tensor:
        if part.startswith("reference"):
            raising("reference", x)
        return x * 2

    def formula(grad: Tensor) -> Tensor:
        if part == "formula":
            raising(part, grad)
        return grad * 2

    operator.gradients(x=formula)
    if part.endswith("kernel"):

        @operator.kernel("cpu")
        def _(x: Tensor) -> Tensor:
            if part == "kernel":
                raising(part, x)
            return x * 2 if part == "kernel" else operator.reference(x)

    for placement in (Replicate(), Shard(0)):
        for _ in range(3 if known else 0):
            operator(place(placement, requires=True)).sum().backward()
        runs.clear()
        scale = torch.tensor(1000.0)
        large = DTensor.from_local(X * 0 + scale, place(placement).device_mesh, [placement], run_check=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is gathered
            with pytest.raises(NotImplementedError, match="takes no large numbers") as caught:
                operator(large.requires_grad_()).backward(large.detach())
        assert len(runs) == 1
        (note,) = caught.value.__notes__
        assert operator.name in note


@pytest.mark.skipif(config.conservative(), reason="adopting is refused then")
def test_an_adopted_class_that_looks_at_numbers(place: Any) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.by = x.max().item()
            return x * ctx.by

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.by

    operator = opsmith.adopt(Scaled, "numbers::adopted")
    for placement in PLACEMENTS:
        for _ in range(2):
            assert_close(
                told(operator, place(placement, requires=True)),
                told(Scaled.apply, X.clone().requires_grad_()),
            )


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x * 2)[0],
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x * 2,))[1],
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
}


def sine(x: Tensor) -> Tensor:
    return x.sin() * x


def with_reference(name: str) -> Any:
    return opsmith.operator(name)(sine)


def with_formula(name: str) -> Any:
    return with_reference(name).gradients(x=lambda grad, x: grad * (x.cos() * x + x.sin()))


def with_kernel(name: str) -> Any:
    operator = with_reference(name)
    operator.kernel("cpu", lambda x: x.sin().mul_(x))
    return operator


@pytest.mark.every(8)
@pytest.mark.skipif(config.conservative(), reason="transforms level by level are refused then")
@pytest.mark.parametrize("declared", [with_reference, with_formula, with_kernel], ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_the_reference(transform: str, declared: Any, place: Any) -> None:
    """Equal where torch takes the reference on DTensors through a transform; else the same error."""
    name = f"{declared.__name__}_{transform.replace(' ', '_')}"
    operator = declared(f"transformed_dtensors::{name}")
    apply = TRANSFORMS[transform]
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = place(placement)
        expected, found = attempted(apply, sine, x), attempted(apply, operator, x)
        if isinstance(expected, str):
            assert transform in ("jvp", "hessian")  # torch has no placements for what these do
            assert found == expected
        else:
            assert isinstance(found, DTensor)
            assert found.placements == expected.placements
            assert_close(found.full_tensor(), expected.full_tensor())
            assert_close(found.full_tensor(), apply(sine, X))


def attempted(apply: Callable[[Any, Tensor], Any], function: Any, x: Tensor) -> Any:
    """The result, or the error as text."""
    try:
        return apply(function, x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


BREAKS = (
    pytest.mark.slow,
    pytest.mark.skipif(config.conservative(), reason="torch warns of what it traces after a break"),
)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # after a break of the graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch reads it
@pytest.mark.xdist_group("compiled dtensors")
@pytest.mark.parametrize(
    "reference",
    [heads, with_list, *(pytest.param(f, marks=BREAKS) for f in (scaled, branching))],
    ids=lambda f: f.__name__,
)
def test_compiled_code(reference: Callable[..., Any], place: Any) -> None:
    torch.compiler.reset()
    operator = opsmith.operator(f"compiled_numbers::{reference.__name__}")(reference)
    operator.kernel("cpu", lambda x: reference(x))
    operator(X)  # validated, which Dynamo would trace after a break of the graph
    compiled = torch.compile(operator, backend="aot_eager")
    for placement in (Replicate(), Shard(0)):
        expected = told(reference, X.clone().requires_grad_())
        assert_close(told(compiled, place(placement, requires=True)), expected)
    torch.compiler.reset()
