"""Options that an author gives to the C++ compiler and the linker: flags, folders of headers, libraries."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsmith import errors
from opsmith.build.source_text import file_of

if TYPE_CHECKING:
    from opsmith.build.toolchain import Toolchain

LINKER_FOLDERS = ("/usr/local/lib", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
"""Folders in which linkers search libraries, in addition to the compiler's folders."""

KEEPING, AS_BEFORE = "-Wl,--push-state,--no-as-needed", "-Wl,--pop-state"
"""Flags around libraries that must be linked although the kernel uses no symbol of them."""

# Patterns as texts, which `re` compiles at their first use and caches: few kernels have options.
_WITH_WORD = r"-[DULz]|-Xlinker|-Xclang|-Xassembler|-Xpreprocessor|-mllvm|--param"
"""Flags whose value may be the next word."""
_FOR_LINKER = r"-L.*|-Wl,.*|-Xlinker|-z|-fuse-ld=.*|-static-lib\S+"
_FOR_BOTH = r"-B.*|-stdlib=.*|-fopenmp.*|-pthread|--sysroot=.*|--gcc-toolchain=.*"
"""Flags that both compiler and linker get; only the compiler gets the rest, such as `-ffast-math`."""
_OF_MACHINE = r"-L.*|-B.*|--sysroot=.*|--gcc-toolchain=.*"
"""Flags that name folders of this machine, in which compiler and linker search."""
_PASSED_ON = r"-Xclang|-Xpreprocessor"
"""Flags whose value is passed on as a flag of the actual compiler."""
_FILE = r".*\.(?:a|so(?:\.\d+)*)"
_SYSTEM_FOLDER = r"(?:/usr)?/lib(?:32|64)?(?:/[^/]+-linux-[^/]+)?"
"""Folders in which the loader finds libraries for every process."""
_NOT_FOUND = r"(?:cannot find|unable to find library|library not found:) (?:-l)?(?P<name>[^\s:]+)"


