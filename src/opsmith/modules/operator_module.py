"""`OperatorModule`, the base of generated module classes; its plan, tensors, and inferred sizes."""

from __future__ import annotations

import copy
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from opsmith import errors
from opsmith.core.call_arguments import shown, type_error
from opsmith.core.expression import Expression, ExpressionError
from opsmith.core.operator import Operator
from opsmith.core.schema import Argument


@dataclass(frozen=True)
class OwnedTensor:
    """A parameter or buffer.

    Args:
        name: The operator's argument for which it is passed.
        shape: Its dimensions.
        fill: Initialiser, which fills it in place.
        optional: True if a module may be made without it, by a flag of the constructor.
        buffer: True for a buffer.
        persistent: True if a state_dict contains it.
    """

    name: str
    shape: tuple[Expression, ...]
    fill: Callable[[Tensor], Any]
    optional: bool
    buffer: bool
    persistent: bool

    @property
    def layout(self) -> str:
        """Text of its shape, for docstrings."""
        return f"[{', '.join(each.text for each in self.shape)}]"

    @property
    def filling(self) -> str:
        """Text of its initialiser, which is the same in every process."""
        return _shown(self.fill)


def _shown(fill: Any) -> str:
    if inspect.isroutine(fill):
        return fill.__name__
    if isinstance(fill, partial):
        arguments = [*map(repr, fill.args), *(f"{name}={value!r}" for name, value in fill.keywords.items())]
        return f"{_shown(fill.func)}({', '.join(arguments)})"
    return repr(fill)


@dataclass(frozen=True)
class ModulePlan:
    """The plan of a class of modules.

    Args:
        operator: The operator that `forward` calls.
        name: Name of the class.
        where: `file:line` of the call of `module`.
        sizes: The constructor's sizes, in order.
        letters: The name of each letter of the operator's `shapes=` that is a size.
        inferred: Sizes that may be None and are then inferred in the first call.
        owned: Parameters and buffers, in the order in which they are made and filled.
        options: Arguments other than tensors that the constructor takes, in the operator's order.
        forward: Arguments that `forward` takes, in the operator's order.
    """

    operator: Operator[..., Any]
    name: str
    where: str
    sizes: tuple[str, ...]
    letters: dict[str, str]
    inferred: frozenset[str]
    owned: tuple[OwnedTensor, ...]
    options: tuple[Argument, ...]
    forward: tuple[Argument, ...]

    @property
    def flags(self) -> tuple[OwnedTensor, ...]:
        """Optional parameters and buffers."""
        return tuple(each for each in self.owned if each.optional)


R = TypeVar("R")


