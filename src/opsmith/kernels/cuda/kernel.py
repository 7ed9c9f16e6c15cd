"""CUDA kernels of operators: choose the instances for a call, and plan the call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.operator import Operator
from opsmith.core.specification import Specification
from opsmith.kernels.common.call_cache import CallCache, call_signature, is_symbolic
from opsmith.kernels.common.dtypes import DEFAULT_DTYPES
from opsmith.kernels.cuda.rules import KernelRules, passed_arguments
from opsmith.kernels.cuda.source import CudaSource
from opsmith.kernels.runtime.planned_kernel import LaunchedKernel

# A declaration does not need the other modules, and few processes use them: functions import them.
if TYPE_CHECKING:
    from opsmith.kernels.cuda.compiler import Cubin, Instance
    from opsmith.kernels.cuda.functions import GpuFunctions
    from opsmith.kernels.cuda.nvrtc import Nvrtc
    from opsmith.kernels.cuda.packaged import PackagedImages
    from opsmith.kernels.cuda.parameters import CudaParameter
    from opsmith.kernels.cuda.plan import CudaChoice, CudaPlan
    from opsmith.kernels.runtime.dispatch import DispatchedKernel
    from opsmith.kernels.runtime.plan import Plan


class CudaKernel(LaunchedKernel[CudaSource]):
    """Function that computes an operator by a kernel in CUDA C++.

    Args:
        operator: The operator that the kernel computes.
        read: Function that reads the source, now and after each `reload`.
        dtypes: The dtypes for which a template is instantiated; None for the default dtypes.
        rules: Rules for the launches.
        strict: True if a missing NVRTC, or a call that the kernel does not take, raises an error. If False,
            the reference runs.
        copies_back: See `BuiltKernel`.
        deterministic: See `BuiltKernel`.
    """

    key, language, written_in = "cuda", "CUDA", "CUDA C++"

    def __init__(
        self,
        operator: Operator[..., Any],
        read: Callable[[], CudaSource],
        dtypes: Sequence[torch.dtype] | None,
        rules: KernelRules,
        *,
        strict: bool,
        copies_back: bool = False,
        deterministic: bool = True,
    ) -> None:
        super().__init__(
            operator,
            read,
            strict=strict,
            copies_back=copies_back,
            deterministic=deterministic,
        )
        self._dtypes = dtypes
        self.rules = rules
        if len(rules.launches) > 1:
            self.manner = f"{len(rules.launches)} launches"

    def _forget(self) -> None:
        super()._forget()
        self._missing: errors.ToolchainError | None = None
        self._wrong: dict[Any, errors.OpsmithError] = {}
        self._described: dict[Any, tuple[tuple[CudaParameter, ...], ...]] = {}
        self._functions: GpuFunctions | None = None
        self._choices: CallCache[CudaChoice | str] = CallCache()
        self._images: dict[str, PackagedImages] = {}

    @property
    def functions(self) -> GpuFunctions:
        """Functions of the kernel that are loaded on GPUs."""
        functions = self._functions
        if functions is None:
            from opsmith.kernels.cuda.functions import GpuFunctions

            with self._lock:
                functions = self._functions = self._functions or GpuFunctions(self)
        return functions

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes for which its templates are instantiated; empty if no template is over the dtype."""
        sources = [self.source.kernel(launch.entry) for launch in self.rules.launches]
        return tuple(self._dtypes or DEFAULT_DTYPES) if any(each.over_dtype for each in sources) else ()

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take a call with these argument values; None if it does.

        Raises:
            CompileError: If NVRTC refuses the source.
        """
        reason = self.machine.unavailable()
        if reason is not None:
            return reason
        from opsmith.core.missing_kernels import missing_reason
        from opsmith.kernels.common.parameters import device_refusal, dtype_refusal

        reason = device_refusal(values)
        if reason is not None:
            return reason
        specification = self.operator.specification
        values = with_defaults(specification, values)
        signature = call_signature(values)
        if is_symbolic(signature):  # each run of the compiled code makes a new choice
            return dtype_refusal(specification.schema.names, values, self.dtypes)
        try:
            choice = self._cached_choice(specification, values, signature)
        except errors.ToolchainError as error:
            return missing_reason(self, error)
        if isinstance(choice, str):
            return choice
        try:
            self._load()
        except errors.ToolchainError as error:  # an error of the runtime
            return missing_reason(self, error)
        return None

    def origin_of(self, values: Sequence[Any]) -> str:
        """Return the origins of a call's instances in words, in the order of its launches."""
        specification = self.operator.specification
        values = with_defaults(specification, values)
        choice = self._cached_choice(specification, values, call_signature(values))
        if isinstance(choice, str):
            return ""
        index = tensors_in(list(values))[0].device.index or 0
        found = dict.fromkeys(self._origin_of_instance(each, index) for each in choice.instances)
        return ", ".join(each for each in found if each)

    def _origin_of_instance(self, instance: Instance, index: int) -> str:
        from opsmith.kernels.cuda.compiler import name_expression

        loaded = self.functions.loaded.get((instance, index))
        if loaded is not None:
            return loaded.cubin.origin
        images = self.packaged(self.machine.architecture(index)).images(
            name_expression(self.source, instance)
        )
        return next((image.cubin.origin for _, image in images), "")

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments and results that the kernel copies into a different layout."""
        values = with_defaults(self.operator.specification, values)
        choice = self._cached_choice(self.operator.specification, values, call_signature(values))
        return () if isinstance(choice, str) else self.copied_tensors(choice, values)

    def copied_tensors(self, choice: CudaChoice, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments and results that are copied for an instance, each with the reason."""
        from opsmith.kernels.common.parameters import copied_tensors

        return copied_tensors(self.operator.specification, values, choice.taken)

    def choose(self, values: Sequence[Any], architecture: str) -> CudaChoice | str:
        """Return the instances that take these argument values, or the reason why none do.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
            KernelSignatureError: If the parameters do not match the operator's arguments and results.
            LaunchError: If a constant cannot be computed.
        """
        from opsmith.kernels.common.parameters import index_refusal

        variants = self.variants(values)
        instances = [*dict.fromkeys(each for variant in variants for each in variant)]
        described = dict(zip(instances, self.candidates(instances, architecture), strict=True))
        return index_refusal(self, values) or self.choose_among(variants, described, values)

    def narrow_indices(self, values: Sequence[Any]) -> list[Any]:
        """Return the kernel's indices of 32 bits; see `BuiltKernel.narrow_indices` and `compile`."""
        from opsmith.kernels.common.gpu_resources import ARCHITECTURES
        from opsmith.kernels.cpp.diagnostics import narrow_indices
        from opsmith.kernels.cuda.compiler import diagnostics

        instances = dict.fromkeys(each for variant in self.variants(values) for each in variant)
        logs = [self.compile(each, ARCHITECTURES[-1]).log for each in instances]
        log = "\n".join(logs).replace("warning #", "error #")  # `diagnostics` returns errors
        launched = [(self.source.kernel(rules.entry), rules.passed) for rules in self.rules.launches]
        return narrow_indices(diagnostics(log, self.source), launched)

    def variants(self, values: Sequence[Any]) -> list[tuple[Instance, ...]]:
        """Return the instances that may take these argument values: for each dtype, one for each launch.

        Raises:
            LaunchError: If a constant cannot be computed.
        """
        from opsmith.kernels.cuda.plan import without_data

        schema = self.operator.specification.schema
        given = dict(zip(schema.names, without_data(schema, values), strict=True))
        constants = [rules.constants_of(given) if rules.constants else () for rules in self.rules.launches]
        return [self.variant(dtype, constants) for dtype in self.dtypes or (None,)]

    def variant(
        self, dtype: torch.dtype | None, constants: Sequence[tuple[tuple[str, int], ...]]
    ) -> tuple[Instance, ...]:
        """Return the instance of each launch, for a dtype and for the constants of each launch."""
        from opsmith.kernels.cuda.compiler import Instance

        return tuple(
            Instance(dtype if self.source.kernel(rules.entry).over_dtype else None, each, rules.entry)
            for rules, each in zip(self.rules.launches, constants, strict=True)
        )

    def choose_among(
        self,
        variants: Sequence[tuple[Instance, ...]],
        described: Mapping[Instance, tuple[CudaParameter, ...]],
        values: Sequence[Any],
    ) -> CudaChoice | str:
        """Return the instances that take these argument values, or the reason why none do.

        Args:
            variants: Instances of the launches, for each dtype.
            described: Parameters of each instance.
            values: Argument values.

        Raises:
            KernelSignatureError: If two launches have contradictory parameters for one tensor.
        """
        from opsmith.kernels.cuda.parameters import choose_cuda_candidate, merged_parameters
        from opsmith.kernels.cuda.plan import CudaChoice, without_data

        schema = self.operator.specification.schema
        given = dict(zip(schema.names, without_data(schema, values), strict=True))
        passed = [rules.passed for rules in self.rules.launches]
        parameters = [tuple(described[each] for each in variant) for variant in variants]
        taken = [merged_parameters(self, zip(passed, each, strict=True)) for each in parameters]
        names = [name for name in passed_arguments(schema) if name in taken[0]]
        candidates = [[each[name] for name in names] for each in taken]
        values = [given[name] for name in names]
        found = choose_cuda_candidate(names, values, candidates, copies_back=self.copies_back)
        return (
            found if isinstance(found, str) else CudaChoice(variants[found], parameters[found], taken[found])
        )

    def compile(self, instance: Instance, architecture: str, nvrtc: Nvrtc | None = None) -> Cubin:
        """Compile an instance for an architecture, with the given NVRTC or else with `find_nvrtc()`.

        Raises:
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        """
        from opsmith.kernels.cuda.compiler import compile_instance

        return compile_instance(self.source, self.operator.name, instance, architecture, nvrtc)

    def plan(self, choice: CudaChoice, values: Sequence[Any]) -> CudaPlan:
        """Plan the calls that have the signature of these values; see `plan_call`."""
        from opsmith.kernels.cuda.plan import plan_call

        return plan_call(self, self.rules, choice, values)

    @property
    def _sizing(self) -> tuple[int, ...] | None:
        return super()._sizing if self.rules.are_expressions else None

    def _numbers_read(self) -> set[str]:
        return self.rules.names

    def _plan(self, loaded: DispatchedKernel, values: Sequence[Any]) -> Plan | str:
        from opsmith.kernels.common.parameters import device_refusal

        specification = self.operator.specification
        choice = device_refusal(values) or self._cached_choice(specification, values, call_signature(values))
        if isinstance(choice, str):
            return choice
        try:
            return self.functions.plan(self.plan(choice, values), values)
        except errors.ToolchainError as error:  # the driver does not load the built kernels
            from opsmith.core.missing_kernels import missing_reason

            return missing_reason(self, error)

    def choose_anew(self, missing: errors.ToolchainError | None = None) -> None:
        """Forget the choices for calls, after a compiler or built kernels became unusable.

        Args:
            missing: Error of a missing compiler; None if built kernels do not load.
        """
        self._missing = missing or self._missing
        self._described.clear()
        self._choices = CallCache()

    def sources(self) -> tuple[Any, ...]:
        """Return the values that define the kernel, with its launches."""
        return *super().sources(), self.rules

    def packaged(self, architecture: str = "") -> PackagedImages:
        """Return the images for a GPU in the kernel's package, which are read once until `reload`.

        Args:
            architecture: Architecture of the GPU; empty for any GPU.
        """
        from opsmith.build.packaged import search
        from opsmith.kernels.cuda.packaged import PackagedImages, gpu_misfit, gpu_rank
        from opsmith.kernels.cuda.parameters import VERSION

        if architecture not in self._images:
            found = search(
                self.package,
                self.language,
                self.operator.name,
                self.digest,
                VERSION,
                functools.partial(gpu_misfit, architecture=architecture),
                gpu_rank,
            )
            self._images[architecture] = PackagedImages(found, architecture)
        return self._images[architecture]

    def candidates(
        self, instances: Sequence[Instance], architecture: str
    ) -> tuple[tuple[CudaParameter, ...], ...]:
        """Return the parameters of each instance, after comparing them with the launches.

        Raises:
            KernelSignatureError: If they do not match the launches.
            CompileError, ToolchainError: If NVRTC refuses the source, or is missing.
        """
        from opsmith.kernels.cuda.compiler import name_expression

        key = (*instances, architecture)
        with self._lock:
            if key in self._wrong:
                raise self._wrong[key].with_traceback(None)
            if key not in self._described:
                packaged = self.packaged(architecture)
                found = packaged.described([name_expression(self.source, each) for each in instances])
                try:
                    if found is None:
                        found = self._describe(instances, architecture, packaged)
                    self.check_parameters(dict(zip(instances, found, strict=True)))
                except errors.ToolchainError as error:
                    self._missing = error
                    raise
                except (errors.CompileError, errors.KernelSignatureError) as error:
                    self._wrong[key] = self.explained(error)  # kept until `reload`
                    raise self._wrong[key] from error.__cause__
                self._described[key] = found
            return self._described[key]

    def _describe(
        self, instances: Sequence[Instance], architecture: str, packaged: PackagedImages
    ) -> tuple[tuple[CudaParameter, ...], ...]:
        """Return the parameters of each instance, which NVRTC reports.

        Args:
            instances: The instances.
            architecture: For example `sm_90`.
            packaged: The package's images for this GPU, for the error.
        """
        from opsmith.core.missing_kernels import with_reason
        from opsmith.kernels.cuda.compiler import describe_instances

        if self._missing is not None:
            raise self._missing.with_traceback(None)
        try:
            return describe_instances(self.source, self.operator.name, instances, architecture)
        except errors.ToolchainError as error:
            reasons = [packaged.found.reason]
            if packaged.targets:
                reasons.append(f"its package has no built kernels for {', '.join(map(str, instances))}")
            raise with_reason(error, "; ".join(filter(None, reasons))) from None

    def check_parameters(self, described: Mapping[Instance, Sequence[CudaParameter]]) -> None:
        """Compare the parameters of instances with the values that launches pass to them.

        Raises:
            KernelSignatureError: If they differ.
        """
        from opsmith.kernels.cuda.parameters import check_cuda_parameters

        several = any(rules.entry for rules in self.rules.launches)
        for instance, parameters in described.items():
            for rules in self.rules.launches:
                if rules.entry == instance.entry:
                    check_cuda_parameters(self, parameters, rules.passed, rules.call if several else None)

    def explained(self, error: errors.OpsmithError) -> errors.OpsmithError:
        """Return a compiler's error; if a parameter has a type that no kernel takes, the error names it."""
        from opsmith.kernels.common.parameters import misdeclared
        from opsmith.kernels.cuda.parameters import wanted_parameters

        for rules in self.rules.launches:
            declared = self.source.kernel(rules.entry).declared_parameters()
            wanted = wanted_parameters(self, rules.passed)
            error = misdeclared(self, error, declared, wanted, rules.passed)
        return error

    def _cached_choice(
        self, specification: Specification, values: Sequence[Any], signature: Any
    ) -> CudaChoice | str:
        def choose() -> CudaChoice | str:
            index = tensors_in(list(values))[0].device.index or 0
            return self.choose(values, self.machine.architecture(index))

        return self._choices.obtain(specification, signature, choose)


def cuda_kernels(specification: Specification) -> list[CudaKernel]:
    """Return the kernels in CUDA C++ of an operator, in the order in which they are tried."""
    kernels = dict.fromkeys(each.given for each in specification.kernels)
    return [each for each in kernels if isinstance(each, CudaKernel)]


def with_defaults(specification: Specification, values: Sequence[Any]) -> list[Any]:
    """Return the value of every argument, since torch omits default values at the end."""
    rest = specification.schema.arguments[len(values) :]
    return [*values, *(argument.default for argument in rest)]
