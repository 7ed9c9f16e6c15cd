"""Arguments that are objects with tensors, such as modules: a copy in each dtype, and its state.

Every call begins with the state that the author gave: a copy is made once, and restored before each call. So
the running statistics of a call do not affect the next call, and the author's own object is not changed.
"""

from __future__ import annotations

import copy
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith.core.reachable import Step, is_library, uses
from opsmith.torch_library import capabilities

MOST = 2000
"""Maximum number of values in an object that are examined."""

LARGE = 1 << 22
"""Number of elements of all tensors in an object beyond which its state is not copied."""

_OUTSIDE = (Step.GLOBAL, Step.MODULE_MEMBER, Step.TYPE, Step.BASE)
_NAMED = (Step.CLOSURE, Step.ATTRIBUTE)


def tensors_of_object(value: Any) -> dict[str, Tensor]:
    """Return the tensors in an author's object, without repetition, by their names in the object.

    A tensor in a list or dict has the name of the container, with a number in brackets.

    Example:
        >>> list(tensors_of_object(torch.nn.BatchNorm1d(2)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    return {} if isinstance(value, Tensor) else _named_tensors(_within(value))


def _named_tensors(within: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    found = [(path or "a tensor", each) for path, each in within if isinstance(each, Tensor)]
    times, several = Counter[str](), Counter(path for path, _ in found)
    named: dict[str, Tensor] = {}
    for path, each in found:
        named[f"{path}[{times[path]}]" if several[path] > 1 else path] = each
        times[path] += 1
    return named


def _within(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and the values in it, without repetition, with their names in the object."""
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
            left.extend((_joined(path, name), inner) for name, inner in each.named_children())
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
        numbers = tensor.detach().clone() if copied and not tensor.is_meta else None
        return cls(
            tensor, numbers, tensor.requires_grad, None if grad is None else cls.of(grad, copied=copied)
        )

    def written(self) -> bool:
        """Return True if its numbers have changed."""
        return self.numbers is not None and not same_numbers(self.tensor, self.numbers)

    def other_grad(self) -> bool:
        """Return True if its `.grad` was replaced or written into."""
        now = self.tensor.grad if self.tensor.is_leaf else None
        if self.grad is None:
            return now is not None
        return now is not self.grad.tensor or self.grad.written()

    def restore(self) -> None:
        """Restore the tensor; a tensor that did not change is not written to."""
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
    """Return the address of a tensor's first element; for a sparse tensor, the address of the object."""
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


@dataclass(frozen=True)
class ObjectState:
    """State of an object.

    Args:
        value: The object.
        tensors: The states of its tensors, by their names in it.
        training: The flag `training` of each module.
        contents: Each namespace and container in it, with a copy of its contents.
    """

    value: Any
    tensors: dict[str, TensorState]
    training: tuple[tuple[torch.nn.Module, bool], ...]
    contents: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def of(
        cls,
        value: Any,
        saved: Callable[[Tensor], TensorState] | None = None,
        besides: Collection[int] = (),
    ) -> ObjectState:
        """Record the state of an object.

        Args:
            saved: Function that records a tensor. By default, every tensor is recorded, or none of an object
                that is too large.
            besides: The ids of tensors that do not belong to its state.
        """
        within = [*_within(value)]
        held = _named_tensors(within)
        tensors = {name: tensor for name, tensor in held.items() if id(tensor) not in besides}
        if saved is None and sum(each.numel() for each in tensors.values()) > LARGE:
            tensors = {}
        states = {name: (saved or TensorState.of)(each) for name, each in tensors.items()}
        training = tuple((each, each.training) for _, each in within if isinstance(each, torch.nn.Module))
        containers = (held for _, each in within for held in _containers(each))
        return cls(value, states, training, tuple((each, each.copy()) for each in containers))

    @property
    def statistics(self) -> frozenset[int]:
        """The ids of the buffers that may change: the buffers of modules in training."""
        return frozenset(
            id(buffer)
            for module, training in self.training
            if training
            for buffer in module.buffers(recurse=False)
        )

    def written(self) -> dict[str, Tensor]:
        """Return the tensors whose numbers have changed, by name."""
        return {name: state.tensor for name, state in self.tensors.items() if state.written()}

    def with_gradients(self) -> list[str]:
        """Return the names of the tensors whose `.grad` has changed."""
        return [name for name, state in self.tensors.items() if state.other_grad()]

    def flags(self) -> list[str]:
        """Describe the flags that have changed."""
        switched = [
            f"`{name}.requires_grad`"
            for name, state in self.tensors.items()
            if state.tensor.requires_grad != state.requires_grad
        ]
        return [*switched, *("`training`" for module, flag in self.training[:1] if module.training != flag)]

    def restore(self) -> Any:
        """Return the object, restored to the recorded state."""
        for held, before in self.contents:
            if not _holds_the_same(held, before):
                held.clear()
                held.update(before) if isinstance(held, dict) else held.extend(before)
        for state in self.tensors.values():
            state.restore()
        return self.value


