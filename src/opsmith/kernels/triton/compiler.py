"""Compilation of a Triton kernel to a cubin, through the cache and without a GPU, and Triton's errors."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from opsmith import errors
from opsmith.build.cache import cache_on_disk
from opsmith.build.toolchain import file_identity
from opsmith.core.location import chain_of
from opsmith.kernels.common.gpu_resources import Resources, read_resources
from opsmith.kernels.triton.source import (
    LAUNCH_OPTIONS,
    TritonSource,
    compiler_options,
    language_lock,
    triton_module,
)

SHOWN = 6
"""Number of quoted lines of the compiler's message."""
CUBIN, USED = "kernel.cubin", "used.json"
WARP = 32
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})")


def launch_error(error: Exception, source: TritonSource, operator: str) -> errors.OpsmithError | None:
    """Return the error for an exception of Triton's compiler or launcher; None for other exceptions."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError | PTXASError):
        return compile_error(error, source, operator)
    if isinstance(error, OutOfResources):
        return errors.KernelError(
            f"the Triton kernel needs more {error.name} than the GPU has",
            operator=operator,
            expected=f"at most {error.limit}",
            got=f"{error.required}",
            where=source.where,
            hint="make its blocks smaller, or lower `num_stages` in `constants=`",
        )
    return None


def compile_error(error: Any, source: TritonSource, operator: str) -> errors.CompileError:
    """Return the error for a kernel that Triton's compiler refuses, at the author's line and column.

    A `CompilationError` of Triton counts lines from the `def` of the function.
    """
    message = ""
    for each in chain_of(error):  # the innermost cause is most specific
        message = getattr(each, "error_message", None) or message or str(each)
    lines, first = source.text.splitlines(), source.function.__code__.co_firstlineno
    before = next((at for at, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    at, shown = source.where, message.strip()
    shown = "\n        ".join(shown.splitlines()[:SHOWN])
    line = getattr(getattr(error, "node", None), "lineno", None)
    if line is not None:
        at = f"{source.function.__code__.co_filename}:{first + before + line - 1}"
        quoted = "".join(lines[before + line - 1 : before + line])
        indent = len(lines[0]) - len(lines[0].lstrip())  # Triton removes this indentation
        column = error.node.col_offset + indent
        shown = f"{at}:{column + 1}: {shown}\n        {quoted}\n        {' ' * column}^"
    return errors.CompileError(
        "Triton's compiler refuses the kernel",
        operator=operator,
        got=shown,
        where=at,
        hint="correct this line" if line is not None else "simplify the kernel",
    )


@dataclass(frozen=True, slots=True)
class Specialization:
    """Specialization of a kernel: types of its parameters, and known properties of their values.

    Attributes:
        signature: Type of each parameter, in order: `*fp32`, `i32`, `constexpr`.
        constants: Values of `constexpr` parameters.
        divisible: Parameters whose address or value is divisible by 16.
        options: Options of Triton, such as `num_warps`.
    """

    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...]
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the types and constants, for a report."""
        types = [f"{name}: {kind}" for name, kind in self.signature.items() if kind != "constexpr"]
        constants = [f"{name}={value}" for name, value in {**self.constants, **self.options}.items()]
        return ", ".join([*types, *constants])


DIVISOR = 16
"""Triton specializes kernels for numbers that are divisible by this number, and then vectorizes loads."""


