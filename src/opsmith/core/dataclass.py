"""The standard decorator `dataclass`, with methods that are written when they are first used.

The standard library compiles six methods for a frozen dataclass at once, which was a quarter of the time of
`import opsmith.ops`. Most classes of a program make no instance in it. The methods do what those of Python
3.11 do, and are written here: the standard decorator takes three times as long for a single one.
torch.compile cannot trace the first use of a method: classes with instances that are made in traces, as by
autograd nodes, have the standard decorator.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from itertools import dropwhile
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

_COMPARING = ("__eq__", "__hash__")
"""The methods that a class with `eq=False` has not."""

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
            ValueError: If instances have an order, and none are equal.
        """
        if order and not eq:
            raise ValueError("eq must be true if order is true")

        def decorate(undecorated):
            own = set(vars(undecorated))
            _refuse(undecorated, frozen)
            if "__eq__" in own and vars(undecorated)["__hash__"] is None:
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
            _refuse_fields(made)
            for name in _WRITERS:
                if name not in own and (eq or name not in _COMPARING):
                    setattr(made, name, _WrittenMethod(made, name))
            if eq and not frozen and "__hash__" not in own:
                made.__hash__ = None
            if frozen:
                made.__dataclass_params__.frozen = True  # by it torch.compile knows a frozen class
                made.__setattr__, made.__delattr__ = _refusals(made)
                if slots and "__getstate__" not in own:
                    made.__getstate__ = _state
                if slots and "__setstate__" not in own:
                    made.__setstate__ = _set_state
            abc.update_abstractmethods(made)
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


def _refuse_fields(made: Any) -> None:
    """Refuse fields that no `__init__` can take.

    Raises:
        TypeError: If one without a default follows one with a default, or one is an `InitVar`.
    """
    declared = fields(made)
    for name in made.__dataclass_fields__.keys() - {each.name for each in declared}:
        if "ClassVar" not in str(made.__dataclass_fields__[name].type):
            raise TypeError(f"{made.__name__}.{name} is an InitVar, which is not supported")
    positional = (each for each in declared if each.init and not each.kw_only)
    for each in dropwhile(lambda each: not _has_default(each), positional):
        if not _has_default(each):
            raise TypeError(f"non-default argument {each.name!r} follows default argument")


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


class _WrittenMethod:
    """Method of a dataclass that is written when it is first looked up, in place of this.

    Two threads that look it up first at once both have it written, and use either.
    """

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, holder: object, owner: type | None = None) -> Any:
        method = _WRITERS[self._name](self._owner)
        method.__module__ = self._owner.__module__
        method.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        setattr(self._owner, self._name, method)
        return method.__get__(holder, owner)


_OF_STANDARD: Any = dataclasses.make_dataclass(
    "Made", [("anew", list, dataclasses.field(default_factory=list))], repr=False, eq=False
)
(_HAS_FACTORY,) = _OF_STANDARD.__init__.__defaults__
"""Default of a parameter whose value a factory makes: torch.compile knows the one of the standard library."""


def _write_init(owner: Any) -> Any:
    declared = fields(owner)
    positional = [each for each in declared if each.init and not each.kw_only]
    by_name = [each for each in declared if each.init and each.kw_only]
    defaults = {
        each.name: each.default if each.default_factory is MISSING else _HAS_FACTORY
        for each in (*positional, *by_name)
    }
    self_name = "__dataclass_self__" if any(each.name == "self" for each in declared) else "self"
    closure: dict[str, Any] = {"__dataclass_object__": object, "__dataclass_has_factory__": _HAS_FACTORY}
    body = []
    for each in declared:
        value = _initial_value(each, "__slots__" in vars(owner), closure)
        if value is not None and owner.__dataclass_params__.frozen:
            body.append(f"__dataclass_object__.__setattr__({self_name}, {each.name!r}, {value})")
        elif value is not None:
            body.append(f"{self_name}.{each.name} = {value}")
    if hasattr(owner, "__post_init__"):
        body.append(f"{self_name}.__post_init__()")
    names = [*defaults]
    if by_name:
        names.insert(len(positional), "*")
    method = _compiled(owner, "__init__", [self_name, *names], body or ["pass"], closure)
    with_default = (defaults[each.name] for each in positional if _has_default(each))
    method.__defaults__ = tuple(with_default) or None
    named = {each.name: defaults[each.name] for each in by_name if _has_default(each)}
    method.__kwdefaults__ = named or None
    method.__annotations__ = {each.name: each.type for each in (*positional, *by_name)} | {"return": None}
    return method


