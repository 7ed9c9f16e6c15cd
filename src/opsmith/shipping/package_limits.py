"""Limits of a package: built kernels depend on no header and no folder of the machine that builds them."""

from __future__ import annotations

import hashlib
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from opsmith import errors
from opsmith.build.elf import NEEDED, RPATH, RUNPATH, dynamic_texts
from opsmith.build.source_text import computed_includes, header_digests
from opsmith.kernels.cpp.compiler import kernel_toolchain
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cuda.kernel import CudaKernel


def shipped_headers(
    kernel: CppKernel | CudaKernel, package: Path, headers: Mapping[str, str]
) -> dict[str, str]:
    """Return the headers of a package that a kernel includes, which decide whether it is used once built.

    Those of installed packages are, as the compiler's own, part of the machine that builds.

    Args:
        kernel: The kernel.
        package: Folder of the package.
        headers: Digest of each header that is not the compiler's, by its absolute path.

    Returns:
        Digest of each header by its path in the package.

    Raises:
        UsageError: If a header lies elsewhere: nobody would see that it was edited.
    """
    found, root = {}, package.resolve()
    for name, digest in headers.items():
        path = Path(name).parent.resolve() / Path(name).name  # a link in the package is a file in a wheel
        if path.is_relative_to(root):
            found[path.relative_to(root).as_posix()] = digest
        elif not any(path.is_relative_to(each) for each in _installed()):
            raise kernel.error(
                errors.UsageError,
                f"a header of its kernel in {kernel.language} lies outside of the package",
                argument="include_dirs",
                expected=f"headers in {root}, or installed ones",
                got=str(path),
                hint="copy it into the package: an edit of it would go unseen, and users would not have it",
            )
    return dict(sorted(found.items()))


def shipped_cuda_headers(kernel: CudaKernel, package: Path) -> dict[str, str]:
    """Return the headers of a package that a kernel in CUDA C++ may include; see `shipped_headers`.

    NVRTC does not say which headers it reads, so that their names must be written out.

    Raises:
        UsageError: Also if a macro makes the name of a header.
    """
    source = kernel.source
    computed = computed_includes(source.text, source.folder)
    if computed:
        raise kernel.error(
            errors.UsageError,
            "its kernel in CUDA includes a header whose name a macro makes",
            expected="the name of each header in its directive, or in the definition of a macro",
            got=f"#include {computed[0]}",
            hint='write the name out: one `#include "..."` for each case',
        )
    return shipped_headers(kernel, package, header_digests(source.text, source.folder))


def shipped_libraries(kernel: CppKernel, package: Path, home: Path) -> dict[str, str]:
    """Return the libraries of a package that a kernel is linked with, as `shipped_headers` does headers.

    Args:
        kernel: The kernel.
        package: Folder of the package.
        home: Folder of its built kernels.

    Returns:
        Digest of each library by its path in the package.
    """
    found = {}
    for path in kernel.source.options.inside(kernel_toolchain(), home):
        place = (path.parent.resolve() / path.name).relative_to(package.resolve())
        found[place.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def _installed() -> list[Path]:
    """Return the folders of what is installed for this Python."""
    named = [sysconfig.get_path(name) for name in ("purelib", "platlib", "include", "platinclude")]
    return [Path(each).resolve() for each in (*named, f"{sys.prefix}/include", site.getusersitepackages())]


def refuse_folders(kernel: CppKernel, content: bytes) -> None:
    """Refuse a library that names folders of this machine: a process would load code from there.

    Args:
        kernel: The kernel.
        content: Content of its library.

    Raises:
        UsageError: If it does.
    """
    folders = [each for text in dynamic_texts(content, RPATH, RUNPATH) for each in text.split(":")]
    named = [each for each in folders if each.partition("/")[0] != "$ORIGIN"]
    named += [each for each in dynamic_texts(content, NEEDED) if "/" in each]
    if named:
        raise kernel.error(
            errors.UsageError,
            "its built kernel in C++ names a folder of this machine, from which a process would load code",
            argument="flags",
            expected="libraries in the package, or such as a process finds by itself",
            got=", ".join(map(repr, named)),
            hint="leave `-rpath` out of `flags=`, and unset LD_RUN_PATH",
        )
