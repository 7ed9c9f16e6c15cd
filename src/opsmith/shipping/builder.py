"""Compilation of a package's kernels for every target, into a new folder that replaces the old folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import opsmith
from opsmith import errors
from opsmith.build.manifest import BuiltFile, write_manifest
from opsmith.build.packaged import FOLDER, nothing_packaged, package_of
from opsmith.build.processor import levels, machine
from opsmith.build.toolchain import processors
from opsmith.config import NO_CALLS_BUILD, no_calls_build
from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.common.ahead import Built, SharedLibrary
from opsmith.kernels.languages import Language
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
from opsmith.shipping.source_package import SourcePackage
from opsmith.shipping.targets import BuildTargets
from opsmith.torch_library.calls_extension import LANGUAGE as CALLS
from opsmith.torch_library.calls_extension import LIBRARY as CALLS_LIBRARY
from opsmith.torch_library.calls_extension import VERSION as CALLS_VERSION
from opsmith.torch_library.calls_extension import cached_calls, compile_calls, source_digest
from opsmith.torch_library.calls_extension import target as calls_target

Advance = Callable[[str, int, int], None]
"""Function of the current activity, the number of finished compilations, and their total number."""
SOURCE_TARGET = "source"
"""Target of a kernel that ships as source."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Compilation of one kernel for one target."""

    kernel: BuiltKernel[Any] | None
    target: str
    build: Callable[[], Built]
    required: bool = True

    @property
    def name(self) -> str:
        """Description of the compilation."""
        return f"{'opsmith' if self.kernel is None else self.kernel.operator.name} for {self.target}"


def build_package(
    package: str, *, cpu: str | None = None, cuda: str | None = None, output: Path | None = None
) -> PackageBuild:
    """Build the kernels of a package into its folder, without checking the operators.

    If there are kernels in C++ or CUDA C++, the library between torch and all kernels is built, too. So users
    may install opsmith without built kernels. The kernels of opsmith's own operators are in `opsmith.ops`.

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

    At any time, as many kernels are compiled as the process has cores. If only a part of a package is built,
    the files that an earlier build made for its other modules are kept.

    Args:
        package: The package.
        targets: The targets.
        output: Folder of the built kernels; `_kernels` in the package by default.
        advance: Called with the current activity, the number of finished compilations, and their total.

    Raises:
        CompileError: If a compiler refuses a kernel.
        ToolchainError: If there is no compiler, or it does not know a target.
        MissingSamplesError: If a CUDA kernel's constants depend on sizes, and no sample determines them.
        UsageError: If no target is left, or the folder cannot be written, or contains other files.
    """
    place = (output or package.root / FOLDER).absolute()
    refuse_other_folder(place)
    left_out: list[str] = []
    built = {each: kernels for each, kernels in package.by_language().items() if each.ahead is not None}
    jobs = _jobs(package, targets, left_out)
    if built and not jobs:
        raise _no_target(package, [*built])
    for language, kernels in built.items():
        wanted = _targets_of(language, targets)
        if language.ahead is not None and wanted:
            language.ahead.refuse(kernels, wanted)
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
        rows += [
            BuiltRow(kernel.operator.name, kernel.language, SOURCE_TARGET, 0, 0, 0.0)
            for language, kernels in package.by_language().items()
            if language.ahead is None
            for kernel in kernels
        ]
        yield PackageBuild(package, directory, tuple(files), tuple(rows), place, kept, tuple(left_out))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for operator in {each.operator for each in package.kernels}:
            with suppress(errors.KernelSourceError):  # its file was deleted; the next call reports it
                operator.reload()  # the build used no built kernels; later calls use them


def _jobs(package: SourcePackage, targets: BuildTargets, left_out: list[str]) -> list[_Job]:
    """The compilations of a build; `left_out` gets the parts that are not built, with the reasons."""
    of_kernels: list[_Job] = []
    root = package.root
    own = root == package_of(opsmith.__file__)
    languages = package.by_language()
    shared: dict[SharedLibrary, bool] = {}
    if targets.cpu and (own or any("cpu" in each.devices for each in languages)):
        if own or not no_calls_build() or cached_calls():
            shared[SharedLibrary(calls_target(), build_calls)] = own
        else:
            left_out.append(f"calls in C++: {NO_CALLS_BUILD} prevents their build; unset it")
    for language, kernels in languages.items():
        ahead, wanted = language.ahead, _targets_of(language, targets)
        if ahead is not None and wanted:
            for library, required in ahead.shared():
                shared[library] = required or shared.get(library, False)
            of_kernels += [
                _Job(kernel, target, partial(ahead.build, kernel, target, root, root / FOLDER))
                for kernel in kernels
                for target in wanted
            ]
    of_all = [_Job(None, each.target, each.build, required) for each, required in shared.items()]
    return [*of_all, *of_kernels]


def _targets_of(language: Language, targets: BuildTargets) -> list[str]:
    """Return the targets of the devices of a language."""
    return [target for device in language.devices for target in targets.of_device(device)]


def _compiled(
    jobs: list[_Job], directory: Path, advance: Advance, left_out: list[str]
) -> tuple[list[BuiltFile], list[BuiltRow]]:
    """Run the jobs; return files and rows in the order of the jobs. `left_out` gets the failures."""
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
    with nothing_packaged():  # ignore the files of an earlier build
        built = write_named_by_content(job.build(), directory)
    return built, time.perf_counter() - started


def build_calls() -> Built:
    """Build the module for calls in C++, for this Python and this torch.

    Raises:
        ToolchainError: If the module cannot be compiled.
    """
    library = compile_calls().directory / CALLS_LIBRARY
    described = BuiltFile(
        operator="",
        language=CALLS,
        digest=source_digest(),
        abi=CALLS_VERSION,
        target=calls_target(),
        machine=machine(),
    )
    return Built(described, library.read_bytes(), "so")


def _no_target(package: SourcePackage, languages: Sequence[Language]) -> errors.UsageError:
    reason = "" if levels() else f"; libraries for {machine()} are not built ahead"
    return errors.UsageError(
        f"no target is left for the kernels of `{package.name}`",
        argument=languages[0].devices[0],
        expected=f"a target for its kernels in {' or '.join(each.name for each in languages)}",
        got=f"none{reason}",
        hint='name targets such as `cpu="x86-64-v3"` or `cuda="sm_90"`, or ship only the sources',
    )
