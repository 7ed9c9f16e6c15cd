"""torch's distributed tensors: what one is made of, and how plain tensors meet them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from opsmith.core.calls import tensors_in
from opsmith.torch_library import capabilities


def dtensor() -> Any:
    """Torch's class of distributed tensors; None where nothing has imported it, which takes a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def dtensors_in(values: Iterable[Any]) -> list[Any]:
    """The DTensors among argument values, those in lists too."""
    kind = dtensor()
    return [] if kind is None else [each for each in tensors_in(list(values)) if isinstance(each, kind)]


def replicating(values: Iterable[Any]) -> AbstractContextManager[None]:
    """A region for author's code on these values: where one is a DTensor, plain tensors count as replicated.

    They are what the code makes by itself, `torch.arange(x.shape[0])`, which is the same on every rank.
    """
    return capabilities.implicit_replication() if dtensors_in(values) else nullcontext()


def replicated(tensor: Tensor, mesh: Any) -> Tensor:
    """A tensor that is the same on every rank, as a DTensor on a mesh."""
    from torch.distributed.tensor import Replicate

    placed: Tensor = dtensor().from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed


def mesh_of(tensor: Tensor) -> Any:
    """The mesh of a DTensor; None for any other tensor."""
    kind = dtensor()
    return tensor.device_mesh if kind is not None and isinstance(tensor, kind) else None


def mapped(function: Callable[[Tensor], Tensor], values: Iterable[Any]) -> list[Any]:
    """Argument values, each tensor in them replaced, those in lists too."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        return [replaced(item) for item in value] if tensors_in([value]) else value

    return [replaced(value) for value in values]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    kind = dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def gathered(tensor: Tensor) -> Tensor:
    """A DTensor that is the same on every rank; other tensors as they are."""
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(tensor)
    if mesh is None:
        return tensor
    placed: Any = tensor.detach()  # a leaf that stays as it is, torch 2.11 would detach in place
    with torch.no_grad():
        whole: Tensor = placed.redistribute(placements=[Replicate()] * mesh.ndim)
    return whole
