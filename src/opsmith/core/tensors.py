"""Tensors in nested values: found with their names, replaced, tiled to other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def subscript(name: str, key: Any) -> str:
    """The name of an item as Python writes it; an item of an unnamed value has no name."""
    return f"{name}[{key!r}]" if name else ""


def named_tensors(
    value: Any, name: str = "", label: Callable[[str, Any], str] = subscript
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested tuples, lists and mappings, with its name.

    Args:
        value: A tensor, a container, or any other value, which contains no tensor.
        name: The name of the value.
        label: The name of an item, from the name of its container and its key or position.

    Example:
        >>> [name for name, _ in named_tensors([torch.ones(1), {"a": torch.ones(1), "n": 2}], "y")]
        ['y[0]', "y[1]['a']"]
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_tensors(each, label(name, key), label)
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from named_tensors(each, label(name, position), label)


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    return (tensor for _, tensor in named_tensors(value))


def sequence_like(sequence: Sequence[Any], items: Iterable[Any]) -> Any:
    """Return a sequence of the same type, which may be a named tuple, with these items.

    Example:
        >>> from typing import NamedTuple
        >>> Size = NamedTuple("Size", [("height", int), ("width", int)])
        >>> sequence_like(Size(1, 2), [3, 4]), sequence_like([1, 2], (3, 4))
        (Size(height=3, width=4), [3, 4])
    """
    kind: Any = type(sequence)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def replace_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """The value with its tensors replaced, in the order of `named_tensors`; unchanged if it has none."""
    if isinstance(value, Tensor):
        return next(tensors)
    if next(nested_tensors(value), None) is None:
        return value
    if isinstance(value, Mapping):
        items = {key: replace_tensors(each, tensors) for key, each in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return sequence_like(value, [replace_tensors(each, tensors) for each in value])
    return value


def map_tensors(function: Callable[[Tensor], Tensor], values: Iterable[Any]) -> list[Any]:
    """Return argument values with a function applied to each tensor, including tensors in lists and tuples.

    Example:
        >>> map_tensors(torch.neg, [torch.ones(1), [torch.zeros(1), None], 2])
        [tensor([-1.]), [tensor([-0.]), None], 2]
    """
    return [_mapped(function, value) for value in values]


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    holds_tensors = isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)
    return sequence_like(value, map_tensors(function, value)) if holds_tensors else value


def resolved(values: Iterable[Any]) -> list[Any]:
    """Resolve the conjugate and negated views of argument values, as the dispatcher does for kernels.

    Example:
        >>> resolved([torch.ones(1, dtype=torch.complex64).conj()])[0].is_conj()
        False
    """
    return map_tensors(lambda tensor: tensor.resolve_conj().resolve_neg(), values)


def tiled(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """The tensor with new sizes along some axes: its entries are repeated from the first, or cut off.

    Example:
        >>> tiled(torch.tensor([1, 2, 3]), {0: 5})
        tensor([1, 2, 3, 1, 2])
    """
    for axis, size in sizes.items():
        if tensor.shape[axis] != size:
            index = torch.arange(size, device=tensor.device) % tensor.shape[axis]
            tensor = tensor.index_select(axis, index)
    return tensor


def on_meta(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without data, of the same shape and strides; of the same dtype unless one is given."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
