"""Kernel in Triton: launch it on a GPU, trace it into compiled code, or interpret it on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.missing_kernels import missing_reason
from opsmith.core.operator import Operator
from opsmith.kernels.common.call_cache import CallCache, call_signature, is_symbolic
from opsmith.kernels.common.dtypes import dtype_name
from opsmith.kernels.common.gpu_resources import MOST_GRID
from opsmith.kernels.common.parameters import (
    copied_tensors,
    copy_of,
    device_refusal,
    layout_refusal,
    needs_copy,
)
from opsmith.kernels.runtime.driver import DEFAULT_MAX_SHARED, DriverError
from opsmith.kernels.runtime.planned_kernel import LaunchedKernel
from opsmith.kernels.triton.binding import Binding, bind, names_of_call
from opsmith.kernels.triton.compiler import launch_error
from opsmith.kernels.triton.interpreter import interpret
from opsmith.kernels.triton.source import TritonSource, compiler_options, triton_module
from opsmith.torch_library.result_layouts import CHANNELS_LAST, ResultLayout, extent_of, result_layouts
from opsmith.torch_library.writes import refuse_unwritable

if TYPE_CHECKING:
    from opsmith.kernels.runtime.dispatch import DispatchedKernel
    from opsmith.kernels.runtime.plan import Plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Default floating-point dtypes of a kernel."""
MAX_EXTENT = 2**31 - 1
"""Maximum extent of a tensor in elements: kernels use 32-bit indices, which would overflow silently."""
_ANY_CONTEXT = nullcontext()
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """Launch of a call.

    Attributes:
        device: Device of the tensors.
        grid: Function that returns the number of programs, given the parameters that decorators fill.
        arguments: Values of the kernel's parameters, and options of Triton.
        layouts: Layouts of the results.
        results: Results, which the kernel writes.
        written: Tensors into which the kernel writes in place, by name.
        back: Written arguments, each with its copy in the layout that the kernel takes.
    """

    device: torch.device
    grid: Callable[[Mapping[str, Any]], tuple[int, ...]]
    arguments: dict[str, Any]
    layouts: tuple[ResultLayout, ...]
    results: list[Tensor]
    written: dict[str, Tensor]
    back: list[tuple[Tensor, Tensor]]