def _containers(value: Any) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield a dict or list; for an object, its namespace; for a module, also the dicts and lists in it."""
    if isinstance(value, dict | list):
        yield value
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | types.FunctionType):
        yield vars(value)
        if isinstance(value, torch.nn.Module):
            yield from (each for each in vars(value).values() if isinstance(each, dict | list))


def _holds_the_same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in one and one[key] is value for key, value in other.items())
    return all(mine is value for mine, value in zip(one, other, strict=True))


def copied_object(
    value: Any, dtype: torch.dtype | None, device: torch.device | None, memo: dict[int, Any] | None = None
) -> Any:
    """Copy an object with its tensors cast; return it as it is if it cannot be copied.

    Args:
        value: The object.
        dtype: dtype of its floating tensors; None for each tensor's own.
        device: Device of its tensors; None for each tensor's own.
        memo: Replacements of some objects by their ids, as for `copy.deepcopy`: copies of values that several
            objects share, and tensors that are arguments, which are not copied.
    """
    memo = {} if memo is None else memo
    given = {id(each) for each in memo.values()}
    try:
        _copy_functions(value, memo)
        made = copy.deepcopy(value, memo)
    except _NO_COPY:
        return value  # it has a resource of the system, or a tensor with a graph
    with torch.no_grad(), suppress(*_NO_COPY):  # for example a sparse tensor, which a device does not support
        for each in tensors_of_object(made).values() if made is not value else ():
            if id(each) not in given:
                target = dtype if each.is_floating_point() else None
                each.data = each.data.to(device=device, dtype=target)
    return made


_NO_COPY = (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, copy.Error)


def _copy_functions(value: Any, memo: dict[int, Any]) -> None:
    """Add copies of an object's functions that reach tensors to `memo`, since `deepcopy` copies none."""
    within = [each for _, each in _within(value) if isinstance(each, types.FunctionType)]
    reaching = [each for each in within if each is value or tensors_of_object(each)]
    own = [each for each in reaching if id(each) not in memo and not is_library(each.__module__)]
    # Values that two variables share stay shared: each is copied once. A variable without a value gets it
    # later.
    cells = {id(cell): cell for each in own for cell in each.__closure__ or () if id(cell) not in memo}
    filled = {key: cell.cell_contents for key, cell in cells.items() if _has_value(cell)}
    memo.update((key, types.CellType() if key in filled else cell) for key, cell in cells.items())
    for each in own:
        closure = tuple(memo[id(cell)] for cell in each.__closure__ or ())
        memo[id(each)] = types.FunctionType(each.__code__, each.__globals__, each.__name__, None, closure)
    for key, contents in filled.items():
        memo[key].cell_contents = copy.deepcopy(contents, memo)
    for each in own:
        made = memo[id(each)]
        made.__defaults__, made.__kwdefaults__ = copy.deepcopy((each.__defaults__, each.__kwdefaults__), memo)
        made.__dict__.update(copy.deepcopy(each.__dict__, memo))


def _has_value(cell: types.CellType) -> bool:
    with suppress(ValueError):
        return (cell.cell_contents, True)[1]
    return False


class ObjectArguments(dict[int, Any]):
    """The objects with tensors among flat arguments, by position, with copies of them.

    A tensor of an object that is also an argument is replaced by the argument in the copies, so that moving,
    casting, laying out or differentiating the argument has the same effect within the objects. The same is
    true of parameters that an argument contains in a row, as for the adjoint of a differential equation,
    which returns their gradients by this argument.

    Args:
        flat: Flat arguments.
        copies: Copies of these objects, which derived samples share.
        own: The author's flat arguments, some of which are replaced here.
    """

    def __init__(
        self, flat: Sequence[Any], copies: dict[Any, Any] | None = None, own: Sequence[Any] = ()
    ) -> None:
        held = {argnum: tensors_of_object(value) for argnum, value in enumerate(flat)}
        super().__init__((argnum, flat[argnum]) for argnum, tensors in held.items() if tensors)
        self._copies: dict[Any, Any] = {} if copies is None else copies
        self._form = _form(flat)
        self._held = {
            argnum: held_arguments(held[argnum].values(), own if own and own[argnum] is value else flat)
            for argnum, value in self.items()
        }
        self._followed: dict[int, ObjectState] | None = None

    def holds(self, argnum: int) -> bool:
        """Return True for an object that contains another argument."""
        return bool(self._held.get(argnum))

    @property
    def arguments(self) -> frozenset[int]:
        """Positions of the arguments that an object contains."""
        return frozenset(each.argnum for each in self._every)

    @property
    def flattened(self) -> frozenset[int]:
        """Positions of the arguments that consist of all parameters of an object in a row."""
        return frozenset(each.argnum for each in self._every if each.part is not None)

    @property
    def _every(self) -> list[HeldArgument]:
        return [each for held in self._held.values() for each in held]

    @contextmanager
    def followed(self) -> Iterator[dict[int, ObjectState]]:
        """A region that yields the initial states of the copies of its last call, by position."""
        self._followed = {}
        try:
            yield self._followed
        finally:
            self._followed = None

    def apart(self) -> dict[int, Any]:
        """Return copies of the objects by position, which contain the same arguments as the objects."""
        return self._copied(
            (None, None), {id(each.tensor): each.tensor for each in self._every if each.part is None}
        )

    def fresh(self, flat: Sequence[Any]) -> list[Any]:
        """Return flat arguments with copies of the objects, in the state that the author gave.

        Their tensors get the dtype and device of these arguments, if the author's had the same.
        """
        plain = (Tensor, torch.nn.Parameter)  # any other tensor, such as one of a trace, has no data
        if not self or torch.compiler.is_compiling():
            return list(flat)
        if any(isinstance(value, Tensor) and type(value) not in plain for value in flat):
            return list(flat)
        pairs = zip(_form(flat), self._form, strict=True)
        dtype, device = (None if one == own else one for one, own in pairs)
        if every := self._every:  # copies only for this call: nothing else may keep its tensors
            memo: dict[int, Any] = {id(each.tensor): each.of(flat) for each in every if each.fits(flat)}
            besides = {id(each) for each in memo.values()}
            made = self._copied((dtype, device), memo)
            if self._followed is not None:
                states = {at: ObjectState.of(each, besides=besides) for at, each in made.items()}
                self._followed.update(states)
            return [made.get(at, value) for at, value in enumerate(flat)]
        # Calls in threads of the check share no copies.
        key = *map(id, self.values()), dtype, device, threading.get_ident()
        if key not in self._copies:
            states = {at: ObjectState.of(each) for at, each in self._copied((dtype, device), {}).items()}
            self._copies[key] = [*self.values()], states
        states = self._copies[key][1]
        if self._followed is not None:
            self._followed.update(states)
        return [states[at].restore() if at in self else value for at, value in enumerate(flat)]

    def _copied(self, form: tuple[Any, Any], memo: dict[int, Any]) -> dict[int, Any]:
        """Copies of the objects, which share values like the objects."""
        return {argnum: copied_object(value, *form, memo) for argnum, value in self.items()}


