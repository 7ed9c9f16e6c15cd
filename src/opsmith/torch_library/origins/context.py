"""The `ctx` that a Function class receives: the interface of torch's own context, without autograd."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.core.origins.function_class import AdoptedFunction


class Context:
    """Values that a Function class keeps from its forward for its backward, under torch's names.

    All other attributes belong to the class.

    Args:
        adopted: The class.
        needs_input_grad: For each argument of `forward`, True if its gradient is needed.
        to_save: Tensors kept for the backward.
        saved_for_forward: Tensors kept for `jvp`.
        materialize_grads: True if a missing gradient is passed as zeros.

    Attributes:
        dirty_tensors: Inputs that were written into.
        non_differentiable: Results that have no gradient.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "dirty_tensors",
        "materialize_grads",
        "needs_input_grad",
        "non_differentiable",
        "opsmith_adopted",
        "saved_for_forward",
        "to_save",
    )

    def __init__(
        self,
        adopted: AdoptedFunction,
        needs_input_grad: Sequence[bool],
        to_save: Sequence[Tensor | None] = (),
        saved_for_forward: Sequence[Tensor | None] = (),
        *,
        materialize_grads: bool = True,
    ) -> None:
        self.opsmith_adopted, self.needs_input_grad = adopted, tuple(needs_input_grad)
        self.to_save, self.saved_for_forward = tuple(to_save), tuple(saved_for_forward)
        self.dirty_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.materialize_grads = materialize_grads

    def without_tensors(self) -> Context:
        """Drop the marked and saved tensors, which its node keeps; return the context."""
        self.to_save = self.saved_for_forward = self.non_differentiable = self.dirty_tensors = ()
        return self

    def with_tensors(
        self, saved: tuple[Tensor | None, ...], attributes: Collection[tuple[str, Tensor | None]] = ()
    ) -> Context:
        """Copy the context for one backward.

        Args:
            saved: The tensors that the class saved.
            attributes: Names and values of attributes that are tensors.
        """
        other = Context.__new__(Context)
        other.opsmith_adopted, other.needs_input_grad = self.opsmith_adopted, self.needs_input_grad
        other.to_save, other.materialize_grads = saved, self.materialize_grads
        other.saved_for_forward = other.dirty_tensors = other.non_differentiable = ()
        if attributes or vars(self):
            vars(other).update(vars(self))
            vars(other).update(attributes)
        return other

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors; as in torch, only the last call counts."""
        self.to_save = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `jvp`."""
        self.saved_for_forward = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """Saved tensors; in `jvp`, the tensors of `save_for_forward`."""
        return self.to_save

    saved_variables = saved_tensors  # for old classes; torch's own context still has it

    def mark_dirty(self, *tensors: Any) -> None:
        """Record the inputs that were written into."""
        self.dirty_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Record the results that have no gradient."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose if an undefined gradient is passed as zeros (the default) or as None."""
        self.materialize_grads = value

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute of the class, for a class whose methods take the context as `self`."""
        adopted = None if name in Context.__slots__ else self.opsmith_adopted
        if adopted is None or not adopted.takes_self:
            raise AttributeError(f"the context has no attribute {name!r}")
        found = inspect.getattr_static(adopted.function_class, name, None)
        if inspect.isfunction(found):
            return types.MethodType(found, self)
        return getattr(adopted.function_class, name)

    def each_tensor(self, change: Callable[[Any], Any]) -> Context:
        """Copy the context, with `change` applied to every tensor, also in tuples, lists and dicts.

        Marked tensors are dropped: they matter only right after the forward, and a result in the context of
        its own node would close a reference cycle.
        """
        other = Context(
            self.opsmith_adopted,
            self.needs_input_grad,
            _changed(self.to_save, change),
            _changed(self.saved_for_forward, change),
            materialize_grads=self.materialize_grads,
        )
        vars(other).update({name: _changed(value, change) for name, value in vars(self).items()})
        return other

    def hides(self, given: Sequence[Any]) -> bool:
        """Return True if it contains an object, other than an argument, that may hide tensors."""
        known = {id(value) for value in given}
        return any(hidden(value, known) for value in vars(self).values())

    def with_identities(self, known: Mapping[int, Tensor]) -> Context:
        """Copy the context, with some tensors replaced by identity."""
        return self.each_tensor(lambda value: known.get(id(value), value)) if known else self

    def pack(self, saved: SavedTensors) -> PackedContext:
        """The context without its tensors, which are saved."""
        # A backward does not use tensors for `jvp`.
        self.saved_for_forward = ()
        return PackedContext(
            self.each_tensor(
                lambda value: _TensorIndex(saved.place(value)) if isinstance(value, Tensor) else value
            )
        )


class SavedTensors:
    """Tensors that autograd saves for a class: its own, as in `apply`, and others, each once.

    All routes of a call save the same tensors in the same order: a checkpoint may rerun it on another route.

    Args:
        own: The tensors that the class saved.
    """

    def __init__(self, own: Iterable[Tensor | None]) -> None:
        self.tensors: list[Any] = [*own]
        self._places = {id(tensor): at for at, tensor in enumerate(self.tensors)}

    def place(self, tensor: Tensor) -> int:
        """Index of a tensor, which is added if it is not saved yet."""
        place = self._places.get(id(tensor))
        if place is None:
            place = self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return place


@dataclass(frozen=True, slots=True)
class _TensorIndex:
    """Index of a tensor that is saved by autograd."""

    position: int


@dataclass(frozen=True)
class PackedContext:
    """A context whose tensors autograd saves, so that hooks see them and no reference cycle forms."""

    context: Context

    def unpack(self, tensors: Sequence[Tensor]) -> Context:
        """The context with its tensors."""
        return self.context.each_tensor(
            lambda value: tensors[value.position] if isinstance(value, _TensorIndex) else value
        )


NUMBERS_AND_NAMES = frozenset(
    (
        *(bool, int, float, complex, str, bytes, types.NoneType, slice, range, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


def holds_no_tensor(values: Iterable[Any]) -> bool:
    """Return True if values clearly contain no tensor: numbers, strings, and tuples and lists of these.

    Example:
        >>> holds_no_tensor([3, (1, "mean")]), holds_no_tensor([print])
        (True, False)
    """
    return all(
        type(value) in NUMBERS_AND_NAMES or (type(value) in (tuple, list) and holds_no_tensor(value))
        for value in values
    )


_PLAIN = (
    Tensor,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.BuiltinFunctionType,
    type,
    slice,
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch.nn.Module,
)


def hidden(value: Any, known: Collection[int]) -> bool:
    """Return True if an object may hide tensors; objects whose `id` is in `known` do not count."""
    if id(value) in known or isinstance(value, _PLAIN):
        return False
    if type(value) in (list, tuple, torch.Size):
        return any(hidden(item, known) for item in value)
    if type(value) is dict:
        return any(hidden(item, known) for item in value.values())
    return not (isinstance(value, types.FunctionType) and value.__closure__ is None)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_changed(item, change) for item in value)
    if type(value) is dict:
        return {key: _changed(item, change) for key, item in value.items()}
    return change(value)
