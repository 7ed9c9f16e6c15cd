"""A kernel in CUDA C++: compiled when it is first needed, for the GPU and for what pays, and launched."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.build.cpp.generating import DEFAULT
from opsmith.build.cuda.compiling import Cubin, compiled, descriptions
from opsmith.build.cuda.driver import DriverError
from opsmith.build.cuda.generating import Instance
from opsmith.build.cuda.parameters import CudaParameter
from opsmith.build.cuda.source import CudaSource
from opsmith.core.calls import tensors_in
from opsmith.core.operator import Operator
from opsmith.core.specification import Specification
from opsmith.kernels.choosing import of_other_dtypes, scattered
from opsmith.kernels.cuda_machine import TorchCuda
from opsmith.kernels.cuda_plan import Plan, allocated, constants_of, copy_of, in_form, must_copy, planned
from opsmith.kernels.cuda_signature import check_cuda_parameters, chosen, passed
from opsmith.kernels.from_source import KernelFromSource
from opsmith.kernels.launching import Geometry, Launching
from opsmith.kernels.memory import Memory, form_of_call, is_open


@dataclass(frozen=True, slots=True)
class Limits:
    """What the author allows a kernel to take; None: anything.

    Attributes:
        spills: Bytes that are spilled.
        registers: Registers of a thread.
    """

    spills: int | None = None
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The instance that takes a call, and its parameters."""

    instance: Instance
    parameters: tuple[CudaParameter, ...]


@dataclass(slots=True)
class _Function:
    """A kernel that is loaded on a GPU, and how much dynamic shared memory its launches may have."""

    handle: int
    cubin: Cubin
    shared: int


