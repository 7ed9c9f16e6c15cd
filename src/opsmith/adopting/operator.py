"""The handle of an adopted class: it is called as `apply` is, and returns what `apply` returns."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.core.operator import Operator


class AdoptedOperator(Operator[..., Any]):
    """An operator that stands for a Function class."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator."""
        adopted = self._specification.adopted
        if adopted is None:
            return super().__call__(*args, **kwargs)
        args, kwargs = adopted.completed(args, kwargs)
        results = super().__call__(*args, **kwargs)
        return adopted.structured(results if isinstance(results, tuple) else (results,))

    def _from_door(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return AdoptedOperator.__call__(self, *args, **kwargs)

    def _call_mend(self) -> str:
        call = self._specification.schema.call_text(self._specification.short_name)
        say = '`adopt(..., signature="(x: Tensor, n: int) -> Tensor")`'
        return f"call it as {call}; if its types are others, say so: {say}"

    @property
    def function_class(self) -> type[torch.autograd.Function] | None:
        """The class; None once the operator was declared anew as another one."""
        adopted = self._specification.adopted
        return None if adopted is None else adopted.function_class
