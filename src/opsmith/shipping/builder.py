"""Compilation of the kernels of a package for every target, into a folder that replaces the built ones."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import opsmith
from opsmith import errors
from opsmith.build.manifest import RUNTIME, BuiltFile, write_manifest
from opsmith.build.packaged import FOLDER, nothing_packaged, package_of
from opsmith.build.processor import levels, machine
from opsmith.build.toolchain import FLAGS, processors
from opsmith.config import NO_CALLS_BUILD, no_calls_build
from opsmith.kernels.cpp.compiler import building_with, kernel_toolchain
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cpp.library import VERSION as CPP_VERSION
from opsmith.kernels.cuda.compiler import Instance, compile_to_ptx, name_expression
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.packaged import MAGIC, BuiltImage
from opsmith.kernels.cuda.parameters import VERSION as CUDA_VERSION
from opsmith.kernels.gpu_usage import needed_instances, sample_values
from opsmith.kernels.runtime.library import compile_runtime, runtime_digest
from opsmith.kernels.runtime.loading import LIBRARY
from opsmith.kernels.triton.kernel import TritonKernel
from opsmith.shipping.package_build import (
    STAGED,
    BuiltRow,
    PackageBuild,
    files_of_other_modules,
    refuse_other_folder,
    remove_abandoned,
    unwritable,
    write_named_by_content,
)
from opsmith.shipping.package_limits import (
    refuse_folders,
    shipped_cuda_headers,
    shipped_headers,
    shipped_libraries,
)
from opsmith.shipping.source_package import SourcePackage
from opsmith.shipping.targets import BuildTargets
from opsmith.torch_library.calls_extension import LANGUAGE as CALLS
from opsmith.torch_library.calls_extension import LIBRARY as CALLS_LIBRARY
from opsmith.torch_library.calls_extension import VERSION as CALLS_VERSION
from opsmith.torch_library.calls_extension import cached_calls, compile_calls, source_digest
from opsmith.torch_library.calls_extension import target as calls_target

Advance = Callable[[str, int, int], None]
"""Function of the current activity, the number of finished ones, and their total."""
SOURCE_TARGET = "source"
"""Target of a kernel that ships as source."""
ANY_TARGET = "any"
"""Target of a library for every processor of a machine."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Compilation of one kernel for one target."""

    kernel: CppKernel | CudaKernel | None
    target: str
    build: Callable[[Path], BuiltFile]
    required: bool = True

    @property
    def name(self) -> str:
        """Words for what is compiled."""
        return f"{'opsmith' if self.kernel is None else self.kernel.operator.name} for {self.target}"


def build_package(
    package: str, *, cpu: str | None = None, cuda: str | None = None, output: Path | None = None
) -> PackageBuild:
    """Build the kernels of a package into its folder, without a check.

    With kernels in C++ or CUDA C++ is the library between torch and all kernels, so that opsmith itself may
    be installed without built kernels. Those of opsmith's own operators are the kernels of `opsmith.ops`.

    Args:
        package: Name of a module, or path of a package's folder.
        cpu: Levels of processors; see `BuildTargets.of`.
        cuda: Architectures of GPUs.
        output: Folder of the built kernels; `_kernels` in the package by default.

    Raises:
        UsageError, OperatorNotFoundError, ModuleImportError: See `SourcePackage.of` and `BuildTargets.of`.
        CompileError, ToolchainError, MissingSamplesError: See `staged_build`.
    """
    with staged_build(SourcePackage.of(package), BuildTargets.of(cpu, cuda), output) as build:
        build.write()
    return build


