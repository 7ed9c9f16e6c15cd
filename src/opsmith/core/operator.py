"""The handle of an operator: what its author and its callers hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch

from opsmith import errors
from opsmith.core.attaching import check_attached
from opsmith.core.calls import call_fault, shown, tensors_in
from opsmith.core.gradients import GradientRules, Rule, formula_rules, joint_rules
from opsmith.core.kernels import Kernel, check_device, dtypes_of
from opsmith.core.location import where
from opsmith.core.samples import Samples
from opsmith.core.specification import Specification

if TYPE_CHECKING:
    from opsmith.core.explanation import Explanation

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


MISSING = object()
"""What a front door hands on for an argument that was not given."""


class Registration(Protocol):
    """What stands behind a handle: the operator as torch knows it."""

    overload: Any

    @property
    def proven(self) -> bool:
        """Whether a call has been through the dispatcher without fault."""
        ...

    def front_door(self, call: Callable[..., Any]) -> Callable[..., Any] | None:
        """A `__call__` that is faster, and hands on to `call` what it does not take; None where none is."""
        ...

    def update(self, specification: Specification) -> None:
        """Make torch use this specification from now on."""
        ...


class Operator(Generic[P, R]):
    """An operator: call it as the function it was declared with; attach to it what you write by hand.

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

    def __init__(
        self,
        specification: Specification,
        registration: Registration,
        find: Callable[[str, str], Operator[..., Any]],
    ) -> None:
        self._specification = specification
        self._registration = registration
        self._find = find
        self._opened = False
        functools.update_wrapper(self, specification.reference)

    def __new__(cls, *args: Any) -> Operator[P, R]:
        """Make a handle of a class of its own, so that code generated for it can be its `__call__`."""
        return super().__new__(
            type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        )

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the operator."""
        if torch.compiler.is_compiling():
            result: R = self._registration.overload(*args, **kwargs)
            return result
        for position, name in self._specification.schema.plain:
            # torch would make a number of a tensor, which waits for the device and loses the gradient.
            if tensors_in([args[position] if position < len(args) else kwargs.get(name)]):
                self._check_call(args, kwargs)
        try:
            result = self._registration.overload(*args, **kwargs)
        except errors.OpsmithError:
            raise
        except (RuntimeError, TypeError, ValueError):
            # To look only after a failure keeps right calls fast; it says what is wrong better than torch.
            self._check_call(args, kwargs)
            raise
        if self._registration.proven and not self._opened:
            self._open_door()
        return result

    def _open_door(self) -> None:
        """Take the front door from now on, since a call has been through the dispatcher without fault."""
        self._opened = True
        door = self._registration.front_door(type(self)._from_door)
        if door is not None:
            setattr(type(self), "__call__", door)  # noqa: B010

    def _close_door(self) -> None:
        self._opened = False
        if "__call__" in vars(type(self)):
            delattr(type(self), "__call__")

    def _from_door(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a call that is not one for the front door: all arguments, some perhaps not given."""
        if any(value is MISSING for value in (*args, *kwargs.values())):
            named = dict(zip(self._specification.schema.names, args, strict=False))
            kwargs = {name: value for name, value in {**named, **kwargs}.items() if value is not MISSING}
            args = ()
        return Operator.__call__(self, *args, **kwargs)

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Say what this call would run, without running it: kernel, formulas, what is saved.

        Example:
            >>> import torch, opsmith
            >>> print(opsmith.ops.exp.explain(torch.ones(2)).saved)
            ('result',)
        """
        from opsmith.core.explanation import explain  # asked for by people, not by programs

        self._check_call(args, kwargs)
        return explain(self._specification, self._specification.schema.call_values(args, kwargs))

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fault = call_fault(args, kwargs, self._specification.schema)
        if fault is not None:
            problem, argument, expected, got = fault
            raise errors.ArgumentError(
                problem,
                operator=self.name,
                argument=argument,
                expected=expected,
                got=got,
                where=self._specification.where,
                mend=f"call it as {self._specification.schema.text(self._specification.short_name)}",
            ) from None

    @property
    def name(self) -> str:
        """`namespace::name`."""
        return self._specification.name

    @property
    def specification(self) -> Specification:
        """The frozen value that describes the operator now; attaching an aspect replaces it."""
        return self._specification

    @property
    def reference(self) -> Callable[P, R]:
        """The function that the operator was declared with, as it was written."""
        return self._specification.reference

    @property
    def torch_operator(self) -> Any:
        """The operator as torch knows it: `torch.ops.namespace.name.default`."""
        return self._registration.overload

    def __repr__(self) -> str:
        return f"<opsmith operator {self._specification.schema.text(self.name)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator[P, R]:
        return self

    def __copy__(self) -> Operator[P, R]:
        return self

    def __reduce__(self) -> Any:
        return self._find, (self.name, self._specification.module)

    def redeclare(self, specification: Specification) -> None:
        """Become another operator of the same name; what was attached before is gone."""
        self._registration.update(specification)
        self._specification = specification
        self._close_door()
        functools.update_wrapper(self, specification.reference)

    def _replace(self, **aspects: Any) -> Operator[P, R]:
        """Replace parts of the specification, all at once."""
        specification = replace(self._specification, **aspects)
        self._registration.update(specification)
        self._specification = specification
        self._close_door()
        return self

    @overload
    def gradients(self, joint: Callable[..., dict[str, Any]], /) -> Operator[P, R]: ...
    @overload
    def gradients(self, first: str, /, *others: str) -> Callable[[F], F]: ...
    @overload
    def gradients(self, /, **rules: Any) -> Operator[P, R]: ...
    def gradients(self, /, *joint: Any, **rules: Any) -> Any:
        """Give gradient formulas, by input name, or one joint formula for several inputs.

        A formula's parameters name what it needs: inputs, `result` (or a result's name), `grad` (or
        `grad_<name>`). What no formula is given for is derived from the reference.

        Args:
            *joint: A function that returns a dict of gradients by input name (as a decorator); or names of
                the inputs that the decorated joint formula covers.
            **rules: A formula, `opsmith.zero`, `opsmith.non_differentiable`, `opsmith.not_implemented(why)`.

        Returns:
            The operator; with input names, a decorator.

        Raises:
            UnknownInputError, NotDifferentiableError, FormulaError, FormulaParameterError,
            GradientConflictError: As their names say.

        Example:
            >>> @opsmith.operator("demo::reciprocal")
            ... def reciprocal(x: torch.Tensor) -> torch.Tensor:
            ...     return 1 / x
            >>> reciprocal.gradients(x=lambda grad, result: -grad * result.square())
            <opsmith operator demo::reciprocal(Tensor x) -> Tensor>
        """
        self._check_gradients_call(joint, rules)
        if joint and isinstance(joint[0], str):

            def decorate(function: F) -> F:
                self._attach_joint(function, joint)
                return function

            return decorate
        if joint:
            self._attach_joint(joint[0], ())
            return self
        return self._attach_gradients(formula_rules(rules, *self._context()), surrogate=False)

    def _check_gradients_call(self, joint: tuple[Any, ...], rules: dict[str, Any]) -> None:
        names = all(isinstance(each, str) for each in joint)
        if joint and (rules or not (names or len(joint) == 1)):
            given = [repr(each) if isinstance(each, str) else where(each) for each in joint]
            raise errors.FormulaError(
                "gradients are given in one of three ways at a time",
                operator=self.name,
                expected="one joint formula, or names of inputs, or `name=formula` for each input",
                got=", ".join([*given, *(f"{name}=..." for name in rules)]),
                where=self._specification.where,
                mend="call `gradients` once for each way",
            )

    def surrogate_gradients(
        self, stand_in: Callable[..., Any] | None = None, /, **rules: Any
    ) -> Operator[P, R]:
        """Give gradients that are wrong on purpose: straight-through estimators, reversal, clipping, spikes.

        Args:
            stand_in: A smooth function of the same arguments. Its true gradient is the operator's where no
                formula is given; where one is given, `check` holds the formula to it.
            **rules: As for `gradients`.

        Raises:
            GradientConflictError: If true gradients are declared already.
            NotAFunctionError: If the stand-in cannot be called as the operator is.

        Example:
            >>> @opsmith.operator("demo::straight_through")
            ... def straight_through(x: torch.Tensor) -> torch.Tensor:
            ...     return x.round()
            >>> x = torch.tensor([0.4], requires_grad=True)
            >>> straight_through.surrogate_gradients(x=lambda grad: grad)(x).backward()
            >>> x.grad
            tensor([1.])
        """
        if stand_in is not None:
            self._check_attached(stand_in, "the stand-in")
        return self._attach_gradients(
            formula_rules(rules, *self._context()), surrogate=True, stand_in=stand_in
        )

    def _check_attached(self, function: Any, what: str) -> None:
        check_attached(function, what, self._specification.schema, self.name)

    def _context(self) -> tuple[Any, str, str]:
        return self._specification.schema, self.name, self._specification.where

    def _attach_joint(self, function: Any, inputs: tuple[str, ...]) -> None:
        self._attach_gradients(joint_rules(function, inputs, *self._context()), surrogate=False)

    def _attach_gradients(
        self, rules: dict[str, Rule], *, surrogate: bool, stand_in: Callable[..., Any] | None = None
    ) -> Operator[P, R]:
        now: GradientRules = self._specification.gradients
        if now.given and now.surrogate != surrogate:
            raise errors.GradientConflictError(
                "true and surrogate gradients are declared for one operator",
                operator=self.name,
                got="surrogate_gradients(...)" if surrogate else "gradients(...)",
                where=self._specification.where,
                mend="keep one of them; declare the operator again to change your mind",
            )
        return self._replace(
            gradients=now.with_rules(rules, surrogate=surrogate, stand_in=stand_in or now.stand_in)
        )

    @overload
    def kernel(self, device: str, /, *, dtypes: Any = None) -> Callable[[F], F]: ...
    @overload
    def kernel(
        self, device: str, function: Callable[..., Any], /, *, dtypes: Any = None
    ) -> Operator[P, R]: ...
    def kernel(
        self, device: str, function: Callable[..., Any] | None = None, /, *, dtypes: Any = None
    ) -> Any:
        """Give a kernel for one type of device: a function that computes what the reference does, faster.

        Args:
            device: Device type: `cpu`, `cuda`, `mps`, ...
            function: Takes and returns what the reference does. Without it, `kernel` is a decorator.
            dtypes: dtypes that it takes; all by default. Others run the reference: `explain` tells.

        Raises:
            DeviceNameError: If torch knows no such device type.
            NotAFunctionError: If the kernel cannot be called as the operator is.

        Example:
            >>> @opsmith.operator("demo::negate")
            ... def negate(x: torch.Tensor) -> torch.Tensor:
            ...     return -x
            >>> negate.kernel("cpu", torch.neg, dtypes=[torch.float32]).explain(torch.ones(2)).forward
            'kernel for cpu, neg'
        """
        check_device(device, self.name)
        chosen = None if dtypes is None else dtypes_of(dtypes, self.name)

        def attach(function: F) -> F:
            self._check_attached(function, f"the kernel for {device}")
            kernel = Kernel(device, function, chosen)
            others = [k for k in self._specification.kernels if (k.device, k.dtypes) != (device, chosen)]
            self._replace(kernels=(kernel, *others))
            return function

        if function is None:
            return attach
        attach(function)
        return self

    def fake(self, function: F) -> F:
        """Give the fake kernel: same arguments, returns empty tensors of the right shape, dtype and device.

        Only an opaque operator needs one; for others the reference serves, on fake tensors.

        Example:
            >>> @opsmith.operator("demo::numpy_sort", opaque=True)
            ... def numpy_sort(x: torch.Tensor) -> torch.Tensor:
            ...     return torch.from_numpy(numpy.sort(x.numpy()))
            >>> fake = numpy_sort.fake(torch.empty_like)
            >>> numpy_sort(torch.ones(3, device="meta")).shape
            torch.Size([3])
        """
        self._check_attached(function, "the fake kernel")
        self._replace(fake=function)
        return function

    def samples(self, function: Samples) -> Samples:
        """Give representative inputs: a function of `make` that yields tuples, or `make.call(...)`.

        Example:
            >>> @opsmith.operator("demo::halve")
            ... def halve(x: torch.Tensor) -> torch.Tensor:
            ...     return x / 2
            >>> samples = halve.samples(lambda make: [(make(2, 3),), (make(0),)])
            >>> opsmith.check(halve, only=["forward"]).passed_as_asked
            True
        """
        if not callable(function):
            raise errors.NotAFunctionError(
                "samples are given as a function that yields them",
                operator=self.name,
                expected="a function of `make`",
                got=shown(function),
                where=self._specification.where,
                mend="write `@op.samples` over `def _(make): yield make(2, 3), ...`",
            )
        self._replace(samples=function)
        return function
