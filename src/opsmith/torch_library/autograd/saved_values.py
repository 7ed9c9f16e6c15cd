"""Values that an autograd node saves by name for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.torch_library.flattening import Flattening, ResultFlattening


@dataclass(frozen=True)
class SavedValues:
    """Description of values saved by name.

    Args:
        items: For each name, True for a list, and its items: the index of a saved tensor, or a 1-tuple with a
                value.
    """

    items: tuple[tuple[str, bool, tuple[int | tuple[Any], ...]], ...]

    def load(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Restore the values by name from the saved tensors."""
        loaded: dict[str, Any] = {}
        for name, is_list, items in self.items:
            values = [item[0] if isinstance(item, tuple) else tensors[item] for item in items]
            loaded[name] = values if is_list else values[0]
        return loaded

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the saved tensors, in order: `x`, or `xs[0]`."""
        return tuple(
            f"{name}[{position}]" if is_list else name
            for name, is_list, items in self.items
            for position, item in enumerate(items)
            if isinstance(item, int)
        )


def save_values(
    names: Sequence[str],
    flattening: Flattening,
    flat: Sequence[Any],
    results: Sequence[Any],
    result_flattening: ResultFlattening,
) -> tuple[tuple[Tensor, ...], SavedValues]:
    """Return the tensors among some arguments and results, and the form for loading them again.

    Args:
        names: Names of the values to save.
        flattening: Flat form of the arguments.
        flat: The flat arguments.
        results: The flat results.
        result_flattening: Flat form of the results.
    """
    tensors: list[Tensor] = []
    items: list[tuple[str, bool, tuple[int | tuple[Any], ...]]] = []
    for name in names:
        is_result = name in result_flattening.spans
        values = results[result_flattening.spans[name]] if is_result else flat[flattening.spans[name]]
        kept: list[int | tuple[Any]] = []
        for value in values:
            if isinstance(value, Tensor):
                kept.append(len(tensors))
                tensors.append(value)
            else:
                kept.append((value,))
        is_list = result_flattening.is_list(name) if is_result else flattening.is_list(name)
        items.append((name, is_list, tuple(kept)))
    return tuple(tensors), SavedValues(tuple(items))
