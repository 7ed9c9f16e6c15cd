"""Kernel in Triton: launched on a GPU, traced into compiled code, or interpreted on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
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
from opsmith.kernels.common.parameters import copied_results, copy_reason, device_refusal, layout_refusal
from opsmith.kernels.runtime.driver import DEFAULT_MAX_SHARED, DriverError
from opsmith.kernels.runtime.planned_kernel import LaunchedKernel
from opsmith.kernels.triton.binding import Binding, bind, names_of_call
from opsmith.kernels.triton.compiler import launch_error
from opsmith.kernels.triton.interpreter import interpret
from opsmith.kernels.triton.source import TritonSource, compiler_options, defaults_of, triton_module
from opsmith.torch_library.result_layouts import ResultLayout, result_layouts

if TYPE_CHECKING:
    from opsmith.kernels.runtime.dispatch import DispatchedKernel
    from opsmith.kernels.runtime.plan import Plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Default floating-point dtypes of a kernel."""
MAX_EXTENT = 2**31 - 1
"""Largest extent of a tensor in elements: kernels index in 32 bits, which would overflow silently."""
_ANY_CONTEXT = nullcontext()
Launch = Callable[[Any, dict[str, Any]], None]
"""Function that runs a kernel, given its grid and all its arguments."""


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """Launch of a call.

    Attributes:
        grid: Number of programs; a function of the configuration where `triton.autotune` chooses one.
        arguments: Values of the kernel's parameters, and options of Triton.
        layouts: Layouts of the results.
        results: Results, which the kernel writes.
        written: Tensors into which the kernel writes in place, by name.
        back: Arguments that are written, each with the copy in another layout that the kernel has.
    """

    grid: Any
    arguments: dict[str, Any]
    layouts: tuple[ResultLayout, ...]
    results: list[Tensor]
    written: dict[str, Tensor]
    back: list[tuple[Tensor, Tensor]]


