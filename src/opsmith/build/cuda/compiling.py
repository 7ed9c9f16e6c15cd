"""From the text of a CUDA kernel to a cubin, through the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opsmith import errors
from opsmith.build.cache import cache_on_disk
from opsmith.build.cuda.diagnostics import told
from opsmith.build.cuda.finding import headers_version, include_directories
from opsmith.build.cuda.generating import Instance, alone, described, expression
from opsmith.build.cuda.nvrtc import Outcome, find_nvrtc, nvrtc_identity
from opsmith.build.cuda.parameters import CudaParameter, tables
from opsmith.build.cuda.resources import Resources, resources
from opsmith.build.cuda.source import CudaSource
from opsmith.build.includes import has_includes, include_parts

HEADER = Path(__file__).parent / "opsmith_cuda.h"
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
"""The second: a function of the author's that says nothing runs on the GPU, where else could it."""
VERBOSE = "--ptxas-options=-v"
SOURCE, CUBIN, REPORT, PTX = "kernel.cu", "kernel.cubin", "kernel.json", "kernel.ptx"


@dataclass(frozen=True, slots=True)
class Cubin:
    """An instance of a kernel, compiled for an architecture.

    Attributes:
        image: The cubin.
        name: Name of the kernel in it.
        resources: What it takes of the GPU.
        architecture: As `sm_90`.
    """

    image: bytes
    name: str
    resources: Resources
    architecture: str


@cache
def header() -> str:
    """What every kernel includes."""
    return HEADER.read_text(encoding="utf-8")


def descriptions(
    source: CudaSource, operator: str, instances: Sequence[Instance], architecture: str
) -> tuple[tuple[CudaParameter, ...], ...]:
    """The parameters of each instance.

    Raises:
        CompileError: If NVRTC refuses the source: its errors, in the author's lines.
        ToolchainError: If there is no NVRTC, or it knows no such architecture.
    """
    text = described(source, operator, instances)
    # Nothing of it runs; but what a source holds may depend on what it is compiled for.

    def build(directory: Path) -> None:
        target = f"--gpu-architecture={nearest(architecture).replace('sm_', 'compute_')}"
        (directory / SOURCE).write_text(text, encoding="utf-8")
        made = _compiled(text, source, operator, [*OPTIONS, target], ptx=True)
        (directory / PTX).write_bytes(made.image.rstrip(b"\0"))

    parts = _parts("cuda description", operator, text, OPTIONS, source) | {"architecture": architecture}
    entry = cache_on_disk().obtain(parts, build)
    return tables((entry.directory / PTX).read_text(), len(instances))


def compiled(source: CudaSource, operator: str, instance: Instance, architecture: str) -> Cubin:
    """Compile an instance for an architecture, or find it compiled.

    Args:
        source: The author's text.
        operator: Name of the operator.
        instance: Which instance.
        architecture: As `sm_90`.

    Raises:
        CompileError: If NVRTC refuses the source: its errors, in the author's lines.
        ToolchainError: If there is no NVRTC, or it knows no such architecture.
    """
    text, named = alone(source, operator), expression(source, instance)
    options = (*OPTIONS, VERBOSE)

    def build(directory: Path) -> None:
        target = f"--gpu-architecture={nearest(architecture)}"
        (directory / SOURCE).write_text(text, encoding="utf-8")
        made = _compiled(text, source, operator, [*options, target], names=(named,))
        (directory / CUBIN).write_bytes(made.image)
        report = {"name": made.names[named], "log": made.log}
        (directory / REPORT).write_text(json.dumps(report), encoding="utf-8")

    parts = _parts("cuda", operator, text, options, source) | {
        "instance": named,
        "architecture": architecture,
    }
    directory = cache_on_disk().obtain(parts, build).directory
    report = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    taken = resources(report["log"], report["name"])
    if taken is None:
        raise errors.ToolchainError(
            "NVRTC does not say what the kernel takes of the GPU",
            operator=operator,
            expected=f"a line `Compiling entry function '{report['name']}'`, and its registers",
            got=report["log"].strip() or "nothing",
            hint="use NVRTC of CUDA 12 or 13",
        )
    return Cubin((directory / CUBIN).read_bytes(), report["name"], taken, architecture)


def known_architectures() -> tuple[str, ...]:
    """The architectures that NVRTC compiles for, as `sm_90`.

    Raises:
        ToolchainError: If there is no NVRTC.
    """
    return tuple(f"sm_{each}" for each in find_nvrtc().architectures)


def nearest(architecture: str) -> str:
    """The architecture to compile for: the same, or else the newest one whose code a GPU of it runs.

    Raises:
        ToolchainError: If there is none, or no NVRTC.
    """
    known = known_architectures()
    if architecture.rstrip("af") in known:  # whose code runs on that GPU alone, or on its family
        return architecture
    # CUDA programming guide, binary compatibility: within a major version, from each minor one to later ones.
    wanted = int(architecture.removeprefix("sm_").rstrip("af"))
    older = [each for each in find_nvrtc().architectures if each // 10 == wanted // 10 and each < wanted]
    if older:
        return f"sm_{max(older)}"
    version = ".".join(map(str, find_nvrtc().version))
    raise errors.ToolchainError(
        f"NVRTC does not compile for `{architecture}`",
        expected=f"one of {', '.join(known)}",
        got=f"NVRTC of CUDA {version}",
        hint="install an NVRTC that knows it: `pip install -U nvidia-cuda-nvrtc`",
    )


def _compiled(
    text: str,
    source: CudaSource,
    operator: str,
    options: Sequence[str],
    names: Sequence[str] = (),
    *,
    ptx: bool = False,
) -> Outcome:
    own = [source.folder] if source.folder is not None and has_includes(source.text) else []
    includes = [f"--include-path={folder}" for folder in (*own, *include_directories())]
    made = find_nvrtc().compile(
        text, options=[*options, *includes], headers={HEADER.name: header()}, names=names, ptx=ptx
    )
    if made.refused:
        raise errors.CompileError(
            "NVRTC refuses the kernel",
            operator=operator,
            got="\n".join(f"    {line}" for line in told(made.log, source).splitlines()).lstrip(),
            where=source.where,
            hint="fix the first of these; those after it may follow from it",
        )
    return made


def _parts(kind: str, operator: str, text: str, options: Sequence[str], source: CudaSource) -> dict[str, str]:
    """All that decides what is built."""
    return {
        "kind": kind,
        "operator": operator,
        "text": text,
        "options": " ".join(options),
        "header": header(),
        "compiler": nvrtc_identity(),
        "headers": headers_version() if "#include" in text.partition("\n")[2] else "",
        **include_parts(source.text, source.folder),
    }
