"""Source of arguments, with the tensors of lists one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opsmith.core.argument_types import ArgumentType
from opsmith.core.schema import Schema


def item_names(schema: Schema, lengths: Mapping[str, int]) -> dict[str, list[str]]:
    """Names in a source for the tensors of each argument, of which a list has several.

    Args:
        schema: The operator's signature.
        lengths: The lengths of lists of tensors.
    """
    return {
        name: [f"_op_item_{name}_{at}" for at in range(lengths[name])] if name in lengths else [name]
        for name in schema.names
    }


def sequence_source(kind: ArgumentType, items: Iterable[str]) -> str:
    """Source of a new list or tuple, as an argument of this kind is annotated, of items."""
    listed = "".join(f"{item}, " for item in items)
    return f"({listed})" if kind.as_tuple else f"[{listed}]"


def make_lists(names: Iterable[str], items: Mapping[str, Sequence[str]]) -> str:
    """Source of lists of tensors, as formulas get them, from their items."""
    return "; ".join(f"{name} = [{', '.join(items[name])}]" for name in names)


def to_kernel_source(schema: Schema, items: Mapping[str, Sequence[str]]) -> str:
    """Source of the arguments of a kernel, which gets lists of its own."""
    return ", ".join(
        (f"{each.name}=" if each.keyword_only else "")
        + (sequence_source(each.kind, items[each.name]) if _is_list(each.kind) else each.name)
        for each in schema.arguments
    )


def _is_list(kind: ArgumentType) -> bool:
    return kind.is_tensor and kind.sequence
