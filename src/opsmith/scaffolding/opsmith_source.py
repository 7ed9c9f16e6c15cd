"""Find the source from which opsmith was installed, for the dependencies of a new package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import opsmith
from opsmith.display import short_repr


@dataclass(frozen=True, slots=True)
class OpsmithSource:
    """Source that `pip` can install opsmith from.

    Attributes:
        reference: URL of a direct reference, `opsmith @ URL`; empty if only a version can be named. indexed:
            True if opsmith came from a package index, so that the version is enough to find it.
    """

    __repr__ = short_repr

    reference: str = ""
    indexed: bool = False

    @property
    def reachable(self) -> bool:
        """True if other machines can reach the source."""
        return self.indexed or (bool(self.reference) and not self.reference.startswith("file:"))


def opsmith_source() -> OpsmithSource:
    """Return the source of the running opsmith, as `pip` recorded it.

    A checkout, also an editable install, has no reference: `pip` would replace it by a copy.
    """
    if _is_checkout(Path(opsmith.__file__)):
        return OpsmithSource()
    try:
        recorded = metadata.distribution("opsmith").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return OpsmithSource()
    return _parse(recorded) if recorded else OpsmithSource(indexed=True)


def _is_checkout(file: Path) -> bool:
    return file.parents[1].name == "src" and (file.parents[2] / "pyproject.toml").is_file()


def _parse(recorded: str) -> OpsmithSource:
    """Parse a file `direct_url.json`; the format is PyPA's "Recording the Direct URL Origin".

    Example:
        >>> _parse('{"url": "https://a/b.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}').reference
        'git+https://a/b.git@1a2b'
    """
    origin = json.loads(recorded)
    url = str(origin["url"])
    if origin.get("dir_info", {}).get("editable", False):
        return OpsmithSource()
    version = origin.get("vcs_info")
    if version is not None:
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    folder = origin.get("subdirectory")
    return OpsmithSource(f"{url}#subdirectory={folder}" if folder else url)
