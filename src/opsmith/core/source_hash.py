"""Source hash: identifies the behaviour of functions by their code and everything that the code reaches.

torch caches compiled code on disk by the names of operators, so it would not notice an edited formula. This
hash is part of the cache's key. It follows code, constants, defaults, closures, and the globals and
attributes that the code names. An installed library adds its name and version. A value that cannot be
followed adds a random number of this process, so that stale code is never found.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import hashlib
import sys
import types
import typing
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.core.reachable import Step, is_library, is_wrapper, uses
from opsmith.core.specification import Specification

Seen = dict[int, tuple[int, Any]]  # keeps each value alive, so that its id is not used again

_PROCESS = uuid.uuid4().hex
_BY_REPR = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.EllipsisType,
    types.UnionType,
    typing.ForwardRef,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    range,
    slice,
)


_PLACE = "where it is declared: the same text elsewhere does the same"
_CHECKED = "only a check reads it, no call"
NOT_IN_THE_KEY: dict[str, dict[str, str]] = {
    "Specification": {
        **dict.fromkeys(("module", "qualname", "where"), _PLACE),
        **dict.fromkeys(("samples", "accept"), _CHECKED),
        "flops": "only a counter reads it, no compiled code",
    },
    "AdoptedFunction": {
        "facts": "runs of the class show it, and the code of the class is in the key",
        "provenance": "the other fields are made of it, and it holds samples",
    },
}
"""Fields of our dataclasses that are not in the key of compiled code, by class, each with the reason. All
other fields are in the key; a new field is added automatically."""


def operator_hash(specification: Specification) -> str:
    """Hash the whole specification of an operator, except `NOT_IN_THE_KEY`."""
    return source_hash(specification)


def source_hash(*things: Any) -> str:
    """Hash functions and values, with everything that they reach.

    Example:
        >>> def scaled_by(factor):
        ...     return lambda x: x * factor
        >>> twice, thrice = source_hash(scaled_by(2)), source_hash(scaled_by(3))
        >>> twice == source_hash(scaled_by(2)), twice == thrice
        (True, False)
    """
    digest = hashlib.sha256()
    seen: Seen = {}
    for piece in _pieces(things, seen):
        digest.update(piece.encode())
        digest.update(b"\x00")
    return digest.hexdigest()


def _pieces(thing: Any, seen: Seen) -> Iterator[str]:
    """Yield the text of a value; for a value that was met before, its number."""
    if isinstance(thing, _BY_REPR):
        yield f"{type(thing).__name__}:{thing!r}"
        return
    if id(thing) in seen:
        yield f"again:{seen[id(thing)][0]}"
        return
    seen[id(thing)] = len(seen), thing
    for matches, follow in _FOLLOW:
        if matches(thing):
            yield type(thing).__name__
            yield from follow(thing, seen)
            return
    yield f"opaque:{type(thing).__module__}.{type(thing).__qualname__}:{_PROCESS}"


def _uses(thing: Any, seen: Seen, steps: Collection[Step]) -> Iterator[str]:
    """Yield the text of the values that a function, class or wrapper uses."""
    for each in uses(thing):
        if each.step in steps:
            yield f"{each.step.name}:{each.name}"
            yield from _pieces(each.value, seen)


def _function(function: Any, seen: Seen) -> Iterator[str]:
    if is_library(function.__module__):
        yield _library_name(function)
    else:
        yield from _pieces(function.__code__, seen)
    steps = (Step.CLOSURE, Step.DEFAULT, Step.GLOBAL, Step.MODULE_MEMBER, Step.WRAPPED)
    yield from _uses(function, seen, steps)


def _code(code: types.CodeType, seen: Seen) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount))
    for constant in code.co_consts:
        yield from _pieces(constant, seen)


def _is_library_wrapper(thing: Any) -> bool:
    """True for a method, a partial, a property or a cache; a user's own wrapper may have more state."""
    return is_library(type(thing).__module__) and is_wrapper(thing)