class TritonKernel(LaunchedKernel[TritonSource]):
    """Function that computes an operator by a kernel in Triton.

    The first call of a signature is launched by Triton, and later ones by a plan. Triton launches all where a
    plan does not say enough.

    Args:
        operator: The operator that the kernel computes.
        source: The kernel.
        grid: Number of programs: numbers, or a function of values of the call.
        constants: Values of parameters, or functions of values of the call.
        layouts: Layouts of tensors, where the parameters do not imply them.
        dtypes: The dtypes that it takes; integers are taken too unless some are named.
        strict: True if a missing Triton, or a call that the kernel does not take, is an error. Otherwise the
            reference runs.
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
        # A function in Python is read again by declaring it again.
        super().__init__(
            operator,
            lambda: source,
            strict=strict,
            copies_back=copies_back,
            deterministic=deterministic,
        )
        self._dtypes = dtypes
        self._launched_by = grid, constants, layouts
        self._filled, self.defaults = bool(source.filled), defaults_of(source)
        self.binding: Binding = bind(self, constants, layouts)
        self._read_by_rules: set[str] = set()
        named = dict.fromkeys((*schema.names, *(result.name for result in schema.results)))
        self._constants = {
            name: self._rule(value, named, f"the constant `{name}`") for name, value in constants.items()
        }
        meta = {parameter.name: None for parameter in source.parameters if parameter.constant}
        self._grid = self._rule(grid, {**named, **dict.fromkeys(constants), **meta}, "the grid")
        if not callable(grid):
            self._check_grid(_grid_tuple(grid))

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that it takes; integers are taken too unless some are named."""
        return self._dtypes

    def digest(self) -> str:
        """Return the digest of its text: it is built into no package."""
        return BuiltKernel.digest(self)

    def sources(self) -> tuple[Any, ...]:
        """Return the values that define the kernel: compiled code contains its launch, too."""
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
        return device_refusal(values) or self.value_refusal(values)

    def value_refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take these values, even if Triton is installed; None if it does."""
        schema = self.operator.specification.schema
        for name, value in zip(schema.names, values, strict=False):
            for tensor in tensors_in([value]):
                if not self._takes(tensor.dtype):
                    taken = " or ".join(sorted(map(dtype_name, self.dtypes)))
                    return f"`{name}` is {dtype_name(tensor.dtype)}, and it takes {taken}"
            wanted = self.binding.tensors.get(name)
            if wanted is None:
                continue
            refused = wanted.dim_refusal(name, value)
            if refused is not None:
                return refused
            if name in schema.written and wanted.needs_copy(value) and not self.copies_back:
                found, taken = layout_refusal(name, wanted.layout)
                return f"{found}, and it takes {taken}"
            if isinstance(value, Tensor) and wanted.extent(value) > MAX_EXTENT:
                return f"`{name}` reaches over more than 2**31 elements, which it cannot count"
        return None

    def _takes(self, dtype: torch.dtype) -> bool:
        """Return True for a dtype that is taken; integers, as indices, are taken unless some are named."""
        if dtype in self.dtypes:
            return True
        exact = not (dtype.is_floating_point or dtype.is_complex)
        return exact and all(each.is_floating_point for each in self.dtypes)

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments and results that the kernel copies into another layout."""
        schema = self.operator.specification.schema
        tensors = self.binding.tensors
        copied = tuple(
            copy_reason(name, tensors[name].layout, written=name in schema.written)
            for name, value in zip(schema.names, values, strict=True)
            if name in tensors and tensors[name].needs_copy(value)
        )
        layouts = [tensors[result.name].layout for result in schema.results]
        return copied + copied_results(schema.results, self._result_layouts(values), layouts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a GPU."""
        if self._runs_by_plans():
            return super().__call__(*args, **kwargs)
        return self._run(self._values(args, kwargs), self._launch, count=True)

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
        """Number of copies for their layout, of each argument and of `result`, without zeros."""
        return dict(self._copied + Counter(super().copied))

    @property
    def _sizing(self) -> None:
        """None: the grid is a function in Python, and C++ plans no other sizes."""

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Take the dispatcher's calls of the operator, where calls run by plans."""
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
            return "something stands between a launch and Triton"
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
        """Return the same, also where `shapes=` alone says the sizes of the results."""
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
            self.operator.forget_calls()  # they hold what goes by plans
            return None

    def _awaits_plan(self, values: Sequence[Any]) -> bool:
        """Return False for the first call of a signature: the second is planned.

        A plan costs more than a launch by Triton, and sizes or numbers may be others in each call.
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
        result = self._run(values, self._launch, count=True)
        return result[0] if isinstance(result, tuple) and len(result) == 1 else result

    def compiled(self, prepared: PreparedLaunch, device: torch.device) -> Any:
        """Return what Triton launches for these arguments, compiled or found in its cache.

        Raises:
            CompileError: If Triton's compiler refuses the kernel.
        """
        launched = self.source.launched()
        given = {**prepared.arguments, **compiler_options()}
        return self._in_triton(device, lambda: launched.run(grid=prepared.grid, warmup=True, **given))

    def loaded(self, compiled: Any, index: int) -> tuple[int, int, int] | None:
        """Load what Triton has compiled on a GPU, once; None while a CUDA graph is captured.

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
        except (DriverError, errors.ToolchainError) as error:  # Triton's launcher says what is wrong
            raise NoPlanError(errors.message_of(error)) from None

    def programs(self, values: Sequence[Any]) -> int:
        """Return the number of programs that the interpreter runs for these argument values."""
        prepared = self.prepare(values)
        return prod(self._interpretable(prepared.grid, prepared.arguments)[0])

    def prepare(
        self, values: Sequence[Any], *, count: bool = False, rules: AbstractContextManager[Any] = _ANY_CONTEXT
    ) -> PreparedLaunch:
        """Copy arguments into their layouts, allocate the results, and bind the kernel's parameters.

        Args:
            values: Argument values.
            count: True if copies are counted.
            rules: Context in which the grid and the constants are computed.
        """
        schema = self.operator.specification.schema
        named = dict(zip(schema.names, values, strict=True))
        device = tensors_in(list(values))[0].device
        back = []
        for name, wanted in self.binding.tensors.items():
            if name in named and wanted.needs_copy(named[name]):
                given, named[name] = named[name], wanted.copy_of(named[name])
                back += [(given, named[name])] if name in schema.written else []
                if count:
                    self._copied[name] += 1
        written = {name: named[name] for name in schema.written if named[name] is not None}
        results, layouts = [], self._result_layouts(values)
        for result, layout in zip(schema.results, layouts, strict=True):
            results.append(layout.allocate(device, self.binding.tensors[result.name].layout))
            self._check_result(result.name, layout)
            named[result.name] = results[-1]
        with rules:
            constants = {name: rule(named) for name, rule in self._constants.items()}
        everything = {**named, **constants}
        arguments = {bound.parameter: bound.of(everything) for bound in self.binding.bounds}
        arguments |= {name: constants[name] for name in self.binding.options}
        grid: Any
        if self._filled:  # their values are known only at the launch
            grid = lambda meta: _grid_tuple(self._grid({**everything, **meta}))
        else:
            with rules:
                grid = _grid_tuple(self._grid({**everything, **self.defaults}))
        return PreparedLaunch(grid, arguments, layouts, results, written, back)

    def _run(self, values: Sequence[Any], launch: Launch, *, count: bool = False) -> Any:
        schema = self.operator.specification.schema
        prepared = self.prepare(values, count=count)
        if self.has_programs(prepared):
            launch(prepared.grid, prepared.arguments)
        for given, copy in prepared.back:
            given.copy_(copy)
        results = []
        for layout, written in zip(prepared.layouts, prepared.results, strict=True):
            results.append(layout.restore(written))
            if count and results[-1] is not written:
                self._copied["result"] += 1
        return (results[0] if schema.single else tuple(results)) if results else None

    def has_programs(self, prepared: PreparedLaunch) -> bool:
        """Return True if there is something to write; a grid without programs is an error for a result."""
        if not callable(prepared.grid):
            self._check_grid(prepared.grid)
        described = self.operator.specification.schema.results
        filled = [
            (each.name, result)
            for each, result in zip(described, prepared.results, strict=True)
            if result.numel()
        ]
        if filled and not callable(prepared.grid) and not all(prepared.grid):
            name, result = filled[0]
            raise self.error(
                errors.LaunchError,
                f"the grid of the Triton kernel has no programs, and nothing writes `{name}`",
                argument=name,
                expected="a grid with a program for each part of each result",
                got=f"grid {prepared.grid}, `{name}` {list(result.shape)}",
                hint="count the programs by the results, as in `grid=lambda result: ...`",
            )
        if filled:
            return True
        programs = callable(prepared.grid) or all(prepared.grid)
        return programs and any(tensor.numel() for tensor in prepared.written.values())

    def _launch(self, grid: Any, arguments: dict[str, Any]) -> None:
        if not callable(grid):
            self.check_limits(grid)
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        launched = self.source.launched()
        self._in_triton(device, lambda: launched[grid](**arguments, **compiler_options()))

    def check_limits(self, grid: Sequence[int]) -> None:
        """Refuse a grid that is larger than a GPU takes.

        Raises:
            LaunchError: Naming the dimension.
        """
        for dim, (size, limit) in enumerate(zip(grid, MOST_GRID, strict=False)):
            if size > limit:
                raise self.error(
                    errors.LaunchError,
                    "the grid of the Triton kernel has more programs than a GPU takes",
                    argument="grid",
                    expected=f"at most {limit} in dimension {dim}",
                    got=f"{grid}",
                    hint="put the larger number first, or let each program do more",
                )

    def _in_triton(self, device: torch.device, run: Callable[[], Any]) -> Any:
        """Call Triton, whose exceptions become errors of ours."""
        with torch.cuda.device(device):  # Triton compiles for the current one, and launches on its stream
            try:
                return run()
            except Exception as error:
                reported = launch_error(error, self.source, self.operator.name)
                if reported is None:
                    raise
                raise reported from error

    def _wrapped(self, grid: Any, arguments: dict[str, Any]) -> None:
        torch.library.wrap_triton(self.source.launched())[grid](**arguments)

    def _interpret(self, grid: Any, arguments: dict[str, Any]) -> None:
        shape, arguments = self._interpretable(grid, arguments)
        interpret(self.source, shape, arguments, self.operator.name)

    def _interpretable(self, grid: Any, arguments: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return the grid as numbers, and the arguments of the function with those of its decorators."""
        arguments = {name: value for name, value in arguments.items() if name not in self.binding.options}
        for config in self.source.configs[:1]:  # the interpreter cannot time the others
            arguments |= config.kwargs
        for name, heuristic in self.source.heuristics.items():
            arguments[name] = heuristic(arguments)
        shape = grid({**self.defaults, **arguments}) if callable(grid) else grid
        self._check_grid(shape)
        return shape, arguments

    def _check_grid(self, grid: tuple[Any, ...]) -> None:
        """Refuse a grid that is not one to three whole numbers, or negative."""
        sizes = all(isinstance(size, int | torch.SymInt) and not isinstance(size, bool) for size in grid)
        if not sizes or not 1 <= len(grid) <= 3 or any(size < 0 for size in grid):
            raise self.error(
                errors.LaunchError,
                "the grid of the Triton kernel is not valid",
                argument="grid",
                expected="one to three whole numbers, none of them negative",
                got=shown(grid),
                hint="write `grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),)`",
            )

    def _check_result(self, name: str, layout: ResultLayout) -> None:
        wanted = self.binding.tensors[name]
        if wanted.dim not in (None, len(layout.shape)):
            raise self.error(
                errors.KernelSignatureError,
                "the Triton kernel does not write the result that the reference gives",
                argument=name,
                expected=f"{len(layout.shape)} dimensions",
                got=f"sizes or strides of {wanted.dim}",
                hint="take the sizes and strides of as many dimensions as the result has",
            )

    def _result_layouts(self, values: Sequence[Any]) -> tuple[ResultLayout, ...]:
        specification = self.operator.specification
        signature = call_signature(values)
        if is_symbolic(signature):  # symbols differ between calls
            return result_layouts(specification, values)
        return self._layouts.obtain(specification, signature, lambda: result_layouts(specification, values))


def _grid_tuple(grid: Any) -> tuple[Any, ...]:
    return tuple(grid) if isinstance(grid, list | tuple) else (grid,)
