"""Writes into DTensors on a mesh of one process: histories, refusals, `out`, compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import implicit_replication

import opsmith
from opsmith import errors

X, W = torch.arange(1.0, 13).view(4, 3), torch.tensor([1.0, 2.0, 3.0])
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@opsmith.operator("shards::scale_", mutates=["x"], returns="x")
def scale_(x: Tensor, w: Tensor) -> Tensor:
    return x.mul_(w).add_(1)


@opsmith.operator("shards::scaled")
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@opsmith.operator("shards::with_sum", mutates=["x"])
def with_sum(x: Tensor, w: Tensor) -> Tensor:
    first = x[:, :1].clone()
    x.mul_(w)
    return first.sum() * w


@pytest.fixture(scope="module")
def place() -> Iterator[Callable[[Tensor, Placement], DTensor]]:
    """Distribute a copy of a tensor over a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor, placement: distribute_tensor(tensor.clone(), mesh, [placement])
    dist.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # What torch keeps of operations on another process group's DTensors, compiled code cannot differentiate.
    _clear_sharding_prop_cache()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
def test_the_argument_that_is_returned_is_the_one_that_is_given(
    placement: Placement, mode: Any, place: Any
) -> None:
    with mode():
        x = place(X, placement)
        assert scale_(x, place(W, R)) is x
        assert scale_(scale_(x, place(W, R)), place(W, R)) is x
    expected = X * W**3 + W**2 + W + 1
    assert torch.equal(x.full_tensor(), expected)
    assert x.placements == (placement,)


def test_history_goes_on_from_the_write(place: Any) -> None:
    w = place(W, R).requires_grad_()
    x = place(X, S0)
    scale_(x, w)
    assert x.requires_grad
    assert x.grad_fn is not None
    x.square().sum().backward()
    assert torch.equal(w.grad.full_tensor(), (2 * (X * W + 1) * X).sum(0))


def test_a_view_is_written(place: Any) -> None:
    w, base = place(W, R).requires_grad_(), place(X, S0) * 1
    scale_(base.view(4, 3), w)
    base.square().sum().backward()
    assert torch.equal(base.full_tensor(), X * W + 1)
    assert torch.equal(w.grad.full_tensor(), (2 * (X * W + 1) * X).sum(0))


def test_a_backward_finds_a_modified_value(place: Any) -> None:
    x = place(X, S0).requires_grad_()
    copy = x * 1
    sine = copy.sin()
    scale_(copy, place(W, R))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sine.sum().backward()


def test_a_leaf_is_refused(place: Any) -> None:
    x = place(X, R).requires_grad_()
    with pytest.raises(errors.MutationError, match="`x` is a leaf that requires a gradient"):
        scale_(x, place(W, R))
    assert torch.equal(x.full_tensor(), X)


def test_shared_elements_are_refused(place: Any) -> None:
    x = place(X, S0)
    with pytest.raises(errors.MutationError, match="shares elements with `w`"):
        scale_(x, x)
    with pytest.raises(errors.MutationError, match="shares elements with `w`"):
        scale_(x, x.view(4, 3))


def test_an_undeclared_write_is_refused_before_anything_is_written(place: Any) -> None:
    @opsmith.operator("shards::undeclared", mutates=["x"])
    def undeclared(x: Tensor, y: Tensor) -> None:
        x.mul_(2)
        y.add_(1)

    x, y = place(X, S0), place(X, S0)
    with pytest.raises(errors.MutationError, match="must not write into an input that it does not declare"):
        undeclared(x, y)
    assert torch.equal(x.full_tensor(), X)
    assert torch.equal(y.full_tensor(), X)


def test_an_error_of_the_reference_comes_before_anything_is_written(place: Any) -> None:
    @opsmith.operator("shards::late", mutates=["x"])
    def late(x: Tensor, w: Tensor) -> None:
        x.mul_(2)
        if w.shape != (3,):
            raise ValueError("three numbers are needed")

    x = place(X, S0)
    with pytest.raises(ValueError, match="three numbers are needed"):
        late(x, place(torch.ones(1), R))
    assert torch.equal(x.full_tensor(), X)