def _initial_value(field: Field[Any], slots: bool, closure: dict[str, Any]) -> str | None:
    """Return the expression that `__init__` assigns to a field; None if it assigns nothing.

    Args:
        field: The field.
        slots: True if the class has no attribute with the default.
        closure: Values that the expression names, by name; what it needs is added.
    """
    name = f"__dataclass_default_{field.name}__"
    if field.default_factory is not MISSING:
        closure[name] = field.default_factory
        made = f"{name}()"
        return (
            f"{made} if {field.name} is __dataclass_has_factory__ else {field.name}" if field.init else made
        )
    if field.init:
        return field.name
    if slots and field.default is not MISSING:
        closure[name] = field.default
        return name
    return None


def _write_repr(owner: Any) -> Any:
    shown = ", ".join(f"{each.name}={{self.{each.name}!r}}" for each in fields(owner) if each.repr)
    body = [f'return self.__class__.__qualname__ + f"({shown})"']
    return recursive_repr()(_compiled(owner, "__repr__", ["self"], body, {}))


def _write_eq(owner: Any) -> Any:
    compared = [each.name for each in fields(owner) if each.compare]
    body = [
        "if other.__class__ is self.__class__:",
        f" return {_values('self', compared)} == {_values('other', compared)}",
        "return NotImplemented",
    ]
    return _compiled(owner, "__eq__", ["self", "other"], body, {})


def _write_hash(owner: Any) -> Any:
    hashed = [each.name for each in fields(owner) if (each.compare if each.hash is None else each.hash)]
    return _compiled(owner, "__hash__", ["self"], [f"return hash({_values('self', hashed)})"], {})


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "__init__": _write_init,
    "__repr__": _write_repr,
    "__eq__": _write_eq,
    "__hash__": _write_hash,
}


def _values(holder: str, names: list[str]) -> str:
    """Return the expression of the tuple of these attributes."""
    return f"({''.join(f'{holder}.{name}, ' for name in names)})"


def _compiled(owner: type, name: str, parameters: list[str], body: list[str], closure: dict[str, Any]) -> Any:
    """Compile a function, which holds values in a closure, where torch.compile follows them.

    Args:
        owner: The class, in whose module the function finds its annotations.
        name: Name of the function.
        parameters: Its parameters.
        body: Its lines.
        closure: Other values that the lines name, by name.
    """
    lines = "".join(f"  {line}\n" for line in body)
    text = f"def create({', '.join(closure)}):\n def {name}({', '.join(parameters)}):\n{lines} return {name}"
    module = sys.modules.get(owner.__module__)
    made: dict[str, Any] = {}
    exec(text, {} if module is None else vars(module), made)
    return made["create"](**closure)


def _refusals(owner: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `__setattr__` and `__delattr__`, which refuse fields; a subclass may have other attributes."""

    def is_refused(self: Any, name: str) -> bool:
        return type(self) is owner or any(each.name == name for each in fields(owner))

    def refuse_to_set(self: Any, name: str, value: Any) -> None:
        if is_refused(self, name):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(owner, self).__setattr__(name, value)

    def refuse_to_delete(self: Any, name: str) -> None:
        if is_refused(self, name):
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(owner, self).__delattr__(name)

    return refuse_to_set, refuse_to_delete


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
