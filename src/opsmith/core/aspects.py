"""Aspects that authors attach to an operator: gradients, tangents, kernels, a fake kernel, samples."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from opsmith import errors
from opsmith.core.call_arguments import check_attached, shown
from opsmith.core.feature_packages import feature_function
from opsmith.core.gradients import (
    GradientRules,
    Rule,
    formula_rules,
    joint_rules,
    joint_tangent_rules,
    tangent_rules,
)
from opsmith.core.kernels import BuiltKernel, Dtypes, Kernel, check_device, dtypes_of
from opsmith.core.location import where
from opsmith.core.samples import Samples
from opsmith.core.specification import Specification

if TYPE_CHECKING:
    from opsmith.core.kernel_options import CudaOptions, TritonOptions, UnknownOption

F = TypeVar("F", bound=Callable[..., Any])

KERNEL_OBSERVERS: list[Callable[[Any], None]] = []
"""Functions that are called with an operator after a kernel was attached to it."""


class Aspects:
    """The methods of a handle that attach an aspect: each adds the aspect to a new specification."""

    _specification: Specification

    @property
    @abstractmethod
    def name(self) -> str:
        """`namespace::name`."""

    @abstractmethod
    def _replace(self, **aspects: Any) -> Self:
        """Replace parts of the specification, all at once."""

    @overload
    def gradients(self, joint: Callable[..., dict[str, Any]], /) -> Self: ...
    @overload
    def gradients(self, first: str, /, *others: str) -> Callable[[F], F]: ...
    @overload
    def gradients(self, /, **rules: Any) -> Self: ...
    def gradients(self, /, *joint: Any, **rules: Any) -> Any:
        """Give gradient formulas, by input name, or one joint formula for several inputs.

        A formula's parameters are the names of the values that it needs: inputs, `result` (or a result's
        name), `grad` (or `grad_<name>`). Gradients without a formula are derived from the reference.

        Args:
            *joint: A function that returns a dict of gradients by input name (as a decorator); or names of
                the inputs that the decorated joint formula covers.
            **rules: A formula, `opsmith.zero`, `opsmith.non_differentiable`, `opsmith.not_implemented(why)`.

        Returns:
            The operator; with input names, a decorator.

        Raises:
            UnknownInputError, NotDifferentiableError: If a gradient's name is not the name of a tensor input.
            FormulaError, FormulaParameterError: If a formula, or a parameter of one, is invalid.
            GradientConflictError: If the operator has surrogate gradients.

        Example:
            >>> @opsmith.operator("demo::reciprocal")
            ... def reciprocal(x: torch.Tensor) -> torch.Tensor:
            ...     return 1 / x
            >>> reciprocal.gradients(x=lambda grad, result: -grad * result.square())
            <opsmith operator demo::reciprocal(Tensor x) -> Tensor>
        """
        attach = partial(self._attach_gradients, surrogate=False)
        return self._attach_rules("gradients", "input", joint, rules, formula_rules, joint_rules, attach)

    def _attach_rules(
        self,
        aspect: str,
        owner: str,
        joint: tuple[Any, ...],
        rules: dict[str, Any],
        read: Callable[..., dict[str, Any]],
        read_joint: Callable[..., dict[str, Any]],
        attach: Callable[[dict[str, Any]], Self],
    ) -> Any:
        """Attach gradients or tangents: a rule for each name, or a joint formula, also as a decorator."""
        names = all(isinstance(each, str) for each in joint)
        if joint and (rules or not (names or len(joint) == 1)):
            given = [repr(each) if isinstance(each, str) else where(each) for each in joint]
            raise self._specification.error(
                errors.FormulaError,
                f"`{aspect}` mixes ways to give formulas in one call",
                expected=f"one joint formula, or names of {owner}s, or `name=formula` for each {owner}",
                got=", ".join([*given, *(f"{name}=..." for name in rules)]),
                hint=f"call `{aspect}` once for each way",
            )
        if not joint:
            return attach(self._rules(read, rules))
        if not names:
            return attach(self._rules(read_joint, joint[0], ()))

        def decorate(function: F) -> F:
            attach(self._rules(read_joint, function, joint))
            return function

        return decorate

    def surrogate_gradients(self, stand_in: Callable[..., Any] | None = None, /, **rules: Any) -> Self:
        """Give gradients that are wrong on purpose: straight-through estimators, reversal, clipping, spikes.

        Args:
            stand_in: A smooth function of the same arguments. Its true gradient is used for inputs without a
                formula. `check` compares a given formula with its gradient.
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
        return self._attach_gradients(self._rules(formula_rules, rules), surrogate=True, stand_in=stand_in)

    @overload
    def tangents(self, joint: Callable[..., dict[str, Any]], /) -> Self: ...
    @overload
    def tangents(self, first: str, /, *others: str) -> Callable[[F], F]: ...
    @overload
    def tangents(self, /, **rules: Any) -> Self: ...
    def tangents(self, /, *joint: Any, **rules: Any) -> Any:
        """Give formulas for forward mode, by result name, or one joint formula for several results.

        A formula's parameters are the names of the values that it needs: inputs, results, and
        `tangent_<input>`, which is zero for an input without a tangent. Without formulas for tangents,
        forward mode is derived from the gradient formulas.

        Args:
            *joint: A function that returns a dict of tangents by result name (as a decorator); or names of
                the results that the decorated joint formula covers.
            **rules: A formula, `opsmith.zero` or `opsmith.not_implemented(why)`.

        Returns:
            The operator; with result names, a decorator.

        Raises:
            UnknownResultError, NotDifferentiableError, FormulaError, FormulaParameterError: As their names
                say.

        Example:
            >>> @opsmith.operator("demo::inverse")
            ... def inverse(x: torch.Tensor) -> torch.Tensor:
            ...     return 1 / x
            >>> inverse.tangents(result=lambda result, tangent_x: -tangent_x * result.square())
            <opsmith operator demo::inverse(Tensor x) -> Tensor>
            >>> torch.func.jvp(inverse, (torch.tensor(2.0),), (torch.tensor(1.0),))
            (tensor(0.5000), tensor(-0.2500))
        """
        attach = self._attach_tangents
        return self._attach_rules(
            "tangents", "result", joint, rules, tangent_rules, joint_tangent_rules, attach
        )

    def _attach_tangents(self, rules: dict[str, Any]) -> Self:
        return self._replace(tangents=self._specification.tangents.with_rules(rules))

    def _own_stays(self, what: str, hint: str) -> errors.UsageError:
        return self._specification.error(
            errors.UsageError,
            f"it was adopted with its own {what}, which cannot be replaced",
            hint=hint,
        )

    def _check_attached(self, function: Any, what: str) -> None:
        check_attached(function, what, self._specification.schema, self.name)

    def _rules(self, read: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        """Read rules for gradients or tangents."""
        with errors.about(self.name, self._specification.where):
            return read(*given, self._specification.formula_schema)

    def _attach_gradients(
        self, rules: dict[str, Rule], *, surrogate: bool, stand_in: Callable[..., Any] | None = None
    ) -> Self:
        now: GradientRules = self._specification.gradients
        if now.given and now.surrogate != surrogate:
            raise self._specification.error(
                errors.GradientConflictError,
                "true and surrogate gradients are both declared for this operator",
                got="surrogate_gradients(...)" if surrogate else "gradients(...)",
                hint="keep one of the two; to change the kind, declare the operator again",
            )
        return self._replace(
            gradients=now.with_rules(rules, surrogate=surrogate, stand_in=stand_in or now.stand_in)
        )

    @overload
    def kernel(self, device: str, /, *, dtypes: Dtypes | None = None) -> Callable[[F], F]: ...
    @overload
    def kernel(
        self, device: str, function: Callable[..., Any], /, *, dtypes: Dtypes | None = None
    ) -> Self: ...
    @overload
    def kernel(
        self,
        device: str,
        /,
        *,
        cpp: str,
        entry: str | None = None,
        dtypes: Dtypes | None = None,
        strict: bool = False,
        flags: Sequence[str] = ...,
        include_dirs: Sequence[str | PathLike[str]] = ...,
        libraries: Sequence[str | PathLike[str]] = ...,
        copies: Literal["allowed"] = ...,
    ) -> Self: ...
    @overload
    def kernel(
        self,
        device: str,
        /,
        *,
        cpp_file: str | PathLike[str],
        entry: str | None = None,
        dtypes: Dtypes | None = None,
        strict: bool = False,
        flags: Sequence[str] = ...,
        include_dirs: Sequence[str | PathLike[str]] = ...,
        libraries: Sequence[str | PathLike[str]] = ...,
        copies: Literal["allowed"] = ...,
    ) -> Self: ...
    @overload
    def kernel(
        self, device: str, /, *, derived: Literal[True], dtypes: Dtypes | None = None, strict: bool = False
    ) -> Self: ...
    @overload
    def kernel(self, device: str, /, **options: Unpack[CudaOptions]) -> Self: ...
    @overload
    def kernel(self, device: str, /, **options: Unpack[TritonOptions]) -> Self: ...
    @overload
    def kernel(  # in a language of another package, whose options nobody knows here
        self,
        device: str,
        /,
        *,
        cpp: UnknownOption = ...,
        cpp_file: UnknownOption = ...,
        cuda: UnknownOption = ...,
        cuda_file: UnknownOption = ...,
        triton: UnknownOption = ...,
        derived: UnknownOption = ...,
        dtypes: Dtypes | None = None,
        strict: bool = False,
        copies: Literal["allowed"] = ...,
        **options: Any,
    ) -> Self: ...
    def kernel(
        self,
        device: str,
        function: Callable[..., Any] | None = None,
        /,
        *,
        dtypes: Dtypes | None = None,
        strict: bool = False,
        **options: Any,
    ) -> Any:
        """Give a kernel for one type of device: a faster implementation of the reference.

        Args:
            device: Device type: `cpu`, `cuda`, `mps`, ...
            function: A function with the reference's arguments and results; without it, returns a decorator.
            dtypes: dtypes that it takes; all by default, float32 and float64 for a template in C++. For other
                dtypes the reference runs, as `explain` reports.
            strict: True to raise an error if the kernel cannot be built here.
            **options: A source, and the options of its language. `cpp=` is a function in C++, whose
                parameters are the arguments and then the results. `cpp_file=` is a file with it, in the
                folder of the calling file. `entry=` is its name, by default the operator's. `flags=`,
                `include_dirs=` and `libraries=` are lists for the compiler and the linker. For CUDA C++ and
                Triton see `CudaOptions` and `TritonOptions`. `derived=True` derives the kernel and its
                backward from the reference. An installed package may add a language.
                `copies="allowed"`, in each language: an argument that the kernel writes may be copied into a
                layout that it takes, and back; without this option it does not take such calls.

        Raises:
            DeviceNameError: If torch knows no such device type.
            NotAFunctionError: If the kernel cannot be called as the operator is.
            UsageError, KernelSourceError, KernelDtypeError, KernelSignatureError, LaunchError: If an option
                is not valid.
            ModuleImportError: If the package that adds the language cannot be imported.

        Example:
            >>> @opsmith.operator("demo::negate")
            ... def negate(x: torch.Tensor) -> torch.Tensor:
            ...     return -x
            >>> negate.kernel("cpu", torch.neg, dtypes=[torch.float32]).explain(torch.ones(2)).forward
            'kernel for cpu, neg'
        """
        check_device(device, self.name)
        if self._specification.origin.registered:
            raise self._own_stays("kernels", "register it with `torch.library.impl`")
        chosen = None if dtypes is None else dtypes_of(dtypes, self.name)
        options = {name: value for name, value in options.items() if value is not None}
        if strict or options:
            frame = inspect.currentframe()
            with errors.about(self.name):
                built = feature_function("build_kernel")(
                    self,
                    device,
                    frame=None if frame is None else frame.f_back,
                    function=function,
                    dtypes=chosen,
                    strict=strict,
                    options=options,
                )
            self._attach_kernel(Kernel(device, built))
            return self

        def attach(function: F) -> F:
            self._check_attached(function, f"the kernel for {device}")
            self._attach_kernel(Kernel(device, function, chosen))
            return function

        if function is None:
            return attach
        attach(function)
        return self

    def reload(self) -> Self:
        """Read the sources of kernels again; changed sources are built again at the next call.

        Raises:
            KernelSourceError: If a source cannot be read; the kernels are then unchanged.
        """
        with errors.about(self.name):
            for kernel in self._specification.kernels:
                if isinstance(kernel.function, BuiltKernel):
                    kernel.function.reload()
        return self._replace()

    def require_kernel(self, device: str, /) -> Self:
        """Raise an error if its kernels for a device can neither be loaded nor built, in this process.

        Otherwise the reference runs in their place, after a warning. A kernel in C++ is loaded or built now.
        The reference still computes calls that a kernel does not take, for example of a different dtype. The
        environment variable `OPSMITH_REQUIRE_KERNELS=1` requires the kernels of all operators.

        Args:
            device: Device type, `cpu` or `cuda`.

        Raises:
            DeviceNameError: If torch knows no such device type.
            UsageError: If no kernel for the device is built from a source.
            KernelRefusedError: If a kernel in C++ can neither be loaded nor built here.

        Example:
            >>> opsmith.ops.involution.require_kernel("cpu") is opsmith.ops.involution
            True
        """
        check_device(device, self.name, "op.require_kernel({device!r})")
        given = [each.given for each in self._specification.kernels if each.device == device]
        built = [each for each in given if isinstance(each, BuiltKernel)]
        if not built:
            raise self._specification.error(
                errors.UsageError,
                f"it has no kernel for `{device}` that is built from a source",
                expected=f"`op.kernel({device!r}, ...)` with a source in C++, CUDA C++ or Triton",
                got="kernels in Python" if given else "no kernel",
                hint="give the device of a kernel with a source, or leave the call out",
            )
        for each in built:
            each.require()
        return self._replace()

    def _attach_kernel(self, kernel: Kernel) -> None:
        others = [each for each in self._specification.kernels if not kernel.supersedes(each)]
        self.replace_kernels((kernel, *others))
        for observe in [*KERNEL_OBSERVERS]:
            observe(self)

    def replace_kernels(self, kernels: tuple[Kernel, ...]) -> Self:
        """Replace all kernels, in the order in which they are tried."""
        return self._replace(kernels=kernels)

    def fake(self, function: F) -> F:
        """Give the fake kernel: a function of the same arguments that returns empty results.

        Shape, dtype and device of the results must be right.

        Only an opaque operator needs one; for others the reference runs on fake tensors.

        Example:
            >>> @opsmith.operator("demo::numpy_sort", opaque=True)
            ... def numpy_sort(x: torch.Tensor) -> torch.Tensor:
            ...     return torch.from_numpy(numpy.sort(x.numpy()))
            >>> fake = numpy_sort.fake(torch.empty_like)
            >>> numpy_sort(torch.ones(3, device="meta")).shape
            torch.Size([3])
        """
        self._check_attached(function, "the fake kernel")
        if self._specification.origin.own("fake"):
            raise self._own_stays("fake kernel", "correct that fake kernel")
        self._replace(fake=function)
        return function

    def flops(self, function: F) -> F:
        """Give a function for the number of floating-point operations, for `torch.utils.flop_counter`.

        Only an opaque operator needs it; for others the operations of the reference are counted.

        Args:
            function: A function of the operator's arguments, with `meta` tensors, that returns an int.

        Example:
            >>> @opsmith.operator("demo::numpy_matmul", opaque=True)
            ... def numpy_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ...     return torch.from_numpy(x.numpy() @ y.numpy())
            >>> flops = numpy_matmul.flops(lambda x, y: 2 * x.numel() * y.shape[-1])
            >>> with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            ...     y = numpy_matmul(torch.ones(2, 3), torch.ones(3, 4))
            >>> counter.get_total_flops()
            48
        """
        self._check_attached(function, "the count of floating-point operations")
        self._replace(flops=function)
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
            raise self._specification.error(
                errors.NotAFunctionError,
                "samples must be given as a function that yields samples",
                expected="a function of `make`",
                got=shown(function),
                hint="write `@op.samples` over `def _(make): yield make(2, 3), ...`",
            )
        self._replace(samples=function)
        return function
