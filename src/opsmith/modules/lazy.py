"""Modules that learn a size from their first call: built on torch's `LazyModuleMixin`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from opsmith import errors
from opsmith.modules.operator_module import OperatorModule, new, shape_of
from opsmith.modules.plan import Owned


class LearnsSizes(LazyModuleMixin):
    """What a lazy twin of a class does otherwise, until it has seen a call; then it becomes that class."""

    def _learns(self, name: str) -> bool:
        """Whether a size may be None."""
        this: Any = self
        return name in this.plan.learnt

    def _new(self, owned: Owned, device: Any, dtype: torch.dtype | None) -> Tensor:
        """A tensor that has no shape yet, where a size of its shape is not known."""
        this: Any = self
        if all(getattr(this, name) is not None for each in owned.shape for name in each.names):
            return new(this, owned, device, dtype)
        kind: Any = UninitializedBuffer if owned.buffer else UninitializedParameter
        unknown: Tensor = kind(device=device, dtype=dtype)
        return unknown

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Learn sizes from the arguments of a call, and make what could not be made before."""
        this: Any = self
        plan = this.plan
        specification = plan.operator.specification
        given = inspect.signature(this.forward).bind(*args, **kwargs).arguments
        values = [given.get(name, getattr(this, name, None)) for name in specification.schema.names]
        values = [None if isinstance(value, Tensor) and is_lazy(value) else value for value in values]
        sizes, _ = specification.shapes.bind(specification.schema, values)
        for letter, name in plan.letters.items():
            if getattr(this, name) is None and sizes.get(letter) is not None:
                setattr(this, name, int(sizes[letter]))
        unknown = [name for name in plan.sizes if getattr(this, name) is None]
        if unknown:
            raise errors.SizeError(
                f"`{unknown[0]}` does not follow from this call",
                operator=f"{plan.name} ({plan.operator.name})",
                argument=unknown[0],
                expected=f"a call with tensors of `{specification.shapes.text}`",
                where=plan.where,
                hint=f"give `{unknown[0]}` when the module is made",
            )
        lazy = [each for each in plan.owned if is_lazy(getattr(this, each.name))]
        for each in lazy:
            getattr(this, each.name).materialize(shape_of(this, each))
        if lazy:
            this.reset_parameters()

    def __reduce_ex__(self, protocol: Any) -> Any:
        this: Any = self
        raise errors.ModulePicklingError(
            "its parameters have no shape yet, and a pickle of such a one forgets its dtype and device",
            operator=f"{this.plan.name} ({this.plan.operator.name})",
            where=this.plan.where,
            hint="call it once before it is pickled",
        )


def lazy_twin(kind: type[OperatorModule[Any]]) -> type[nn.Module]:
    """The class of what `kind(None, ...)` makes."""
    members = {
        "__module__": kind.__module__,
        "__qualname__": f"{kind.__qualname__}.Lazy",
        "__doc__": f"A `{kind.__name__}` before its first call, which tells it its sizes.",
        "cls_to_become": kind,
    }
    return type(f"Lazy{kind.__name__}", (LearnsSizes, kind), members)
