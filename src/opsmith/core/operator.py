"""The handle of an operator, for its author and its callers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core import lowering
from opsmith.core.aspects import Aspects
from opsmith.core.call_arguments import call_error, shown
from opsmith.core.feature_packages import FeatureMethods, feature_function
from opsmith.core.out_form import out_names
from opsmith.core.specification import OUT, Specification
from opsmith.display import LONGEST, shortened

if TYPE_CHECKING:
    from opsmith.core.explanation import Explanation

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class OutForm:
    """The out form of an operator.

    Args:
        operator: Its handle.
        registration: Its registration.
        overload: Its `OpOverload`.
        names: Names of its arguments that results are written into.
    """

    operator: Operator[..., Any]
    registration: Registration
    overload: Any
    names: tuple[str, ...]


class Registration(Protocol):
    """The operator in torch's library, behind a handle.

    `DispatcherRegistration` in `torch_library.registration` implements it.
    """

    overload: Any
    out_form: OutForm | None
    functional: Operator[..., Any] | None
    owner: Operator[..., Any]
    """The handle. Traced code calls methods without arguments: torch 2.11 takes only constants."""

    @property
    def traced(self) -> bool:
        """True if a graph may contain the operator."""
        ...

    @property
    def overloads(self) -> tuple[Any, ...]:
        """The operators of torch that compute this one."""
        ...

    @property
    def copied_results(self) -> tuple[str, ...]:
        """Descriptions of the kernel results that earlier calls have copied into different strides."""
        ...

    def update(self, specification: Specification) -> None:
        """Use this specification from now on."""
        ...

    def remove(self) -> None:
        """Deregister the operator."""
        ...

    def forget_calls(self) -> None:
        """Validate the next call like the first call of a process."""
        ...

    def make_functional(self) -> None:
        """Make the functional form of an in-place operator, if it does not exist yet."""
        ...

    def make_out_form(self) -> None:
        """Make the out form, if it does not exist yet."""
        ...


_NO_TENSORS = (int, float, complex, str, list, tuple)
"""Types of values that are never converted to a tensor."""

_FOR_OPSMITH = {
    *("derived_kind", "forget_calls", "function_class", "is_handle", "learning"),
    *("out_operator", "redeclare", "replace_kernels"),
}
"""Members of a handle that other modules of opsmith use, and that are not documented."""


class Operator(Aspects, FeatureMethods[R], Generic[P, R]):
    """An operator: call it like the function that it was declared with, and attach handwritten parts to it.

    Example:
        >>> import torch, opsmith
        >>> from torch import Tensor
        >>> @opsmith.operator("demo::square")
        ... def square(x: Tensor) -> Tensor:
        ...     return x * x
        >>> square = square.gradients(x=lambda grad, x: 2 * grad * x)
        >>> square(torch.tensor([1.0, 3.0]))
        tensor([1., 9.])
    """

    __name__: str
    __wrapped__: Callable[P, R]
    is_handle = True
    """Mark of handles, for modules that this module imports."""

    def __init__(
        self,
        specification: Specification,
        registration: Registration,
        find: Callable[[str, str], Operator[..., Any]],
    ) -> None:
        self._specification = specification
        self._registration = registration
        registration.owner = self
        self._find = find
        self._take_arguments(specification)
        self._describe(specification)

    def __new__(cls, *args: Any) -> Operator[P, R]:
        """Make a handle with a class of its own, so that an accelerator can replace its calls."""
        return super().__new__(
            type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        )

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the operator."""
        result: R
        if torch.compiler.is_dynamo_compiling():
            result = self._call_traced(args, kwargs)
            return result
        try:
            if self._lowering is None:
                result = self._registration.overload(*args, **kwargs)
            else:
                lowered, named = self._lowering.call(args, kwargs)
                result = self._registration.overload(*lowered, **named)
            return result
        except errors.OpsmithError:
            raise
        except (RuntimeError, TypeError, ValueError):
            # Checked only after a failure, so that valid calls stay fast; the message is better than torch's.
            self._check_call(args, kwargs)
            raise

    def _call_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the operator in code that `torch.compile` traces."""
        given = [*enumerate(args), *kwargs.items()]
        if any(isinstance(value, _NO_TENSORS) for place, value in given if place in self._tensor_places):
            self._check_traced(args, kwargs)
        if self._lowering is None:
            return self._registration.overload(*args, **kwargs)
        if self._uncompiled is not None:
            return self._uncompiled(*args, **kwargs)
        try:
            lowered, named = self._lowering.call(args, kwargs)
        except TypeError:
            self._check_traced(args, kwargs)
            raise
        except ValueError as failure:
            raise ValueError(f"{self.name}: {failure.args[0]}") from None
        return self._registration.overload(*lowered, **named)

    def _check_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        error = self._call_error(args, kwargs)
        if error is not None:
            raise TypeError(error.message())

    def _take_arguments(self, specification: Specification) -> None:
        single = [
            (at, argument.name)
            for at, argument in enumerate(specification.schema.arguments)
            if argument.kind.is_tensor and not argument.kind.sequence
        ]
        self._tensor_places = frozenset(place for places in single for place in places)
        self._lowering = specification.schema.lowering
        self._uncompiled: Callable[..., Any] | None = None
        if self._lowering is not None and self._lowering.objects:
            lowering.prepare()
            if not lowering.TRACED:
                self._uncompiled = torch.compiler.disable(self.__call__)

    def _describe(self, specification: Specification) -> None:
        """Take the reference's name and docstring, and the signature of a call."""
        functools.update_wrapper(self, specification.reference)
        signature = specification.schema.signature(specification.reference)
        self.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        self.__annotations__["return"] = signature.return_annotation
        # If a handle and its class have the same docstring, `help` shows the class, with its methods.
        described: Any = type(self)
        described.__signature__, described.__doc__ = signature, self.__doc__

    def __dir__(self) -> list[str]:
        """List the members that authors and callers use."""
        names = set(super().__dir__()) - _FOR_OPSMITH
        return sorted(each for each in names if each.startswith("__") or not each.startswith("_"))

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Explain this call without running it: the kernel, the formulas, the saved tensors.

        Example:
            >>> import torch, opsmith
            >>> print(opsmith.ops.exp.explain(torch.ones(2)).saved)
            ('result',)
        """
        from opsmith.core.explanation import explain  # imported when it is used

        self._check_call(args, kwargs)
        explanation = explain(self._specification, self._specification.schema.call_values(args, kwargs))
        return replace(explanation, copies=(*explanation.copies, *self._registration.copied_results))

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():  # Dynamo compiles each function after a graph break
            torch.compiler.disable(self._check_call)(args, kwargs)
            return
        error = self._call_error(args, kwargs)
        if error is not None:
            raise error from None

    def _call_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> errors.ArgumentError | None:
        schema = self._specification.schema
        error = call_error(args, kwargs, schema)
        if error is None:
            return None
        out = error.argument == "out" and bool(schema.visible) and schema.always_tensors
        return error.of(self.name, self._specification.where, self._call_hint(out=out))

    def _call_hint(self, *, out: bool = False) -> str:
        return _hint_of(self._specification, out=out)

    @property
    def name(self) -> str:
        """`namespace::name`."""
        return self._specification.name

    @property
    def specification(self) -> Specification:
        """The frozen value that describes the current operator; attaching an aspect replaces it."""
        return self._specification

    @property
    def reference(self) -> Callable[P, R]:
        """The function that the operator was declared with."""
        return self._specification.reference

    @property
    def derived_kind(self) -> type[DerivedOperator[..., Any]]:
        """The class of the handle of its functional form."""
        return DerivedOperator

    @property
    def functional(self) -> Operator[P, R]:
        """The operator that writes into no argument, and returns the new values before the other results.

        An operator that is not declared with `mutates=` is its own functional form.

        Example:
            >>> import torch, opsmith
            >>> @opsmith.operator("demo::increase_", mutates=["x"])
            ... def increase_(x: torch.Tensor) -> None:
            ...     x.add_(1)
            >>> x = torch.zeros(2)
            >>> increase_.functional(x), x
            (tensor([1., 1.]), tensor([0., 0.]))
        """
        if not self._specification.schema.written:
            return self
        if torch.compiler.is_compiling() or self._registration.functional is None:
            self._registration.make_functional()
        made: Any = self._registration.functional
        form: Operator[P, R] = made
        return form

    def out(self, /, *args: Any, out: R, **kwargs: Any) -> R:
        """Compute the operator into existing tensors, and return them.

        Kernels in C++ write directly into these tensors. The results have no gradient.

        Args:
            args: The arguments of a call.
            out: Tensor with the shape, dtype and device of the result, or a tuple of one for each result. It
                must not share elements with an argument.
            kwargs: Keyword arguments of the call.

        Raises:
            UsageError: If a result may be a list or None, or `out` is not a tensor for each result.
            ShapeError, ResultTypeError: If `out` has a wrong shape or dtype.
            PlacementError: If `out` is on a wrong device, or is a DTensor with wrong placements.
            MutationError: If `out` cannot be written, or an argument requires a gradient.

        Example:
            >>> import torch, opsmith
            >>> buffer = torch.empty(2)
            >>> opsmith.ops.exp.out(torch.zeros(2), out=buffer) is buffer, buffer
            (True, tensor([1., 1.]))
        """
        form = self._out_form()
        names = form.names
        if names == ("out",) and isinstance(out, Tensor):
            form.operator(*args, out=out, **kwargs)
            return out
        given = out if isinstance(out, tuple) else (out,)
        if len(names) != len(given) or not all(isinstance(each, Tensor) for each in given):
            raise self._specification.error(
                errors.UsageError,
                "`out` is not a tensor for each result",
                argument="out",
                expected="a tensor" if len(names) == 1 else f"a tuple of {len(names)} tensors",
                got=shown(out),
                hint=self._call_hint(out=True),
            )
        outs = dict(zip(names, given, strict=True))
        form.operator(*args, **kwargs, **outs)
        return out

    @property
    def out_operator(self) -> Operator[..., Any]:
        """The in-place operator that `out` calls, with an argument for each result."""
        return self._out_form().operator

    def _out_form(self) -> OutForm:
        if torch.compiler.is_compiling() or self._registration.out_form is None:
            self._registration.make_out_form()
        form = self._registration.out_form
        assert form is not None
        return form

    @property
    def torch_operator(self) -> Any:
        """The `OpOverload` that is registered with torch: `torch.ops.namespace.name.default`."""
        return self._registration.overload

    @property
    def torch_operators(self) -> tuple[Any, ...]:
        """All `OpOverload`s of the operator, `torch_operator` first.

        Graphs that torch makes may contain the others: an operator that also returns hidden results, one
        that writes and returns nothing, and one that returns new values instead of writing.

        Example:
            >>> import opsmith.ops
            >>> print(*opsmith.ops.rms_norm.torch_operators)
            opsmith.rms_norm.default opsmith.rms_norm_and_hidden.default
        """
        return self._registration.overloads

    def __repr__(self) -> str:
        return f"<opsmith operator {shortened(self._specification.schema.text(self.name), LONGEST - 20)}>"

    def _repr_html_(self) -> str:
        shown: str = feature_function("operator_html")(self)
        return shown

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator[P, R]:
        return self

    def __copy__(self) -> Operator[P, R]:
        return self

    def __reduce__(self) -> Any:
        return self._find, (self.name, self._specification.module)

    def redeclare(
        self, specification: Specification, register: Callable[[Specification], Registration] | None = None
    ) -> None:
        """Replace the operator by a new one of the same name; everything attached before is removed.

        Args:
            specification: The operator.
            register: Registers it if the current registration does not fit: only one of them writes.
        """
        before = self._specification
        if register is None or bool(before.schema.written) == bool(specification.schema.written):
            self._registration.update(specification)
        else:
            self._registration.remove()
            try:
                self._registration = register(specification)
            except Exception:
                self._registration = register(before)
                raise
            finally:
                self._registration.owner = self
        self._specification = specification
        self._take_arguments(specification)
        self._describe(specification)

    def forget_calls(self) -> None:
        """Treat the next call like the first call of a process: it is validated, and skips no step.

        Example:
            >>> import torch, opsmith.ops
            >>> opsmith.ops.exp.forget_calls()
            >>> opsmith.ops.exp(torch.zeros(2))
            tensor([1., 1.])
        """
        self._registration.forget_calls()

    def _replace(self, **aspects: Any) -> Self:
        """Replace parts of the specification, all at once."""
        specification = replace(self._specification, **aspects)
        self._registration.update(specification)
        self._specification = specification
        self._take_arguments(specification)
        return self


def _hint_of(specification: Specification, *, out: bool) -> str:
    schema, name = specification.schema, specification.variable
    if not out:
        return f"call it as {schema.call_text(name)}"
    buffers = ", ".join(out_names(schema))
    text = f"({buffers})" if len(schema.visible) > 1 else buffers
    return f"call it as {schema.call_text(f'{name}.out', out=text)}"


class DerivedOperator(Operator[P, R]):
    """A form of an operator; formulas and kernels are attached to that operator.

    Args:
        specification: The form.
        registration: Its registration.
        owner: The operator of which this is a form.
        name: Attribute of the owner for this handle.
    """

    def __init__(
        self, specification: Specification, registration: Registration, owner: Operator[..., Any], name: str
    ) -> None:
        super().__init__(specification, registration, lambda *_: getattr(owner, name))
        self._reduced = getattr, (owner, name)
        self._owner = owner

    def __reduce__(self) -> Any:
        return self._reduced

    def _call_hint(self, *, out: bool = False) -> str:
        form = self.name.endswith(OUT)
        return _hint_of(self._owner.specification, out=True) if form else super()._call_hint(out=out)

    def _replace(self, **aspects: Any) -> Self:
        raise self._specification.error(
            errors.UsageError,
            f"it is derived from `{self._owner.name}`, so nothing can be attached to it",
            hint=f"attach {', '.join(aspects)} to `{self._owner.name}`",
        )
