"""Kernels that `op.kernel(...)` declares from a source in C++, CUDA C++ or Triton."""

from __future__ import annotations

import difflib
import linecache
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.build.compiler_options import NO_OPTIONS, compiler_options
from opsmith.build.source_text import file_of
from opsmith.core.kernels import (
    COMPILER_OPTIONS,
    CUDA_LAUNCH,
    CUDA_LAUNCH_OPTIONS,
    CUDA_SOURCES,
    TRITON_LAUNCH_OPTIONS,
    BuiltKernel,
)
from opsmith.core.operator import Operator
from opsmith.kernels.common.dtypes import CPP_TYPES
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.source import CppSource, cpp_source

if TYPE_CHECKING:
    from opsmith.kernels.cuda.source import CudaSource

_SOURCES = "one of a function in Python, `cpp=`, `cpp_file=`, `cuda=`, `cuda_file=` and `triton=`"


def build_kernel(
    operator: Operator[..., Any],
    device: str,
    *,
    frame: FrameType | None,
    function: Callable[..., Any] | None,
    dtypes: Iterable[torch.dtype] | None,
    cpp: str | None,
    cpp_file: str | PathLike[str] | None,
    entry: str | None,
    strict: bool,
    options: Mapping[str, Any] | None = None,
) -> BuiltKernel[Any]:
    """Make a kernel from a source; it is compiled when it is first needed.

    Args:
        operator: The operator that the kernel computes.
        device: Type of device.
        frame: Frame that declares the kernel.
        function: A function in Python; refused, since it is not a source.
        dtypes: The dtypes that a template is instantiated for.
        cpp: Text in C++.
        cpp_file: File with text in C++.
        entry: Name of the function in the source.
        strict: True if a kernel that cannot be built here is an error.
        options: A source in CUDA C++ or Triton, and its launch: `CudaOptions` or `TritonOptions`.

    Raises:
        UsageError: If the arguments contradict one another.
        KernelSourceError, KernelDtypeError, LaunchError: If the source, a dtype or the launch is not valid.
        KernelSignatureError: If a parameter of a Triton kernel cannot be bound.
    """
    options = dict(options or {})
    declared = None if frame is None else _file_of(frame)
    cuda, cuda_file, triton = (options.pop(name, None) for name in (*CUDA_SOURCES, "triton"))
    cpp_file, cuda_file = (
        None if each is None else file_of(each, declared) for each in (cpp_file, cuda_file)
    )
    sources = {"cpp": cpp, "cpp_file": cpp_file, "cuda": cuda, "cuda_file": cuda_file, "triton": triton}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1 or function is not None:
        shown = [*(["a function"] if function is not None else []), *(f"`{name}=`" for name in given)]
        close = [] if given else difflib.get_close_matches(next(iter(options), ""), sources, n=1)
        raise errors.UsageError(
            "a kernel has one source",
            expected=_SOURCES,
            got=" and ".join(shown or [f"`{name}=`" for name in options]) or "`entry=` or `strict=` alone",
            hint=f"did you mean `{close[0]}=`?"
            if close
            else "give each kernel by a call of `op.kernel(...)` of its own",
        )
    copies_back = _allows_copies(operator, options.pop("copies", None))
    deterministic = True
    if cpp is None and cpp_file is None:
        deterministic = _is_deterministic(options.pop("deterministic", True))
    declaration = _Declaration(
        operator, device, entry, declared, dtypes, options, strict, copies_back, deterministic
    )
    if triton is not None:
        return _triton_kernel(declaration, triton)
    if cuda is not None or cuda_file is not None:
        return _cuda_kernel(declaration, cuda, cuda_file)
    return _cpp_kernel(declaration, cpp, cpp_file)


