"""Built CUDA kernels of a package: the images that fit a GPU, and the parameters of each instance."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opsmith.build.manifest import BuiltFile
from opsmith.build.packaged import Found
from opsmith.core.argument_types import NUMBERED
from opsmith.kernels.common.gpu_resources import Resources
from opsmith.kernels.cuda.compiler import Cubin
from opsmith.kernels.cuda.parameters import CudaParameter

MAGIC = b"opsmith's images of CUDA kernels\n"
"""First bytes of a file of images, so that tools do not mistake the file for a library or a cubin."""
_TARGET = re.compile(r"(?P<form>sm|compute)_(?P<number>\d+)(?P<suffix>[af]?)")


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """Image of an instance in a file.

    Attributes:
        cubin: The cubin, or PTX instead of a cubin.
        parameters: Parameters of the instance.
    """

    cubin: Cubin
    parameters: tuple[CudaParameter, ...]

    def describe(self, at: int) -> dict[str, Any]:
        """Return all fields except the content, as values of JSON types.

        Args:
            at: Offset of the content in the file.
        """
        return {
            "at": at,
            "bytes": len(self.cubin.image),
            "name": self.cubin.name,
            "resources": asdict(self.cubin.resources),
            "max_threads": self.cubin.max_threads,
            "parameters": [_encoded(each) for each in self.parameters],
        }

    @classmethod
    def read(cls, held: Mapping[str, Any], content: bytes, architecture: str, origin: str) -> BuiltImage:
        """Return an image from its form in JSON, and the content of the file.

        Raises:
            ValueError, KeyError, TypeError: If the form is wrong.
        """
        image = content[held["at"] : held["at"] + held["bytes"]]
        resources = Resources(**held["resources"])
        cubin = Cubin(image, held["name"], resources, architecture, held["max_threads"], origin)
        return cls(cubin, tuple(map(_decoded, held["parameters"])))


def _encoded(parameter: CudaParameter) -> dict[str, Any]:
    dtype = None if parameter.dtype is None else NUMBERED["ScalarType"].index(parameter.dtype)
    return {**asdict(parameter), "dtype": dtype}


def _decoded(held: Mapping[str, Any]) -> CudaParameter:
    dtype = None if held["dtype"] is None else NUMBERED["ScalarType"][held["dtype"]]
    return CudaParameter(**{**held, "dtype": dtype})


@dataclass
class PackagedImages:
    """Images of a kernel that fit a GPU.

    Args:
        found: Files that fit, the best first.
        architecture: Architecture of the GPU; empty for any GPU.
    """

    found: Found
    architecture: str
    _files: list[tuple[str, Path, dict[str, BuiltImage]]] = field(init=False)

    def __post_init__(self) -> None:
        self._files = []
        for built, path, content in self.found.usable():
            origin = f"built into the package for {built.target}"
            try:
                images = {
                    name: BuiltImage.read(held, content, self.architecture, origin)
                    for name, held in built.instances.items()
                }
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self.found.reject(path, f"its manifest is damaged: {error}")
                continue
            self._files.append((built.target, path, images))

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of the files, the best first."""
        return tuple(target for target, _, _ in self._files)

    def images(self, name: str) -> Iterator[tuple[Path, BuiltImage]]:
        """Yield the images of an instance with their files, the best first.

        Args:
            name: Name expression of the instance.
        """
        for _, path, images in [*self._files]:
            if name in images:
                yield path, images[name]

    def described(self, names: Sequence[str]) -> tuple[tuple[CudaParameter, ...], ...] | None:
        """Return the parameters of each instance; None if an instance is missing."""
        first = [next((image for _, image in self.images(name)), None) for name in names]
        return tuple(each.parameters for each in first if each is not None) if all(first) else None

    def drop(self, path: Path, reason: str) -> None:
        """Stop using a file, and warn about it."""
        self._files = [each for each in self._files if each[1] != path]
        self.found.reject(path, reason)


def gpu_misfit(built: BuiltFile, architecture: str) -> str | None:
    """Return why a GPU cannot run a file; None if it can.

    A cubin runs on GPUs of the same major version and of the same or a later minor version. With the suffix
    `a` it runs only on that GPU, and with `f` on the GPU's family. PTX runs on later GPUs, too (CUDA
    programming guide, "Binary Compatibility", "PTX Compatibility").

    Args:
        built: The file.
        architecture: Architecture of the GPU, such as `sm_90`; empty for any GPU.

    Example:
        >>> file = BuiltFile(operator="", language="CUDA", digest="", abi=1, target="sm_80")
        >>> gpu_misfit(file, "sm_86") is None, gpu_misfit(file, "sm_90")
        (True, 'built for sm_80, but this GPU is sm_90')
    """
    match = _TARGET.fullmatch(built.target)
    if match is not None and not architecture:
        return None
    if match is not None:
        number, wanted = int(match["number"]), int(re.sub(r"\D", "", architecture))
        fits = number == wanted if match["suffix"] == "a" else number <= wanted
        if match["form"] == "sm":
            fits = fits and number // 10 == wanted // 10
        if fits:
            return None
    return f"built for {built.target}, but this GPU is {architecture or 'of NVIDIA'}"


def gpu_rank(built: BuiltFile) -> tuple[bool, int]:
    """Return the sort key of a file that fits a GPU: cubins before PTX, later targets first."""
    match = _TARGET.fullmatch(built.target)
    assert match is not None
    return match["form"] == "compute", -int(match["number"])
