"""The standard decorator `dataclass`, with methods that are written when they are first used.

The standard library compiles six methods for a frozen dataclass at once, which was a quarter of the time of
`import opsmith.ops`. Most classes of a program make no instance in it. torch.compile cannot trace the first
use of a method: classes with instances that are made in traces, as by autograd nodes, have the standard one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import copy
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

_ALWAYS = ("__init__", "__repr__")
_COMPARED = ("__eq__", "__hash__")
"""The methods of a class whose instances are compared, besides."""

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, order=False, slots=False, kw_only=False):
        """Make a class a dataclass, as `dataclasses.dataclass` does.

        `dataclasses.fields`, `replace`, `asdict` and `is_dataclass` take it.

        Args:
            cls: The class; None where options are given.
            frozen: True if its fields cannot be assigned.
            eq: True if two instances with equal fields are equal.
            order: True if instances have an order.
            slots: True if instances have slots in place of a dictionary.
            kw_only: True if all fields are given by name.

        Raises:
            TypeError: As of the standard decorator; and if a field is an `InitVar`.
        """

        def decorate(undecorated):
            own = set(vars(undecorated))
            _refuse(undecorated, frozen)
            if undecorated.__hash__ is None and "__eq__" in own:
                own.discard("__hash__")  # Python sets None where a class has `__eq__` alone
            made = dataclasses.dataclass(
                init=False,
                repr=False,
                eq=order,
                order=order,
                frozen=any(each.frozen for each in _inherited(undecorated)),  # it compares the two
                slots=slots,
                kw_only=kw_only,
            )(undecorated)
            for name in made.__dataclass_fields__.keys() - {each.name for each in fields(made)}:
                if "ClassVar" not in str(made.__dataclass_fields__[name].type):
                    raise TypeError(f"{made.__name__}.{name} is an InitVar, which is not supported")
            for name in (*_ALWAYS, *_COMPARED) if eq else _ALWAYS:
                if name not in own:
                    setattr(made, name, _WrittenMethod(made, name, frozen))
            if eq and not frozen and "__hash__" not in own:
                made.__hash__ = None
            if frozen:
                made.__dataclass_params__.frozen = True  # by it torch.compile knows a frozen class
                made.__setattr__, made.__delattr__ = _refusals(made)
                if slots and "__getstate__" not in own:
                    made.__getstate__ = _state
                if slots and "__setstate__" not in own:
                    made.__setstate__ = _set_state
            return made

        return decorate if cls is None else decorate(cls)


def _inherited(undecorated: type) -> list[Any]:
    """Return the parameters of the bases that are dataclasses."""
    params = (vars(each).get("__dataclass_params__") for each in undecorated.__mro__[1:])
    return [each for each in params if each is not None]


def _refuse(undecorated: type, frozen: bool) -> None:
    """Refuse what would be lost or overwritten.

    Raises:
        TypeError: If a class and its base are not both frozen; if a frozen class has its own method to set or
            delete an attribute.
    """
    if any(each.frozen != frozen for each in _inherited(undecorated)):
        raise TypeError(f"{undecorated.__name__} and its base must both be frozen, or neither")
    if frozen:
        for name in {"__setattr__", "__delattr__"} & set(vars(undecorated)):
            raise TypeError(f"{undecorated.__name__} is frozen, and has its own {name}")


class _WrittenMethod:
    """Method of a dataclass that the standard library writes when it is first looked up, in place of this.

    Two threads that look it up first at once both have it written, and use either.
    """

    def __init__(self, owner: type, name: str, frozen: bool) -> None:
        self._owner, self._name, self._frozen = owner, name, frozen

    def __get__(self, holder: object, owner: type | None = None) -> Any:
        method = getattr(_standard(self._owner, self._name, self._frozen), self._name)
        method.__module__ = self._owner.__module__
        method.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        setattr(self._owner, self._name, method)
        return method.__get__(holder, owner)


def _standard(owner: Any, method: str, frozen: bool) -> type:
    """Return a class of the standard decorator with the same fields and one of its methods."""
    taken = fields(owner)
    namespace: dict[str, Any] = {each.name: copy(each) for each in taken}
    namespace["__doc__"] = owner.__name__  # else the decorator computes a signature for it
    namespace["__annotations__"] = {each.name: each.type for each in taken}
    if hasattr(owner, "__post_init__"):
        namespace["__post_init__"] = owner.__post_init__  # `__init__` calls that of its instance
    decorate = dataclasses.dataclass(
        init=method == "__init__",
        repr=method == "__repr__",
        eq=method in _COMPARED,
        frozen=frozen,
        slots="__slots__" in vars(owner),
    )
    return decorate(type(owner.__name__, (), namespace))


def _refusals(owner: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `__setattr__` and `__delattr__`, which refuse fields; a subclass may have other attributes."""

    def refuse_to_set(self: Any, name: str, value: Any) -> None:
        if type(self) is owner or name in owner.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(owner, self).__setattr__(name, value)

    def refuse_to_delete(self: Any, name: str) -> None:
        if type(self) is owner or name in owner.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(owner, self).__delattr__(name)

    return refuse_to_set, refuse_to_delete


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