@contextmanager
def staged_build(
    package: SourcePackage,
    targets: BuildTargets,
    output: Path | None = None,
    advance: Advance = lambda activity, done, total: None,
) -> Iterator[PackageBuild]:
    """Context manager that builds every kernel of a package; `PackageBuild.write` keeps the result.

    As many kernels are compiled at a time as the process has cores. Where a part of a package is built, what
    an earlier build has of its other modules is kept.

    Args:
        package: The package.
        targets: The targets.
        output: Folder of the built kernels; `_kernels` in the package by default.
        advance: Called with the current activity, the number of finished ones and their total.

    Raises:
        CompileError: If a compiler refuses a kernel.
        ToolchainError: If there is no compiler, or it does not know a target.
        MissingSamplesError: If the constants of a CUDA kernel depend on sizes, and no sample gives them.
        UsageError: If no target is left, or the folder cannot be written, or holds something else.
    """
    place = (output or package.root / FOLDER).absolute()
    refuse_other_folder(place)
    cpp, cuda = package.of_language(CppKernel), package.of_language(CudaKernel)
    left_out: list[str] = []
    jobs = _jobs(package, targets, left_out)
    if (cpp or cuda) and not jobs:
        raise _no_target(package, ["C++"] * bool(cpp) + ["CUDA"] * bool(cuda))
    if cpp and targets.cpu:
        for each in cpp:
            _refuse_instructions(each)
        targets.refuse_unknown_to_compiler()
    if cuda and targets.cuda:
        targets.refuse_unknown_to_nvrtc()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(place.parent)
        directory = Path(tempfile.mkdtemp(prefix=f"{STAGED}{os.getpid()}-", dir=place.parent))
    except OSError as error:
        raise unwritable(place, error) from error
    try:
        files, rows = _compiled(jobs, directory, advance, left_out)
        kept = () if package.whole else files_of_other_modules(package, files, place, directory)
        write_manifest(directory, [*files, *kept], opsmith.__version__)
        for kernel in package.of_language(TritonKernel):
            rows.append(BuiltRow(kernel.operator.name, kernel.language, SOURCE_TARGET, 0, 0, 0.0))
        yield PackageBuild(package, directory, tuple(files), tuple(rows), place, kept, tuple(left_out))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for operator in {each.operator for each in package.kernels}:
            with suppress(errors.KernelSourceError):  # of a file that went; the next call says so
                operator.reload()  # a build uses no built kernels, and calls after it do


def _jobs(package: SourcePackage, targets: BuildTargets, left_out: list[str]) -> list[_Job]:
    """The compilations of a build; `left_out` gets what is not built, with the reason."""
    jobs = []
    own = package.root == package_of(opsmith.__file__)
    if targets.cpu and (own or package.of_language(CppKernel)):
        if own or not no_calls_build() or cached_calls():
            jobs.append(_Job(None, calls_target(), build_calls, required=own))
        else:
            left_out.append(f"calls in C++: {NO_CALLS_BUILD} keeps them from being built; unset it")
    in_cpp = bool(package.of_language(CppKernel) and targets.cpu)
    if in_cpp or (package.of_language(CudaKernel) and (targets.cuda or targets.ptx)):
        jobs.append(_Job(None, ANY_TARGET, build_runtime, required=in_cpp))
    for level in reversed(targets.cpu):
        jobs += [
            _Job(kernel, level, partial(_build_cpp, kernel, level, package.root))
            for kernel in package.of_language(CppKernel)
        ]
    for kernel in package.of_language(CudaKernel):
        jobs += [
            _Job(kernel, each, partial(_build_cuda, kernel, each, False, package.root))
            for each in targets.cuda
        ]
        if targets.ptx is not None:
            target = targets.ptx.replace("sm_", "compute_")
            jobs.append(_Job(kernel, target, partial(_build_cuda, kernel, targets.ptx, True, package.root)))
    return jobs


def _compiled(
    jobs: list[_Job], directory: Path, advance: Advance, left_out: list[str]
) -> tuple[list[BuiltFile], list[BuiltRow]]:
    """Run the jobs; return files and rows in the order of the jobs. `left_out` gets failures and reasons."""
    finished: dict[_Job, tuple[BuiltFile, float]] = {}
    pool = ThreadPoolExecutor(processors())
    try:
        waiting = {pool.submit(_timed, job, directory): job for job in jobs}
        for count, done in enumerate(as_completed(waiting), 1):
            job = waiting[done]
            try:
                finished[job] = done.result()
            except errors.ToolchainError as error:
                if job.required:
                    raise
                left_out.append("; ".join(filter(None, (error.problem, error.hint))))
            advance(job.name, count, len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)
    ordered = [(job, *finished[job]) for job in jobs if job in finished]
    rows = [
        BuiltRow(file.operator, file.language, job.target, len(file.instances), file.bytes, seconds)
        for job, file, seconds in ordered
    ]
    return [file for _, file, _ in ordered], rows


def _timed(job: _Job, directory: Path) -> tuple[BuiltFile, float]:
    started = time.perf_counter()
    with nothing_packaged():  # what an earlier build left there
        built = job.build(directory)
    return built, time.perf_counter() - started


def build_runtime(directory: Path) -> BuiltFile:
    """Build the library between torch and all kernels, for every processor of this machine.

    Args:
        directory: Folder that gets the file.
    """
    library = compile_runtime().directory / LIBRARY
    return _own(
        directory, library, language=RUNTIME, digest=runtime_digest(), abi=CPP_VERSION, target=ANY_TARGET
    )