class HeldArgument(NamedTuple):
    """A tensor in an object that is also an argument.

    Args:
        tensor: The tensor in the object.
        argnum: Position of the argument.
        apart: True if it is a separate leaf with the argument's memory, such as its `detach()` or a
            parameter.
        part: The elements of the argument that are its numbers, if the argument has all parameters in a row.
        total: Number of elements of such an argument.
    """

    tensor: Tensor
    argnum: int
    apart: bool
    part: slice | None = None
    total: int = 0

    def fits(self, flat: Sequence[Any]) -> bool:
        """Return True if the argument has the elements for it."""
        return self.part is None or flat[self.argnum].numel() == self.total

    def of(self, flat: Sequence[Any]) -> Tensor:
        """Return the tensor that replaces it, made from other arguments."""
        value: Tensor = flat[self.argnum]
        if self.part is not None:
            value = value.flatten()[self.part].view(self.tensor.shape)
        if not self.apart or capabilities.innermost_transform() is not None:  # these have no leaves
            return value
        return value.detach().requires_grad_(self.tensor.requires_grad)


def held_arguments(tensors: Collection[Tensor], flat: Sequence[Any]) -> list[HeldArgument]:
    """Find the tensors of an object that are arguments, share an argument's memory, or form one in a row."""
    values = [(at, value) for at, value in enumerate(flat) if isinstance(value, Tensor)]
    same, alike = ({key(value): at for at, value in reversed(values)} for key in (id, _memory))
    found = [(tensor, same.get(id(tensor)), alike.get(_memory(tensor))) for tensor in tensors]
    held = [
        HeldArgument(tensor, place, one is None and tensor.is_leaf)
        for tensor, one, other in found
        if (place := other if one is None else one) is not None
    ]
    return held or _one_after_another(
        [each for each in tensors if isinstance(each, torch.nn.Parameter)], values
    )


def _one_after_another(
    parameters: Sequence[Tensor], values: Sequence[tuple[int, Tensor]]
) -> list[HeldArgument]:
    """The parameters of an object as parts of an argument that contains their numbers in a row."""
    ends = [*accumulate((each.numel() for each in parameters), initial=0)]
    if len({(each.dtype, each.device) for each in parameters}) != 1 or not ends[-1]:
        return []
    form = parameters[0].dtype, parameters[0].device, torch.Size([ends[-1]])
    places = [at for at, value in values if (value.dtype, value.device, value.shape) == form]
    row = torch.cat([each.detach().flatten() for each in parameters]) if places else None
    places = [at for at in places if row is not None and same_numbers(dict(values)[at], row)]
    return [
        HeldArgument(each, place, True, slice(*part), ends[-1])
        for place in places[:1]
        for each, part in zip(parameters, pairwise(ends), strict=True)
    ]


def _memory(tensor: Tensor) -> Hashable:
    """Key that is equal for two tensors with the same numbers in the same memory."""
    if tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _form(flat: Sequence[Any]) -> tuple[torch.dtype | None, torch.device | None]:
    """Return dtype and device of the first floating tensor."""
    floating = [each for each in flat if isinstance(each, Tensor) and each.is_floating_point()]
    return (floating[0].dtype, floating[0].device) if floating else (None, None)