def _library_name(thing: Any) -> str:
    module = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", "")
    top = sys.modules.get(str(module).partition(".")[0])
    version = getattr(top, "__version__", "")
    return f"{module}:{getattr(thing, '__qualname__', '')}:{version}"


def _class(kind: type, seen: Seen) -> Iterator[str]:
    yield _library_name(kind)
    yield from _uses(kind, seen, (Step.ATTRIBUTE, Step.BASE))


def _callable(thing: Any, seen: Seen) -> Iterator[str]:
    """Yield the name of a callable of an installed library, such as `torch.ops.aten.mul`, if it has one."""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    yield f"{_library_name(thing)}:{name or _PROCESS}"


def _tensor(tensor: torch.Tensor, seen: Seen) -> Iterator[str]:
    yield repr((tensor.dtype, tuple(tensor.shape), tensor.device.type))
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        yield repr(tensor.detach().cpu().tolist())
        return
    # Memory is read without torch: during tracing, an operation on the tensor would be traced, too.
    storage = tensor.untyped_storage()
    held = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    yield repr((tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()))
    yield hashlib.sha256(held).hexdigest()


def _items(things: Any, seen: Seen) -> Iterator[str]:
    yield str(len(things))
    for thing in things:
        yield from _pieces(thing, seen)


def _unordered(things: Any, seen: Seen) -> Iterator[str]:
    yield from sorted("|".join(_pieces(thing, dict(seen))) for thing in things)


def _mapping(things: Any, seen: Seen) -> Iterator[str]:
    for key, value in things.items():
        yield from _pieces(key, seen)
        yield from _pieces(value, seen)


def _attributes(*names: str) -> Callable[[Any, Seen], Iterator[str]]:
    def follow(thing: Any, seen: Seen) -> Iterator[str]:
        for name in names:
            yield from _pieces(getattr(thing, name), seen)

    return follow


def _dataclass(thing: Any, seen: Seen) -> Iterator[str]:
    yield from _class(type(thing), seen)
    left_out = NOT_IN_THE_KEY.get(type(thing).__name__, {}) if is_library(type(thing).__module__) else {}
    for field in dataclasses.fields(thing):
        if field.name not in left_out:
            yield field.name
            yield from _pieces(getattr(thing, field.name), seen)


_FOLLOW: list[tuple[Callable[[Any], bool], Callable[[Any, Seen], Iterator[str]]]] = [
    (lambda thing: isinstance(thing, types.FunctionType), _function),
    (lambda thing: isinstance(thing, types.CodeType), _code),
    (_is_library_wrapper, lambda thing, seen: _uses(thing, seen, (Step.WRAPPED,))),
    (
        lambda thing: isinstance(thing, Operator),
        lambda thing, seen: _pieces(thing.specification, seen),
    ),
    (
        lambda thing: isinstance(thing, BuiltKernel),
        lambda thing, seen: _pieces(thing.sources(), seen),
    ),
    (lambda thing: isinstance(thing, types.ModuleType), lambda thing, seen: iter([_library_name(thing)])),
    (lambda thing: isinstance(thing, enum.Enum), _attributes("name", "value")),
    (lambda thing: isinstance(thing, type), _class),
    (lambda thing: isinstance(thing, tuple | list), _items),
    (lambda thing: isinstance(thing, set | frozenset), _unordered),
    (lambda thing: isinstance(thing, dict | types.MappingProxyType), _mapping),
    (lambda thing: isinstance(thing, torch.Tensor), _tensor),
    (lambda thing: dataclasses.is_dataclass(thing) and not isinstance(thing, type), _dataclass),
    (lambda thing: callable(thing) and is_library(type(thing).__module__), _callable),
    (
        lambda thing: isinstance(thing, types.MemberDescriptorType | types.GetSetDescriptorType),
        lambda thing, seen: iter([str(thing)]),
    ),
    (  # a field of a named tuple: its position and its text
        lambda thing: type(thing).__name__ == "_tuplegetter",
        lambda thing, seen: iter([repr(thing.__reduce__()[1])]),
    ),
]