class OperatorModule(nn.Module, Generic[R]):
    """A module that owns the parameters of an operator and calls it; `op.module(...)` makes subclasses.

    The arguments of the constructor, such as sizes, are attributes, as in the modules of torch.

    Attributes:
        operator: The operator that `forward` calls. If it is declared again, the module calls the new
            declaration.
        plan: The plan of the class.
        Lazy: The class of modules in which a size is None until the first call infers it.

    Example:
        >>> layer = opsmith.ops.Linear(2, 1, bias=False)
        >>> isinstance(layer, opsmith.modules.OperatorModule), layer.in_features, layer.operator.name
        (True, 2, 'opsmith::linear')
    """

    operator: ClassVar[Operator[..., Any]]
    plan: ClassVar[ModulePlan]
    Lazy: ClassVar[type[nn.Module] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a lazy module if a size is None."""
        twin: Any = vars(cls).get("Lazy")  # a base class may have a different constructor
        if twin is not None:
            given = {**dict(zip(cls.plan.sizes, args, strict=False)), **kwargs}
            if any(given.get(name, 0) is None for name in cls.plan.inferred):
                cls = twin
        return super().__new__(cls)

    if TYPE_CHECKING:  # each generated class has its own `__init__` and `forward`

        def __init__(
            self,
            *arguments: Any,
            device: torch.device | str | int | None = None,
            dtype: torch.dtype | None = None,
            **named: Any,
        ) -> None: ...

        def __call__(self, *args: Any, **kwargs: Any) -> R: ...

        # The names of parameters, sizes and options are in the plan.
        def __getattr__(self, name: str) -> Any: ...

    def _make(self, given: Mapping[str, Any], device: Any, dtype: torch.dtype | None) -> None:
        """Construct the module from the constructor's arguments, by name."""
        super().__init__()
        plan = self.plan
        for name in plan.sizes:
            lazy = given[name] is None and self._is_inferred(name)
            setattr(self, name, None if lazy else self._size(name, given[name]))
        for option in plan.options:
            value = given[option.name]
            if not option.kind.accepts(value):
                given_as = ", ".join((*plan.sizes, f"{option.name}=..."))
                hint = f"call it as `{type(self).__name__}({given_as})`"
                raise type_error(option, value).of(
                    f"{type(self).__name__} ({plan.operator.name})", plan.where, hint
                )
            setattr(self, option.name, list(value) if isinstance(value, list) else value)
        for each in plan.flags:
            if not isinstance(given[each.name], bool):
                raise errors.ArgumentError(
                    f"`{each.name}` must be True or False",
                    operator=f"{type(self).__name__} ({plan.operator.name})",
                    argument=each.name,
                    expected="bool",
                    got=shown(given[each.name]),
                    where=plan.where,
                    hint=f"write `{each.name}=False`; its values come from `init`, or from a state_dict",
                )
        for each in plan.owned:
            tensor = None
            if not each.optional or given[each.name]:
                tensor = self._new(each, device, dtype)
            if each.buffer:
                self.register_buffer(each.name, tensor, persistent=each.persistent)
            else:
                self.register_parameter(each.name, tensor)
        self.reset_parameters()

    def _is_inferred(self, name: str) -> bool:
        return False

    def _new(self, owned: OwnedTensor, device: Any, dtype: torch.dtype | None) -> Any:
        return new_tensor(self, owned, device, dtype)

    def _size(self, name: str, value: Any) -> int:
        try:
            size = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            size = -1
        if size < 0:
            raise errors.SizeError(
                f"`{name}` is not a size",
                operator=f"{type(self).__name__} ({self.plan.operator.name})",
                argument=name,
                expected="a whole number, zero or more",
                got=shown(value),
                where=self.plan.where,
                hint=f"call it as `{type(self).__name__}({', '.join(self.plan.sizes)}, ...)`",
            )
        return size

    def reset_parameters(self) -> None:
        """Fill parameters and buffers with their initialisers, in the order of their declaration."""
        for each in self.plan.owned:
            tensor = getattr(self, each.name)
            if tensor is not None and not is_lazy(tensor):
                self._fill(each, tensor)

    def _fill(self, owned: OwnedTensor, tensor: Tensor) -> None:
        try:
            with torch.no_grad():
                answer = owned.fill(tensor)
        except Exception as error:
            error.add_note(
                f"while {owned.filling} filled `{owned.name}` {list(tensor.shape)} of {type(self).__name__}"
            )
            raise
        if not _filled(tensor, answer):
            raise errors.InitializerError(
                f"the initialiser of `{owned.name}` did not fill the tensor that it was given",
                operator=f"{type(self).__name__} ({self.plan.operator.name})",
                argument=owned.name,
                expected="a function that fills its tensor in place",
                got=f"`{owned.filling}`, which returned {shown(answer)}",
                where=self.plan.where,
                hint="write `opsmith.init.uniform(-0.1, 0.1)`, or a function whose name ends in `_`, "
                "such as `torch.nn.init.ones_`",
            )

    def extra_repr(self) -> str:
        """Return sizes, options other than the defaults, and the optional parameters that are present."""
        shown_options = [each.name for each in self.plan.options if getattr(self, each.name) != each.default]
        pieces = [f"{name}={getattr(self, name)!r}" for name in (*self.plan.sizes, *shown_options)]
        pieces += [f"{each.name}={getattr(self, each.name) is not None}" for each in self.plan.flags]
        return ", ".join(pieces)

    # Python calls `__reduce_ex__` for pickles and for copies; only a pickle finds the class by its name.
    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_lost(type(self), self.plan)
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__setstate__(self.__getstate__())  # type: ignore[no-untyped-call]  # torch's, untyped
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return twin


def new_tensor(
    module: OperatorModule[Any], owned: OwnedTensor, device: Any, dtype: torch.dtype | None
) -> Tensor | nn.Parameter:
    """Return a parameter or buffer that is not filled yet."""
    tensor = torch.empty(shape_of(module, owned), device=device, dtype=dtype)
    return tensor if owned.buffer else nn.Parameter(tensor)


def shape_of(module: OperatorModule[Any], owned: OwnedTensor) -> list[int]:
    """Return the shape of a parameter or buffer of a module whose sizes are known."""
    shape = []
    for dimension in owned.shape:
        values = {name: getattr(module, name) for name in dimension.names}
        try:
            size = dimension.value(values)
        except ExpressionError:
            size = -1
        if size < 0:
            raise errors.SizeError(
                f"`{owned.name}` has a dimension that is not a valid size",
                operator=f"{type(module).__name__} ({module.plan.operator.name})",
                argument=owned.name,
                expected=f"{dimension.text}, zero or more",
                got=", ".join(f"{name} = {value}" for name, value in values.items()) or dimension.text,
                where=module.plan.where,
                hint="give different sizes",
            )
        shape.append(size)
    return shape


def _filled(tensor: Tensor, answer: Any) -> bool:
    """Return True if an initialiser worked in place: it returned None, or memory of the tensor."""
    if answer is None or answer is tensor:
        return True
    if not isinstance(answer, Tensor) or answer.device != tensor.device:
        return False
    return answer.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def refuse_lost(kind: type[Any], plan: ModulePlan) -> None:
    """Raise an error if the class of a module to pickle cannot be imported by its name.

    Raises:
        ModulePicklingError: If it cannot; the hint says to which name the class must be bound.
    """
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        short = kind.__qualname__.rpartition(".")[2]
        raise errors.ModulePicklingError(
            f"a pickle finds a class by its name, but `{kind.__module__}.{kind.__qualname__}` is "
            + ("another one" if isinstance(found, type) else "not there"),
            operator=plan.operator.name,
            expected=f"`{short}` at the top of the module `{kind.__module__}`",
            where=plan.where,
            hint=f"write `{short} = op.module(...)` there, or give the variable's name as `name=`; "
            "a state_dict needs no such name",
        )


class InfersSizes(LazyModuleMixin, OperatorModule[Any]):
    """Mixin of a lazy module, which becomes its eager class in the first call."""

    def _is_inferred(self, name: str) -> bool:
        """Return True if a size may be None."""
        return name in self.plan.inferred

    def _new(self, owned: OwnedTensor, device: Any, dtype: torch.dtype | None) -> Tensor:
        """Return an uninitialised tensor if a size of its shape is not known."""
        if all(getattr(self, name) is not None for each in owned.shape for name in each.names):
            return new_tensor(self, owned, device, dtype)
        kind: Any = UninitializedBuffer if owned.buffer else UninitializedParameter
        unknown: Tensor = kind(device=device, dtype=dtype)
        return unknown

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Infer sizes from the arguments of a call, and make the tensors that depend on them."""
        plan = self.plan
        specification = plan.operator.specification
        assert specification.shapes is not None  # sizes are inferred from them
        given = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        values = [given.get(name, getattr(self, name, None)) for name in specification.schema.names]
        values = [None if isinstance(value, Tensor) and is_lazy(value) else value for value in values]
        sizes, _ = specification.shapes.bind(specification.schema, values)
        for letter, name in plan.letters.items():
            if getattr(self, name) is None and sizes.get(letter) is not None:
                setattr(self, name, int(sizes[letter]))
        unknown = [name for name in plan.sizes if getattr(self, name) is None]
        if unknown:
            raise errors.SizeError(
                f"`{unknown[0]}` does not follow from this call",
                operator=f"{plan.name} ({plan.operator.name})",
                argument=unknown[0],
                expected=f"a call with tensors of `{specification.shapes.shown(specification.schema)}`",
                where=plan.where,
                hint=f"give `{unknown[0]}` when the module is made",
            )
        lazy = [each for each in plan.owned if is_lazy(getattr(self, each.name))]
        for each in lazy:
            getattr(self, each.name).materialize(shape_of(self, each))
        if lazy:
            self.reset_parameters()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise errors.ModulePicklingError(
            "its parameters have no shape yet, and a pickle would lose their dtype and device",
            operator=f"{self.plan.name} ({self.plan.operator.name})",
            where=self.plan.where,
            hint="call the module once before you pickle it",
        )


def lazy_twin(kind: type[OperatorModule[Any]]) -> type[nn.Module]:
    """Return the class of `kind(None, ...)`."""
    members = {
        "__module__": kind.__module__,
        "__qualname__": f"{kind.__qualname__}.Lazy",
        "__doc__": f"A `{kind.__name__}` before its first call, in which its sizes are inferred.",
        "cls_to_become": kind,
    }
    return type(f"Lazy{kind.__name__}", (InfersSizes, kind), members)
