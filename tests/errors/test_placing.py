"""Messages for distributed tensors whose answer nothing derives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import opsmith
from opsmith import config, errors

Place = Callable[[Callable[..., Any]], str]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def test_plain_tensor_beside_a_dtensor(name: str, place: Place, says: Any, mesh: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    with says(
        errors.PlacementError,
        f"""
        {name}: a plain tensor is mixed with a DTensor
          argument: weight
          expected: only DTensors, or only plain tensors
          got: a plain tensor of shape [3]
          where: {place(scaled)}
          hint: call it with `distribute_tensor(weight, mesh, placements)`
        """,
    ):
        operator(x, torch.ones(3))


def test_shards_of_an_opaque_operator(name: str, place: Place, says: Any, mesh: Any) -> None:
    operator = opsmith.operator(name, opaque=True)(scaled)
    x, weight = (distribute_tensor(torch.ones(3), mesh, [kind]) for kind in (Shard(0), Replicate()))
    with says(
        errors.PlacementError,
        f"""
        {name}: it is opaque, so its results on parts of a tensor are unknown
          argument: x
          expected: a DTensor that is replicated
          got: a DTensor of shape [3], placed as [Shard(dim=0)]
          where: {place(scaled)}
          hint: call it with `x.redistribute(placements=[Replicate()] * mesh.ndim)`
        """,
    ):
        operator(x, weight)


def test_random_operator(name: str, place: Place, says: Any, mesh: Any) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    operator = opsmith.operator(name, random=True)(noisy)
    x = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    with says(
        errors.PlacementError,
        f"""
        {name}: it draws random numbers, and the ranks may draw different numbers
          got: a DTensor of shape [3], placed as [Replicate()]
          where: {place(noisy)}
          hint: pass the drawn numbers as an argument, or call it on this rank's part, `x.to_local()`
        """,
    ):
        operator(x)


def test_lists_from_a_kernel(name: str, mesh: Any) -> None:
    def halves(x: Tensor) -> list[Tensor]:
        return [x * 0.5, x * 0.25]

    operator = opsmith.operator(name)(halves)
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert [each.full_tensor().sum().item() for each in operator(x)] == [2.0, 1.0]
    operator.kernel("cpu", lambda x: [x * 0.5, x * 0.25])
    assert [each.full_tensor().sum().item() for each in operator(x)] == [2.0, 1.0]


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """A mesh of two processes, of which the other one does not exist: nothing may be communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_sum_that_is_not_computed_is_written(name: str, place: Place, says: Any, mesh: Any) -> None:
    def double(cache: Tensor) -> None:
        cache.mul_(2)

    operator = opsmith.operator(name, mutates=["cache"])(double)
    cache = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with says(
        errors.PlacementError,
        f"""
        {name}: the written argument `cache` is a sum that is not computed yet
          argument: cache
          expected: a DTensor that is replicated or sharded
          got: a DTensor of shape [3], placed as [Partial(sum)]
          where: {place(double)}
          hint: call it with `cache.redistribute(placements=[Replicate()] * mesh.ndim)`
        """,
    ):
        operator(cache)
    assert cache.to_local().tolist() == [1.0] * 3


def test_a_write_on_several_meshes(name: str, place: Place, says: Any, mesh: Any) -> None:
    def add(cache: Tensor, x: Tensor) -> None:
        cache.add_(x)

    operator = opsmith.operator(name, mutates=["cache"])(add)
    other = init_device_mesh("cpu", (1, 1))
    cache = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    with says(
        errors.PlacementError,
        f"""
        {name}: the DTensors of an in-place call are on several meshes
          argument: x
          expected: {mesh}
          got: {other}
          where: {place(add)}
          hint: distribute all DTensors over one mesh
        """,
    ):
        operator(cache, distribute_tensor(torch.ones(3), other, [Replicate()] * 2))
    assert cache.full_tensor().tolist() == [1.0] * 3


def placed_otherwise(caches: list[Tensor]) -> None:
    for cache in caches:
        cache.scatter_(0, torch.tensor([0, 1]), 2.0)


def a_view_that_is_a_copy(caches: list[Tensor]) -> None:
    for cache in caches:
        cache[:1].add_(1)


def a_copy_that_is_stale(caches: list[Tensor]) -> None:
    for cache in caches:
        first = cache[:1]
        cache.mul_(2).mul_(first * 2)


def a_copy_of_its_own(caches: list[Tensor]) -> None:
    for cache in caches:
        other = cache * 2
        other[:1].zero_()
        cache.copy_(other)


def another_shape(caches: list[Tensor]) -> None:
    for cache in caches:
        cache.squeeze_(1)


