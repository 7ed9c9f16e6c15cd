"""Limits of an in-place call: no write into a leaf with a gradient, or into elements shared by arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors, named_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.dtensor.placements import local_shard


def written_tensors(specification: Specification, values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a call writes into, each with the name of its argument."""
    named = zip(specification.schema.names, _written_values(specification, values), strict=True)
    return named_tensors(dict(named), label=label_of)


def _written_values(specification: Specification, values: Sequence[Any]) -> list[Any]:
    """Return argument values, with None in place of the arguments that a call only reads."""
    pairs = zip(specification.schema.arguments, values, strict=True)
    return [value if argument.alias else None for argument, value in pairs]


def label_of(name: str, key: Any) -> str:
    """The name of an item of an argument, such as `caches[0]`."""
    return f"{name}[{key}]" if name else key


@contextmanager
def raising_versions(written: Sequence[Tensor]) -> Iterator[None]:
    """Context that raises the versions of the tensors that a kernel writes into without torch."""
    before = [capabilities.version(tensor) for tensor in written]
    yield
    for tensor, count in zip(written, before, strict=True):
        if count is not None and capabilities.version(tensor) == count:
            torch.autograd.graph.increment_version(tensor)


def refuse_leaves(specification: Specification, values: Sequence[Any]) -> None:
    """Refuse to write into a leaf that requires a gradient, or into a view of a leaf, as torch does.

    Raises:
        MutationError: With the name of the argument.
    """
    for name, tensor in written_tensors(specification, values):
        viewed = capabilities.viewed(tensor)
        base = tensor if viewed is None else viewed
        if base.is_leaf and base.requires_grad:
            raise specification.error(
                errors.MutationError,
                f"`{name}` is {'a leaf' if base is tensor else 'a view of a leaf'} that requires a gradient",
                argument=name,
                expected="a tensor that requires no gradient, or that an operation has computed",
                hint=f"call it under `torch.no_grad()`, or on `{name}.clone()`",
            )


def goes_on_from_a_write(tensor: Tensor) -> bool:
    """Return True if the history of a tensor continues from the node that writes it.

    The history of a view continues in its base, and a leaf that requires a gradient must not be written.
    """
    return capabilities.viewed(tensor) is None and not (tensor.is_leaf and tensor.requires_grad)


def refuse_unwritable(specification: Specification, values: Sequence[Any]) -> None:
    """Refuse to write into tensors that cannot be written, or whose elements share memory.

    Raises:
        MutationError: If a tensor is an inference tensor outside inference mode, is expanded, or is a negated
            or conjugate view; or if its strides show that it shares elements with another argument.
    """
    values = map_tensors(local_shard, values)  # the part of a DTensor that is written
    inference_mode = torch.is_inference_mode_enabled()
    # Names are made only for errors: lists may be long, such as an optimizer's.
    for position, tensor in enumerate(tensors_in(_written_values(specification, values))):
        if (tensor.is_inference() and not inference_mode) or not owns_its_elements(tensor):
            name = list(written_tensors(specification, values))[position][0]
            raise _unwritable(specification, name, tensor)
    if not capabilities.recording():
        _refuse_shared_elements(specification, values)


def owns_its_elements(tensor: Tensor) -> bool:
    """Return True if each element of a tensor has its own memory, which contains its number."""
    if tensor.is_neg() or tensor.is_conj():
        return False
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    if not _known_extent(tensor):
        return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not _meets_itself(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)
