"""Floating-point operations of an operator, for `torch.utils.flop_counter`.

torch silently counts zero for an operator without a formula. So each operator gets a formula when it is
registered: the author's, or one that counts the operations of the reference on `meta` tensors. A backward
needs none: its formulas are torch operations and operators, which are counted as they run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType
from typing import Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import shown
from opsmith.core.location import where
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors, on_meta

Flops = Callable[..., int]
"""The author's formula: takes the operator's arguments, with `meta` tensors for tensors."""


def register_flops(packet: Any, specification: Callable[[], Specification]) -> None:
    """Make `FlopCounterMode` count an operator, until `unregister_flops` is called.

    Args:
        packet: The operator, `torch.ops.namespace.name`.
        specification: Returns the current specification.
    """

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        described = specification()
        values = map_tensors(on_meta, described.schema.received(args, kwargs))
        formula = described.flops
        return _derived(described, values) if formula is None else _given(described, formula, values)

    _counts[packet] = flops
    if _COUNTER in sys.modules:
        import_module(_COUNTER)  # another thread may be importing it
        _hand_over()
    elif not any(isinstance(each, _WhenImported) for each in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def unregister_flops(packet: Any) -> None:
    """Remove the count of an operator that is removed or registered again."""
    if _counts.pop(packet, None) is None and _COUNTER in sys.modules:
        sys.modules[_COUNTER].flop_registry.pop(packet, None)


_COUNTER = "torch.utils.flop_counter"
"""torch's module, which imports Triton: too slow for a program that counts nothing."""
_counts: dict[Any, Callable[..., int]] = {}
"""Counts to be registered when torch's module is imported."""


def _hand_over() -> None:
    register: Any = sys.modules[_COUNTER].register_flop_formula
    while _counts:
        packet, flops = _counts.popitem()
        register(packet, get_raw=True)(flops)


class _WhenImported(MetaPathFinder):
    """Finder that registers the counts once torch's module is imported."""

    def __init__(self) -> None:
        self._searching: set[int] = set()

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of torch's module, whose loader registers the counts; None for other modules."""
        thread = get_ident()
        if name != _COUNTER or thread in self._searching:
            return None
        self._searching.add(thread)
        try:
            spec = find_spec(name)
        finally:
            self._searching.remove(thread)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _hand_over()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _given(specification: Specification, formula: Flops, values: list[Any]) -> int:
    args, kwargs = specification.schema.split(values)
    count: Any = formula(*args, **kwargs)
    if isinstance(count, bool) or not isinstance(count, int | torch.SymInt):
        raise specification.error(
            errors.UsageError,
            "the number of floating-point operations must be a whole number",
            expected="int",
            got=shown(count),
            where=where(formula),
            hint="return an int, computed from shapes: `2 * x.numel()`; use `//` instead of `/`",
        )
    return count  # type: ignore[return-value]  # torch adds symbols like numbers


def _derived(specification: Specification, values: list[Any]) -> int:
    hint = "write `@op.flops` over a function that takes the operator's arguments and returns an int"
    if specification.opaque:
        raise specification.error(
            errors.TransformError,
            "it is opaque, so its floating-point operations cannot be counted",
            hint=hint,
        )
    from torch.utils.flop_counter import FlopCounterMode

    args, kwargs = specification.schema.split(values)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), torch.device("meta"), counter:
            specification.reference(*args, **kwargs)
    except errors.OpsmithError:
        raise
    except Exception as error:
        raise specification.error(
            errors.TransformError,
            "its floating-point operations are counted on `meta` tensors, but its reference does not run "
            f"on them: {error}",
            hint=hint,
        ) from error
    return counter.get_total_flops()
