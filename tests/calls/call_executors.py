"""Executors as rows: ways in which calls are made. A new accelerator is one row more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.utils._pytree import tree_map

from opsmith.torch_library import capabilities

Function = Callable[..., Any]
MESHES = itertools.count()


def _as_it_is(function: Function) -> Function:
    return function


def _compiled(function: Function) -> Function:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _by_inductor(function: Function) -> Function:
    return torch.compile(function, fullgraph=True)


def _at_a_grad_level(function: Function) -> Function:
    return lambda *given: torch.func.vjp(function, *given)[0]


def _at_a_vmap_level(function: Function) -> Function:
    """Each tensor as the only one of a batch."""

    def mapped(*given: Tensor) -> Any:
        results = torch.func.vmap(function, randomness="different")(*(each.unsqueeze(0) for each in given))
        return tree_map(lambda each: each.squeeze(0), results)

    return mapped


def _on_dtensors(placement: Any) -> Callable[[Function], Function]:
    def on_dtensors(function: Function) -> Function:
        def called(*given: Tensor) -> Any:
            placements = [placement]
            with torch.inference_mode(False):  # inference tensors count no writes
                placed = [DTensor.from_local(each, _mesh(), placements, run_check=False) for each in given]
            results = function(*placed)
            return tree_map(lambda each: each.full_tensor() if isinstance(each, DTensor) else each, results)

        return called

    return on_dtensors


@cache
def _mesh() -> Any:
    """A mesh of this process alone; torch keeps placements by equal meshes, so that each has another name."""
    return init_device_mesh("cpu", (1,), mesh_dim_names=(f"calls_{next(MESHES)}",))


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _mesh.cache_clear()
        dist.destroy_process_group()


def _without_an_accelerator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capabilities, "calls_in_cpp", lambda: None)


def _as_installed(patch: pytest.MonkeyPatch) -> None:
    pass


@dataclass(frozen=True)
class Executor:
    """A way in which calls are made.

    Args:
        name: Name of the row.
        call: The way as a function of functions of tensors.
        choose: Setting under which an operator calls this way.
        needs: Capability without which there is no such way.
        contexts: Contexts in which it is tried; None for all.
        chosen: Subjects and breaches with which it is tried, slow as it is; None for all.
        way: What `way_taken` says after known calls of a plain operator; empty where it does not matter.
    """

    name: str
    call: Callable[[Function], Function] = _as_it_is
    choose: Callable[[pytest.MonkeyPatch], None] = _as_installed
    needs: str = ""
    contexts: tuple[str, ...] | None = None
    chosen: tuple[str, ...] | None = None
    way: str = ""

    @property
    def compiles(self) -> bool:
        return self.call in (_compiled, _by_inductor)

    @property
    def distributes(self) -> bool:
        return self.name.startswith("DTensor")

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Context in which operators call this way."""
        ranks = one_rank() if self.distributes else nullcontext()
        with pytest.MonkeyPatch.context() as patch, ranks:
            self.choose(patch)
            yield

    @property
    def missing(self) -> str:
        """The reason why this executor is missing here; empty if it is not."""
        if self.needs == "calls_in_cpp":
            return (
                "" if capabilities.calls_in_cpp() is not None else "calls in C++ are not built, or turned off"
            )
        return (
            "" if not self.needs or capabilities.on(self.needs) else f"the capability `{self.needs}` is off"
        )


# In other contexts torch takes no function that is called at a level of `torch.func` or on DTensors.
INSIDE = (
    "requires-grad",
    "no-grad",
    "inference-mode",
    "inference-tensors",
    "autocast",
    "parameters",
    "checkpoint",
    "retain-graph",
    "function-mode",
    "dispatch-mode",
    "profiler",
    "thread",
    "vmap",
    "grad",
    "double-backward",
)
COMPILED = (
    "requires-grad",
    "no-grad",
    "inference-mode",
    "autocast",
    "parameters",
    "checkpoint",
    "retain-graph",
)
INDUCTOR = (
    "declared",
    "in-place",
    "swap",
    "rotate",
    "momentum",
    "kept-clone-columns",
    "kept-clone-rows",
    "kept-clone-whole",
    "kernel-by-numpy",
    "kernel-misfit-shape",
    "kernel-misfit-dtype",
    "kernel-misfit-narrow-dtype",
    "kernel-misfit-strides",
    "opaque-misfit-strides",
)

EXECUTORS = {
    each.name: each
    for each in (
        Executor("dispatcher", choose=_without_an_accelerator, way="dispatcher"),
        Executor("C++", needs="calls_in_cpp", way="C++"),
        Executor("compiled", _compiled, contexts=COMPILED),
        Executor("Inductor", _by_inductor, contexts=("requires-grad", "no-grad"), chosen=INDUCTOR),
        Executor("grad level", _at_a_grad_level, needs="torch_func", contexts=INSIDE),
        Executor("vmap level", _at_a_vmap_level, needs="torch_func", contexts=INSIDE),
        Executor("DTensor", _on_dtensors(Replicate()), needs="sharding", contexts=INSIDE),
        Executor("DTensor rows", _on_dtensors(Shard(0)), needs="sharding", contexts=INSIDE),
    )
}


def way_taken(operator: Any) -> str:
    """The way that the next known call of a handle takes."""
    routes = operator._registration._routes
    accelerator = None if routes is None else routes._accelerator
    return "dispatcher" if accelerator is None or accelerator._plan is None else "C++"
