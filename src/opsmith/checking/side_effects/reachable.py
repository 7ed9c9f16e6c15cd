"""Values that the functions of an operator reach without taking them as arguments, and where each is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import ModuleType
from typing import Any

from torch import Tensor

from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula
from opsmith.core.reachable import CONTAINERS, Reached, Step, uses
from opsmith.torch_library import capabilities

MOST = 2000
"""Largest number of reported values; an operator that reaches more is an application."""


def roots(subject: Subject) -> list[Any]:
    """List the functions and classes that make up an operator."""
    specification = subject.specification
    if specification.adopted is not None:
        found: list[Any] = [specification.adopted.function_class, specification.adopted.reference]
    elif subject.kind.in_library:
        own = specification.library_operator
        parts = capabilities.custom_parts(own.overload) if own is not None else None
        found = [] if parts is None else [parts.function, parts.backward, parts.setup_context, parts.fake]
    else:
        found = [specification.reference, specification.fake]
    found += [kernel.function for kernel in specification.kernels]
    found += [rule.function for rule in specification.gradients.rules.values() if isinstance(rule, Formula)]
    return [each for each in found if each is not None]


def reachable_values(subject: Subject) -> list[Reached]:
    """List the values that an operator's functions reach under a name, each object once."""
    found: list[Reached] = []
    seen: dict[int, Any] = {}
    left = deque(Reached("", root) for root in roots(subject))
    while left and len(found) < MOST:
        each = left.popleft()
        if not _is_plain(each.value) and id(each.value) in seen:
            continue
        seen[id(each.value)] = each.value
        if each.path and not isinstance(each.value, ModuleType):
            found.append(each)
        left.extend(inner for inner in islice(uses(each.value), MOST) if _is_followed(inner))
    return found


def _is_followed(each: Reached) -> bool:
    """False for special methods of classes, and for items of containers that lead nowhere."""
    if each.step is Step.ITEM:
        return not _is_plain(each.value) and not isinstance(each.value, Tensor)
    return each.step is not Step.ATTRIBUTE or not (each.name.startswith("__") and each.name.endswith("__"))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def tensors_within(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or those in its containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (*CONTAINERS, tuple, frozenset)):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_within(each, depth - 1)