@dataclass(frozen=True, slots=True)
class _Declaration:
    """Arguments of `op.kernel(...)` that all languages have, and the file that calls it."""

    operator: Operator[..., Any]
    device: str
    entry: str | None
    declared: str | None
    dtypes: Iterable[torch.dtype] | None
    options: Mapping[str, Any]
    strict: bool
    copies_back: bool
    deterministic: bool

    def check_device(self, language: str, wanted: str, argument: str, reason: str) -> None:
        """Refuse another device than the language's."""
        if self.device != wanted:
            raise errors.UsageError(
                f"a kernel in {language} is declared for `{self.device}`",
                expected=f"`{wanted}`, {reason}",
                got=repr(self.device),
                hint=f"write `op.kernel({wanted!r}, {argument}=...)`",
            )

    def check_options(self, language: str, known: Sequence[str], source: str, hint: str) -> None:
        """Refuse unknown options, and a launch without a grid."""
        unknown = [name for name in self.options if name not in known]
        if unknown or all(self.options.get(name) is None for name in ("grid", "launches")):
            raise errors.UsageError(
                f"a kernel in {language} {'is given unknown options' if unknown else 'has no grid'}",
                expected=", ".join(f"`{name}=`" for name in known),
                got=", ".join(f"`{name}=`" for name in unknown) or f"{source} without `grid=`",
                hint=hint,
            )

    def ordered_dtypes(self, language: str, known: Collection[torch.dtype]) -> tuple[torch.dtype, ...] | None:
        """Return the dtypes in the order of `known`; None for the default ones."""
        if self.dtypes is None:
            return None
        unknown = [dtype for dtype in self.dtypes if dtype not in known]
        if unknown:
            raise errors.KernelDtypeError(
                f"a kernel in {language} is declared for a dtype that it does not support",
                argument="dtypes",
                expected=", ".join(map(str, known)),
                got=", ".join(sorted(map(str, unknown))),
                hint="leave it out: the reference computes it",
            )
        return tuple(dtype for dtype in known if dtype in set(self.dtypes))


def _file_of(frame: FrameType) -> str:
    """Return the file of the code that a frame runs; where its text is nowhere, the module's own."""
    named = frame.f_code.co_filename
    has_text = os.path.exists(named) or bool(linecache.getlines(named))  # as a notebook's cell has
    return named if has_text else str(frame.f_globals.get("__file__") or named)


def _is_deterministic(value: Any) -> bool:
    if not isinstance(value, bool):
        raise errors.UsageError(
            "`deterministic=` of a kernel is True or False",
            argument="deterministic",
            expected="True, or False if it rounds otherwise from run to run",
            got=repr(value),
            hint="leave it out for a kernel that adds in a fixed order",
        )
    return value


def _allows_copies(operator: Operator[..., Any], copies: Any) -> bool:
    if copies is None:
        return False
    if copies != "allowed":
        raise errors.UsageError(
            "`copies=` of a kernel has one value",
            argument="copies",
            expected='`copies="allowed"`',
            got=repr(copies),
            hint="leave it out, and the kernel does not take what it would have to copy back",
        )
    if not operator.specification.schema.written:
        raise errors.UsageError(
            "`copies=` is given for an operator that writes into no argument",
            argument="copies",
            expected="an operator with `mutates=`",
            got=repr(copies),
            hint="leave it out: what is only read is copied where a kernel needs it",
        )
    return True


def _cpp_kernel(
    declaration: _Declaration, cpp: str | None, cpp_file: str | PathLike[str] | None
) -> BuiltKernel[Any]:
    operator, entry, declared = declaration.operator, declaration.entry, declaration.declared
    unknown = [name for name in declaration.options if name not in COMPILER_OPTIONS]
    if unknown:
        raise errors.UsageError(
            "a kernel in C++ is not launched",
            expected=", ".join(f"`{name}=`" for name in ("entry", "dtypes", "strict", *COMPILER_OPTIONS)),
            got=", ".join(f"`{option}=`" for option in unknown),
            hint="leave it out; `grid=` and what belongs to it are for `cuda=` and `triton=`",
        )
    declaration.check_device("C++", "cpu", "cpp", "where C++ runs")
    dtypes = declaration.ordered_dtypes("C++", CPP_TYPES)
    options = (
        compiler_options(**declaration.options, declared=declared) if declaration.options else NO_OPTIONS
    )

    def read() -> CppSource:
        source = cpp_source(
            operator.name, cpp=cpp, cpp_file=cpp_file, entry=entry, declared=declared, options=options
        )
        if dtypes is not None and not source.template:
            raise _not_a_template(source, "C++", "void")
        return source

    return CppKernel(
        operator,
        read,
        dtypes,
        strict=declaration.strict,
        copies_back=declaration.copies_back,
        declared=declared,
    )


