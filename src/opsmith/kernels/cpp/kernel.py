"""Kernel in C++: compile or load it when it is first needed, and decide which calls it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.build.compiler_options import NO_OPTIONS
from opsmith.core.call_arguments import tensors_in
from opsmith.core.operator import Operator
from opsmith.kernels.common.dtypes import DEFAULT_DTYPES
from opsmith.kernels.cpp.source import CppSource
from opsmith.kernels.runtime.planned_kernel import PlannedKernel

# A declaration does not need the other modules: functions import them, in the first call or build.
if TYPE_CHECKING:
    from opsmith.build.cache import CacheEntry
    from opsmith.build.packaged import Found
    from opsmith.kernels.cpp.library import CppLibrary
    from opsmith.kernels.runtime.dispatch import DispatchedKernel
    from opsmith.kernels.runtime.linked_library import KernelObject
    from opsmith.kernels.runtime.plan import Plan


class CppKernel(PlannedKernel[CppSource]):
    """Function that computes an operator by a kernel in C++.

    Args:
        operator: The operator that the kernel computes.
        read: Function that reads the source, now and after each `reload`.
        dtypes: The dtypes for which a template is instantiated; None for the default dtypes.
        strict: True if a missing compiler, or a call that the kernel does not take, raises an error. If
            False, the reference runs.
        copies_back: See `BuiltKernel`.
        out_of: For the kernel of an out form, the kernel whose library it shares; else None.

    Attributes:
        origin: Origin of the library in words; empty before it is loaded.
    """

    key, language = "cpp", "C++"
    device = "cpu"
    pure = True  # it gets const views of tensors that the operator only reads, and new memory for the results

    def __init__(
        self,
        operator: Operator[..., Any],
        read: Callable[[], CppSource],
        dtypes: Sequence[torch.dtype] | None,
        *,
        strict: bool,
        copies_back: bool = False,
        out_of: CppKernel | None = None,
    ) -> None:
        super().__init__(operator, read, strict=strict, copies_back=copies_back)
        self._dtypes, self._out_of = dtypes, out_of
        self.manner = "" if self.source.options is NO_OPTIONS else str(self.source.options)

    def _forget(self) -> None:
        super()._forget()
        self.origin = ""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...] | None:
        """The dtypes for which a template is instantiated; None for a function, whose views have dtypes."""
        return tuple(self._dtypes or DEFAULT_DTYPES) if self.source.template else None

    @property
    def takes_any_layout(self) -> bool:
        """True if it takes arguments that it writes into in any layout."""
        count = len(self.operator.specification.schema.arguments)
        library: CppLibrary = self._load().library
        arguments = [each for candidate in library.candidates for each in candidate[:count]]
        return self.copies_back or all(each.layout == "any" for each in arguments if each.written)

    @property
    def sizing(self) -> str:
        """Source of the results' sizes, for `explain`."""
        if self.source.sizes is not None:
            return f"`sizes` in C++ for contiguous tensors; else {self._by_reference}"
        return super().sizing

    @property
    def computes_sizes(self) -> bool:
        """True if C++ computes the sizes of the results."""
        library: CppLibrary = self._load().library
        return library.computes_sizes or super().computes_sizes

    def library_object(self, processor: str = "native") -> KernelObject:
        """Compile the kernel as an object for a library without Python.

        Args:
            processor: `native`, or a value of `-march=`.

        Raises:
            CompileError: If the compiler refuses the source.
            ToolchainError: If there is no compiler.
        """
        from opsmith.kernels.cpp.kernel_object import kernel_object

        return kernel_object(self.source, self.operator.name, self.dtypes or (), processor)

    def into_results(self, operator: Operator[..., Any]) -> CppKernel:
        """Return the kernel for the out form, which gets the result sizes from the tensors that it writes."""

        def read() -> CppSource:
            return replace(self._read(), sizes=None)

        return CppKernel(operator, read, self._dtypes, strict=False, out_of=self)

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take a call with these argument values; None if it does.

        Raises:
            CompileError: If the compiler refuses the source.
        """
        from opsmith.core.missing_kernels import missing_reason
        from opsmith.kernels.common.parameters import dtype_refusal

        # Check dtypes first: the library takes a while to compile, and may never be needed.
        refused = dtype_refusal(self.operator.specification.schema.names, values, self.dtypes or ())
        if refused is not None:
            return refused
        try:
            loaded = self._load()
        except errors.ToolchainError as error:
            return missing_reason(self, error)
        if not tensors_in(list(values)):
            return "the arguments contain no tensor, and torch chooses a kernel by the device of a tensor"
        choice = self._choose(loaded.library, values)
        return choice if isinstance(choice, str) else None

    def narrow_indices(self, values: Sequence[Any]) -> list[Any]:
        """Return the kernel's indices of 32 bits; see `BuiltKernel.narrow_indices` and `compile_kernel`."""
        from opsmith.kernels.cpp.compiler import index_warnings
        from opsmith.kernels.cpp.diagnostics import diagnostics, narrow_indices, own_headers

        schema = self.operator.specification.schema
        names = [*schema.names, *(result.name for result in schema.results)]
        printed = index_warnings(self.source, self.operator.name, self.dtypes or ())
        found = diagnostics(printed, self.source, own_headers(self.source))
        return narrow_indices(found, [(self.source, names)])

    def require(self) -> None:
        """Load the kernel, and from now on raise an error if it can neither be loaded nor built.

        Raises:
            KernelRefusedError: If it can neither be loaded nor built.
            CompileError: If the compiler refuses the source.
        """
        from opsmith.core.missing_kernels import missing_reason

        super().require()
        try:
            self.load()
        except errors.ToolchainError as error:
            missing_reason(self, error)

    def load(self) -> None:
        """Load the kernel from its package or from the cache, or compile it now.

        Raises:
            CompileError, KernelSignatureError: If the source is wrong.
            ToolchainError: If the kernel can neither be loaded nor built.
        """
        self._load()

    def compile(self) -> CacheEntry:
        """Compile the library of the kernel, or find it in the cache.

        Raises:
            CompileError, ToolchainError: See `compile_kernel`.
        """
        from opsmith.kernels.cpp.compiler import compile_kernel

        return compile_kernel(self.source, self.operator.name, self.dtypes or ())

    def compile_with_headers(self) -> tuple[CacheEntry, Mapping[str, str]]:
        """Compile the library, and return also the digests of its headers by path.

        Raises:
            CompileError, ToolchainError: See `compile_with_headers`.
        """
        from opsmith.kernels.cpp.compiler import compile_with_headers

        return compile_with_headers(self.source, self.operator.name, self.dtypes or ())

    def origin_of(self, values: Sequence[Any]) -> str:
        """Return the origin of the library in words; it is the same for every call."""
        return self.origin

    def compile_ahead(self) -> None:
        """Compile the library without loading it, unless the package of the kernel has a fitting library.

        If the compiler refuses the source or is missing, the first call raises the error.
        """
        whole = self._out_of or self
        found = whole.built_in_package()
        if found.files:
            return
        refused: errors.OpsmithError
        try:
            whole.compile()
        except errors.CompileError as error:
            refused = error
        except errors.ToolchainError as error:
            from opsmith.core.missing_kernels import with_reason

            refused = with_reason(error, found.reason)
        except errors.CacheError:
            return  # the first call raises it again
        else:
            return
        with self._lock:
            if self._loaded is None:
                self._refused = refused

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments and results that the kernel copies into a different layout."""
        from opsmith.kernels.common.parameters import copied_tensors

        library: CppLibrary = self._load().library
        choice = self._choose(library, values)
        if isinstance(choice, str):
            return ()
        schema = self.operator.specification.schema
        names = (*schema.names, *(each.name for each in schema.results))
        taken = dict(zip(names, library.candidates[choice], strict=True))
        return copied_tensors(self.operator.specification, values, taken)

    def _build(self) -> DispatchedKernel:
        from opsmith.build.cache import COMPILED_NOW
        from opsmith.kernels.common.parameters import (
            Parameter,
            check_parameters,
            cpp_arguments,
            misdeclared,
        )
        from opsmith.torch_library.calls.own_build import OWN_BUILD

        specification = self.operator.specification
        schema = specification.schema
        arguments = cpp_arguments(self)
        wanted = [*arguments, *(Parameter("Tensor", written=True) for _ in schema.results)]
        names = [*schema.names, *(result.name for result in schema.results)]
        declared = self.source.declared_parameters()
        try:
            library = self._library()
            check_parameters(self, library.candidates, wanted, names, declared)
            self._check_sizes(library)
            described = f"{library.file.origin}, {library.file.path}"
            loaded = self._dispatched((self._out_of or self).package, described)
            loaded.library = library
            self.origin = library.file.origin
            if self.origin == COMPILED_NOW:  # so a compiler and a cache exist
                OWN_BUILD.begin((self._out_of or self).package)
            return loaded
        except (errors.CompileError, errors.KernelSignatureError, errors.ToolchainError) as error:
            # This stays until `reload`: calls do not look at files.
            self._refused = misdeclared(self, error, declared, wanted, names)
            raise self._refused from error.__cause__

    def _library(self) -> CppLibrary:
        """Load the library from the kernel's package or from the cache, or compile it now."""
        from opsmith.core.missing_kernels import with_reason
        from opsmith.kernels.cpp.codegen import OUT_TABLE, TABLE
        from opsmith.kernels.cpp.library import CppLibrary
        from opsmith.kernels.runtime.loading import loadable, packaged_library, refuse_other_library

        whole, table = (self, TABLE) if self._out_of is None else (self._out_of, OUT_TABLE)
        found = whole.built_in_package()
        linked = whole.source.options.shared_files
        file = packaged_library(found, table, linked)
        if file is not None:
            return CppLibrary(file, table)
        try:
            compiled = loadable(whole.compile, table)
            refuse_other_library(linked)
            return CppLibrary(compiled, table)
        except errors.ToolchainError as error:
            raise with_reason(error, found.reason) from None

    def built_in_package(self) -> Found:
        """Search the kernel's package for its libraries; special builds, such as sanitised, use none."""
        from opsmith.build.packaged import Found, search
        from opsmith.kernels.cpp.compiler import builds_as_usual
        from opsmith.kernels.cpp.library import VERSION

        if not builds_as_usual():
            return Found()
        return search(self.package, self.language, self.operator.name, self.digest, VERSION)

    def _check_sizes(self, library: CppLibrary) -> None:
        count = len(self.operator.specification.schema.results)
        if library.sized not in (None, count):
            raise self.error(
                errors.KernelSignatureError,
                "`sizes` of the C++ kernel does not return the sizes of the operator's results",
                expected=f"{count} value{'s' * (count != 1)} of type Shape, from a function of all arguments",
                got=f"{library.sized}",
                hint="give `sizes` the kernel's parameters, without the parameters of results"
                if count
                else "leave `sizes` out: the operator returns nothing",
            )

    def _numbers_read(self) -> Collection[str]:
        # In a plan, `out` must have the sizes of the results, which may depend on any number.
        return () if self._out_of is None else self.operator.specification.schema.names

    def _choose(self, library: CppLibrary, values: Sequence[Any]) -> int | str:
        from opsmith.kernels.common.parameters import choose_candidate, index_refusal

        names = self.operator.specification.schema.names
        choice = choose_candidate(names, values, library.candidates, copies_back=self.copies_back)
        return index_refusal(self, values) or choice

    def _plan(self, loaded: DispatchedKernel, values: Sequence[Any]) -> Plan | str:
        from opsmith.kernels.cpp.plan import plan_call

        library: CppLibrary = loaded.library
        choice = self._choose(library, values)
        if isinstance(choice, str):
            return choice
        parameters = library.candidates[choice]
        return plan_call(self, values, library.instances[choice], parameters, sizes=library.computes_sizes)

    def _failed(self, text: str) -> errors.KernelError:
        return self.error(
            errors.KernelError,
            f"the C++ kernel threw: {text or 'an exception without a message'}",
            where=self.source.given or self.where,
            hint="call it with arguments that the kernel takes, or correct the kernel",
        )