@dataclass(frozen=True, slots=True)
class CompilerOptions:
    """Options of a C++ kernel for the compiler and the linker.

    Attributes:
        flags: Flags, in the author's order; folders of `-L` in them are absolute.
        include_dirs: Absolute folders of headers.
        libraries: Names of libraries, such as `openblas`, and absolute paths of library files.
    """

    flags: tuple[str, ...] = ()
    include_dirs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the options in the form of a command line; empty if there are none.

        Example:
            >>> str(CompilerOptions(("-ffast-math",), ("/usr/include/eigen3",), ("openblas",)))
            '-ffast-math -I/usr/include/eigen3 -lopenblas'
        """
        import shlex  # only options need it

        return shlex.join([*self.flags, *_folder_flags(self.include_dirs), *_library_flags(self.libraries)])

    @property
    def compiling(self) -> list[str]:
        """Arguments of the compiler."""
        own = [
            word
            for group in _grouped(self.flags)
            if not re.fullmatch(_FOR_LINKER, group[0])
            for word in group
        ]
        beside = ["-iquote", "."] if self.include_dirs else []  # for headers that include opsmith.h
        return [*own, *beside, *_folder_flags(self.include_dirs)]

    @property
    def portable_flags(self) -> list[str]:
        """Flags, except flags that name folders of this machine."""
        return [
            word
            for group in _grouped(self.flags)
            if not re.fullmatch(_OF_MACHINE, group[0])
            for word in group
        ]

    def linking(self, toolchain: Toolchain, home: Path | None = None) -> list[str]:
        """Return the arguments of the linker, which follow the kernel's object file.

        An rpath lets a process find a library in the folder where the linker found it. A kernel in a package
        has no such rpath: it finds libraries of the package by their relative path, and other libraries where
        the process searches.

        Args:
            toolchain: The compiler.
            home: Folder of the package that will contain the kernel; None for this machine alone.
        """
        own = [word for group in _grouped(self.flags) if _is_linked(group[0]) for word in group]
        folders: dict[str, None] = {}
        for path in self._files(toolchain):
            if path is None or ".so" not in path.name or re.fullmatch(_SYSTEM_FOLDER, str(path.parent)):
                continue
            if home is None:
                folders |= dict.fromkeys(map(str, (path.parent, path.resolve().parent)))
            elif _is_inside(path, home):
                folders[os.path.join("$ORIGIN", os.path.relpath(path.parent.resolve(), home))] = None
        rpath = [word for folder in folders for word in ("-Xlinker", "-rpath", "-Xlinker", folder)]
        libraries = _library_flags(self.libraries) if home is None else _by_file_name(self.libraries)
        return [*own, *([KEEPING, *libraries, AS_BEFORE] if libraries else []), *rpath]

    def foreign(self, toolchain: Toolchain, home: Path) -> tuple[str, ...]:
        """Return the names of the libraries that the users of a package must have.

        Args:
            toolchain: The compiler.
            home: Folder of the package that will contain the kernel.
        """
        return tuple(
            os.path.basename(name)
            for name, path in zip(self.libraries, self._files(toolchain), strict=True)
            if path is None or (path.suffix != ".a" and not _is_inside(path, home))
        )

    def inside(self, toolchain: Toolchain, home: Path) -> list[Path]:
        """Return the files of libraries that are inside a package.

        Args:
            toolchain: The compiler.
            home: Folder of the package that will contain the kernel.
        """
        return [path for path in self._files(toolchain) if path is not None and _is_inside(path, home)]

    @property
    def shared_files(self) -> list[Path]:
        """Files of shared libraries for which the author gives paths."""
        return [Path(each) for each in self.libraries if os.path.isabs(each) and ".so" in Path(each).name]

    def parts(self, toolchain: Toolchain, home: Path | None = None) -> dict[str, str]:
        """Return the parts of a cache key for the linker and the libraries; empty without libraries."""
        import shlex

        from opsmith.build.toolchain import file_identity  # a declaration needs no compiler

        linking = self.linking(toolchain, home)
        if not linking:
            return {}
        identities = [file_identity(path) if path else "not found" for path in self._files(toolchain)]
        return {"linking": shlex.join(linking), "libraries": "\n".join(identities)}

    def refuse_missing(self) -> None:
        """Raise an error for folders and files that do not exist.

        Raises:
            CompileError: If one does not exist.
        """
        for argument, kind, paths, exists in (
            ("include_dirs", "folder of headers", self.include_dirs, os.path.isdir),
            ("flags", "folder of libraries", self._library_folders(), os.path.isdir),
            (
                "libraries",
                "library",
                [each for each in self.libraries if os.path.isabs(each)],
                os.path.isfile,
            ),
        ):
            missing = next((path for path in paths if not exists(path)), None)
            if missing is not None:
                raise errors.CompileError(
                    f"a {kind} of the C++ kernel does not exist",
                    argument=argument,
                    expected="an absolute path, or a path relative to the file that declares the kernel",
                    got=missing,
                    hint="install the library with this file or folder, or correct the path",
                )

    def _library_folders(self) -> list[str]:
        return [group[0][2:] for group in _grouped(self.flags) if group[0].startswith("-L")]

    def _files(self, toolchain: Toolchain) -> list[Path | None]:
        """Return the file of each library; None if only the linker can find it."""
        return [_file(each, self._library_folders(), toolchain) for each in self.libraries]


NO_OPTIONS = CompilerOptions()
"""Options of a kernel whose author gives none."""


def _is_linked(flag: str) -> bool:
    return bool(re.fullmatch(_FOR_LINKER, flag) or re.fullmatch(_FOR_BOTH, flag))


def _folder_flags(folders: Sequence[str]) -> list[str]:
    return [f"-I{folder}" for folder in folders]


def _library_flags(libraries: Sequence[str]) -> list[str]:
    return [each if os.path.isabs(each) else f"-l{each}" for each in libraries]


def _by_file_name(libraries: Sequence[str]) -> list[str]:
    """Return the flags for libraries, without their folders in the linked file."""
    return [
        word
        for each in libraries
        for word in (
            [f"-L{os.path.dirname(each)}", f"-l:{os.path.basename(each)}"]
            if os.path.isabs(each)
            else [f"-l{each}"]
        )
    ]


def _is_inside(path: Path, home: Path) -> bool:
    """Return True for a file of the package that has the folder `home`."""
    return path.parent.resolve().is_relative_to(home.parent)


def _grouped(flags: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each flag, together with the next word if that is its value."""
    words = iter(flags)
    for flag in words:
        value = next(words, None) if re.fullmatch(_WITH_WORD, flag) else None
        yield (flag,) if value is None else (flag, value)


def _file(library: str, folders: Sequence[str], toolchain: Toolchain) -> Path | None:
    if os.path.isabs(library):
        return Path(library)
    from opsmith.build.toolchain import compiler_variables

    for folder in (*folders, *_searched(toolchain, compiler_variables())):
        for name in (f"lib{library}.so", f"lib{library}.a"):
            if os.path.isfile(os.path.join(folder, name)):
                return Path(folder, name)
    return None


