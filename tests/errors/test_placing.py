"""Messages for distributed tensors whose answer nothing derives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import opsmith
from opsmith import errors

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
        {name}: a plain tensor is given beside a DTensor
          argument: weight
          expected: DTensors only, or none
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
        {name}: it is opaque, so that its results on parts of a tensor are unknown
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
        {name}: it draws random numbers, and the ranks may draw different ones
          got: a DTensor of shape [3], placed as [Replicate()]
          where: {place(noisy)}
          hint: pass what is drawn as an argument, or call it on this rank's part, `x.to_local()`
        """,
    ):
        operator(x)


def test_lists_from_a_kernel(name: str, place: Place, says: Any, mesh: Any) -> None:
    def halves(x: Tensor) -> list[Tensor]:
        return [x * 0.5, x * 0.25]

    operator = opsmith.operator(name)(halves)
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert [each.full_tensor().sum().item() for each in operator(x)] == [2.0, 1.0]
    operator.kernel("cpu", lambda x: [x * 0.5, x * 0.25])
    with says(
        errors.PlacementError,
        f"""
        {name}: what a kernel returns on shards cannot be put together where it may be None, or a list
          got: a DTensor of shape [4], placed as [Shard(dim=0)]
          where: {place(halves)}
          hint: call it on whole tensors: `x.full_tensor()`
        """,
    ):
        operator(x)
