"""What a node keeps: tensors by autograd, so that hooks see them; the rest beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.result_flattening import ResultFlattening


@dataclass(frozen=True)
class Kept:
    """A recipe for values kept by name.

    Args:
        items: For each name whether it is a list, and its items: the place of a saved tensor, or a value in
            a tuple of one.
    """

    items: tuple[tuple[str, bool, tuple[int | tuple[Any], ...]], ...]

    def load(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The values by name, with the saved tensors in their places."""
        loaded: dict[str, Any] = {}
        for name, is_list, items in self.items:
            values = [item[0] if isinstance(item, tuple) else tensors[item] for item in items]
            loaded[name] = values if is_list else values[0]
        return loaded


def keep(
    save: Callable[..., None],
    names: Sequence[str],
    flattening: Flattening,
    flat: Sequence[Any],
    results: Sequence[Any],
    lying: ResultFlattening,
) -> Kept:
    """Keep arguments and results by name: tensors go to `save`, which is a method of an autograd context.

    Args:
        save: Takes the tensors.
        names: What to keep.
        flattening: How the arguments lie in flat form.
        flat: The flat arguments.
        results: The flat results.
        lying: How the results lie in flat form.
    """
    tensors: list[Tensor] = []
    items: list[tuple[str, bool, tuple[int | tuple[Any], ...]]] = []
    for name in names:
        is_result = name in lying.spans
        values = results[lying.spans[name]] if is_result else flat[flattening.spans[name]]
        kept: list[int | tuple[Any]] = []
        for value in values:
            if isinstance(value, Tensor):
                kept.append(len(tensors))
                tensors.append(value)
            else:
                kept.append((value,))
        is_list = lying.is_list(name) if is_result else flattening.is_list(name)
        items.append((name, is_list, tuple(kept)))
    save(*tensors)
    return Kept(tuple(items))
