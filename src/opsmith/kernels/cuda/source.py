"""Source of a CUDA kernel, and the parameters of its template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.build.source_text import FoundFunction, SourceLanguage, find_functions, folder_of
from opsmith.kernels.cpp.source import CppSource

_ATTRIBUTES = r"""
    (?: \s* __ (?: launch_bounds | maxnreg | cluster_dims | block_size ) __ \s*
      \( (?: [^()] | \( (?: [^()] | \( [^()]* \) )* \) )* \) \s*
    )*
"""
"""Attributes of a kernel; the arguments of attributes may contain parentheses."""
_KERNEL = r"""
    (?: template \s* < (?P<template> [^;{{}}]*? ) > \s* )?
    (?: (?: extern | static ) \s+ )? {attributes} \s*
    (?: __global__ \s+ {attributes} void \b | void \s+ __global__ \b ) {attributes}
    \s* \b {name} \s* \(
""".replace("{attributes}", _ATTRIBUTES)


@dataclass(frozen=True, slots=True)
class TemplateParameter:
    """Parameter of a template.

    Attributes:
        name: Name of the parameter.
        is_type: True if it is a type, which is the dtype.
        default: True if it has a default.
    """

    name: str
    is_type: bool
    default: bool


@dataclass(frozen=True, slots=True)
class CudaSource(CppSource):
    """Source of a CUDA kernel.

    Attributes:
        parameters: Parameters of the template, in order.
        others: Sources of the other kernels in the same text that are launched with this kernel.
    """

    parameters: tuple[TemplateParameter, ...] = ()
    others: tuple[CudaSource, ...] = ()

    @property
    def constants(self) -> tuple[str, ...]:
        """Parameters of the template that are numbers."""
        return tuple(each.name for each in self.parameters if not each.is_type)

    @property
    def over_dtype(self) -> bool:
        """True if the kernel is a template over the dtype."""
        return any(each.is_type for each in self.parameters)

    def authored(self, package: Path | None) -> dict[str, Any]:
        """Return the parts that the author wrote, by name, without the location of files."""
        entries = [self.entry, *(each.entry for each in self.others)]
        return {**CppSource.authored(self, package), "entry": entries}

    def kernel(self, entry: str) -> CudaSource:
        """Return the source with one of its kernels as the entry.

        Args:
            entry: Name of the kernel; empty for the source's default kernel.
        """
        return next((each for each in self.others if each.entry == entry), self)


def cuda_source(
    operator: str,
    *,
    cuda: str | None,
    cuda_file: str | PathLike[str] | None,
    entries: Sequence[str | None],
    declared: str | None,
) -> CudaSource:
    """Read the source of a CUDA kernel.

    Args:
        operator: Name of the operator, `namespace::name`.
        cuda: Text of the source.
        cuda_file: File of the source; a relative path starts at the folder of the declaring file.
        entries: Names of the kernels; None for the operator's name without its namespace.
        declared: File that declares the kernel.

    Raises:
        KernelSourceError: If there is no such file or function, or it is a template over two types.
    """
    found = find_functions(CUDA, operator, text=cuda, file=cuda_file, entries=entries, declared=declared)
    folder = folder_of(cuda_file, declared)
    first, *others = (_source(each, folder) for each in found)
    return replace(first, others=tuple(others))


def _source(found: FoundFunction, folder: str | None) -> CudaSource:
    listed = found.match["template"] or ""
    parameters = tuple(map(_parameter, _parts(listed))) if listed.strip() else ()
    types = [each.name for each in parameters if each.is_type]
    if len(types) > 1:
        raise errors.KernelSourceError(
            f"the CUDA kernel `{found.name}` is a template over {len(types)} types",
            expected="one type, which is the dtype; any number of `int` or `bool`, which are `constants=`",
            got=f"template <{' '.join(listed.split())}>",
            where=f"{found.path}:{found.at}",
            hint="keep one type, and write a concrete type instead of each other type",
        )
    return CudaSource(
        found.text,
        found.name,
        found.match["template"] is not None,
        found.path,
        found.line,
        found.at,
        folder=folder,
        parameters=parameters,
    )


def _parts(listed: str) -> list[str]:
    """Split at commas outside of brackets; within parentheses, `<` and `>` are comparisons."""
    parts, round_, pointed = [""], 0, 0
    for letter in listed:
        round_ += (letter in "([") - (letter in ")]")
        pointed += 0 if round_ else (letter == "<") - (letter == ">")
        if letter == "," and not round_ and not pointed:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parameter(text: str) -> TemplateParameter:
    declared, equals, _ = text.partition("=")
    words = re.findall(r"\w+", declared)
    return TemplateParameter(words[-1], words[0] in ("class", "typename"), bool(equals))


def _kernels(bare: str) -> str:
    names = re.findall(r"__global__[^;{}]*?\b(\w+)\s*\((?=[^)]*\)\s*\{)", bare)
    return f"kernels: {', '.join(names)}" if names else "no function that is `__global__ void`"


CUDA = SourceLanguage(
    "CUDA",
    "cuda",
    "kernel",
    _KERNEL,
    "`__global__ void {name}(...)`, whose parameters are the arguments and then the results",
    _kernels,
)
