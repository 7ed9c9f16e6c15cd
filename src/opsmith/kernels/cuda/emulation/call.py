"""Calls of CUDA kernels on CPU tensors: `opsmith.emulate`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import call_error, tensors_in
from opsmith.core.operator import Operator
from opsmith.core.schema import Schema
from opsmith.core.tensors import resolved
from opsmith.kernels.common.gpu_resources import MOST_THREADS
from opsmith.kernels.common.parameters import copy_of
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.emulation.compiler import MAX_SHARED, EmulatedLibrary, emulated_libraries
from opsmith.kernels.cuda.emulation.findings import EmulationFinding, findings_of
from opsmith.kernels.cuda.emulation.launch import (
    ORDERS,
    EmulatedLaunch,
    EmulatedRun,
    Kind,
    LaunchResult,
    LaunchTensor,
    Order,
    TensorUse,
    run_launches,
)
from opsmith.kernels.cuda.kernel import CudaKernel, cuda_kernels
from opsmith.kernels.cuda.limits import LaunchLimits
from opsmith.kernels.cuda.parameters import CudaParameter
from opsmith.kernels.cuda.plan import CudaChoice, CudaPlan
from opsmith.kernels.cuda.rules import passed_arguments
from opsmith.kernels.cuda.source import CudaSource
from opsmith.kernels.on_cpu import NOTE, SKIPPED
from opsmith.torch_library.arguments import refuse_shapes, refuse_unsupported
from opsmith.torch_library.writes import refuse_unwritable

_BOUNDS = re.compile(r"__launch_bounds__\s*\(\s*(\d+)\s*[,)]")


@dataclass(frozen=True, slots=True)
class EmulatedCall:
    """Call of a kernel that can be launched on the CPU, any number of times.

    Attributes:
        plan: The plan of the call.
        tensors: Tensors of the arguments, then the results, then the scratch buffers.
        back: Tensors that the kernel writes through a copy, each with its copy.
        libraries: Library of each launch.
        uses: Name of each tensor, and its permitted use by the launches.
    """

    plan: CudaPlan
    tensors: list[Tensor]
    back: list[tuple[Tensor, Tensor]]
    libraries: tuple[EmulatedLibrary, ...]
    uses: tuple[TensorUse, ...]

    @property
    def threads(self) -> int:
        """Number of threads of the launches."""
        geometries = [launch.geometry for launch in self.plan.launches]
        return sum(math.prod(each.grid) * each.threads for each in geometries)

    def new_run(self, order: Order) -> EmulatedRun:
        """Return the launches with copies of the tensors."""
        planned = self.plan.launches
        tensors = tuple(
            LaunchTensor.of(tensor, use, followed=len(planned) > 1)
            for tensor, use in zip(self.tensors, self.uses, strict=True)
        )
        return tuple(
            EmulatedLaunch(
                library,
                library.instances.index(launch.instance),
                launch.geometry,
                launch.packed,
                launch.tensors,
                tensors,
                order,
            )
            for library, launch in zip(self.libraries, planned, strict=True)
        )

    def finish(self, kernel: CudaKernel, run: EmulatedRun) -> Any:
        """Copy the written values into the tensors of the call, and return the results."""
        for launch in run[:1]:  # all launches have the same tensors
            for tensor, given in zip(self.tensors, launch.tensors, strict=True):
                if given.use.writable:
                    tensor.copy_(given.tensor)
        for tensor, copy in self.back:
            tensor.copy_(copy)
        made = self.tensors[len(self.tensors) - len(self.plan.results) - len(self.plan.scratch) :]
        pairs = zip(self.plan.results, made, strict=False)
        results = [planned.layout.restore(result) for planned, result in pairs]
        single = kernel.operator.specification.schema.single
        return (results[0] if single else tuple(results)) if results else None


class KernelEmulation:
    """CUDA kernel that runs on the CPU."""

    def __init__(self, kernel: CudaKernel) -> None:
        self.kernel = kernel
        self._libraries: dict[Instance, EmulatedLibrary] = {}

    @property
    def _rounds_alike(self) -> bool:
        """False if the kernel is declared with rounding that differs from run to run."""
        return self.kernel.deterministic and self.kernel.operator.specification.deterministic

    def build(self, calls: Sequence[Sequence[Any]]) -> None:
        """Compile the instances that calls with these argument values may need.

        Raises:
            CompileError: If its source is wrong.
            NotEmulatedError: If the CPU cannot run the kernel.
            KernelSignatureError: If its parameters do not match the operator's arguments and results.
            LaunchError: If a constant cannot be computed.
            ToolchainError: If there is no compiler.
        """
        needed = {
            instance: None
            for values in calls
            for variant in self._variants(values)
            for instance in variant
            if instance not in self._libraries
        }
        if not needed:
            return
        operator = self.kernel.operator.name
        try:
            libraries = emulated_libraries(self.kernel.source, operator, needed)
        except errors.CompileError as error:
            raise self.kernel.explained(error) from None
        for library in libraries:
            self.kernel.check_parameters(dict(zip(library.instances, library.parameters, strict=True)))
            self._libraries |= dict.fromkeys(library.instances, library)

    def _variants(self, values: Sequence[Any]) -> list[tuple[Instance, ...]]:
        """Return the instances for the dtypes of some tensors, or all instances if no instance fits."""
        every = self.kernel.variants(values)
        dtypes = {tensor.dtype for tensor in tensors_in(list(values))}
        return [variant for variant in every if any(each.dtype in dtypes for each in variant)] or every

    def choose(self, values: Sequence[Any]) -> CudaChoice | str:
        """Return the instances that take these argument values, or the reason why none do.

        Raises:
            Exception: See `build`.
        """
        self.build([values])
        variants = self._variants(values)
        described = {each: self._parameters(each) for variant in variants for each in variant}
        return self.kernel.choose_among(variants, described, values)

    def prepare(self, values: Sequence[Any]) -> EmulatedCall | str:
        """Return the call with these argument values, or the reason why the kernel does not take it.

        Raises:
            Exception: See `build` and `CudaKernel.plan`.
        """
        kernel, schema = self.kernel, self.kernel.operator.specification.schema
        choice = self.choose(values)
        if not isinstance(choice, CudaChoice):
            return choice
        plan = kernel.plan(choice, values)
        named = dict(zip(schema.names, values, strict=True))
        given, back = list(values), list[tuple[Tensor, Tensor]]()
        for index, parameter in plan.copied:
            given[index] = copy_of(values[index], parameter)
            if parameter.written:
                back += zip(tensors_in([values[index]]), tensors_in([given[index]]), strict=True)
        tensors = tensors_in([given[index] for index in plan.passed])
        uses: list[TensorUse] = []
        for name in passed_arguments(schema):
            written = name in choice.taken and choice.taken[name].written
            uses += [TensorUse(label, written, True) for label in _labels(name, named[name])]
        for buffer in (*plan.results, *plan.scratch):
            complete = buffer in plan.results
            tensors.append(buffer.allocate("cpu"))
            uses.append(TensorUse(buffer.name, True, buffer.initial is not None, complete))
        libraries = tuple(self._libraries[launch.instance] for launch in plan.launches)
        for launch, library in zip(plan.launches, libraries, strict=True):
            limits = _limits(kernel.source.kernel(launch.instance.entry), library)
            if not limits.allow(launch.geometry):
                raise limits.refused(kernel, launch.geometry)
        return EmulatedCall(plan, tensors, back, libraries, tuple(uses))

    def _parameters(self, instance: Instance) -> tuple[CudaParameter, ...]:
        library = self._libraries[instance]
        return library.parameters[library.instances.index(instance)]

    def run(self, runs: Sequence[EmulatedRun], *, in_process: bool = False) -> list[list[EmulationFinding]]:
        """Run the launches of calls, and return the findings of each call.

        Raises:
            ToolchainError: If the system cannot fork a process.
        """
        results = self.results(runs, in_process=in_process)
        return [self.findings(run, each) for run, each in zip(runs, results, strict=True)]

    def results(
        self, runs: Sequence[EmulatedRun], *, in_process: bool = False, counted: bool = False
    ) -> list[list[LaunchResult]]:
        """Run the launches of calls, and return the result of each launch of each call.

        Raises:
            ToolchainError: If the system forks no process.
        """
        try:
            return run_launches(runs, in_process=in_process, counted=counted)
        except errors.ToolchainError as error:
            raise error.of(self.kernel.operator.name, self.kernel.where) from error

    def findings(self, run: EmulatedRun, results: Sequence[LaunchResult]) -> list[EmulationFinding]:
        """Return the findings of a call: notes, and the faults of the first launch with faults."""
        found: list[EmulationFinding] = []
        for number, (launch, result) in enumerate(zip(run, results, strict=True), 1):
            entry = launch.library.instances[launch.entry].entry
            before = f"in launch {number} of {len(run)}, `{entry}`, " if len(run) > 1 else ""
            for each in findings_of(self.kernel.source.kernel(entry), launch, result):
                if each.kind != Kind.UNORDERED_SUM or self._rounds_alike:
                    found.append(replace(each, message=f"{before}{each.message}"))
            if any(each.cause != NOTE for each in found):
                break  # later launches read its faulty results
        return found

    def compute(self, call: EmulatedCall, order: Order, *, in_process: bool = False) -> Any:
        """Run a call, and return its results.

        Raises:
            KernelFaultError: If the kernel has a fault.
            NotEmulatedError: If the CPU cannot run it.
        """
        run = call.new_run(order)
        (found,) = self.run([run], in_process=in_process)
        faults = [each for each in found if each.cause != NOTE]
        if faults:
            raise fault_error(self.kernel, faults)
        return call.finish(self.kernel, run)


def _limits(source: CudaSource, library: EmulatedLibrary) -> LaunchLimits:
    """Return the limits of launches on any GPU, so that launches which no GPU can run are refused here, too.

    Static shared memory counts only if a library has one instance: for several, the size of each is unknown.
    """
    static = sum(each.size for each in library.shared) if len(library.instances) == 1 else 0
    bounds = _launch_bounds(source)
    return LaunchLimits(bounds, bounds or MOST_THREADS, 0, static, MAX_SHARED, "any GPU")


def _launch_bounds(source: CudaSource) -> int | None:
    """Return the threads that `__launch_bounds__` allows; None without it, or if it is not a number."""
    text = "\n".join(source.text.split("\n")[source.at - source.line :])
    head, entry, _ = text.partition(f"{source.entry}(")
    found = _BOUNDS.findall(re.sub(r"//.*", "", re.split(r"[;}]", head)[-1])) if entry else []
    return int(found[-1]) if found else None


def _labels(name: str, value: Any) -> list[str]:
    if isinstance(value, Tensor):
        return [name]
    return [f"{name}[{at}]" for at in range(len(tensors_in([value])))]


def emulate(
    operator: Operator[..., Any],
    *args: Any,
    order: str = "forward",
    in_process: bool = False,
    **kwargs: Any,
) -> Any:
    """Run the CUDA C++ kernel of an operator on the CPU, and check every memory access.

    Args:
        operator: The operator.
        args: Its arguments; tensors must be on the CPU.
        order: Order in which the threads of a block run: `forward`, `backward`, `alternating`, `random`, or
            `random(7)` with a seed.
        in_process: True to run in this process, for a debugger; then a crash of the kernel ends the process.
        kwargs: Its keyword arguments.

    Returns:
        The results that a call returns. There are no gradients.

    Raises:
        KernelFaultError: If the kernel has a fault, such as a race or an access outside of its memory.
        NotEmulatedError: If the kernel uses features that the CPU cannot run.
        KernelRefusedError, UsageError: If the kernel does not take the call, or is not in CUDA C++.
        ArgumentError, MutationError, LayoutError, ShapeError: As in any call.
        CompileError, ToolchainError, KernelSignatureError, LaunchError: As in a call on a GPU.

    Example:
        >>> import opsmith.ops
        >>> x, weight = torch.ones(1, 2, 3, 3), torch.ones(1, 1, 3, 3, 3, 3)
        >>> emulate(opsmith.ops.involution, x, weight, padding=1).shape
        torch.Size([1, 2, 3, 3])
    """
    wanted = parse_order(order, 'opsmith.emulate(op, x, order="backward")')
    if not isinstance(operator, Operator):
        raise errors.UsageError(
            "only an operator of opsmith can be emulated",
            argument="operator",
            expected="an operator that `opsmith.operator` returns",
            got=repr(operator),
            hint='declare it: `@opsmith.operator("ns::name")`',
        )
    kernels = cuda_kernels(operator.specification)
    if not kernels:
        raise errors.UsageError(
            "it has no kernel in CUDA C++ to emulate",
            operator=operator.name,
            hint='declare one: `op.kernel("cuda", cuda=..., grid=...)`',
        )
    values = _values_of(operator, args, kwargs)
    devices = {tensor.device.type for tensor in tensors_in(values)} - {"cpu"}
    if devices:
        raise errors.UsageError(
            "a kernel is emulated on CPU tensors",
            operator=operator.name,
            expected="tensors on cpu",
            got=f"a tensor on {min(devices)}",
            hint="pass copies on the CPU: `x.cpu()`",
        )
    specification = operator.specification
    refuse_unsupported(specification, values)
    refuse_shapes(specification, values)
    if specification.schema.written:
        refuse_unwritable(specification, values)
    reasons: list[str] = []
    with torch.no_grad():
        taken = resolved(values)
        for kernel in kernels:
            emulation = KernelEmulation(kernel)
            call = emulation.prepare(taken)
            if isinstance(call, EmulatedCall):
                results = emulation.compute(call, wanted, in_process=in_process)
                return _returned(specification.schema, values, results)
            reasons.append(call)
    raise kernels[0].error(
        errors.KernelRefusedError,
        f"its CUDA kernel does not take the call: {'; '.join(reasons)}",
        hint="call it with arguments that the kernel takes",
    )


def _values_of(operator: Operator[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the value of every argument of a call."""
    specification = operator.specification
    schema = specification.schema
    error = call_error(args, kwargs, schema)
    if error is not None:
        hint = f"call it as {schema.call_text(specification.variable)}"
        raise error.of(specification.name, specification.where, hint) from None
    return schema.call_values(args, kwargs)