class CudaKernel(KernelFromSource[CudaSource]):
    """A function that computes an operator by a kernel in CUDA C++.

    Args:
        operator: Whose kernel it is.
        read: Reads the source; again after `reload`.
        dtypes: Those that a template is made for; None for the usual ones.
        launching: How it is launched.
        limits: What it may take of a GPU.
        strict: Whether a missing NVRTC, or a call that it does not take, is an error, and not only a reason
            to run the reference.
        machine: The GPUs.

    Attributes:
        copied: How often each argument, and the results, were copied for their layout.
    """

    def __init__(
        self,
        operator: Operator[..., Any],
        read: Callable[[], CudaSource],
        dtypes: Sequence[torch.dtype] | None,
        launching: Launching,
        limits: Limits,
        *,
        strict: bool,
        machine: TorchCuda | None = None,
    ) -> None:
        super().__init__(operator, read(), strict=strict)
        self._read_again = read
        self._dtypes = dtypes
        self._machine = machine or TorchCuda()
        self.launching, self.limits = launching, limits

    def _read(self) -> CudaSource:
        return self._read_again()

    def _forget(self) -> None:
        self._missing: errors.ToolchainError | None = None
        self._described: dict[Any, tuple[tuple[CudaParameter, ...], ...]] = {}
        # What was loaded stays loaded: a launch of it may wait in some stream.
        self._functions: dict[tuple[Instance, int], _Function] = {}
        self._choices: Memory[Choice | str] = Memory()
        self._plans: Memory[Plan] = Memory()
        self.copied: Counter[str] = Counter()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What its template is made for; nothing where it is none over the dtype."""
        return tuple(self._dtypes or DEFAULT) if self.source.over_dtype else ()

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Why it does not take a call with these argument values; None where it does.

        Raises:
            CompileError: If NVRTC refuses the source.
        """
        hindrance = self._machine.hindrance() or scattered(values)
        if hindrance is not None:
            return hindrance
        tensors = tensors_in(list(values))
        specification = self.operator.specification
        if is_open(form_of_call(values)):
            # Its sizes are letters to a compiler; each run decides for itself.
            return of_other_dtypes(specification.schema.names, values, self.dtypes)
        try:
            choice = self._chosen(specification, _whole(specification, values), tensors[0].device)
        except errors.ToolchainError as error:
            if self.strict:
                raise
            return f"{error.problem}: {error.got}; {error.hint}"
        return choice if isinstance(choice, str) else None

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The arguments that it copies, as it takes another layout than theirs."""
        schema = self.operator.specification.schema
        values = _whole(self.operator.specification, values)
        (device, *_) = {tensor.device for tensor in tensors_in(list(values))}
        choice = self._chosen(self.operator.specification, values, device)
        if isinstance(choice, str):
            return ()
        named = dict(zip(schema.names, values, strict=True))
        return tuple(
            f"`{name}`, which is not {parameter.layout}"
            if parameter.layout != "any"
            else f"`{name}`, which has the negative bit"
            for name, parameter in zip(passed(schema), choice.parameters, strict=False)
            if must_copy(named[name], parameter)
        )

    def choose(self, values: Sequence[Any], architecture: str) -> Choice | str:
        """The instance that takes these argument values, or why none does.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or there is none.
            KernelSignatureError: If its parameters are not the operator's arguments and results.
            LaunchError: If a constant cannot be told.
        """
        specification = self.operator.specification
        schema = specification.schema
        constants = constants_of(self.launching, schema, values)
        instances = [Instance(dtype, constants) for dtype in self.dtypes or (None,)]
        candidates = self._candidates(instances, architecture)
        names = passed(schema)
        restored = {
            each.name: each.kind.restore(value) for each, value in zip(schema.arguments, values, strict=True)
        }
        found = chosen(names, [restored[name] for name in names], candidates)
        return found if isinstance(found, str) else Choice(instances[found], candidates[found])

    def check(self, instance: Instance, architecture: str) -> None:
        """Hold the parameters of an instance to the operator.

        Raises:
            KernelSignatureError: If they are others.
            CompileError, ToolchainError: If NVRTC refuses the source, or there is none.
        """
        self._candidates([instance], architecture)

    def compiled(self, instance: Instance, architecture: str) -> Cubin:
        """An instance, compiled for an architecture.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or there is none.
        """
        return compiled(self.source, self.operator.name, instance, architecture)

    def plan(self, choice: Choice, values: Sequence[Any]) -> Plan:
        """How calls of the form of these values are run by an instance.

        Raises:
            LaunchError, KernelSignatureError, MissingFakeError: As their names say.
        """
        return planned(
            self.operator.specification,
            values,
            choice.instance,
            choice.parameters,
            self.launching,
            self.where,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; by the reference where the kernel does not take the call."""
        specification = self.operator.specification
        values = specification.schema.call_values(args, kwargs)
        device = tensors_in(values)[0].device
        call = form_of_call(values)
        plan = self._plans.of(specification, call)
        if plan is None:
            choice = self._chosen(specification, values, device)
            if isinstance(choice, str):
                return specification.computed_by(*args, **kwargs)
            plan = self._plans.obtain(specification, call, functools.partial(self.plan, choice, values))
        for position, parameter in plan.copied:
            values[position] = copy_of(values[position], parameter)
            self.copied[specification.schema.names[position]] += 1
        results = [allocated(form, other, device) for form, other in plan.results]
        if plan.geometry is not None:
            tensors = [*tensors_in([values[position] for position in plan.given]), *results]
            self._launch(plan, plan.geometry, tensors, device.index or 0)
        for position, (form, other) in enumerate(plan.results):
            if other is not None and results[position].stride() != form.stride:
                results[position] = in_form(results[position], form)
                self.copied["result"] += 1
        return results[0] if specification.schema.single else tuple(results)

    def _launch(self, plan: Plan, geometry: Geometry, tensors: Sequence[Tensor], index: int) -> None:
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
                    plan.packing.filled([tensor.data_ptr() for tensor in tensors]),
                    plan.packing.offsets,
                )
        except DriverError as error:
            raise errors.KernelError(
                f"the CUDA kernel is not launched: {error}",
                operator=self.operator.name,
                got=f"grid {geometry.grid}, block {geometry.block}, {geometry.shared} bytes of shared "
                f"memory, on {self._machine.architecture(index)}",
                where=self.where,
                hint="see what it takes with `opsmith compile`; what a kernel before it did wrong comes up "
                "here, too: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer",
            ) from None

    def _function(self, instance: Instance, geometry: Geometry, index: int) -> _Function:
        """The kernel, loaded on a GPU whose context is this thread's."""
        with self._lock:
            driver = self._machine.driver()
            function = self._functions.get((instance, index))
            if function is None:
                cubin = self.compiled(instance, self._machine.architecture(index))
                handle = driver.load(cubin.image, cubin.name, shared=geometry.shared)
                function = _Function(handle, cubin, geometry.shared)
                self._functions[instance, index] = function
            if geometry.shared > function.shared:
                driver.allow_shared(function.handle, geometry.shared)
                function.shared = geometry.shared
            return function

    def _candidates(
        self, instances: Sequence[Instance], architecture: str
    ) -> tuple[tuple[CudaParameter, ...], ...]:
        key = (*instances, architecture)
        with self._lock:
            if self._missing is not None:
                raise self._missing
            if key not in self._described:
                specification = self.operator.specification
                try:
                    found = descriptions(self.source, specification.name, instances, architecture)
                except errors.ToolchainError as error:
                    self._missing = error
                    raise
                check_cuda_parameters(found, specification.schema, specification.name, self.where)
                self._described[key] = found
            return self._described[key]

    def _chosen(
        self, specification: Specification, values: Sequence[Any], device: torch.device
    ) -> Choice | str:
        """What `choose` says, remembered."""
        return self._choices.obtain(
            specification,
            form_of_call(values),
            lambda: self.choose(values, self._machine.architecture(device.index or 0)),
        )


def _whole(specification: Specification, values: Sequence[Any]) -> list[Any]:
    """The value of every argument, where torch left out defaults at the end."""
    rest = specification.schema.arguments[len(values) :]
    return [*values, *(argument.default for argument in rest)]
