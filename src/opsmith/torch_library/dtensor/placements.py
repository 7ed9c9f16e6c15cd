"""Placements of DTensors: torch derives an operator's placements from its reference."""

from __future__ import annotations

import dis
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import NOT_PLACED, has_message


def dtensor() -> Any:
    """The class DTensor; None if nothing has imported it, since the import takes a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def dtensors_in(values: Iterable[Any]) -> list[Any]:
    """The DTensors among argument values, including DTensors in lists."""
    kind = dtensor()
    return [] if kind is None else [each for each in tensors_in(list(values)) if isinstance(each, kind)]


class _AuthorCode(threading.local):
    """Context for code of the author, in which `item` returns the whole tensor's number, not a shard's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


author_code = _AuthorCode()


@cache
def serve_numbers() -> None:
    """Register the rule for the number of a DTensor; outside `author_code` it works like torch's rule."""

    def number(kind: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (tensor,) = args
        with torch.no_grad():
            if author_code.depth:
                return operator(gathered(tensor))
            # torch returns no number on a rank that is not in the mesh.
            return operator(local_shard(tensor)) if tensor.device_mesh.get_coordinate() else None

    torch.library.register_torch_dispatch("aten::_local_scalar_dense", dtensor(), number)


def replicating(values: Iterable[Any]) -> AbstractContextManager[None]:
    """Context for code of the author: if a value is a DTensor, plain tensors count as replicated.

    The code makes such tensors itself, for example `torch.arange(x.shape[0])`, the same on every rank.
    """
    return _replicating() if dtensors_in(values) else nullcontext()


@contextmanager
def _replicating() -> Iterator[None]:
    with author_code, capabilities.implicit_replication():
        yield


def replicated(tensor: Tensor, mesh: Any) -> Tensor:
    """A DTensor on a mesh, from a tensor that is the same on every rank."""
    from torch.distributed.tensor import Replicate

    placed: Tensor = dtensor().from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed


def mesh_of(tensor: Tensor) -> Any:
    """The mesh of a DTensor; None for any other tensor."""
    kind = dtensor()
    return tensor.device_mesh if kind is not None and isinstance(tensor, kind) else None


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors unchanged."""
    kind = dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def placed_marks(tensors: Iterable[Tensor]) -> list[Any]:
    """The marks of the shards of DTensors, with the writes counted in the shards and in the DTensors."""
    found = []
    for each in tensors:
        version, *form = capabilities.marks([capabilities.shard_of(each)])
        found += [capabilities.version_counter(each) + version, *form]
    return found


def is_replicated(tensor: Tensor) -> bool:
    """Return True for a DTensor that is the same on every rank."""
    placed: Any = tensor
    return all(each.is_replicate() for each in placed.placements)


def replicate(tensor: Tensor) -> Tensor:
    """Replicate a DTensor on every rank; return other tensors and replicated DTensors unchanged."""
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(tensor)
    if mesh is None or is_replicated(tensor):
        return tensor
    placed: Any = tensor
    if not torch.is_grad_enabled():
        placed = tensor.detach()  # torch 2.11 detaches an unchanged leaf in place
    whole: Tensor = placed.redistribute(placements=[Replicate()] * mesh.ndim)
    return whole


def gathered(tensor: Tensor) -> Tensor:
    """A whole DTensor as a plain tensor in the same graph; other tensors unchanged."""
    whole: Any = replicate(tensor)
    plain: Tensor = whole if mesh_of(tensor) is None else whole.to_local()
    return plain


def is_authors(error: Exception) -> bool:
    """Return True for an error that code outside torch has raised itself."""
    trace: Any = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
    # An error from C++ has no frame of its own: the last frame is only a call, without a `raise`.
    return dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS" and not f"{module}.".startswith(
        "torch."
    )


def is_unplaced(error: Exception) -> bool:
    """Return True for torch's error, the same on every rank, if it cannot derive placements."""
    unplaced = isinstance(error, NotImplementedError) or has_message(error, NOT_PLACED)
    return unplaced and not is_authors(error)


def warn_gathers(specification: Specification, values: Iterable[Any], reason: str | Exception) -> None:
    """Warn that an operator, or its gradient, is computed on whole tensors, if some are not whole."""
    if all(map(is_replicated, dtensors_in(values))):
        return
    if isinstance(reason, Exception):
        cause = reason.__cause__ or reason
        said = str(cause).strip().partition("\n")[0]
        reason = said if cause is reason else f"{type(cause).__name__}: {said}"
    warnings.warn(
        f"opsmith: {specification.name} gathers its DTensors on every rank, because torch cannot "
        f"derive placements for it: {reason}",
        stacklevel=2,
    )


def note_placement(specification: Specification, error: Exception, values: Iterable[Any]) -> None:
    """Add the operator and its DTensors to an error of torch or the author; opsmith's errors have them."""
    if not isinstance(error, errors.OpsmithError):
        placed = ", ".join(map(described, dtensors_in(values)))
        error.add_note(f"raised in {specification.name}, {specification.where}, called with {placed}")


def validated_placements(specification: Specification, values: list[Any]) -> list[Any]:
    """Validate the placements of arguments, and replicate plain tensors that are mixed with DTensors.

    Raises:
        PlacementError: If DTensors are mixed with plain tensors, are sharded although nothing defines the
            result on shards, are partial although they are written, are on several meshes in a call that
            writes, or are given to an operator that draws random numbers.
    """
    placed = dtensors_in(values)
    if not placed or capabilities.innermost_transform() is not None:
        return values  # the levels of `torch.func` are handled first
    from opsmith.torch_library.autograd.random_state import generators_in

    written = specification.schema.written
    if specification.opaque or written or len(placed) < len(tensors_in(values)):
        for name, value in zip(specification.schema.names, values, strict=True):
            for tensor in tensors_in([value]):
                _refuse_placement(specification, name, tensor, written=name in written)
                if written and mesh_of(tensor) not in (None, placed[0].device_mesh):
                    raise specification.error(
                        errors.PlacementError,
                        "the DTensors of an in-place call are on several meshes",
                        argument=name,
                        expected=f"{placed[0].device_mesh}",
                        got=f"{mesh_of(tensor)}",
                        hint="distribute all DTensors over one mesh",
                    )
        mesh = placed[0].device_mesh
        values = map_tensors(lambda tensor: tensor if mesh_of(tensor) else replicated(tensor, mesh), values)
    if specification.random or generators_in(values):
        raise specification.error(
            errors.PlacementError,
            "it draws random numbers, and the ranks may draw different numbers",
            got=described(placed[0]),
            hint="pass the drawn numbers as an argument, or call it on this rank's part, `x.to_local()`",
        )
    return values


def _refuse_placement(specification: Specification, name: str, tensor: Tensor, *, written: bool) -> None:
    if mesh_of(tensor) is None:
        if not written and (tensor.ndim == 0 or capabilities.replicates_implicitly()):
            return
        raise specification.error(
            errors.PlacementError,
            "a plain tensor is mixed with a DTensor",
            argument=name,
            expected="only DTensors, or only plain tensors",
            got=f"a plain tensor of shape {list(tensor.shape)}",
            hint=f"call it with `distribute_tensor({name}, mesh, placements)`",
        )
    placed: Any = tensor
    if written and any(each.is_partial() for each in placed.placements):
        raise specification.error(
            errors.PlacementError,
            f"the written argument `{name}` is a sum that is not computed yet",
            argument=name,
            expected="a DTensor that is replicated or sharded",
            got=described(placed),
            hint=f"call it with `{name}.redistribute(placements=[Replicate()] * mesh.ndim)`",
        )
    if specification.opaque and not all(each.is_replicate() for each in placed.placements):
        raise specification.error(
            errors.PlacementError,
            "it is opaque, so its results on parts of a tensor are unknown",
            argument=name,
            expected="a DTensor that is replicated",
            got=described(placed),
            hint=f"call it with `{name}.redistribute(placements=[Replicate()] * mesh.ndim)`",
        )


def described(tensor: Any) -> str:
    """The shape and placements of a DTensor, for messages."""
    return f"a DTensor of shape {list(tensor.shape)}, placed as {list(tensor.placements)}"