def test_a_plain_tensor_is_not_written_beside_dtensors(place: Any) -> None:
    """Also where torch would replicate it: what is written into its copy would be lost."""
    number = torch.tensor(1.0)
    with (
        implicit_replication(),
        pytest.raises(errors.PlacementError, match="a plain tensor is mixed with a DTensor"),
    ):
        scale_(number, place(torch.tensor(2.0), R))
    assert number.item() == 1


def test_a_number_is_read_beside_dtensors(place: Any) -> None:
    x = place(X, S0)
    scale_(x, torch.tensor(2.0))
    assert torch.equal(x.full_tensor(), X * 2 + 1)


@pytest.mark.parametrize("native", [False, True], ids=["reference", "cpp"])
def test_out(native: bool, place: Any) -> None:
    """`out` has the placements of the result; a kernel writes straight into its shard."""
    operator = opsmith.operator(f"shards::scaled_{'natively' if native else 'by_torch'}")(scaled.reference)
    if native:
        operator.kernel(
            "cpu",
            entry="scaled",
            cpp="""
template <class T>
void scaled(View<const T, 2> x, View<const T, 1> w, View<T, 2> result) {
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) result(i, j) = x(i, j) * w(j);
}
""",
        )
    for placement in (R, S0, S1):
        out = place(torch.zeros(4, 3), placement)
        where = out.to_local().data_ptr()
        assert operator.out(place(X, placement), place(W, R), out=out) is out
        assert torch.equal(out.full_tensor(), X * W)
        assert out.placements == (placement,)
        assert out.to_local().data_ptr() == where


def test_several_results_of_one_trial(place: Any) -> None:
    """What is read before the write may be gathered, and is a copy."""
    x = place(X, S1)
    made = with_sum(x, place(W, R))
    assert torch.equal(x.full_tensor(), X * W)
    assert torch.equal(made.full_tensor(), X[:, 0].sum() * W)


@pytest.mark.every(5)
@pytest.mark.parametrize("gradients", [False, True], ids=["plain", "gradients"])
@pytest.mark.xdist_group("compiled_shards")
def test_compiled(gradients: bool, place: Any, fresh_compiler: None) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, w: Tensor) -> Tensor:
        own = x * 2
        made = with_sum(own, w)
        return (own + made).sin()

    for placement in (R, S0, S1):
        ends = []
        for x, w in ((X.clone(), W.clone()), (place(X, placement), place(W, R))):
            w.requires_grad_(gradients)
            result = step(x, w)
            if gradients:
                result.square().sum().backward()
            ends.append([result, w.grad] if gradients else [result])
        for plain, placed in zip(*ends, strict=True):
            assert torch.allclose(placed.full_tensor(), plain)


@pytest.mark.slow
@pytest.mark.xdist_group("compiled_shards")
def test_compiled_code_writes_into_shards(place: Any, fresh_compiler: None) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, w: Tensor) -> Tensor:
        with_sum(x, w)
        return x.sum()

    for placement in (R, S0, S1):
        x = place(X, placement)
        where = x.to_local().data_ptr()
        step(x, place(W, R))
        assert torch.equal(x.full_tensor(), X * W)
        assert x.to_local().data_ptr() == where


@pytest.mark.xdist_group("compiled_shards")
def test_compiled_code_refuses_what_needs_communication(place: Any, fresh_compiler: None) -> None:
    @opsmith.operator("shards::reversed_rows", mutates=["x"])
    def reversed_rows(x: Tensor, y: Tensor) -> None:
        x.scatter_(0, torch.arange(3, -1, -1).unsqueeze(1).expand_as(y), y)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        reversed_rows(x, y)
        return x.sum()

    x = place(X, S0)
    with pytest.raises(Exception, match="`x` cannot be written without communication between the ranks"):
        step(x, place(X, R))
    assert torch.equal(x.full_tensor(), X)
