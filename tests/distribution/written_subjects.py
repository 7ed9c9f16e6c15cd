"""Operators that write in place, and the placements under which each rank can write its own shard."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import opsmith
from opsmith import config, errors

kernel_runs: list[tuple[int, ...]] = []
"""Shapes that kernels were called with."""


@opsmith.operator("written::decay", mutates=["cache"])
def decay(cache: Tensor, x: Tensor) -> None:
    """cache, x [B, N]."""
    cache.mul_(0.5).add_(x)


@opsmith.operator("written::decay_by_formula_", mutates=["cache"], returns="cache")
def decay_by_formula_(cache: Tensor, x: Tensor) -> Tensor:
    """cache, x [B, N]: a kernel, and formulas that are three times too large."""
    return cache.mul_(0.5).add_(x)


decay_by_formula_.gradients(cache=lambda grad_cache: 1.5 * grad_cache, x=lambda grad_cache: 3 * grad_cache)


@decay_by_formula_.kernel("cpu")
def _(cache: Tensor, x: Tensor) -> Tensor:
    kernel_runs.append(tuple(cache.shape))
    return cache.copy_(cache / 2 + x)


@opsmith.operator("written::normalise", mutates=["cache"], hidden=("scale",))
def normalise(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """cache, x [B, N] -> [N]: a hidden result, and one beside what is written, with a kernel."""
    found = cache.clone()
    scale = found.square().sum(-1, keepdim=True).add(1).rsqrt()
    cache.copy_(found * scale + x)
    return cache.sum(0), scale


@normalise.kernel("cpu")
def _(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    kernel_runs.append(tuple(cache.shape))
    found = cache.clone()
    scale = found.square().sum(-1, keepdim=True).add(1).rsqrt()
    cache.copy_(found * scale + x)
    return cache.sum(0), scale


@opsmith.operator("written::columns", mutates=["cache"])
def columns(cache: Tensor, x: Tensor) -> None:
    """cache, x [B, N]: writes into views, and makes a tensor by itself."""
    cache[:, :2].mul_(torch.arange(1, 3, dtype=cache.dtype)).add_(x[:, 1:])


@opsmith.operator("written::rows", mutates=["cache"])
def rows(cache: Tensor, x: Tensor) -> None:
    """cache, x [B, N]: torch changes the placements where the index is replicated and `x` is not."""
    cache.index_copy_(0, torch.arange(cache.shape[0] - 1, -1, -1), x)


@opsmith.operator("written::accumulate", mutates=["cache"])
def accumulate(cache: Tensor, x: Tensor) -> None:
    """cache, x [B, N]: torch derives no placements."""
    cache.add_(x).cumprod_(0)


@opsmith.operator("written::before", mutates=["cache"])
def before(cache: Tensor, x: Tensor) -> None:
    """cache, x [B, N]: a view is read after a write."""
    first = cache[:, :1]
    cache.mul_(2)
    cache.add_(first * 3).add_(x)


@opsmith.operator("written::several", mutates=["caches", "last"])
def several(caches: list[Tensor], x: Tensor, last: Tensor | None = None) -> Tensor:
    """caches twice [B, N], x [B, N], last [B, N]."""
    for cache in caches:
        cache.mul_(x)
    if last is not None:
        last.add_(x)
    return x.sin()


@opsmith.operator("written::opaque", mutates=["cache"], opaque=True)
def opaque(cache: Tensor, x: Tensor) -> None:
    """cache, x [B, N]: not made of torch operations."""
    cache.copy_(torch.from_numpy(cache.numpy() / 2 + x.numpy()))


@torch.library.custom_op("written::theirs", mutates_args=("cache",))
def theirs(cache: Tensor, x: Tensor) -> None:
    cache.copy_(torch.from_numpy(cache.detach().numpy() / 2 + x.detach().numpy()))


R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Way = tuple[Any, ...]


@dataclass(frozen=True)
class Written:
    """An operator, and the placements of what it writes that are not refused.

    Args:
        call: Takes the written tensors, then what is read; returns the results.
        functional: Takes the same, and returns the new values first; None where it is not tried.
        placements: Placements of what is written that are accepted.
        read: The placements of what is read.
        count: Number of tensors that are written.
        differentiable: Whether torch derives the gradient on DTensors.
    """

    call: Callable[..., Any]
    functional: Callable[..., Any] | None
    placements: tuple[Any, ...]
    read: tuple[Any, ...] = (R, S0, S1, P)
    count: int = 1
    differentiable: bool = True

    def ways(self) -> list[Way]:
        """Placements of the written tensors and of what is read; those of several differ."""
        kinds = (R, S0, S1, P)
        return [
            (
                *(kinds[(kinds.index(kind) + shift) % 3] if shift else kind for shift in range(self.count)),
                read,
            )
            for kind in kinds
            for read in self.read
        ]

    def refuses(self, way: Way) -> bool:
        """Return True if a call under these placements is to be refused."""
        # Without torch's private names nothing shows that a rank may write its shard.
        placements = (R,) if config.conservative() else self.placements
        return any(each not in placements for each in way[:-1])


def in_place(operator: Any) -> tuple[Any, Any]:
    return operator, operator.functional


EVERY = (R, S0, S1)
WRITTEN = {
    "decay": Written(*in_place(decay), EVERY),
    "kernel-and-formula": Written(*in_place(decay_by_formula_), EVERY),
    "hidden-and-result": Written(*in_place(normalise), EVERY),
    "views": Written(*in_place(columns), (R, S0)),
    "moved-rows": Written(*in_place(rows), (R, S1)),
    "underived": Written(*in_place(accumulate), (R,), differentiable=False),
    "view-read-late": Written(*in_place(before), (R, S0)),
    "several": Written(lambda one, other, last, x: several([one, other], x, last), None, EVERY, count=3),
    "one-not-given": Written(lambda one, other, x: several([one, other], x), None, EVERY, count=2),
    "opaque": Written(*in_place(opaque), (R,), (R,), differentiable=False),
}
if not config.conservative():  # adopting is refused then
    WRITTEN["adopted"] = Written(*in_place(opsmith.adopt(theirs, reference=decay.reference)), EVERY)


def tensors(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def place(tensor: Tensor, placement: Any, mesh: Any, rank: int) -> DTensor:
    """The tensor, placed so; the parts of a partial one differ from rank to rank."""
    if isinstance(placement, Partial):
        return DTensor.from_local(tensor * (0.25 if rank else 0.75), mesh, [placement], run_check=False)
    return distribute_tensor(tensor.clone(), mesh, [placement])


def whole(value: Any) -> list[Tensor]:
    """The tensors in results, none of them distributed, nor with a gradient."""
    values = [] if value is None else [value] if isinstance(value, Tensor) else list(value)
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach() for each in values]


def call(written: Written, way: Way, mesh: Any, rank: int) -> None:
    """Write under placements, and compare with the same call on plain tensors."""
    plain = tensors(written.count + 1)
    placed = [place(tensor, kind, mesh, rank) for tensor, kind in zip(plain, way, strict=True)]
    shards = [each.to_local() for each in placed]
    kept, places = [each.clone() for each in shards], [each.data_ptr() for each in shards]
    versions = [each._version for each in placed]
    try:
        found = written.call(*placed)
    except errors.PlacementError:
        assert written.refuses(way), "it was refused"
        assert_close([each.to_local() for each in placed], kept, rtol=0, atol=0)
        return
    finally:
        assert [each.placements for each in placed] == [(kind,) for kind in way]
        assert [each.to_local().data_ptr() for each in placed] == places
    assert not written.refuses(way), "it was not refused"
    expected = written.call(*plain)
    assert_close(whole(found), whole(expected))
    assert_close(whole(placed), plain)
    assert_close(placed[-1].to_local(), kept[-1], rtol=0, atol=0)
    assert all(each._version > count for each, count in zip(placed[:-1], versions, strict=False))
    assert placed[-1]._version == versions[-1]


def differentiate(written: Written, way: Way, mesh: Any, rank: int) -> None:
    """Compare gradients with those of the same call on plain tensors."""
    ends = []
    for kinds in (None, way):
        leaves = [
            (tensor.clone() if kinds is None else place(tensor, kinds[position], mesh, rank))
            .detach()
            .requires_grad_()
            for position, tensor in enumerate(tensors(written.count + 1))
        ]
        caches = [leaf * 1 for leaf in leaves[:-1]]
        made = written.call(*caches, leaves[-1])
        results = caches if made is None or made is caches[0] else [*caches, made]
        values = [each.full_tensor() if isinstance(each, DTensor) else each for each in results]
        torch.stack([(each * each.sin()).sum() for each in values]).sum().backward()
        ends.append([each.grad for each in leaves])
    for expected, found in zip(*ends, strict=True):
        assert isinstance(found, DTensor)
        assert_close(
            found.full_tensor(), torch.zeros(5, 3, dtype=torch.float64) if expected is None else expected
        )


def compute(written: Written, way: Way, mesh: Any, rank: int) -> None:
    """Compare the functional form with that on plain tensors; it takes every placement."""
    assert written.functional is not None
    plain = tensors(written.count + 1)
    placed = [place(tensor, kind, mesh, rank) for tensor, kind in zip(plain, way, strict=True)]
    found = written.functional(*placed)
    assert_close(whole(found), whole(written.functional(*plain)))
    assert_close(whole(placed), plain)


def told_of_writes(written: Written, mesh: Any, rank: int) -> dict[str, Any]:
    """Faults of an operator by placements, and the runs of its kernel."""
    kernel_runs.clear()
    found: dict[str, str] = {}
    for way in written.ways():
        runs: list[Any] = [call]
        if written.differentiable and not written.refuses(way):
            runs.append(differentiate)
        if written.functional is not None and len(written.read) > 1:
            runs.append(compute)
        for run in runs:
            try:
                run(written, way, mesh, rank)
            except Exception:
                found[f"{run.__name__}: {', '.join(map(str, way))}"] = traceback.format_exc(limit=-4)
    return {"faults": found, "kernel": sorted(set(kernel_runs)), "tried": len(written.ways())}
