"""One rank of two: runs every subject under every placement, and tells as JSON what was not right.

python sharding_rank.py RANK RENDEZVOUS
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from sharded_subjects import SUBJECTS, Subject, kernel_runs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing import assert_close
from wrapped_modules import wrapped
from written_subjects import WRITTEN, told_of_writes

MOST = 12
"""How many ways to place the tensors of one subject are tried; of more, some, at even distances."""


def placed(tensor: Tensor, placement: Any, mesh: Any, rank: int) -> DTensor:
    """A leaf that is this tensor, placed so; the parts of a partial one differ from rank to rank."""
    if isinstance(placement, Partial):
        part = tensor * (0.25 if rank else 0.75)
        whole = DTensor.from_local(part, mesh, [placement], run_check=False)
    else:
        whole = distribute_tensor(tensor, mesh, [placement])
    return whole.detach().requires_grad_()


def choices(tensor: Tensor, *, sharded: bool) -> list[Any]:
    """Every placement of a tensor on a mesh of one dimension."""
    return [Replicate(), *(Shard(d) for d in range(tensor.ndim)), Partial()] if sharded else [Replicate()]


def ways(subject: Subject) -> Iterator[tuple[Any, ...]]:
    """Placements for all tensors of a subject, lists flat."""
    flat = [t for value in subject.tensors() for t in (value if isinstance(value, list) else [value])]
    every = list(itertools.product(*(choices(t, sharded=subject.sharded) for t in flat)))
    return iter(every[:: -(-len(every) // MOST)])


def run(
    subject: Subject, way: tuple[Any, ...] | None, mesh: Any, rank: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a call, whole; without a way to place tensors, on plain ones."""
    placements = iter(way or ())
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        plain = way is None
        leaves.append(
            tensor.clone().requires_grad_() if plain else placed(tensor, next(placements), mesh, rank)
        )
        return leaves[-1]

    args = [[leaf(t) for t in v] if isinstance(v, list) else leaf(v) for v in subject.tensors()]
    answer = subject.operator(*args, *subject.others)
    results = flat(answer)
    ends = [weighted(whole(each)) for each in results if each.requires_grad]
    torch.stack(ends).sum().backward()
    gradients = [each.grad for each in leaves if each.grad is not None]
    assert len(gradients) == len(leaves)
    assert way is None or all(isinstance(each, DTensor) for each in (*results, *gradients))
    return [whole(each).detach() for each in results], [whole(each) for each in gradients]


def flat(answer: Any) -> list[Tensor]:
    return [answer] if isinstance(answer, Tensor) else [tensor for each in answer for tensor in flat(each)]


def weighted(result: Tensor) -> Tensor:
    """A number whose gradient differs from element to element."""
    return (result * torch.arange(1.0, 1 + result.shape[-1])).sin().sum()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def told(subject: Subject, mesh: Any, rank: int) -> dict[str, Any]:
    """Faults of a subject by placement; its warnings, and the runs of its kernel."""
    expected = run(subject, None, mesh, rank)
    kernel_runs.clear()
    found: dict[str, str] = {}
    tried = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for way in ways(subject):
            tried += 1
            try:
                assert_close(run(subject, way, mesh, rank), expected)
            except Exception:
                found[", ".join(map(str, way))] = traceback.format_exc(limit=-4)
    return {
        "faults": found,
        "tried": tried,
        "warned": sorted({str(each.message) for each in warned}),
        "kernel": sorted(set(kernel_runs)),
    }


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(minutes=25)
    )
    mesh = init_device_mesh("cpu", (2,))
    report: dict[str, Any] = {name: told(subject, mesh, rank) for name, subject in SUBJECTS.items()}
    report["modules"] = wrapped(mesh, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is gathered
        report["writes"] = {name: told_of_writes(each, mesh, rank) for name, each in WRITTEN.items()}
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