def build_calls(directory: Path) -> BuiltFile:
    """Build the module for calls in C++, for this Python and this torch.

    Args:
        directory: Folder that gets the file.

    Raises:
        ToolchainError: If it cannot be compiled.
    """
    library = compile_calls().directory / CALLS_LIBRARY
    return _own(
        directory, library, language=CALLS, digest=source_digest(), abi=CALLS_VERSION, target=calls_target()
    )


def _own(directory: Path, library: Path, **described: Any) -> BuiltFile:
    """Write a library of opsmith's own."""
    built = BuiltFile(operator="", machine=machine(), **described)
    return write_named_by_content(built, library.read_bytes(), directory, "so")


def _build_cpp(kernel: CppKernel, level: str, root: Path, directory: Path) -> BuiltFile:
    """Build a kernel in C++ for a level of processors, without debug information and paths."""
    kept = [flag for flag in FLAGS if not flag.startswith(("-march", "-g"))]
    last = (f"-march={level}", "-g0", "-Wl,-s")
    with building_with(kept, last, home=root / FOLDER):
        entry, headers = kernel.compile_with_headers()
    content = (entry.directory / LIBRARY).read_bytes()
    refuse_folders(kernel, content)
    built = BuiltFile(
        operator=kernel.operator.name,
        language=kernel.language,
        digest=kernel.digest(),
        abi=CPP_VERSION,
        target=level,
        machine=machine(),
        features=levels()[level],
        headers=shipped_headers(kernel, root, headers),
        linked=shipped_libraries(kernel, root, root / FOLDER),
        libraries=kernel.source.options.foreign(kernel_toolchain(), root / FOLDER),
    )
    return write_named_by_content(built, content, directory, "so")


def _build_cuda(
    kernel: CudaKernel, architecture: str, as_ptx: bool, root: Path, directory: Path
) -> BuiltFile:
    """Build every instance of a CUDA kernel that samples need, for one architecture, into one file."""
    instances = _instances(kernel, architecture)
    content, described = bytearray(MAGIC), {}
    headers = shipped_cuda_headers(kernel, root)
    for instance, parameters in zip(instances, kernel.candidates(instances, architecture), strict=True):
        cubin = kernel.compile(instance, architecture)
        if as_ptx:
            ptx = compile_to_ptx(kernel.source, kernel.operator.name, instance, architecture)
            cubin = replace(cubin, image=ptx)
        image = BuiltImage(cubin, parameters)
        described[name_expression(kernel.source, instance)] = image.describe(len(content))
        content += cubin.image
    built = BuiltFile(
        operator=kernel.operator.name,
        language=kernel.language,
        digest=kernel.digest(),
        abi=CUDA_VERSION,
        target=architecture.replace("sm_", "compute_") if as_ptx else architecture,
        headers=headers,
        instances=described,
    )
    return write_named_by_content(built, bytes(content), directory, "images")


def _instances(kernel: CudaKernel, architecture: str) -> list[Instance]:
    """Return the instances of samples: those that they need, and those that are considered for them."""
    calls = partial(sample_values, kernel.operator)
    found = dict.fromkeys(needed_instances(kernel, architecture, calls))
    for dtype in kernel.dtypes:
        for values in calls(dtype):
            found |= dict.fromkeys(each for variant in kernel.variants(values) for each in variant)
    return list(found)


_INSTRUCTIONS = re.compile(r"-m(?!arch=|tune=|prefer-vector-width=|no-|cmodel=|llvm$).*")
"""Flags by which a compiler uses more instructions than those of a level."""


def _refuse_instructions(kernel: CppKernel) -> None:
    """Refuse flags of the author's by which a library needs more than its level.

    Raises:
        UsageError: If there is one.
    """
    flag = next((each for each in kernel.source.options.flags if _INSTRUCTIONS.fullmatch(each)), None)
    if flag is not None:
        raise kernel.error(
            errors.UsageError,
            f"its kernel in C++ has the flag `{flag}`, which not every processor of a level has",
            argument="flags",
            expected="the instructions of the levels that `opsmith build` is given",
            got=flag,
            hint="leave it out; `-march=` of a kernel is replaced by the level",
        )


def _no_target(package: SourcePackage, languages: Sequence[str]) -> errors.UsageError:
    reason = "" if levels() else f"; libraries for {machine()} are not built ahead"
    return errors.UsageError(
        f"no target is left for the kernels of `{package.name}`",
        argument="cpu" if "C++" in languages else "cuda",
        expected=f"a target for its kernels in {' or '.join(languages)}",
        got=f"none{reason}",
        hint='name targets as `cpu="x86-64-v3"` or `cuda="sm_90"`, or ship the sources alone',
    )
