"""DTensor: plain tensors mixed with DTensors, and the operations on shards below it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library.capabilities.operation import Operation


def replicates_implicitly() -> bool:
    """Return True if the caller requested that DTensor treat plain tensors as replicated."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Context in which DTensor treats plain tensors as replicated; torch's own would end an outer one."""
    before = DTensor._op_dispatcher._allow_implicit_replication
    DTensor._op_dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        DTensor._op_dispatcher._allow_implicit_replication = before


def shard_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, without a graph."""
    shard: Tensor = tensor._local_tensor
    return shard


def shard_key(tensor: Any) -> Hashable:
    """Hashable identity of a DTensor without its data: mesh, placements, metadata of whole and shard."""
    shard = tensor._local_tensor
    return tensor._spec, type(shard), shard.shape, shard.stride(), shard.dtype, shard.device


def placed_like(example: Any) -> Callable[[Tensor], Tensor | None]:
    """A function that makes a DTensor from a shard, with the mesh, placements and metadata of an example.

    It returns None if the shape, layout or dtype of the shard differs from the example's.
    """
    spec, shard = example._spec, example._local_tensor
    shape, stride, dtype = shard.shape, shard.stride(), shard.dtype
    make: Any = DTensor.__new__  # `__init__` does nothing, but costs two frames

    def place(shard: Tensor) -> Tensor | None:
        if shard.shape != shape or shard.stride() != stride or shard.dtype != dtype:
            return None
        placed: Tensor = make(DTensor, shard, spec, requires_grad=False)
        return placed

    return place


def observe_shards(
    see: Callable[[Operation], Any], see_placed: Callable[[Operation], Any] | None = None
) -> AbstractContextManager[Any]:
    """Context in which `see` runs each operation on plain tensors, including those on shards.

    A composite operation is seen as the operations that it is made of, since DTensor splits some of them.

    Args:
        see: Runs an operation, and returns its results.
        see_placed: Runs an operation on DTensors; its operations on shards are passed to `see`.
    """

    class Watch(TorchDispatchMode):
        passes: Any = None
        """The operation on DTensors that `see_placed` runs, and that is left to DTensor."""

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}

            def run() -> Any:
                return operator(*args, **kwargs)

            def place() -> Any:
                self.passes = operator
                with self:
                    return run()

            if any(issubclass(kind, DTensor) for kind in types):
                if see_placed is None or self.passes is operator:
                    self.passes = None
                    return NotImplemented  # DTensor runs it, and its operations on shards arrive here
                return see_placed(Operation(operator, args, kwargs, *_effects(operator, args, kwargs), place))
            if operator.namespace == "prim":  # a query, not a computation
                return run()
            with self:
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            return see(Operation(operator, args, kwargs, *_effects(operator, args, kwargs), run))

    watch: AbstractContextManager[Any] = Watch()  # type: ignore[no-untyped-call]
    return watch


def _effects(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation writes into, and the tensors of which its results are views."""
    written: list[Tensor] = []
    viewed: list[Tensor] = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            (written if argument.alias_info.is_write else viewed).extend(tensors_in([value]))
    return written, viewed


def self_test() -> None:
    """The setting exists and is restored, and operations on plain tensors are seen, split into parts."""
    before = replicates_implicitly()
    with implicit_replication():
        assert replicates_implicitly()
        with implicit_replication():
            assert replicates_implicitly()
        assert replicates_implicitly(), "an inner region ended an outer region"
    assert replicates_implicitly() is before
    for name in ("_local_tensor", "_spec"):
        assert name in DTensor.__slots__ or name in DTensor.__annotations__, name
    seen: list[str] = []

    def see(operation: Operation) -> Any:
        assert all(each is x for each in (*operation.written, *operation.viewed))
        seen.append(f"{operation.operator} {len(operation.written)} {len(operation.viewed)}")
        return operation.run()

    with torch.no_grad(), FakeTensorMode() as mode:
        x, y = (mode.from_tensor(torch.ones(*shape)) for shape in ((2, 3), (3, 2)))
        with observe_shards(see):
            x.matmul(y).sum()
            x.mul_(2)
            x.select(0, 0)
    assert seen == [
        "aten.mm.default 0 0",
        "aten.sum.default 0 0",
        "aten.mul_.Tensor 1 0",
        "aten.select.int 0 1",
    ], str(seen)
