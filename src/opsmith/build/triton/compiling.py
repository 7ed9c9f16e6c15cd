"""From a Triton kernel to a cubin for a GPU that need not be there, through the cache."""

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

from opsmith import errors
from opsmith.build.cache import cache_on_disk
from opsmith.build.cuda.resources import Resources, resources
from opsmith.build.triton.diagnostics import told_of_compilation
from opsmith.build.triton.installed import LANGUAGE, triton_module
from opsmith.build.triton.source import TritonSource

CUBIN, USED = "kernel.cubin", "used.json"
WARP = 32
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})")


@dataclass(frozen=True, slots=True)
class Specialization:
    """What Triton compiles a kernel for: types of parameters, and what is known of their values.

    Attributes:
        signature: Type of each parameter, in order: `*fp32`, `i32`, `constexpr`.
        constants: Values of those that are `constexpr`.
        divisible: Parameters that are divisible by 16: addresses, and numbers.
        options: What Triton is told beside, as `num_warps`.
    """

    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...]
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """As in a report: pointers and constants, which make one different from another."""
        types = [f"{name}: {kind}" for name, kind in self.signature.items() if kind != "constexpr"]
        constants = [f"{name}={value}" for name, value in {**self.constants, **self.options}.items()]
        return ", ".join([*types, *constants])


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel, and what it uses of a GPU.

    Attributes:
        resources: Registers, spills and static shared memory.
        shared: Bytes of dynamic shared memory of each block, with which Triton launches it.
        threads: Threads of each block.
        source: Whether it was compiled now, or where it was found.
        cubin: The file.
    """

    resources: Resources
    shared: int
    threads: int
    source: Literal["memory", "disk", "built", "private"]
    cubin: Path


def compiled(source: TritonSource, operator: str, wanted: Specialization, architecture: str) -> Compiled:
    """Compile a kernel for an architecture, or find it compiled; no GPU is needed.

    Args:
        source: The kernel.
        operator: The operator's name.
        wanted: What it is compiled for.
        architecture: As `sm_90`.

    Raises:
        ToolchainError: If Triton is not installed.
        UsageError: If there is no such architecture.
        CompileError: If Triton's compiler refuses the kernel: at the author's line.
    """
    triton = triton_module()
    number = _number(architecture)
    function = source.compiled_by()

    def build(directory: Path) -> None:
        cubin, used = _compile(triton, function, source, operator, wanted, number)
        (directory / CUBIN).write_bytes(cubin)
        (directory / USED).write_text(json.dumps(used))

    parts = {
        "kind": "triton",
        "operator": operator,
        "source": function.cache_key,  # with that of all functions it calls
        "for": json.dumps(asdict(wanted), sort_keys=True, default=repr),
        "architecture": architecture,
        "generator": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),  # what an entry holds
        "compiler": f"triton {triton.__version__} {_identity(triton)}",
    }
    entry = cache_on_disk().obtain(parts, build)
    used = json.loads((entry.directory / USED).read_text())
    return Compiled(
        Resources(**used["resources"]), used["shared"], used["threads"], entry.source, entry.directory / CUBIN
    )


def _compile(
    triton: Any, function: Any, source: TritonSource, operator: str, wanted: Specialization, number: int
) -> tuple[bytes, dict[str, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(wanted.signature)
        if name in wanted.divisible
    }
    ast = ASTSource(
        fn=function, signature=dict(wanted.signature), constexprs=dict(wanted.constants), attrs=attributes
    )
    printed = io.StringIO()
    knobs = triton.knobs
    with (
        LANGUAGE,
        tempfile.TemporaryDirectory(prefix="opsmith-triton-") as own,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(printed),
    ):
        knobs.cache.dir = own  # the assembler's log says what is used, and is there only when it compiles
        knobs.nvidia.dump_ptxas_log = True
        try:
            kernel = triton.compile(ast, target=GPUTarget("cuda", number, WARP), options=dict(wanted.options))
        except (TritonError, RuntimeError) as error:  # the latter where LLVM fails
            raise told_of_compilation(error, source, operator) from error
    found = resources(printed.getvalue(), kernel.metadata.name)
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
            "this is no architecture that Triton compiles for",
            argument="architecture",
            expected="one from sm_80 on, as `sm_90`",
            got=repr(architecture),
            hint="name the architecture of your GPU: `sm_80` for an A100, `sm_90` for an H100",
        )
    return int(found[1])


def _identity(triton: Any) -> str:
    """Where this very compiler lies, and since when: another build of a version has another identity."""
    file = Path(triton.__file__).resolve()
    return f"{file} {file.stat().st_mtime_ns}"
