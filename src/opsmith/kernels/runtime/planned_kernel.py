"""Kernels whose calls run by plans, entirely in C++: the code that all languages of such kernels share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from opsmith import errors
from opsmith.core.cached_property import cached_property
from opsmith.core.kernels import BuiltKernel, Kernel, KernelSource, Rejected, refuse_strictly
from opsmith.torch_library import capabilities

# A declaration does not need the other modules: functions import them, in the first call or build.
if TYPE_CHECKING:
    from opsmith.kernels.cpp.source import CppSource
    from opsmith.kernels.runtime.dispatch import DispatchedKernel
    from opsmith.kernels.runtime.driver import TorchCuda
    from opsmith.kernels.runtime.plan import Plan

S = TypeVar("S", bound=KernelSource)
C = TypeVar("C", bound="CppSource")


class PlannedKernel(BuiltKernel[S]):
    """Function that computes an operator by plans; Python makes a plan for each new signature of a call.

    `_build` stores an error that persists until `reload` in `_refused`.

    Attributes:
        by_address: True if a plan depends on which addresses of tensors are divisible by 16.
        free: See `_free_numbers`; it is set when the kernel is loaded.
    """

    by_address: ClassVar[bool] = False
    free: Collection[str] = ()
    _loaded: DispatchedKernel | None = None

    @property
    @abstractmethod
    def device(self) -> str:
        """Type of the device that it runs on, as in `torch.device(...).type`."""

    @property
    def package(self) -> Path | None:
        """Folder of the declaring package, which may contain the built kernel; None if there is none."""
        from opsmith.build.packaged import package_of

        return package_of(self.declared)

    def digest(self: PlannedKernel[C]) -> str:
        """Return the digest of the author's source and options, which identifies the built kernel."""
        from opsmith.build.manifest import digest_of_parts

        schema = self.operator.specification.schema
        return digest_of_parts(
            {
                **self.source.authored(self.package),
                "dtypes": list(map(str, self.dtypes or ())),
                "schema": schema.void.text("", with_hidden=True),
            }
        )

    @abstractmethod
    def _build(self) -> DispatchedKernel:
        """Load the kernel.

        Raises:
            CompileError, KernelSignatureError: If the source is wrong.
            ToolchainError: If the kernel can neither be loaded nor built.
        """

    @abstractmethod
    def _plan(self, loaded: DispatchedKernel, values: Sequence[Any]) -> Plan | str | None:
        """Plan the calls that have the signature of these values.

        Returns:
            The plan; the reason if the kernel does not take the call; None to compute it without a plan.
        """

    def _awaits_plan(self, values: Sequence[Any]) -> bool:
        """Return True to plan a call, and False to compute it without a plan."""
        return True

    def _unplanned(self, values: Sequence[Any]) -> Any:
        """Compute a call without a plan."""
        raise NotImplementedError

    @abstractmethod
    def _failed(self, text: str) -> errors.KernelError:
        """Return the error for the text of a C++ exception in a call."""

    def _forget(self) -> None:
        if self._loaded is not None:
            self._loaded.release()
        self._loaded = None
        self._refused: errors.OpsmithError | None = None
        self._serves = False

    def _load(self) -> DispatchedKernel:
        loaded = self._loaded
        if loaded is None:
            with self._lock:
                loaded = self._loaded
                if loaded is None:
                    if self._refused is not None:
                        raise self._refused.with_traceback(None)
                    loaded = self._loaded = self._build()
        return loaded

    def _dispatched(self, folder: Path | None, described: str) -> DispatchedKernel:
        """Give the kernel a place in torch's dispatcher.

        Args:
            folder: Folder of the package that contains the kernel; None if there is none.
            described: Description of the built kernel, for the error.

        Raises:
            KernelSignatureError: If the runtime cannot pass an argument or a result of its operator.
            ToolchainError: If the runtime is missing and cannot be compiled, or has no free place.
        """
        from opsmith.kernels.common.parameters import cpp_arguments
        from opsmith.kernels.runtime.dispatch import dispatched_kernel
        from opsmith.kernels.runtime.library import runtime_file

        specification = self.operator.specification
        arguments = cpp_arguments(self)
        runtime_file(folder, described)
        self.free = self._free_numbers()
        return dispatched_kernel(
            self,
            specification.dispatched_name,
            specification.schema.void.text("", with_hidden=True),
            arguments,
            [each.name in self.free for each in specification.schema.arguments],
            self.by_address,
            len(specification.schema.results),
            self.device.upper(),
            self._without_plan,
            self._failed,
        )

    def _numbers_read(self) -> Collection[str]:
        """Return the arguments on whose numbers a plan depends."""
        return ()

    def _free_numbers(self) -> set[str]:
        """Return the arguments whose floating-point numbers only the kernel reads.

        Calls that differ only in these numbers share a plan. The set is empty if the operator has results,
        since their sizes may depend on any number.
        """
        results = self.operator.specification.schema.results
        return set() if results else self._numbers - set(self._numbers_read())

    @property
    def _numbers(self) -> set[str]:
        """The arguments that are floating-point numbers."""
        arguments = self.operator.specification.schema.arguments
        return {each.name for each in arguments if each.kind.base.annotation == "float"}

    @property
    def direct(self) -> Callable[..., Any]:
        """Fastest callable of the kernel, valid only for calls that the kernel takes."""
        schema = self.operator.specification.schema
        plain = schema.single or (schema.always_tensors and len(schema.results) != 1)
        return capabilities.direct_call(self._load().overload) if plain else self

    @property
    def copied(self) -> dict[str, int]:
        """Number of copies into other layouts for each argument and `result`, without zeros."""
        loaded = self._loaded
        if loaded is None:
            return {}
        names = [*self.operator.specification.schema.names, "result"]
        counts = {name: loaded.copies(index) for index, name in enumerate(names)}
        return {name: count for name, count in counts.items() if count}

    @property
    def cached_plans(self) -> int:
        """Number of call signatures with a plan."""
        loaded = self._loaded
        return 0 if loaded is None else loaded.cached_plans

    @property
    def sizing(self) -> str:
        """Source of the results' sizes, for `explain`."""
        if self._sizing is None:
            return self._by_reference
        return f"`shapes=` in C++ for contiguous tensors; else {self._by_reference}"

    @property
    def computes_sizes(self) -> bool:
        """True if C++ computes the sizes of the results."""
        return self._sizing is not None

    @property
    def _by_reference(self) -> str:
        count = self.cached_plans
        return f"the reference, cached for {count} call signature{'s' * (count != 1)}"

    @property
    def _sizing(self) -> tuple[int, ...] | None:
        """The sizes of the results as numbers: see `sizing_of`; None if C++ cannot plan with `shapes=`."""
        from opsmith.kernels.runtime.recipe import sizing_of

        specification = self.operator.specification
        return sizing_of(specification.shapes, specification.schema)

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Take over the dispatcher's calls of the operator; calls without a plan go to `fallback`."""
        with self._lock:
            if self._loaded is None or self._serves:
                return None
            self._serves = True
            try:
                return self._loaded.serve(fallback)
            except errors.ToolchainError:  # no free entry: calls go through Python
                return None

    def withdraw(self) -> None:
        """Stop taking calls from the dispatcher, and drop all plans."""
        with self._lock:
            if self._loaded is not None:
                self._loaded.withdraw()
            self._serves = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator, by the reference if the kernel does not take the call."""
        result = self._load().overload(*args, **kwargs)
        schema = self.operator.specification.schema
        as_returned = isinstance(result, tuple | list) or schema.single or not schema.results
        return result if as_returned else (result,)

    def _without_plan(self, *args: Any, **kwargs: Any) -> Any:
        """Plan and run a call with a new signature; use the reference if the kernel does not take it."""
        from opsmith.torch_library.writes import refuse_unwritable

        specification, loaded = self.operator.specification, self._load()
        values = specification.schema.call_values(args, kwargs)
        if not self._awaits_plan(values):
            return self._unplanned(values)
        signature = loaded.pending()
        plan: Plan | str | None = None
        try:
            if specification.schema.written:
                refuse_unwritable(specification, values)
            plan = self._plan(loaded, values)
        finally:
            if signature is not None:
                loaded.remember(signature, None if isinstance(plan, str) else plan)
        if plan is None:
            return self._unplanned(values)
        if isinstance(plan, str):
            return self._computed_by_reference(values, plan)
        return loaded.overload(*args, **kwargs)

    def _computed_by_reference(self, values: Sequence[Any], refused: str) -> Any:
        """Compute a call that the kernel does not take by the reference.

        Raises:
            KernelRefusedError: If the kernel is strict.
        """
        refuse_strictly([Rejected(Kernel(self.device, self), refused)], self.operator.name)
        given, named = self.operator.specification.schema.split(values)
        return self.operator.specification.computed_by(*given, **named)


class LaunchedKernel(PlannedKernel[S]):
    """Function that computes an operator by launches on GPUs.

    Attributes:
        written_in: Name of the language of its source, for messages.
    """

    written_in: ClassVar[str]

    @cached_property
    def machine(self) -> TorchCuda:
        """GPUs and the driver."""
        from opsmith.kernels.runtime.driver import TorchCuda

        return TorchCuda()

    @property
    def device(self) -> str:
        """Type of the device that it runs on."""
        return self.machine.device

    def _build(self) -> DispatchedKernel:
        try:
            return self._dispatched(self.package, f"in {self.written_in}, which needs no C++ compiler")
        except errors.ToolchainError as error:
            self._refused = error  # kept until `reload`
            raise

    def _failed(self, text: str) -> errors.KernelError:
        problem, _, got = text.partition("\n  got: ")
        return self.refused(problem, got)

    def refused(self, problem: str, got: str) -> errors.KernelError:
        """Return the error for a launch that the driver refuses."""
        return self.error(
            errors.KernelError,
            problem,
            got=got,
            hint="see the kernel's resources with `opsmith compile`; a fault of an earlier kernel may also "
            "appear here: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer",
        )