@functools.cache
def _searched(toolchain: Toolchain, variables: str) -> tuple[str, ...]:
    """Return the folders in which a compiler's linker searches libraries, under these variables."""
    printed = toolchain.run(["-print-search-dirs"], Path(os.sep)).printed
    found = re.search(r"^libraries: =?(.*)$", printed, re.MULTILINE)
    named = found[1].split(os.pathsep) if found else []
    return tuple(dict.fromkeys(os.path.normpath(each) for each in (*named, *LINKER_FOLDERS) if each))


def compiler_options(
    flags: Any = None, include_dirs: Any = None, libraries: Any = None, *, declared: str | None
) -> CompilerOptions:
    """Read the options of a C++ kernel.

    Args:
        flags: Flags of the compiler and the linker: a list of str.
        include_dirs: Folders of headers: a list of str or paths.
        libraries: A list of names, such as `openblas`, and of paths of files.
        declared: File that declares the kernel; relative paths are relative to its folder.

    Raises:
        UsageError: If an argument is not a list, or a flag is not allowed.
    """
    folders = _listed("include_dirs", include_dirs, "str or paths", (str, PathLike), "/usr/include/eigen3")
    return CompilerOptions(
        _flags(_listed("flags", flags, "str", str, "-ffast-math"), declared),
        tuple(str(file_of(each, declared)) for each in folders),
        tuple(
            _library(each, declared)
            for each in _listed("libraries", libraries, "str or paths", (str, PathLike), "openblas")
        ),
    )


def _listed(argument: str, given: Any, kinds: str, types: Any, example: str) -> list[Any]:
    if given is None:
        return []
    fine = isinstance(given, list | tuple) and all(isinstance(each, types) for each in given)
    if not fine or any("\0" in os.fspath(each) or not os.fspath(each) for each in given):
        shown = f'["{given}"]' if isinstance(given, str) and given else f'["{example}"]'
        raise errors.UsageError(
            f"`{argument}=` of a C++ kernel is not a list of {kinds}",
            argument=argument,
            expected=f"a list of {kinds}, none of them empty",
            got=repr(given),
            hint=f"write `{argument}={shown}`",
        )
    return list(given)


def _flags(given: list[str], declared: str | None) -> tuple[str, ...]:
    from opsmith.build.refused_flags import REFUSED  # few kernels have flags

    found: list[str] = []
    for flag, *values in _grouped(given):
        for each in _compiler_flags(flag, values):
            refusal = next((known for known in REFUSED if re.fullmatch(known.pattern, each)), None)
            if refusal is not None:
                raise _refused(each, refusal.reason, refusal.hint)
        if not flag.startswith("-"):
            raise _refused(flag, "a flag begins with `-`", "sources and libraries have separate arguments")
        if flag.startswith("-L"):
            found.append(f"-L{file_of(values[0] if values else flag[2:], declared)}")
        else:
            found += [flag, *values]
    return tuple(found)


def _compiler_flags(flag: str, values: list[str]) -> list[str]:
    """Return a flag, and the flags that it passes on to the actual compiler."""
    if flag.startswith("-Wp,"):
        return [flag, *flag.split(",")[1:]]
    return [flag, *(values if re.fullmatch(_PASSED_ON, flag) else [])]


def _refused(flag: str, reason: str, hint: str) -> errors.UsageError:
    return errors.UsageError(
        f"a C++ kernel cannot have the flag `{flag}`: {reason}", argument="flags", got=repr(flag), hint=hint
    )


def _library(given: str | PathLike[str], declared: str | None) -> str:
    text = os.fspath(given)
    if not isinstance(given, str) or os.sep in text or re.fullmatch(_FILE, text):
        return str(file_of(given, declared))
    if text.startswith("-"):
        raise errors.UsageError(
            "the name of a C++ kernel's library must not begin with `-`",
            argument="libraries",
            expected="a name such as `openblas`, or the path of a file",
            got=repr(text),
            hint=f"write `libraries=[{text.removeprefix('-l')!r}]`",
        )
    return text


def refuse_missing_library(printed: str) -> None:
    """Raise an error for a library that the linker did not find.

    Args:
        printed: Output of the linker.

    Raises:
        CompileError: If it does not find a library.
    """
    found = re.search(_NOT_FOUND, printed)
    if found is not None:
        raise errors.CompileError(
            "the linker does not find a library of the C++ kernel",
            argument="libraries",
            expected=f"lib{found['name']}.so or lib{found['name']}.a in a folder that the linker searches",
            got=found[0],
            hint="install the library with its development files, or name its folder: "
            '`flags=["-L/its/folder"]`',
        )
