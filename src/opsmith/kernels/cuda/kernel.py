"""CUDA kernels of operators: the choice of an instance, the plan of a call, and its launch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors, on_meta
from opsmith.kernels.common.call_cache import CallCache, call_signature, is_symbolic
from opsmith.kernels.common.parameters import check_written, copy_reason, device_refusal, dtype_refusal
from opsmith.kernels.common.result_layout import (
    ResultLayout,
    has_layout,
    memory_format,
    result_layouts,
)
from opsmith.kernels.cpp.codegen import DEFAULT_DTYPES
from opsmith.kernels.cuda.compiler import Cubin, Instance, compile_instance, describe_instances
from opsmith.kernels.cuda.driver import DEFAULT_MAX_SHARED, DriverError, TorchCuda
from opsmith.kernels.cuda.launch import Geometry, LaunchRules
from opsmith.kernels.cuda.parameters import (
    CudaParameter,
    PackedParameters,
    check_cuda_parameters,
    choose_cuda_candidate,
    pack_parameters,
    passed_arguments,
)
from opsmith.kernels.cuda.source import CudaSource


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """Plan for the calls of one signature.

    Attributes:
        instance: Instance of the kernel.
        copied: Indices of the arguments that are copied into another layout, with their parameters.
        results: Layout of each result, and the name of the layout in which the kernel writes it.
        geometry: Launch; None if all results are empty.
        packed: Parameters of the launch, without addresses.
        passed: Indices of the arguments that are passed to the kernel.
    """

    instance: Instance
    copied: tuple[tuple[int, CudaParameter], ...]
    results: tuple[tuple[ResultLayout, str], ...]
    geometry: Geometry | None
    packed: PackedParameters
    passed: tuple[int, ...]


def without_data(schema: Schema, values: Sequence[Any]) -> list[Any]:
    """Return argument values as a reference gets them, with `meta` tensors in place of tensors."""
    pairs = zip(schema.arguments, values, strict=True)
    return map_tensors(on_meta, [argument.kind.restore(value) for argument, value in pairs])


def needs_copy(value: Any, parameter: CudaParameter) -> bool:
    """Return True if a kernel takes an argument in another layout, or without its negative bit."""
    tensors = tensors_in([value])
    return any(tensor.is_neg() or not has_layout(tensor, parameter.layout) for tensor in tensors)


def copy_of(value: Any, parameter: CudaParameter) -> Any:
    """Copy a tensor, or each of a list, into a parameter's layout; a clone resolves the negative bit."""
    if not isinstance(value, Tensor):
        return [copy_of(item, parameter) for item in value]
    if parameter.layout == "any":
        return value.clone()
    return value.resolve_neg().contiguous(memory_format=memory_format(parameter.layout, value.dim()))


