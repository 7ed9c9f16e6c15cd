"""The handle of an adopted class: it is called as `apply` is, and returns what `apply` returns."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.core.adopted import Adopted, Outputs
from opsmith.core.operator import Operator


class AdoptedOperator(Operator[..., Any]):
    """An operator that stands for a Function class."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator."""
        adopted = self._specification.adopted
        if adopted is None:
            return super().__call__(*args, **kwargs)
        if adopted.variadic:
            args = _gathered(adopted, args)
        results = super().__call__(*args, **kwargs)
        if not isinstance(adopted.outputs, tuple):
            return results
        return _structured(adopted.outputs, results if isinstance(results, tuple) else (results,))

    @property
    def function_class(self) -> type[torch.autograd.Function] | None:
        """The class; None once the operator was declared anew as another one."""
        adopted = self._specification.adopted
        return None if adopted is None else adopted.function_class


def _gathered(adopted: Adopted, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments with those that `*args` took in a list, if they do not come in one."""
    fixed = len(adopted.schema.arguments) - 1
    if len(args) == fixed + 1 and isinstance(args[fixed], list | tuple):
        return args
    return (*args[:fixed], list(args[fixed:])) if len(args) >= fixed else args


def _structured(outputs: Outputs, results: tuple[Any, ...]) -> Any:
    if isinstance(outputs, tuple):
        return tuple(_structured(inner, results) for inner in outputs)
    return None if outputs is None else results[outputs]
