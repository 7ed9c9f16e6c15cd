"""`FILE_OR_MODULE[:NAME]`: from what stands on a command line to what can be checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.registered import is_operator
from opsmith.core.operator import Operator
from opsmith.declaring import declared_operators
from opsmith.locating.classes import classes_in
from opsmith.locating.custom_ops import custom_ops_in, registered_as
from opsmith.locating.importing import import_file, import_module

_FILE = re.compile(r"(?P<place>.+?\.py)(?::(?P<name>.+))?")
_MODULE = re.compile(r"(?P<place>[^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::(?P<name>.+))?")


@dataclass(frozen=True)
class Target:
    """What stands on the command line.

    Args:
        place: Path of a `.py` file, or name of a module.
        name: Which of its operators; None means all.
    """

    place: str
    name: str | None

    @classmethod
    def of(cls, text: str) -> Target:
        """The target that a text names.

        Raises:
            UsageError: If it is neither a file nor a module.

        Example:
            >>> Target.of("my/operators.py:demo::linear")
            Target(place='my/operators.py', name='demo::linear')
        """
        found = _FILE.fullmatch(text) or _MODULE.fullmatch(text)
        if found is None:
            raise errors.UsageError(
                f"`{text}` names neither a file nor a module",
                expected="FILE_OR_MODULE[:NAME]",
                hint="write `operators.py`, `operators.py:linear`, `mypackage.operators` or "
                "`mypackage.operators:linear`",
            )
        return cls(found["place"], found["name"])

    @property
    def is_file(self) -> bool:
        """Whether the place is a file."""
        return self.place.endswith(".py")

    def module(self) -> ModuleType:
        """Import the place.

        Raises:
            OperatorNotFoundError: If there is no such file or module.
            ModuleImportError: If it cannot be imported.
        """
        return import_file(Path(self.place)) if self.is_file else import_module(self.place)

    def operators(self) -> list[Operator[..., Any]]:
        """The operators that it names, in the order of their declaration.

        Raises:
            OperatorNotFoundError: If there is no such file, module or operator.
            ModuleImportError: If it cannot be imported.
        """
        module = self.module()
        found = _declared(module)
        if self.name is not None:
            known = _known(module, found)
            if self.name not in known:
                raise self._unknown(module, known, {})
            return [known[self.name]]
        if not found:
            raise self._none(module)
        return found

    def checkable(self) -> dict[str, Any]:
        """What it names that can be checked, by the name to show: operators, else Functions and custom ops.

        With a name it may be an operator, an `autograd.Function` class, or an operator of torch.library, by
        its variable or as `namespace::name`. Without one it is every operator that the module declares; where
        it declares none, its Functions and the `custom_op` objects that its variables hold.

        Raises:
            OperatorNotFoundError: If there is no such file, module or name, or nothing to check.
            ModuleImportError: If it cannot be imported.
        """
        module = self.module()
        found = _declared(module)
        others = self._others(module)
        if self.name is not None:
            known = _known(module, found)
            if self.name in known:
                return {known[self.name].name: known[self.name]}
            value = _attribute(module, self.name)
            if value is None:
                value = registered_as(self.name)
            if is_function_class(value) or is_operator(value):
                return {self.name: value}
            raise self._unknown(module, known, others)
        if found:
            return {operator.name: operator for operator in found}
        if not others:
            raise self._none(module)
        return others

    def left_aside(self) -> dict[str, Any]:
        """The Functions and custom ops of a module that declares operators, none of which was adopted."""
        module = self.module()
        found = _declared(module)
        if self.name is not None or not found:
            return {}
        adopted = [each.specification.adopted.function_class for each in found if each.specification.adopted]
        return {name: each for name, each in self._others(module).items() if each not in adopted}

    def _others(self, module: ModuleType) -> dict[str, Any]:
        """What can be checked and is no operator of opsmith."""
        inside = not self.is_file
        return {**classes_in(module, inside=inside), **custom_ops_in(module, inside=inside)}

    def _none(self, module: ModuleType) -> errors.OperatorNotFoundError:
        classes = self._others(module)
        functions = all(map(is_function_class, classes.values()))
        what = "Functions" if functions else "Functions and custom ops"
        also = f", but the {what} {_listed(list(classes))}" if classes else ", Function or custom op"
        return errors.OperatorNotFoundError(
            f"`{self.place}` declares no operator{also}",
            hint="adopt one, `opsmith.adopt(...)`: `opsmith adopt` writes the line for each"
            if classes
            else 'declare one with `@opsmith.operator("mylib::name")`, or name the module that does',
        )

    def _unknown(
        self, module: ModuleType, known: dict[str, Operator[..., Any]], others: dict[str, Any]
    ) -> errors.OperatorNotFoundError:
        there = list(dict.fromkeys(operator.name for operator in known.values())) + list(others)
        return errors.OperatorNotFoundError(
            f"`{self.place}` has no operator `{self.name}`",
            expected=f"one of {_listed(there)}" if there else "an operator; it has none",
            hint="name the operator, or the variable that holds it",
        )


def is_function_class(value: Any) -> bool:
    """Whether something is an `autograd.Function` class."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _declared(module: ModuleType) -> list[Operator[..., Any]]:
    """The operators that a module, and those inside it, declare."""
    inside = f"{module.__name__}."
    return [each for each in declared_operators() if f"{each.specification.module}.".startswith(inside)]


def _known(module: ModuleType, found: list[Operator[..., Any]]) -> dict[str, Operator[..., Any]]:
    """The operators by every name that one may write: short, whole, and the variables that hold them."""
    variables = {name: value for name, value in vars(module).items() if isinstance(value, Operator)}
    known = {operator.specification.short_name: operator for operator in found}
    return known | {operator.name: operator for operator in found} | variables


def _attribute(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
