"""The source of a CUDA kernel as its author wrote it, and the parameters of its template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike

from opsmith import errors
from opsmith.build.cpp.source import CppSource
from opsmith.build.includes import folder_of
from opsmith.build.text import Language, find_function

_KERNEL = r"""
    (?: template \s* < (?P<template> [^;{{}}]*? ) > \s* )?
    (?: (?: extern | static ) \s+ )?
    (?: __global__ \s+ (?: __launch_bounds__ \s* \([^)]*\) \s* )? void \b | void \s+ __global__ \b )
    (?: \s* __launch_bounds__ \s* \([^)]*\) )?
    \s* \b {name} \s* \(
"""


@dataclass(frozen=True, slots=True)
class TemplateParameter:
    """A parameter of a template.

    Attributes:
        name: Its name.
        is_type: Whether it stands for a type: the dtype.
        default: Whether it has a default.
    """

    name: str
    is_type: bool
    default: bool


@dataclass(frozen=True, slots=True)
class CudaSource(CppSource):
    """Text of a kernel.

    Attributes:
        parameters: Those of its template, in order.
    """

    parameters: tuple[TemplateParameter, ...] = ()

    @property
    def constants(self) -> tuple[str, ...]:
        """The parameters of the template that are numbers."""
        return tuple(each.name for each in self.parameters if not each.is_type)

    @property
    def over_dtype(self) -> bool:
        """Whether it is a template over the dtype."""
        return any(each.is_type for each in self.parameters)


def cuda_source(
    operator: str,
    *,
    cuda: str | None,
    cuda_file: str | PathLike[str] | None,
    entry: str | None,
    declared: str | None,
) -> CudaSource:
    """Find out about a source.

    Args:
        operator: Name of the operator, `namespace::name`.
        cuda: The text itself.
        cuda_file: Or a file; a relative path is beside the file that declares the kernel.
        entry: Name of the kernel in it; by default the operator's own, without its namespace.
        declared: The file in which the kernel is declared.

    Raises:
        KernelSourceError: If there is no such file or function, or it is a template over two types.
    """
    found = find_function(CUDA, operator, text=cuda, file=cuda_file, entry=entry, declared=declared)
    listed = found.match["template"] or ""
    parameters = tuple(map(_parameter, _parts(listed))) if listed.strip() else ()
    types = [each.name for each in parameters if each.is_type]
    if len(types) > 1:
        raise errors.KernelSourceError(
            f"the CUDA kernel `{found.name}` is a template over {len(types)} types",
            operator=operator,
            expected="one type, which is the dtype; any number of `int` or `bool`, which are `constants=`",
            got=f"template <{' '.join(listed.split())}>",
            where=f"{found.path}:{found.at}",
            hint="write the other type out",
        )
    return CudaSource(
        found.text,
        found.name,
        found.match["template"] is not None,
        found.path,
        found.line,
        found.at,
        folder=folder_of(cuda_file, declared),
        parameters=parameters,
    )


def _parts(listed: str) -> list[str]:
    """What stands between the commas that are in no brackets; in round ones `<` and `>` compare."""
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


CUDA = Language(
    "CUDA",
    "cuda",
    "kernel",
    _KERNEL,
    "`__global__ void {name}(...)`, of the arguments and then the results",
    _kernels,
)