@dataclass(frozen=True, slots=True)
class CudaChoice:
    """Instance that takes a call, and its parameters."""

    instance: Instance
    parameters: tuple[CudaParameter, ...]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """Call of a kernel, ready to be launched.

    Attributes:
        plan: The plan of the call.
        tensors: Tensors that are passed to the kernel, in order: of the arguments, then the results.
        results: The results, in the layouts in which the kernel writes them.
        back: Tensors that the kernel writes through a copy, each with the copy.
    """

    plan: CudaPlan
    tensors: list[Tensor]
    results: list[Tensor]
    back: list[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class _LoadedFunction:
    """Kernel that is loaded on a GPU, with the dynamic shared memory that its launches may use."""

    handle: int
    cubin: Cubin
    shared: int = 0


class CudaKernel(BuiltKernel[CudaSource]):
    """Function that computes an operator by a kernel in CUDA C++.

    Args:
        operator: The operator that the kernel computes.
        read: Reads the source; again after `reload`.
        dtypes: The dtypes that a template is instantiated for; None for the default ones.
        rules: Rules for the launch.
        strict: True if a missing NVRTC, or a call that the kernel does not take, is an error. Otherwise the
            reference runs.
        copies_back: See `BuiltKernel`.

    Attributes:
        copied: Number of copies for their layout, of each argument and of the results.
    """

    language = "CUDA"

    def __init__(
        self,
        operator: Operator[..., Any],
        read: Callable[[], CudaSource],
        dtypes: Sequence[torch.dtype] | None,
        rules: LaunchRules,
        *,
        strict: bool,
        copies_back: bool = False,
    ) -> None:
        super().__init__(operator, read, strict=strict, copies_back=copies_back)
        self._dtypes = dtypes
        self._machine = TorchCuda()
        self.rules = rules

    def _forget(self) -> None:
        self._missing: errors.ToolchainError | None = None
        self._wrong: dict[Any, errors.OpsmithError] = {}
        self._described: dict[Any, tuple[tuple[CudaParameter, ...], ...]] = {}
        # Loaded kernels stay loaded: a launch may be pending in some stream.
        self._functions: dict[tuple[Instance, int], _LoadedFunction] = {}
        self._choices: CallCache[CudaChoice | str] = CallCache()
        self._plans: CallCache[CudaPlan] = CallCache()
        self.copied: Counter[str] = Counter()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that its template is instantiated for; empty if it is not a template over the dtype."""
        return tuple(self._dtypes or DEFAULT_DTYPES) if self.source.over_dtype else ()

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take a call with these argument values; None if it does.

        Raises:
            CompileError: If NVRTC refuses the source.
        """
        reason = self._machine.unavailable() or device_refusal(values)
        if reason is not None:
            return reason
        specification = self.operator.specification
        if is_symbolic(call_signature(values)):
            # The sizes are symbols of a compiler: each run of the compiled code decides again.
            return dtype_refusal(specification.schema.names, values, self.dtypes)
        try:
            choice = self._cached_choice(specification, _with_defaults(specification, values))
        except errors.ToolchainError as error:
            if self.strict:
                raise
            return f"{error.problem}: {error.got}; {error.hint}"
        return choice if isinstance(choice, str) else None

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments that the kernel copies into another layout."""
        values = _with_defaults(self.operator.specification, values)
        choice = self._cached_choice(self.operator.specification, values)
        return () if isinstance(choice, str) else self.copied_arguments(choice, values)

    def copied_arguments(self, choice: CudaChoice, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments that an instance takes as copies in another layout, each with the reason."""
        schema = self.operator.specification.schema
        named = dict(zip(schema.names, values, strict=True))
        return tuple(
            copy_reason(name, parameter.layout, written=parameter.written)
            if parameter.layout != "any"
            else f"`{name}`, which has the negative bit"
            for name, parameter in zip(passed_arguments(schema), choice.parameters, strict=False)
            if needs_copy(named[name], parameter)
        )

    def choose(self, values: Sequence[Any], architecture: str) -> CudaChoice | str:
        """Return the instance that takes these argument values, or the reason why none does.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
            KernelSignatureError: If the parameters are not the operator's arguments and results.
            LaunchError: If a constant cannot be computed.
        """
        instances = self.instances(values)
        return self.choose_among(instances, self.candidates(instances, architecture), values)

    def instances(self, values: Sequence[Any]) -> list[Instance]:
        """Return the instances that may take these argument values: one for each dtype.

        Raises:
            LaunchError: If a constant cannot be computed.
        """
        schema = self.operator.specification.schema
        given = dict(zip(schema.names, without_data(schema, values), strict=True))
        constants = self.rules.constants_of(given) if self.rules.constants else ()
        return [Instance(dtype, constants) for dtype in self.dtypes or (None,)]

    def choose_among(
        self,
        instances: Sequence[Instance],
        candidates: Sequence[tuple[CudaParameter, ...]],
        values: Sequence[Any],
    ) -> CudaChoice | str:
        """Return the instance that takes these argument values, or the reason why none does.

        Args:
            instances: Instances.
            candidates: Parameters of each.
            values: Argument values.
        """
        schema = self.operator.specification.schema
        given = dict(zip(schema.names, without_data(schema, values), strict=True))
        names = passed_arguments(schema)
        passed = [given[name] for name in names]
        found = choose_cuda_candidate(names, passed, candidates, copies_back=self.copies_back)
        return found if isinstance(found, str) else CudaChoice(instances[found], candidates[found])

    def compile(self, instance: Instance, architecture: str) -> Cubin:
        """Compile an instance for an architecture.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        """
        return compile_instance(self.source, self.operator.name, instance, architecture)

    def plan(self, choice: CudaChoice, values: Sequence[Any]) -> CudaPlan:
        """Plan the calls that have the signature of these values.

        Raises:
            LaunchError: If the launch cannot be computed, or a GPU cannot do it.
            KernelSignatureError: If the kernel does not write the results of the reference.
            MissingFakeError: If the layouts of the results depend on data.
        """
        schema, parameters = self.operator.specification.schema, choice.parameters
        passed = tuple(schema.names.index(name) for name in passed_arguments(schema))
        layouts = result_layouts(self.operator.specification, values)
        results = []
        for result, layout, view in zip(schema.results, layouts, parameters[len(passed) :], strict=True):
            check_written(self, result.name, layout, view)
            results.append((layout, view.layout))
        given = without_data(schema, values)
        named = dict(zip(schema.names, given, strict=True))
        copied = []
        for index, parameter in zip(passed, parameters, strict=False):
            if needs_copy(values[index], parameter):
                copied.append((index, parameter))
                given[index] = copy_of(given[index], parameter)
        written = [layout.allocate("meta", view_layout) for layout, view_layout in results]
        packed = pack_parameters(parameters, [*(given[index] for index in passed), *written])
        names = [result.name for result in schema.results]
        named |= {name: layout.allocate("meta") for name, layout in zip(names, layouts, strict=True)}
        geometry = self.rules.geometry(named, names, schema.written)
        return CudaPlan(choice.instance, tuple(copied), tuple(results), geometry, packed, passed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; by the reference if the kernel does not take the call."""
        specification = self.operator.specification
        values = specification.schema.call_values(args, kwargs)
        device = tensors_in(values)[0].device
        signature = call_signature(values)
        plan = self._plans.get(specification, signature)
        if plan is None:
            choice = self._cached_choice(specification, values)
            if isinstance(choice, str):
                return specification.computed_by(*args, **kwargs)
            plan = self._plans.obtain(specification, signature, functools.partial(self.plan, choice, values))
        call = self.prepare(plan, values, device)
        if plan.geometry is not None:
            self._launch(plan, plan.geometry, call.tensors, device.index or 0)
        return self.finish(call)

    def prepare(self, plan: CudaPlan, values: list[Any], device: torch.device) -> PreparedCall:
        """Copy arguments into the layouts that the kernel takes, and allocate its results.

        Args:
            plan: The plan of the call.
            values: Argument values; copies take the places of those that are copied.
            device: Device of the results.
        """
        back: list[tuple[Tensor, Tensor]] = []
        for index, parameter in plan.copied:
            given, values[index] = values[index], copy_of(values[index], parameter)
            if parameter.written:
                back += zip(tensors_in([given]), tensors_in([values[index]]), strict=True)
            self.copied[self.operator.specification.schema.names[index]] += 1
        results = [layout.allocate(device, written) for layout, written in plan.results]
        tensors = [*tensors_in([values[index] for index in plan.passed]), *results]
        return PreparedCall(plan, tensors, results, back)

    def finish(self, call: PreparedCall) -> Any:
        """Return the results of a call that has run, after what it wrote is copied back."""
        for tensor, copy in call.back:
            tensor.copy_(copy)
        results = list(call.results)
        for index, (layout, _) in enumerate(call.plan.results):
            results[index] = layout.restore(call.results[index])
            if results[index] is not call.results[index]:
                self.copied["result"] += 1
        single = self.operator.specification.schema.single
        return (results[0] if single else tuple(results)) if results else None

    def _launch(self, plan: CudaPlan, geometry: Geometry, tensors: Sequence[Tensor], index: int) -> None:
        driver = self._machine.driver()
        try:
            with driver.on_device(index):
                function = self._function(plan.instance, geometry, index)
                driver.launch(
                    function.handle,
                    geometry.grid,
                    geometry.block,
                    geometry.shared,
                    self._machine.stream(index),
                    plan.packed.with_addresses([tensor.data_ptr() for tensor in tensors]),
                    plan.packed.offsets,
                )
        except DriverError as error:
            raise self.error(
                errors.KernelError,
                f"the CUDA kernel is not launched: {error}",
                got=f"grid {geometry.grid}, block {geometry.block}, {geometry.shared} bytes of shared "
                f"memory, on {self._machine.architecture(index)}",
                hint="see what it takes with `opsmith compile`; what a kernel before it did wrong comes up "
                "here, too: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer",
            ) from None

    def _function(self, instance: Instance, geometry: Geometry, index: int) -> _LoadedFunction:
        """Load the kernel into the current context, once for each GPU."""
        with self._lock:
            driver = self._machine.driver()
            function = self._functions.get((instance, index))
            if function is None:
                if self._machine.is_capturing():
                    raise self.error(
                        errors.KernelError,
                        "the CUDA kernel cannot be loaded while a CUDA graph is captured",
                        got="the first call of " + (f"its instance {instance}" if str(instance) else "it"),
                        hint="call the operator once with such arguments before the capture",
                    )
                cubin = self.compile(instance, self._machine.architecture(index))
                function = _LoadedFunction(driver.load(cubin.image, cubin.name), cubin)
                self._functions[instance, index] = function
            most = function.cubin.max_threads
            if most is not None and geometry.threads > most:
                raise self.error(
                    errors.LaunchError,
                    "a block has more threads than `__launch_bounds__` of the CUDA kernel allows",
                    argument="block",
                    expected=f"at most {most} threads",
                    got=f"{geometry.threads} threads, {' x '.join(map(str, geometry.block))}",
                    hint="write a smaller `block=`, or a larger bound",
                )
            static = function.cubin.resources.shared
            if geometry.shared > function.shared and static + geometry.shared > DEFAULT_MAX_SHARED:
                driver.allow_shared(function.handle, geometry.shared)
                function.shared = geometry.shared
            return function

    def candidates(
        self, instances: Sequence[Instance], architecture: str
    ) -> tuple[tuple[CudaParameter, ...], ...]:
        """Return the parameters of each instance, which are the operator's arguments and results.

        Raises:
            KernelSignatureError: If they are not.
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        """
        key = (*instances, architecture)
        with self._lock:
            if self._missing is not None:
                raise self._missing.with_traceback(None)
            if key in self._wrong:
                raise self._wrong[key].with_traceback(None)
            if key not in self._described:
                try:
                    found = describe_instances(self.source, self.operator.name, instances, architecture)
                    check_cuda_parameters(self, found)
                except errors.ToolchainError as error:
                    self._missing = error
                    raise
                except (errors.CompileError, errors.KernelSignatureError) as error:
                    self._wrong[key] = error  # until `reload`: a call looks at no file
                    raise
                self._described[key] = found
            return self._described[key]

    def _cached_choice(self, specification: Specification, values: Sequence[Any]) -> CudaChoice | str:
        index = tensors_in(list(values))[0].device.index or 0
        return self._choices.obtain(
            specification,
            call_signature(values),
            lambda: self.choose(values, self._machine.architecture(index)),
        )


def _with_defaults(specification: Specification, values: Sequence[Any]) -> list[Any]:
    """Return the value of every argument: torch leaves out defaults at the end."""
    rest = specification.schema.arguments[len(values) :]
    return [*values, *(argument.default for argument in rest)]
