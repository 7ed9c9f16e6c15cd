"""Arguments of the forward of an adopted class, carried by the arguments of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from opsmith.core.cached_property import cached_property

Form = Literal["plain", "rest", "either", "nested", "mixed"]

Skeleton = tuple[Any, ...]
"""A value without its tensors, in tuples, so that equal values are equal objects for the dispatcher."""


@dataclass(frozen=True)
class Slot:
    """One parameter of forward, and the arguments of the operator that carry it.

    Args:
        name: Name of the argument that carries it, or its tensors.
        form: `plain`: one argument carries it. `rest`: it is `*args` of tensors, carried by a list.
            `either`: it is a tensor or something else, carried by two arguments. `nested`: it is a container
            of tensors, carried by a list of tensors and a skeleton. `mixed`: it is `*args` of tensors and
            other values.
        value: Name of the argument that carries a value other than a tensor, or the skeleton.
    """

    name: str
    form: Form = "plain"
    value: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments that carry it."""
        return (self.name,) if self.value is None else (self.name, self.value)

    @property
    def collects(self) -> bool:
        """True for `*args`."""
        return self.form in ("rest", "mixed")


@dataclass(frozen=True)
class ForwardArguments:
    """All parameters of forward, in order.

    Args:
        slots: The parameters.
    """

    slots: tuple[Slot, ...]

    @cached_property
    def plain(self) -> bool:
        """True if each argument of forward is an argument of the operator."""
        return all(slot.form == "plain" for slot in self.slots)

    @cached_property
    def collects(self) -> bool:
        """True if the last parameter is `*args`."""
        return bool(self.slots) and self.slots[-1].collects

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position of the first argument of the operator for each parameter."""
        found, count = [], 0
        for slot in self.slots:
            found.append(count)
            count += len(slot.names)
        return tuple(found)

    @cached_property
    def names(self) -> list[str]:
        """Name of the first argument of the operator for each parameter."""
        return [slot.name for slot in self.slots]

    def packed(self, given: Sequence[Any]) -> list[Any]:
        """Return the operator's arguments from forward's arguments; inverse of `spread`."""
        if self.plain:
            return list(given)
        values: list[Any] = []
        for position, slot in enumerate(self.slots):
            value = list(given[position:]) if slot.collects else given[position]
            if slot.form in ("plain", "rest"):
                values.append(value)
            elif slot.form == "either":
                values += [value, None] if isinstance(value, torch.Tensor) else [None, value]
            else:
                tensors: list[torch.Tensor] = []
                skeleton = take_apart(value, tensors)
                values += [tensors, skeleton]
        return values

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return forward's arguments from the operator's arguments."""
        if self.plain:
            return list(values)
        given: list[Any] = []
        rest = iter(values)
        for slot in self.slots:
            value = next(rest)
            if slot.form == "plain":
                given.append(value)
            elif slot.form == "rest":
                given += value
            elif slot.form == "either":
                other = next(rest)
                given.append(other if value is None else value)
            else:
                skeleton = next(rest)
                whole = put_together(skeleton, iter(value)) if isinstance(skeleton, tuple) else value
                given += whole if slot.form == "mixed" else [whole]
        return given

    def are_packed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return True if a call has the operator's arguments, not forward's arguments."""
        if len(args) + len(kwargs) != sum(len(slot.names) for slot in self.slots):
            return False
        names = [name for slot in self.slots for name in slot.names]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return named.keys() == set(names) and all(_fits(slot, named) for slot in self.slots)


NO_PARAMETERS = ForwardArguments(())


def _fits(slot: Slot, named: dict[str, Any]) -> bool:
    tensors, value = named[slot.name], None if slot.value is None else named[slot.value]
    if slot.form == "either":
        return (tensors is None or isinstance(tensors, torch.Tensor)) and None in (tensors, value)
    if slot.form == "rest":
        return isinstance(tensors, list | tuple)
    return slot.form == "plain" or (isinstance(tensors, list | tuple) and isinstance(value, tuple))


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Skeleton:
    """Return the skeleton of a value, and append its tensors to a list.

    Example:
        >>> take_apart(["a", 2], [])
        ('list', ('value', 'a'), ('value', 2))
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor",)
    if type(value) is list:
        return ("list", *[take_apart(item, tensors) for item in value])
    if type(value) is tuple:
        return ("tuple", *[take_apart(item, tensors) for item in value])
    if type(value) is dict:
        return ("dict", *[(key, take_apart(item, tensors)) for key, item in value.items()])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("named", type(value), *[take_apart(item, tensors) for item in value])
    return ("value", value)


def put_together(skeleton: Skeleton, tensors: Iterator[Any]) -> Any:
    """Return the value of a skeleton with these tensors; inverse of `take_apart`."""
    kind, *parts = skeleton
    if kind == "tensor":
        return next(tensors)
    if kind == "list":
        return [put_together(part, tensors) for part in parts]
    if kind == "tuple":
        return tuple([put_together(part, tensors) for part in parts])
    if kind == "dict":
        return {key: put_together(part, tensors) for key, part in parts}
    if kind == "named":
        return parts[0](*[put_together(part, tensors) for part in parts[1:]])
    return parts[0]