def _meets_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if several elements of a tensor share one place in memory."""
    steps = [(stride, size - 1) for size, stride in zip(shape, strides, strict=True) if size > 1]
    for at, (size, limit) in enumerate(steps):
        others = [*steps[:at], *steps[at + 1 :]]
        back = sum(each * most for each, most in others)
        # Two elements some steps apart in one dimension coincide if steps back in the others undo this.
        if _reach((*((each, 2 * most) for each, most in others), (size, limit - 1)), back - size):
            return True
    return False


def _unwritable(specification: Specification, name: str, tensor: Tensor) -> errors.OpsmithError:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return specification.error(
            errors.MutationError,
            f"`{name}` was made in inference mode, and is written outside of it",
            argument=name,
            expected="a tensor that may be written here",
            hint=f"call it under `torch.inference_mode()`, or on `{name}.clone()`",
        )
    if tensor.is_neg() or tensor.is_conj():
        return specification.error(
            errors.MutationError,
            f"`{name}` is a {'negated' if tensor.is_neg() else 'conjugate'} view",
            argument=name,
            expected="a tensor whose memory holds its own numbers",
            hint=f"call it on `{name}.clone()`, and copy the result back",
        )
    return specification.error(
        errors.MutationError,
        f"several elements of `{name}` share the same memory",
        argument=name,
        expected="a tensor that is not expanded",
        got=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
        hint=f"call it on `{name}.clone()`",
    )


def _refuse_shared_elements(specification: Specification, values: Sequence[Any]) -> None:
    storages = [capabilities.storage_of(tensor) for tensor in tensors_in(list(values))]
    if len({id(storage) for storage in storages}) == len(storages):
        return
    every = list(named_tensors(dict(zip(specification.schema.names, values, strict=True)), label=label_of))
    # Only tensors with the same storage are compared.
    grouped: dict[int, list[tuple[str, Tensor]]] = {}
    places = {}
    for (name, tensor), storage in zip(every, storages, strict=True):
        places[name] = id(storage)
        grouped.setdefault(id(storage), []).append((name, tensor))
    written = dict(written_tensors(specification, values))
    for name, tensor in written.items():
        for label, other in grouped[places[name]]:
            if label != name and shares_elements(tensor, other):
                raise specification.error(
                    errors.MutationError,
                    f"the written `{name}` shares elements with `{label}`",
                    argument=label,
                    expected="tensors that share no element",
                    hint=f"call it with `{label}.clone()`{', and copy the result back' * (label in written)}",
                )


def shares_elements(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are known to share elements; `kv.unbind(1)` only interleaves them.

    Tensors of a trace with symbolic sizes count as separate.
    """
    if not (_known_extent(one) and _known_extent(other)):
        return False
    if not capabilities.shares_memory(one, other) or not (one.numel() and other.numel()):
        return False
    # The distance must be the sum of steps forward in one tensor and back in the other.
    steps, others = _steps(one), _steps(other)
    end = _begin(other) + sum(size * limit for size, limit in others)
    return _reach((*steps, *others), end - _begin(one))


def _known_extent(tensor: Tensor) -> bool:
    """Return True if sizes, strides and offset are numbers: symbols would add conditions to a trace."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(isinstance(number, int) for number in numbers)


def _begin(tensor: Tensor) -> int:
    """Return the offset of a tensor in its storage, in bytes: fake tensors have no address."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _steps(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the steps through a non-empty tensor: the size in bytes and the maximum number of each step."""
    item = tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (*((stride * item, size - 1) for size, stride in pairs), (1, item - 1))


@lru_cache(maxsize=4096)
def _reach(steps: tuple[tuple[int, int], ...], distance: int) -> bool:
    """Return True if steps of these sizes, with these maximum numbers, can add up to a distance."""
    limits: Counter[int] = Counter()
    for size, limit in steps:
        limits[size] += limit
    return _reach_by([(size, limits[size]) for size in sorted(limits, reverse=True) if size], distance)


def _reach_by(steps: list[tuple[int, int]], distance: int) -> bool:
    """Return True if steps of these sizes, the largest first, can add up to a distance."""
    if not steps:
        return distance == 0
    (size, limit), *rest = steps
    least = max(0, -((sum(size * limit for size, limit in rest) - distance) // size))
    counts = range(min(limit, distance // size), least - 1, -1)
    return any(_reach_by(rest, distance - size * count) for count in counts)
