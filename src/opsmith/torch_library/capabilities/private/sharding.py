"""DTensor: plain tensors among its own, and the operations on shards below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


def replicates_implicitly() -> bool:
    """Return True if the caller requested that DTensor treat plain tensors as replicated."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Context in which DTensor treats plain tensors as replicated; torch's own ends an outer one."""
    before = DTensor._op_dispatcher._allow_implicit_replication
    DTensor._op_dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        DTensor._op_dispatcher._allow_implicit_replication = before


def observe_shards(see: Callable[[Any, Any, Any, Callable[[], Any]], Any]) -> AbstractContextManager[Any]:
    """Context in which `see` runs each operation on plain tensors, including those on shards.

    An operation that is made of others is seen as those, since DTensor takes some of them apart.

    Args:
        see: Takes the operator, its arguments, its keyword arguments and what runs it; returns the result.

    Raises:
        NotImplementedError: By an operation that writes into a tensor.
    """

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor runs it, and its operations on shards come here
            kwargs = kwargs or {}
            if operator.namespace == "prim":  # a query, not a computation
                return operator(*args, **kwargs)
            if operator._schema.is_mutable:
                raise NotImplementedError(f"{operator} writes into a tensor")
            with self:
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            return see(operator, args, kwargs, lambda: operator(*args, **kwargs))

    watch: AbstractContextManager[Any] = Watch()  # type: ignore[no-untyped-call]
    return watch


def self_test() -> None:
    """The setting is there and is restored, and operations on plain tensors are seen, taken apart."""
    before = replicates_implicitly()
    with implicit_replication():
        assert replicates_implicitly()
        with implicit_replication():
            assert replicates_implicitly()
        assert replicates_implicitly(), "an inner region ended an outer one"
    assert replicates_implicitly() is before
    seen: list[str] = []

    def see(operator: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        seen.append(str(operator))
        return run()

    with torch.no_grad(), FakeTensorMode() as mode:
        x, y = (mode.from_tensor(torch.ones(*shape)) for shape in ((2, 3), (3, 2)))
        with observe_shards(see):
            x.matmul(y).sum()
    assert seen == ["aten.mm.default", "aten.sum.default"], str(seen)
