"""What tensors are called: as a module calls its own, as was given, or as the caller's variables do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.drawing.graph import Role
from opsmith.drawing.storages import Owner, Storages


class Names:
    """Names of tensors, by identity; the first one given stays, unless it is only now said what has it."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[Tensor, Owner]] = {}

    def add(self, name: str, tensor: Tensor, role: Role | None = None) -> None:
        """Name a tensor; without a role it is what it looks like: a parameter, an input, or computed."""
        known = self._named.get(id(tensor))
        if known is None or (role is not None and known[1].role == "intermediate"):
            self._named[id(tensor)] = (tensor, Owner(role or _role(tensor), name))

    def add_module(self, module: torch.nn.Module, prefix: str = "") -> None:
        """Name what a module owns, as its `state_dict` does."""
        for name, parameter in module.named_parameters(prefix):
            self.add(name, parameter, "parameter")
        for name, buffer in module.named_buffers(prefix):
            self.add(name, buffer, "buffer")

    def of(self, tensor: Tensor) -> Owner:
        """The name and role of a tensor; an unnamed one is an input, or a parameter, without a name."""
        known = self._named.get(id(tensor))
        if known is not None:
            return known[1]
        return Owner("parameter" if isinstance(tensor, torch.nn.Parameter) else "input", "")

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._named

    def own(self, storages: Storages, *, computed: bool = False) -> None:
        """Tell whose the storages of the named tensors are.

        Args:
            storages: Who is told.
            computed: Whether of those that were computed alone; else of the others. They come last: what was
                computed may be a view of an input.
        """
        for tensor, owner in self._named.values():
            if (owner.role == "intermediate") == computed:
                storages.own(tensor, owner.role, owner.name)


def _role(tensor: Tensor) -> Role:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "input" if tensor.grad_fn is None else "intermediate"


def given_names(given: Any) -> Names:
    """The names that `names=` gives.

    Raises:
        UsageError: If it is neither a module nor a mapping to tensors and modules.
    """
    names = Names()
    if given is None:
        return names
    if isinstance(given, torch.nn.Module):
        names.add_module(given)
        return names
    fits = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
    if not fits or not all(isinstance(each, Tensor | torch.nn.Module) for each in given.values()):
        raise errors.UsageError(
            "`names` names no tensors",
            argument="names",
            expected="a module, or a dict from names to tensors and modules",
            got=type(given).__name__,
            hint='write `names=model`, or `names={"x": x, "model": model}`',
        )
    for name, value in given.items():
        if isinstance(value, Tensor):
            names.add(name, value)
        else:
            names.add_module(value, name)
    return names


def variables(names: Names, frame: FrameType | None) -> None:
    """Add what the variables of a frame call their tensors, and the modules that they hold."""
    for name, value in _variables(frame):
        if isinstance(value, Tensor):
            names.add(name, value)
        elif isinstance(value, torch.nn.Module):
            names.add_module(value, name)


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """What a frame calls by name: its own variables, then the module's."""
    if frame is None:
        return
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in list(scope.items()):
            if not name.startswith("_"):
                yield name, value
