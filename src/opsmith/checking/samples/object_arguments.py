"""Objects among the arguments that hold tensors, such as modules: a copy in each dtype, and its state.

Every call begins with the state that the author gave: a copy is made once, and restored before each call, so
that running statistics of one call are not those of the next, and the author's own object stays as it is.
"""

from __future__ import annotations

import copy
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.core.reachable import Step, is_library, uses

MOST = 2000
"""Largest number of values in an object that are looked at."""

LARGE = 1 << 22
"""Number of elements of all tensors in an object beyond which its state is not copied."""

_OUTSIDE = (Step.GLOBAL, Step.MODULE_MEMBER, Step.TYPE, Step.BASE)
_NAMED = (Step.CLOSURE, Step.ATTRIBUTE)


def tensors_of_object(value: Any) -> dict[str, Tensor]:
    """Return the tensors that an object of the author's holds, each once, by its name in the object.

    Example:
        >>> list(tensors_of_object(torch.nn.BatchNorm1d(2)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    if isinstance(value, Tensor):
        return {}
    return {path or "a tensor": each for path, each in _within(value) if isinstance(each, Tensor)}


def modules_of_object(value: Any) -> list[torch.nn.Module]:
    """Return the modules that an object of the author's is or holds, those within modules too."""
    found = [each for _, each in _within(value) if isinstance(each, torch.nn.Module)]
    return list(dict.fromkeys(inner for each in found for inner in each.modules()))


