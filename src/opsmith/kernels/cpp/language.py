"""C++ as a kernel language: the options of `op.kernel("cpu", cpp=...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsmith.build.compiler_options import NO_OPTIONS, compiler_options
from opsmith.kernels.common.dtypes import CPP_TYPES
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.source import CppSource, cpp_source, no_template
from opsmith.kernels.languages import Declaration, Language

if TYPE_CHECKING:
    from opsmith.kernels.cpp.ahead import CppAhead

COMPILER = ("flags", "include_dirs", "libraries")
"""Options for the compiler and the linker."""


class CppLanguage(Language):
    """C++, for the CPU."""

    key, name, devices = "cpp", "C++", ("cpu",)
    options = ("cpp_file", "entry", *COMPILER)

    def kernel(self, declaration: Declaration) -> CppKernel:
        """Make a kernel; its source is read now, and at each `reload`."""
        operator, declared, given = declaration.operator, declaration.declared, declaration.options
        dtypes = declaration.ordered_dtypes(CPP_TYPES)
        compiling = {name: given[name] for name in COMPILER if name in given}
        options = compiler_options(**compiling, declared=declared) if compiling else NO_OPTIONS

        def read() -> CppSource:
            source = cpp_source(
                operator.name,
                cpp=declaration.source,
                cpp_file=declaration.file,
                entry=given.get("entry"),
                declared=declared,
                options=options,
            )
            if dtypes is not None and not source.template:
                raise no_template(source, "C++", "void")
            return source.placed(declaration.place)

        return CppKernel(
            operator,
            read,
            dtypes,
            strict=declaration.strict,
            copies_back=declaration.copies_back,
        )

    @property
    def ahead(self) -> CppAhead:
        """Builds libraries."""
        from opsmith.kernels.cpp.ahead import CppAhead  # a declaration does not need it

        return CppAhead()


LANGUAGE = CppLanguage()
