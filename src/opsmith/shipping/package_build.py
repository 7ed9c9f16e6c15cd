"""Folder of built kernels: how a build gets into it, and what it keeps of an earlier one."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from opsmith import errors
from opsmith.build.cache import MANIFEST, flush
from opsmith.build.manifest import BuiltFile, UnusableError, kernel_folder, sealed
from opsmith.build.packaged import FOLDER
from opsmith.display import short_repr
from opsmith.kernels.common.ahead import Built
from opsmith.shipping.source_package import SourcePackage

_FILE = re.compile(r".+\.[0-9a-f]{16}\.\w+")
"""Names of built files; see `write_named_by_content`."""
STAGED = f".{FOLDER}-"
"""Beginning of the name of a build's own folder, before it is written; the number of its process follows."""


@dataclass(frozen=True, slots=True)
class BuiltRow:
    """Build of one kernel for one target.

    Attributes:
        operator: Name of the operator; empty for opsmith's own library.
        language: Language of the kernel.
        target: The target; `source` for a kernel that ships as source.
        instances: Number of instances of a CUDA kernel; 0 for others.
        bytes: Size of the file.
        seconds: Seconds that it took; near 0 where the cache had it.
    """

    __repr__ = short_repr

    operator: str
    language: str
    target: str
    instances: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PackageBuild:
    """Finished build, in a folder of its own until it is written.

    Attributes:
        package: The package.
        directory: The folder.
        files: The files that were built.
        rows: What was built, in the order of the kernels and targets.
        output: Folder that gets the files when the build is written.
        kept: Files of an earlier build in that folder, of kernels in other modules of the package.
        left_out: Files that could not be built and that the package does not need, with the reason.
    """

    __repr__ = short_repr

    package: SourcePackage
    directory: Path
    files: tuple[BuiltFile, ...]
    rows: tuple[BuiltRow, ...]
    output: Path
    kept: tuple[BuiltFile, ...] = ()
    left_out: tuple[str, ...] = ()

    def write(self) -> Path:
        """Put the build in the place of an earlier one, which stays whole if that fails.

        The manifest comes last and at once, so that whoever reads the folder finds one build or the other.
        Files have the name of their content: those of the earlier build stay until nothing names them.

        Returns:
            Folder of the built kernels.

        Raises:
            UsageError: If the folder cannot be written.
        """
        names = {each.file for each in (*self.files, *self.kept)}
        added: list[Path] = []
        try:
            if not self.output.exists():
                self.directory.rename(self.output)
                return self.output
            before = {each.name for each in self.output.iterdir()}
            if self.output.stat().st_mode & 0o777 != 0o755:
                self.output.chmod(0o755)  # as of a new one: a folder that is open to others is not used
            for name in sorted(names):
                if name not in before:
                    added.append(self.output / name)
                (self.directory / name).replace(self.output / name)
            (self.directory / MANIFEST).replace(self.output / MANIFEST)
        except OSError as error:
            for path in added:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise unwritable(self.output, error) from error
        for name in before - names:
            if _FILE.fullmatch(name):
                with suppress(OSError):  # it is in nobody's way
                    (self.output / name).unlink()
        flush(self.output)
        return self.output


def files_of_other_modules(
    package: SourcePackage, files: Sequence[BuiltFile], place: Path, directory: Path
) -> tuple[BuiltFile, ...]:
    """Copy the sound files that an earlier build has of other modules.

    Args:
        package: Part of a package.
        files: The files that were built of it.
        place: Folder of the earlier build.
        directory: Folder that gets the copies.
    """
    kept: list[BuiltFile] = []
    try:
        earlier = kernel_folder(place, package.root / "__init__.py")
    except UnusableError:
        return ()
    own = {(each.operator.name, each.language) for each in package.kernels}
    own |= {(each.operator, each.language) for each in files}
    if earlier is not None:
        for built in earlier.files:
            if (built.operator, built.language) not in own:
                with suppress(UnusableError):
                    (directory / built.file).write_bytes(earlier.content(built))
                    kept.append(sealed(directory, built))
    return tuple(kept)


def write_named_by_content(built: Built, directory: Path) -> BuiltFile:
    """Write a file under a name that no other content has: a process loads a path once."""
    named = (built.described.operator or "opsmith").replace("::", ".")
    digest = hashlib.sha256(built.content).hexdigest()[:16]
    file = f"{named}.{built.described.target}.{digest}.{built.suffix}"
    (directory / file).write_bytes(built.content)
    return sealed(directory, replace(built.described, file=file))


def remove_abandoned(parent: Path) -> None:
    """Remove what builds have left that were killed.

    Args:
        parent: Folder of the packages' folders of built kernels.
    """
    if not Path("/proc/self").exists():  # then no system says which processes run
        return
    for folder in parent.glob(f"{STAGED}*"):
        process = folder.name.removeprefix(STAGED).partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def refuse_other_folder(place: Path) -> None:
    """Refuse a folder that holds something else than built kernels.

    Raises:
        UsageError: If it does.
    """
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise errors.UsageError(
            f"the built kernels cannot be written to `{place}`",
            argument="output",
            expected="a folder for built kernels alone",
            got="a link" if place.is_symlink() else "a file",
            hint="name another folder",
        )
    if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
        raise errors.UsageError(
            f"`{place}` holds something else than built kernels",
            argument="output",
            expected=f"a new or empty folder, or one with the `{MANIFEST}` of an earlier build",
            got=", ".join(sorted(each.name for each in place.iterdir())[:3]),
            hint="name another folder, or empty this one",
        )


def unwritable(place: Path, error: OSError) -> errors.UsageError:
    """Return the error for a folder that the system does not let this user write."""
    return errors.UsageError(
        f"the built kernels cannot be written to `{place}`",
        argument="output",
        expected="a folder in which this user can make files",
        got=error.strerror or str(error),
        hint="name another folder",
    )