def _within(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object, and what it holds, each once, with the name in the object."""
    seen: dict[int, Any] = {}
    left: deque[tuple[str, Any]] = deque([("", value)])
    while left and len(seen) < MOST:
        path, each = left.popleft()
        if each is None or isinstance(each, _PLAIN | type | types.ModuleType) or id(each) in seen:
            continue
        seen[id(each)] = each
        yield path, each
        if isinstance(each, torch.nn.Module):
            named = [*each.named_parameters(), *each.named_buffers()]
            left.extendleft(reversed([(_joined(path, name), tensor) for name, tensor in named]))
        elif not isinstance(each, Tensor):
            reached = [inner for inner in uses(each) if inner.step not in _OUTSIDE]
            left.extend(
                (_joined(path, inner.name if inner.step in _NAMED else ""), inner.value) for inner in reached
            )


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, [path, name]))


_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device | torch.Generator


@dataclass(frozen=True)
class TensorState:
    """State of a tensor in an object.

    Args:
        tensor: The tensor.
        numbers: A copy of its numbers; None for a tensor that is not copied.
        requires_grad: True if it requires a gradient.
        grad: The state of its `.grad`.
    """

    tensor: Tensor
    numbers: Tensor | None
    requires_grad: bool
    grad: TensorState | None

    @classmethod
    def of(cls, tensor: Tensor, *, copied: bool = True) -> TensorState:
        """Record the state of a tensor."""
        grad = tensor.grad if tensor.is_leaf else None
        numbers = tensor.detach().clone() if copied else None
        return cls(
            tensor, numbers, tensor.requires_grad, None if grad is None else cls.of(grad, copied=copied)
        )

    def written(self) -> bool:
        """Return True if its numbers are others now."""
        return self.numbers is not None and not same_numbers(self.tensor, self.numbers)

    def other_grad(self) -> bool:
        """Return True if its `.grad` is another tensor now, or was written into."""
        now = self.tensor.grad if self.tensor.is_leaf else None
        if self.grad is None:
            return now is not None
        return now is not self.grad.tensor or self.grad.written()

    def restore(self) -> None:
        """Make it what it was; a tensor that did not change is not written to."""
        if self.numbers is not None and self.written():
            with torch.no_grad():
                self.tensor.copy_(self.numbers)
        if self.tensor.is_leaf:
            if self.tensor.requires_grad != self.requires_grad:
                self.tensor.requires_grad_(self.requires_grad)
            if self.other_grad():
                self.tensor.grad = None if self.grad is None else self.grad.tensor
        if self.grad is not None:
            self.grad.restore()


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same numbers, nan equal to nan."""
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's first element; that of the object for a sparse tensor."""
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


@dataclass(frozen=True)
class ObjectState:
    """State of an object: its tensors, by their names in it, and the flag `training` of each module."""

    value: Any
    tensors: dict[str, TensorState]
    training: tuple[tuple[torch.nn.Module, bool], ...]

    @classmethod
    def of(cls, value: Any, saved: Callable[[Tensor], TensorState] | None = None) -> ObjectState:
        """Record the state of an object.

        Args:
            saved: Records a tensor; by default every one, and none of an object that is too large.
        """
        tensors = tensors_of_object(value)
        if saved is None and sum(each.numel() for each in tensors.values()) > LARGE:
            tensors = {}
        states = {name: (saved or TensorState.of)(each) for name, each in tensors.items()}
        return cls(value, states, tuple((each, each.training) for each in modules_of_object(value)))

    @property
    def statistics(self) -> frozenset[int]:
        """The ids of the buffers that are meant to change: those of modules in training."""
        return frozenset(
            id(buffer)
            for module, training in self.training
            if training
            for buffer in module.buffers(recurse=False)
        )

    def written(self) -> dict[str, Tensor]:
        """Return the tensors whose numbers are others now, by name."""
        return {name: state.tensor for name, state in self.tensors.items() if state.written()}

    def with_gradients(self) -> list[str]:
        """Return the names of the tensors whose `.grad` is another now."""
        return [name for name, state in self.tensors.items() if state.other_grad()]

    def flags(self) -> list[str]:
        """Describe the flags that are others now."""
        switched = [
            f"`{name}.requires_grad`"
            for name, state in self.tensors.items()
            if state.tensor.requires_grad != state.requires_grad
        ]
        return [*switched, *("`training`" for module, flag in self.training[:1] if module.training != flag)]

    def restore(self) -> Any:
        """Return the object, in the state that it had."""
        for state in self.tensors.values():
            state.restore()
        for module, training in self.training:
            if module.training != training:
                module.training = training
        return self.value


def copied_object(value: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Copy an object with its tensors cast; return it as it is if it cannot be copied."""
    try:
        made = _copied_function(value) if isinstance(value, types.FunctionType) else copy.deepcopy(value)
        with torch.no_grad():
            for each in tensors_of_object(made).values() if made is not value else ():
                target = dtype if each.is_floating_point() else None
                each.data = each.data.to(device=device, dtype=target)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, copy.Error):
        return value  # it holds a resource of the system, a tensor of a graph, or a name not assigned yet
    return made


def _copied_function(function: types.FunctionType) -> types.FunctionType:
    """Copy a function with what it closes over."""
    if is_library(function.__module__):
        return function
    # All of it is copied at once, so that what two variables share stays shared.
    contents, defaults, keyword_defaults, attributes = copy.deepcopy(
        (
            [cell.cell_contents for cell in function.__closure__ or ()],
            function.__defaults__,
            function.__kwdefaults__,
            function.__dict__,
        )
    )
    cells = tuple(types.CellType(each) for each in contents)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    made.__kwdefaults__ = keyword_defaults
    made.__dict__.update(attributes)
    return made


class ObjectArguments(dict[int, Any]):
    """The objects among flat arguments that hold tensors, by position, with a copy of each in each dtype."""

    def __init__(self, flat: Sequence[Any], copies: dict[Any, Any] | None = None) -> None:
        super().__init__((argnum, value) for argnum, value in enumerate(flat) if tensors_of_object(value))
        self._copies: dict[Any, tuple[Any, ObjectState]] = {} if copies is None else copies
        self._form = _form(flat)

    def state(self, argnum: int, flat: Sequence[Any]) -> ObjectState:
        """Return the copy of an object that goes with flat arguments, with the state that it begins with.

        Its tensors get the dtype and device of these arguments, if the author's were alike.
        """
        own = self[argnum]
        dtype, device = _form(flat)
        dtype = None if dtype == self._form[0] else dtype
        device = None if device == self._form[1] else device
        key = id(own), dtype, device, threading.get_ident()  # calls in threads of the check share nothing
        if key not in self._copies:
            self._copies[key] = own, ObjectState.of(copied_object(own, dtype, device))
        return self._copies[key][1]

    def fresh(self, flat: Sequence[Any]) -> list[Any]:
        """Return flat arguments with the copies of objects, in the state that the author gave."""
        plain = (Tensor, torch.nn.Parameter)  # any other tensor has no data of its own, as one of a trace
        if not self or torch.compiler.is_compiling():
            return list(flat)
        if any(isinstance(value, Tensor) and type(value) not in plain for value in flat):
            return list(flat)
        return [
            self.state(argnum, flat).restore() if argnum in self else value
            for argnum, value in enumerate(flat)
        ]


def _form(flat: Sequence[Any]) -> tuple[torch.dtype | None, torch.device | None]:
    """Return dtype and device of the first floating tensor."""
    floating = [each for each in flat if isinstance(each, Tensor) and each.is_floating_point()]
    return (floating[0].dtype, floating[0].device) if floating else (None, None)