def _returned(schema: Schema, values: Sequence[Any], results: Any) -> Any:
    """Return the results that callers see, or the argument that the operator returns."""
    if schema.returns is not None:
        return values[schema.names.index(schema.returns)]
    if not schema.hidden:
        return results
    shown = tuple(results[at] for at in schema.visible)
    return shown[0] if len(shown) == 1 else shown or None


def fault_error(kernel: CudaKernel, faults: Sequence[EmulationFinding]) -> errors.OpsmithError:
    """Return the error for the first of several findings."""
    first = faults[0]
    more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
    lines = [first.message + more]
    for where, text in ((first.where, first.line), (first.other_where, first.other_line)):
        if text:
            lines.append(f"    {where}: {text}")
    if first.cause == SKIPPED:
        return kernel.error(
            errors.NotEmulatedError,
            "the CUDA kernel cannot be run on the CPU",
            got="\n".join(lines),
            hint=first.hint,
        )
    return errors.KernelFaultError(
        f"the CUDA kernel is faulty: {first.cause}",
        operator=kernel.operator.name,
        argument=first.label,
        got="\n".join(lines),
        where=first.where,
        hint=first.hint or None,
    )


def parse_order(text: Any, hint: str) -> Order:
    """Return the order of the threads that a text names, such as `forward` or `random(7)`.

    Args:
        text: The text.
        hint: Example of a call with an order, for the message.

    Raises:
        UsageError: If there is no such order.
    """
    match = re.fullmatch(r"random\((?P<seed>\d+)\)", str(text))
    if match is not None:
        return Order("random", int(match["seed"]))
    if text not in ORDERS:
        raise errors.UsageError(
            "there is no such order of threads",
            argument="order",
            expected=f"{', '.join(f'`{each}`' for each in ORDERS)}, or `random(7)`",
            got=repr(text),
            hint=f"call `{hint}`",
        )
    return Order(text)