class TritonKernel(LaunchedKernel[TritonSource]):
    """Function that computes an operator by a kernel in Triton.

    Triton launches the first call of a signature, and a plan launches later calls. Triton launches all calls
    if no plan is possible.

    Args:
        operator: The operator that the kernel computes.
        source: The kernel.
        grid: Number of programs: numbers, or a function of values of the call.
        constants: Values of parameters, or functions of values of the call.
        layouts: Layouts of tensors, where the parameters do not imply them.
        dtypes: The dtypes that it takes. If no integer dtype is named, it takes all integer dtypes, too.
        strict: True if a missing Triton, or a call that the kernel does not take, raises an error. If False,
            the reference runs.
        copies_back: See `BuiltKernel`.
        deterministic: See `BuiltKernel`.

    Attributes:
        by_triton: Why Triton launches all calls; empty if plans do; None before the first call.
        defaults: Default values of the function's parameters.
    """

    key, language, written_in, by_address = "triton", "Triton", "Triton", True
    by_triton: str | None

    def __init__(
        self,
        operator: Operator[..., Any],
        source: TritonSource,
        *,
        grid: Any,
        constants: Mapping[str, Any],
        layouts: Mapping[str, str],
        dtypes: frozenset[torch.dtype],
        strict: bool,
        copies_back: bool = False,
        deterministic: bool = True,
    ) -> None:
        schema = operator.specification.schema
        # `reload` does not read a Python function again: it must be declared again.
        super().__init__(
            operator,
            lambda: source,
            strict=strict,
            copies_back=copies_back,
            deterministic=deterministic,
        )
        self._dtypes = dtypes
        self._launched_by = grid, constants, layouts
        self._filled = bool(source.filled)
        self.defaults = {each.name: each.default for each in source.parameters if each.has_default}
        self.binding: Binding = bind(self, constants, layouts)
        self._read_by_rules: set[str] = set()
        named = dict.fromkeys((*schema.names, *(result.name for result in schema.results)))
        self._constants = {
            name: self._rule(value, named, f"the constant `{name}`") for name, value in constants.items()
        }
        meta = {parameter.name: None for parameter in source.parameters if parameter.constant}
        self._grid = self._rule(grid, {**named, **dict.fromkeys(constants), **meta}, "the grid")
        if not callable(grid):
            self._checked_grid(grid)

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that it takes. If no integer dtype is named, it takes all integer dtypes, too."""
        return self._dtypes

    def digest(self) -> str:
        """Return the digest of the text only, since Triton kernels are not built into packages."""
        return BuiltKernel.digest(self)

    def sources(self) -> tuple[Any, ...]:
        """Return the values that define the kernel, including its launch, since compiled code contains it."""
        return *super().sources(), self.source.function, *self._launched_by

    def _rule(self, value: Any, known: Mapping[str, Any], what: str) -> Callable[[Mapping[str, Any]], Any]:
        """Return a function that computes a grid or constant from the values of a call, by name."""
        if not callable(value):
            return lambda values: value
        names = names_of_call(self, value, known, what)
        self._read_by_rules.update(names)
        return lambda values: value(**{name: values[name] for name in names})

    def _forget(self) -> None:
        super()._forget()
        self.by_triton = None
        self._functions: dict[tuple[str, int], int] = {}
        self._missing: errors.ToolchainError | None = None
        self._checked_triton = False
        self._layouts: CallCache[tuple[ResultLayout, ...]] = CallCache()
        self._seen: CallCache[bool] = CallCache()
        self._copied: Counter[str] = Counter()

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take a call with these argument values; None if it does.

        Raises:
            ToolchainError: If Triton is missing, and the kernel is strict.
        """
        if not self._checked_triton:
            try:
                triton_module()
            except errors.ToolchainError as error:
                self._missing = error
            self._checked_triton = True
        if self._missing is not None:
            return missing_reason(self, self._missing)
        return self.value_refusal(values)

    def value_refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take these values, even if Triton is installed; None if it does."""
        schema = self.operator.specification.schema
        elsewhere = device_refusal(values)
        if elsewhere is not None:
            return elsewhere
        for name, value in zip(schema.names, values, strict=False):
            for tensor in tensors_in([value]):
                if not self._takes(tensor.dtype):
                    taken = " or ".join(sorted(map(dtype_name, self.dtypes)))
                    return f"`{name}` is {dtype_name(tensor.dtype)}, but the kernel takes {taken}"
            wanted = self.binding.tensors.get(name)
            if wanted is None or value is None:
                continue
            if wanted.dim not in (None, value.dim()):
                return (
                    f"`{name}` has {value.dim()} dimension{'s' * (value.dim() != 1)}, but the kernel "
                    f"takes {wanted.dim}"
                )
            if wanted.layout == "channels-last" and value.dim() not in CHANNELS_LAST:
                return (
                    f"`{name}` has {value.dim()} dimension{'s' * (value.dim() != 1)}, but channels-last "
                    "is for 4 or 5"
                )
            copied = needs_copy(value, wanted)
            if name in schema.written and copied and not self.copies_back:
                found, taken = layout_refusal(name, wanted.layout)
                return f"{found}, but the kernel takes {taken}"
            if (value.numel() if copied else extent_of(value)) > MAX_EXTENT:
                return _uncounted(name)
        return None

    def _takes(self, dtype: torch.dtype) -> bool:
        """Return True for an accepted dtype; all integers are accepted unless `dtypes=` names some."""
        if dtype in self.dtypes:
            return True
        exact = not (dtype.is_floating_point or dtype.is_complex)
        return exact and all(each.is_floating_point for each in self.dtypes)

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments and results that the kernel copies into a different layout."""
        return copied_tensors(self.operator.specification, values, self.binding.tensors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a GPU."""
        if self._runs_by_plans():
            return super().__call__(*args, **kwargs)
        return self._by_triton(self._values(args, kwargs))

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        values: list[Any] = self.operator.specification.schema.call_values(args, kwargs)
        return values

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator under torch's tracing: its compiler sees the kernel and the copies."""
        return self._run(self._values(args, kwargs), self._wrapped)

    def interpreted(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on the CPU, in Triton's interpreter."""
        return self._run(self._values(args, kwargs), self._interpret)

    @property
    def direct(self) -> Callable[..., Any]:
        """Fastest callable of the kernel, valid only for calls that the kernel takes."""
        return super().direct if self._runs_by_plans() else self

    @property
    def copied(self) -> dict[str, int]:
        """Number of copies into other layouts for each argument and `result`, without zeros."""
        return dict(self._copied + Counter(super().copied))

    @property
    def _sizing(self) -> None:
        """None, since the grid is a function in Python, so C++ cannot plan calls of other sizes."""

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Take over the dispatcher's calls of the operator, if calls run by plans."""
        return super().serve(fallback) if self._runs_by_plans() else None

    def _runs_by_plans(self) -> bool:
        if self.by_triton is None:
            self.by_triton = self._obstacle()
        return not self.by_triton

    def _obstacle(self) -> str:
        """Return why no call of the kernel can run by a plan; empty if there is no such reason."""
        if self._filled:
            return "`triton.autotune` or `triton.heuristics` decides at each launch"
        jitted = self.source.compiled_by()
        if self.source.layers not in ((), (jitted,)) or jitted.pre_run_hooks:
            return "a decorator or a hook changes its launches"
        unavailable = self.machine.unavailable()
        if unavailable is not None:
            return unavailable
        try:
            self._load()
        except (errors.KernelSignatureError, errors.ToolchainError) as error:
            return error.problem
        return ""

    def _numbers_read(self) -> set[str]:
        constant = {each.name for each in self.source.parameters if each.constant}
        return self._read_by_rules | {each.name for each in self.binding.bounds if each.parameter in constant}

    def _free_numbers(self) -> set[str]:
        """Return the free numbers; `shapes=` suffices if it determines the sizes of the results."""
        sized = super()._sizing is not None
        return self._numbers - self._numbers_read() if sized else super()._free_numbers()

    def _plan(self, loaded: DispatchedKernel, values: Sequence[Any]) -> Plan | str | None:
        from opsmith.kernels.triton.plan import NoPlanError, hooks_are_set, plan_call

        if hooks_are_set():
            return None
        refused = self.refusal(values)
        if refused is not None:
            return refused
        try:
            return plan_call(self, values)
        except NoPlanError as error:
            self.by_triton = str(error)
            self.withdraw()
            self.operator.forget_calls()  # cached calls may use plans
            return None

    def _awaits_plan(self, values: Sequence[Any]) -> bool:
        """Return False for the first call of a signature: the second is planned.

        A plan costs more than a launch by Triton, and sizes or numbers may differ in each call.
        """
        if self.by_triton:
            return False
        specification = self.operator.specification
        named = zip(specification.schema.names, values, strict=True)
        signature = call_signature([None if name in self.free else value for name, value in named])
        if self._seen.get(specification, signature):
            return True
        self._seen.obtain(specification, signature, lambda: True)
        return False

    def _unplanned(self, values: Sequence[Any]) -> Any:
        result = self._by_triton(values)
        return result[0] if isinstance(result, tuple) and len(result) == 1 else result

    def _by_triton(self, values: Sequence[Any]) -> Any:
        """Compute a call by Triton's launcher, or by the reference if the kernel does not take the call."""
        if self.operator.specification.schema.written:
            refuse_unwritable(self.operator.specification, values)
        refused = self.refusal(values)
        if refused is not None:
            return self._computed_by_reference(values, refused)
        return self._run(values, self._launch, count=True)

    def compiled(self, prepared: PreparedLaunch, grid: tuple[int, ...]) -> Any:
        """Return the kernel that Triton launches for these arguments, compiled now or from its cache.

        Raises:
            CompileError: If Triton's compiler refuses the kernel.
        """
        launched = self.source.launched()
        given = {**prepared.arguments, **compiler_options()}
        return self._in_triton(prepared.device, lambda: launched.run(grid=grid, warmup=True, **given))

    def loaded(self, compiled: Any, index: int) -> tuple[int, int, int] | None:
        """Load a compiled kernel on a GPU, once; None while a CUDA graph is captured.

        Returns:
            The driver, torch's context, and the handle of the kernel.
        """
        from opsmith.kernels.triton.plan import NoPlanError

        metadata, key = compiled.metadata, (compiled.hash, index)
        try:
            driver = self.machine.driver()
            with self._lock, driver.on_device(index) as context:
                if key not in self._functions:
                    if self.machine.is_capturing():
                        return None
                    function = driver.load(compiled.asm["cubin"], metadata.name)
                    if metadata.shared > DEFAULT_MAX_SHARED:
                        driver.prefer_shared(function)  # as Triton does
                        driver.allow_shared(function, metadata.shared)
                    self._functions[key] = function
            return driver.opened, context, self._functions[key]
        except (DriverError, errors.ToolchainError) as error:  # Triton's launcher reports the fault
            raise NoPlanError(errors.message_of(error)) from None

    def programs(self, values: Sequence[Any]) -> int:
        """Return the number of programs that the interpreter runs for these argument values."""
        prepared = self.prepare(values)
        return prod(prepared.grid(self._interpretable(prepared)[0]))

    def prepare(
        self, values: Sequence[Any], *, count: bool = False, rules: AbstractContextManager[Any] = _ANY_CONTEXT
    ) -> PreparedLaunch:
        """Copy arguments into their layouts, allocate the results, and bind the kernel's parameters.

        Args:
            values: Argument values.
            count: True if copies are counted.
            rules: Context in which the constants are computed.
        """
        schema = self.operator.specification.schema
        named = dict(zip(schema.names, values, strict=True))
        device = tensors_in(list(values))[0].device
        back = []
        for name, wanted in self.binding.tensors.items():
            if name in named and needs_copy(named[name], wanted):
                given, named[name] = named[name], copy_of(named[name], wanted)
                back += [(given, named[name])] if name in schema.written else []
                if count:
                    self._copied[name] += 1
        written = {name: named[name] for name in schema.written if named[name] is not None}
        layouts = self._result_layouts(values)
        results: dict[str, Tensor] = {}
        for result, layout in zip(schema.results, layouts, strict=True):
            self._check_result(result.name, layout)
            results[result.name] = layout.allocate(device, self.binding.tensors[result.name].layout)
        named |= results
        with rules:
            constants = {name: rule(named) for name, rule in self._constants.items()}
        bounds = self.binding.bounds
        arguments = {each.parameter: each.of(constants if each.kind == "given" else named) for each in bounds}
        known = {**self.defaults, **named, **constants, **arguments}
        arguments |= {name: constants[name] for name in self.binding.options}

        def grid(filled: Mapping[str, Any]) -> tuple[int, ...]:
            return self._checked_grid(self._grid({**known, **filled}), results)

        return PreparedLaunch(device, grid, arguments, layouts, [*results.values()], written, back)

    def _run(
        self, values: Sequence[Any], launch: Callable[[Any, PreparedLaunch], None], *, count: bool = False
    ) -> Any:
        schema = self.operator.specification.schema
        prepared = self.prepare(values, count=count)
        grid = prepared.grid if self._filled else prepared.grid({})
        if self.has_programs(prepared, grid):
            launch(grid, prepared)
        for given, copy in prepared.back:
            given.copy_(copy)
        results = []
        for layout, written in zip(prepared.layouts, prepared.results, strict=True):
            results.append(layout.restore(written))
            if count and results[-1] is not written:
                self._copied["result"] += 1
        return (results[0] if schema.single else tuple(results)) if results else None

    def has_programs(self, prepared: PreparedLaunch, grid: Any) -> bool:
        """Return True if there are elements to write, and the grid has programs or is not known yet."""
        written = (*prepared.results, *prepared.written.values())
        return any(each.numel() for each in written) and (callable(grid) or all(grid))

    def _launch(self, grid: Any, prepared: PreparedLaunch) -> None:
        launched = self.source.launched()
        given = {**prepared.arguments, **compiler_options()}
        self._in_triton(prepared.device, lambda: launched[grid](**given))

    def _in_triton(self, device: torch.device, run: Callable[[], Any]) -> Any:
        """Call Triton, and convert its exceptions to errors of opsmith."""
        with torch.cuda.device(device):  # Triton uses the current device and its stream
            try:
                return run()
            except Exception as error:
                reported = launch_error(error, self.source, self.operator.name)
                if reported is None:
                    raise
                raise reported from error

    def _wrapped(self, grid: Any, prepared: PreparedLaunch) -> None:
        torch.library.wrap_triton(self.source.launched())[grid](**prepared.arguments)

    def _interpret(self, _: Any, prepared: PreparedLaunch) -> None:
        arguments, hook = self._interpretable(prepared)
        if hook is not None:
            hook(arguments)
        interpret(self.source, prepared.grid(arguments), arguments, self.operator.name)

    def _interpretable(self, prepared: PreparedLaunch) -> tuple[dict[str, Any], Callable[..., Any] | None]:
        """Return a function's arguments with the values of its decorators, and the hook to call first."""
        options = self.binding.options
        arguments = {name: value for name, value in prepared.arguments.items() if name not in options}
        config = self.source.first_config(arguments)
        return self.source.with_filled(arguments, config), config and config.pre_hook

    def _checked_grid(
        self, grid: Any, results: Mapping[str, Tensor] = MappingProxyType({})
    ) -> tuple[Any, ...]:
        """Return a grid as a tuple.

        Args:
            grid: The grid.
            results: Results that the kernel writes, by name.

        Raises:
            LaunchError: If the grid is not one to three whole numbers within the limits of a GPU, or has no
                programs although a result has elements.
        """
        programs: tuple[Any, ...] = tuple(grid) if isinstance(grid, list | tuple) else (grid,)
        sizes = all(isinstance(size, int | torch.SymInt) and not isinstance(size, bool) for size in programs)
        if not sizes or not 1 <= len(programs) <= 3 or any(size < 0 for size in programs):
            raise self.error(
                errors.LaunchError,
                "the grid of the Triton kernel is not valid",
                argument="grid",
                expected="one to three whole numbers, none of them negative",
                got=shown(programs),
                hint="write `grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),)`",
            )
        for dim, (size, limit) in enumerate(zip(programs, MOST_GRID, strict=False)):
            if type(size) is int and size > limit:
                raise self.error(
                    errors.LaunchError,
                    "the grid of the Triton kernel has more programs than a GPU takes",
                    argument="grid",
                    expected=f"at most {limit} in dimension {dim}",
                    got=f"{programs}",
                    hint="put the larger number first, or let each program do more work",
                )
        name = next((name for name, result in results.items() if result.numel()), None)
        if name is not None and not all(programs):
            raise self.error(
                errors.LaunchError,
                f"the grid of the Triton kernel has no programs that could write `{name}`",
                argument=name,
                expected="a grid with a program for each part of each result",
                got=f"grid {programs}, `{name}` {list(results[name].shape)}",
                hint="count the programs by the results, as in `grid=lambda result: ...`",
            )
        return programs

    def _check_result(self, name: str, layout: ResultLayout) -> None:
        wanted, count = self.binding.tensors[name], prod(layout.shape)
        if wanted.dim not in (None, len(layout.shape)):
            raise self.error(
                errors.KernelSignatureError,
                "the result that the Triton kernel writes differs from the reference's result",
                argument=name,
                expected=f"{len(layout.shape)} dimension{'s' * (len(layout.shape) != 1)}",
                got=f"sizes or strides of {wanted.dim} dimension{'s' * (wanted.dim != 1)}",
                hint="take the sizes and strides of as many dimensions as the result has",
            )
        if type(count) is int and count > MAX_EXTENT:  # not a compiler's symbol
            raise self.error(
                errors.KernelRefusedError, f"the kernel cannot write this result: {_uncounted(name)}"
            )

    def _result_layouts(self, values: Sequence[Any]) -> tuple[ResultLayout, ...]:
        specification = self.operator.specification
        signature = call_signature(values)
        if is_symbolic(signature):  # symbols differ between calls
            return result_layouts(specification, values)
        return self._layouts.obtain(specification, signature, lambda: result_layouts(specification, values))


def _uncounted(name: str) -> str:
    return f"`{name}` extends over more than 2**31 elements, which the kernel's indices cannot count"