def specialization_of(source: TritonSource, arguments: Mapping[str, Any]) -> Specialization:
    """Return the specialization that Triton chooses for these parameter values at a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: list[str] = []
    jit = source.compiled_by()
    defaults = {each.name: each.default for each in jit.params if each.has_default}
    for parameter, described in zip(source.parameters, jit.params, strict=True):
        name = parameter.name
        value = arguments[name] if name in arguments else defaults[name]
        fixed = described.do_not_specialize
        one = _is_whole(value) and value == 1 and not (fixed or described.annotation_type)
        if parameter.constant or value is None or one:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = described.annotation_type or triton_type(value)
        if isinstance(value, Tensor) or (_is_whole(value) and value % DIVISOR == 0 and not fixed):
            divisible.append(name)
    options = {name: value for name, value in arguments.items() if name in LAUNCH_OPTIONS}
    return Specialization(signature, constants, tuple(divisible), options)


def triton_type(value: Any) -> str:
    """Return Triton's name for the type of an argument: `*fp32`, `i32`, `i64`, `fp32`, `u1`."""
    from triton.runtime.jit import mangle_type

    on_cpu = torch.empty(1, dtype=value.dtype) if isinstance(value, Tensor) else value
    return str(mangle_type(on_cpu))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class TritonCubin:
    """Compiled kernel.

    Attributes:
        resources: Registers, spills and static shared memory.
        shared: Bytes of dynamic shared memory of each block in Triton's launches.
        threads: Threads of each block.
        source: Origin of the entry in the cache; see `CacheEntry`.
        cubin: File of the cubin.
    """

    resources: Resources
    shared: int
    threads: int
    source: Literal["memory", "disk", "built", "private"]
    cubin: Path


def compile_specialization(
    source: TritonSource, operator: str, wanted: Specialization, architecture: str
) -> TritonCubin:
    """Compile a kernel for an architecture, such as `sm_90`, or find it in the cache. No GPU is needed.

    Raises:
        ToolchainError: If Triton is not installed.
        UsageError: If Triton does not compile for the architecture.
        CompileError: If Triton's compiler refuses the kernel, with its error at the author's line.
    """
    triton = triton_module()
    number = _number(architecture)
    function = source.compiled_by()
    options = {**compiler_options(), **wanted.options}

    def build(directory: Path) -> None:
        cubin, used = _compile(source, operator, wanted, options, number)
        (directory / CUBIN).write_bytes(cubin)
        (directory / USED).write_text(json.dumps(used))

    parts = {
        "kind": "triton",
        "operator": operator,
        "source": function.cache_key,  # includes the functions that it calls
        "for": json.dumps({**asdict(wanted), "options": options}, sort_keys=True, default=repr),
        "architecture": architecture,
        "generator": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),  # format of an entry
        "compiler": f"triton {triton.__version__} {file_identity(Path(triton.__file__))}",
    }
    entry = cache_on_disk().obtain(parts, build)
    used = json.loads((entry.directory / USED).read_text())
    return TritonCubin(
        Resources(**used["resources"]), used["shared"], used["threads"], entry.source, entry.directory / CUBIN
    )


def _compile(
    source: TritonSource, operator: str, wanted: Specialization, options: dict[str, Any], number: int
) -> tuple[bytes, dict[str, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    triton = triton_module()
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(wanted.signature)
        if name in wanted.divisible
    }
    ast = ASTSource(
        fn=source.compiled_by(),
        signature=dict(wanted.signature),
        constexprs=dict(wanted.constants),
        attrs=attributes,
    )
    printed = io.StringIO()
    knobs = triton.knobs
    with (
        language_lock(),
        tempfile.TemporaryDirectory(prefix="opsmith-triton-") as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(printed),
    ):
        knobs.cache.dir = folder  # an empty cache, because the assembler's log exists only after compiling
        knobs.nvidia.dump_ptxas_log = True
        try:
            kernel = triton.compile(ast, target=GPUTarget("cuda", number, WARP), options=options)
        except (TritonError, RuntimeError) as error:  # RuntimeError if LLVM fails
            raise compile_error(error, source, operator) from error
    found = read_resources(printed.getvalue(), kernel.metadata.name)
    assert found is not None, printed.getvalue()
    used = {
        "resources": asdict(found),
        "shared": int(kernel.metadata.shared),
        "threads": int(kernel.metadata.num_warps) * WARP,
    }
    return kernel.asm["cubin"], used


def _number(architecture: str) -> int:
    found = _ARCHITECTURE.fullmatch(architecture)
    if found is None or int(found[1]) < 80:
        raise errors.UsageError(
            "Triton does not compile for this architecture",
            argument="architecture",
            expected="sm_80 or a later architecture, such as `sm_90`",
            got=repr(architecture),
            hint="name the architecture of your GPU: `sm_80` for an A100, `sm_90` for an H100",
        )
    return int(found[1])
