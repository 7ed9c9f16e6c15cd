"""Folder of built kernels: write a build into it, and keep files of an earlier build."""

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
"""Prefix of the name of a build's temporary folder; the number of its process follows."""


@dataclass(frozen=True, slots=True)
class BuiltRow:
    """Build of one kernel for one target.

    Attributes:
        operator: Name of the operator; empty for opsmith's own library.
        language: Language of the kernel.
        target: The target; `source` for a kernel that ships as source.
        instances: Number of instances of a CUDA kernel; 0 for others.
        bytes: Size of the file.
        seconds: Seconds of the build; near 0 if the file was in the cache.
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
    """Finished build, in a temporary folder until it is written.

    Attributes:
        package: The package.
        directory: The temporary folder.
        files: The files that were built.
        rows: The builds, in the order of the kernels and targets.
        output: Folder that gets the files when the build is written.
        kept: Files in this folder from an earlier build, for kernels in other modules of the package.
        left_out: Unnecessary files that could not be built, with the reasons.
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
        """Replace an earlier build by this build; if this fails, the earlier build stays complete.

        The manifest is replaced last, in one step, so a reader of the folder finds one build or the other.
        Files are named after their content: the earlier build's files stay until no manifest names them.

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
                self.output.chmod(0o755)  # as for a new folder: opsmith ignores folders that others may write
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
                with suppress(OSError):  # a remaining file does no harm
                    (self.output / name).unlink()
        flush(self.output)
        return self.output


def files_of_other_modules(
    package: SourcePackage, files: Sequence[BuiltFile], place: Path, directory: Path
) -> tuple[BuiltFile, ...]:
    """Copy the valid files that an earlier build made for other modules.

    Args:
        package: Part of a package.
        files: The files that were built for this part.
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
    """Write a file under a name that depends on its content, since a process loads each path only once."""
    named = (built.described.operator or "opsmith").replace("::", ".")
    digest = hashlib.sha256(built.content).hexdigest()[:16]
    file = f"{named}.{built.described.target}.{digest}.{built.suffix}"
    (directory / file).write_bytes(built.content)
    return sealed(directory, replace(built.described, file=file))


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders of builds that were killed.

    Args:
        parent: Folder of the packages' folders of built kernels.
    """
    if not Path("/proc/self").exists():  # the system does not list the processes that run
        return
    for folder in parent.glob(f"{STAGED}*"):
        process = folder.name.removeprefix(STAGED).partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def refuse_other_folder(place: Path) -> None:
    """Refuse a folder that contains files other than built kernels.

    Raises:
        UsageError: If the folder contains such files.
    """
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise errors.UsageError(
            f"the built kernels cannot be written to `{place}`",
            argument="output",
            expected="a folder for built kernels only",
            got="a link" if place.is_symlink() else "a file",
            hint="name another folder",
        )
    if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
        raise errors.UsageError(
            f"`{place}` contains files that are not built kernels",
            argument="output",
            expected=f"a new or empty folder, or a folder with the `{MANIFEST}` of an earlier build",
            got=", ".join(sorted(each.name for each in place.iterdir())[:3]),
            hint="name a different folder, or empty this folder",
        )


def unwritable(place: Path, error: OSError) -> errors.UsageError:
    """Return the error for a folder that this user may not write to."""
    return errors.UsageError(
        f"the built kernels cannot be written to `{place}`",
        argument="output",
        expected="a folder in which this user can make files",
        got=error.strerror or str(error),
        hint="name another folder",
    )