@pytest.mark.parametrize(
    ("reference", "reason", "placements"),
    [
        (placed_otherwise, "`aten.scatter_.value` would place it as [Replicate()]", "[Replicate()]"),
        (
            a_view_that_is_a_copy,
            "`aten.add_.Tensor` writes a part of it, placed as [Replicate()]",
            "[Replicate()]",
        ),
        (
            a_copy_that_is_stale,
            "`aten.mul.Tensor` reads after a write a part of it, placed as [Replicate()]",
            "[Replicate()]",
        ),
        (
            a_copy_of_its_own,
            "`aten.zero_.default` writes a part of a tensor of the reference, placed as [Replicate()]",
            "[Replicate()] * mesh.ndim",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_cannot_be_written_on_each_rank(
    reference: Any, reason: str, placements: str, name: str, place: Place, says: Any, two_ranks: Any
) -> None:
    operator = opsmith.operator(name, mutates=["caches"])(reference)
    replicated, sharded = torch.ones(4), torch.ones(2)
    caches = [
        DTensor.from_local(replicated, two_ranks, [Replicate()], run_check=False),
        DTensor.from_local(sharded, two_ranks, [Shard(0)], run_check=False),
    ]
    label = "caches[1]"
    with says(
        errors.PlacementError,
        f"""
        {name}: `{label}` cannot be written without communication between the ranks
          argument: {label}
          expected: a DTensor whose new value has the same placements, without communication
          got: a DTensor of shape [4], placed as [Shard(dim=0)]; {reason}
          where: {place(reference)}
          hint: call it with `{label}.redistribute(placements={placements})`
        """,
    ):
        operator(caches)
    assert (replicated.tolist(), sharded.tolist()) == ([1.0] * 4, [1.0] * 2)


def data_dependent(cache: Tensor) -> None:
    if cache.sum() > 0:
        cache.mul_(2)


def underived(cache: Tensor) -> None:
    cache.copy_(cache.unfold(0, 1, 1).squeeze(-1) * 3)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (data_dependent, "DataDependentOutputException: aten._local_scalar_dense.default"),
        (
            underived,
            "NotImplementedError: Operator aten.unfold.default does not have a sharding strategy registered.",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_nothing_shows_to_be_written_on_each_rank(
    reference: Any, reason: str, name: str, place: Place, says: Any, mesh: Any
) -> None:
    operator = opsmith.operator(name, mutates=["cache"])(reference)
    cache = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    if config.conservative():
        reason = "NotImplementedError: it needs the capability `sharding`, which is off"
    with says(
        errors.PlacementError,
        f"""
        {name}: it is not proved that `cache` can be written without communication between the ranks
          argument: cache
          expected: a DTensor whose new value has the same placements, without communication
          got: a DTensor of shape [3], placed as [Shard(dim=0)]; {reason}
          where: {place(reference)}
          hint: call it with `cache.redistribute(placements=[Replicate()] * mesh.ndim)`
        """,
    ):
        operator(cache)
    assert cache.full_tensor().tolist() == [1.0] * 3
    whole = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    operator(whole)
    assert whole.full_tensor().tolist() == ([2.0] * 3 if reference is data_dependent else [3.0] * 3)


def test_a_write_that_changes_the_shape(name: str, place: Place, says: Any, two_ranks: Any) -> None:
    operator = opsmith.operator(name, mutates=["caches"])(another_shape)
    cache = DTensor.from_local(torch.ones(2, 1), two_ranks, [Shard(0)], run_check=False)
    with says(
        errors.PlacementError,
        f"""
        {name}: it is not proved that `caches[0]` can be written without communication between the ranks
          argument: caches[0]
          expected: a DTensor whose new value has the same placements, without communication
          got: a DTensor of shape [4, 1], placed as [Shard(dim=0)]; `aten.squeeze_.dim` changes its shape
          where: {place(another_shape)}
          hint: call it with `caches[0].redistribute(placements=[Replicate()] * mesh.ndim)`
        """,
    ):
        operator([cache])
    assert cache.shape == (4, 1)


def test_what_is_read_is_gathered_for_a_write(name: str, mesh: Any) -> None:
    def accumulate(cache: Tensor, x: Tensor) -> None:
        if x.sum() > 0:  # nothing can be tried without data
            cache.add_(x).cumsum_(0)

    operator = opsmith.operator(name, mutates=["cache"])(accumulate)
    cache, x = (distribute_tensor(torch.ones(3), mesh, [kind]) for kind in (Replicate(), Shard(0)))
    with pytest.warns(UserWarning, match=f"opsmith: {name} gathers its DTensors on every rank"):
        operator(cache, x)
    assert cache.full_tensor().tolist() == [2.0, 4.0, 6.0]


@pytest.mark.filterwarnings("ignore:opsmith")  # where nothing can be tried, what is read is gathered
@pytest.mark.parametrize(
    ("of_out", "expected", "got", "hint"),
    [
        (
            Replicate(),
            "[Shard(dim=0)]",
            "[Replicate()]",
            "call it with `out.redistribute(placements=[Shard(dim=0)])`",
        ),
        (None, "[Partial(sum)]", "[Replicate()]", "call it without `out=`, and copy the results"),
    ],
    ids=["sharded", "partial"],
)
def test_out_is_placed_otherwise(
    of_out: Any, expected: str, got: str, hint: str, name: str, place: Place, says: Any, mesh: Any
) -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(0) if x.shape[0] == 4 else x * 2

    operator = opsmith.operator(name)(total)
    x = distribute_tensor(torch.ones(3 if of_out else 4), mesh, [Shard(0)])
    out = distribute_tensor(torch.zeros(3) if of_out else torch.zeros(()), mesh, [Replicate()])
    with says(
        errors.PlacementError,
        f"""
        {name}: `out` has other placements than the result
          argument: out
          expected: placements {expected}
          got: {got}
          where: {place(total)}
          hint: {hint}
        """,
    ):
        operator.out(x, out=out)
    assert not out.full_tensor().any()