def _cuda_kernel(
    declaration: _Declaration, cuda: str | None, cuda_file: str | PathLike[str] | None
) -> BuiltKernel[Any]:
    from opsmith.kernels.cuda.kernel import CudaKernel
    from opsmith.kernels.cuda.rules import kernel_rules
    from opsmith.kernels.cuda.source import cuda_source

    operator, entry, declared = declaration.operator, declaration.entry, declaration.declared
    options = declaration.options
    declaration.check_device("CUDA C++", "cuda", "cuda", "where CUDA runs")
    hint = "write for example `grid='ceil(result.numel / 256)', block=256`"
    declaration.check_options("CUDA C++", CUDA_LAUNCH_OPTIONS, "the source", hint)
    _check_several(declaration)
    dtypes = declaration.ordered_dtypes("CUDA C++", CPP_TYPES)
    rules = kernel_rules(operator.specification, options)
    entries = [entry] if "launches" not in options else [each.entry for each in rules.launches]

    def read() -> CudaSource:
        source = cuda_source(
            operator.name,
            cuda=cuda,
            cuda_file=cuda_file,
            entries=[*dict.fromkeys(entries)],
            declared=declared,
        )
        launched = [source.kernel(each.entry) for each in rules.launches]
        if dtypes is not None and not any(each.over_dtype for each in launched):
            raise _not_a_template(source, "CUDA", "__global__ void")
        for each, launch in zip(launched, rules.launches, strict=True):
            _check_constants(each, launch.constants)
        return source

    return CudaKernel(
        operator,
        read,
        dtypes,
        rules,
        strict=declaration.strict,
        copies_back=declaration.copies_back,
        deterministic=declaration.deterministic,
        declared=declared,
    )


def _check_several(declaration: _Declaration) -> None:
    """Refuse options of one launch beside several."""
    named = ["entry"] if declaration.entry is not None else []
    named += [name for name in CUDA_LAUNCH if name in declaration.options]
    if "launches" in declaration.options and named:
        raise errors.UsageError(
            "a CUDA kernel with `launches=` has the options of one launch",
            argument="launches",
            expected="each in its `opsmith.Launch(...)`",
            got=", ".join(f"`{name}=`" for name in named),
            hint='write `opsmith.Launch("first(x, result)", grid=64, block=128)`',
        )


def _triton_kernel(declaration: _Declaration, triton: Any) -> BuiltKernel[Any]:
    from opsmith.kernels.triton.kernel import DTYPES, TritonKernel
    from opsmith.kernels.triton.source import POINTED, triton_source

    operator, options = declaration.operator, declaration.options
    reason = "where Triton runs; `check` interprets it on the CPU"
    declaration.check_device("Triton", "cuda", "triton", reason)
    if declaration.entry is not None:
        raise errors.UsageError(
            "`entry=` is given for a kernel in Triton",
            expected="`triton=`, which is the function itself",
            got=f"`entry={declaration.entry!r}`",
            hint="leave it out",
        )
    hint = "write `grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),)`"
    declaration.check_options("Triton", TRITON_LAUNCH_OPTIONS, "`triton=`", hint)
    dtypes = declaration.ordered_dtypes("Triton", POINTED)
    return TritonKernel(
        operator,
        triton_source(triton),
        grid=options["grid"],
        constants=options.get("constants") or {},
        layouts=options.get("layouts") or {},
        dtypes=frozenset(DTYPES if dtypes is None else dtypes),
        strict=declaration.strict,
        copies_back=declaration.copies_back,
        deterministic=declaration.deterministic,
        declared=declaration.declared,
    )


def _not_a_template(source: CppSource, language: str, returns: str) -> errors.KernelDtypeError:
    return errors.KernelDtypeError(
        f"dtypes are given for a {language} function that is not a template over a type",
        argument="dtypes",
        expected="`template <class T>` before the function",
        got=f"`{returns} {source.entry}(...)`",
        where=source.where,
        hint="leave `dtypes=` out: the views in its parameters have dtypes",
    )


def _check_constants(source: CudaSource, constants: Mapping[str, Any]) -> None:
    """Compare the declared constants with the numbers of the template.

    Raises:
        LaunchError: If one is missing, or the template has no such number.
    """
    needed = [each.name for each in source.parameters if not each.is_type and not each.default]
    missing = [name for name in needed if name not in constants]
    unknown = [name for name in constants if name not in source.constants]
    if missing or unknown:
        listed = ", ".join(f"`{name}`" for name in source.constants)
        raise errors.LaunchError(
            "the constants of a CUDA kernel are not the numbers of its template",
            argument="constants",
            expected=f"a dict with {listed}" if listed else "none: the template has no number",
            got=", ".join(f"`{name}`" for name in constants) or "none",
            where=source.where,
            hint=f"write `constants={{{missing[0]!r}: 'x.shape[0]'}}`"
            if missing
            else f"leave `{unknown[0]}` out, or write `template <class T, int {unknown[0]}>`",
        )
