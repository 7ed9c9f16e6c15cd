"""Library that gives operators with kernels in C++ and CUDA C++ to torch without Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.core.output_file import replacing, writable_file
from opsmith.core.specification import Specification
from opsmith.kernels.common.parameters import cpp_arguments
from opsmith.kernels.cpp.ahead import refuse_unknown_levels
from opsmith.kernels.cpp.compiler import kernel_toolchain
from opsmith.kernels.cpp.kernel import CppKernel
from opsmith.kernels.cuda.compiler import refuse_unknown_architectures
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.runtime.linked_library import KernelObject
from opsmith.kernels.runtime.recipe import sizing_of
from opsmith.kernels.serving.cuda_tables import ServedCuda
from opsmith.kernels.serving.library import LIBRARY, link_library
from opsmith.kernels.serving.tables import ServedOperator
from opsmith.shipping.layout_rules import accepted_layouts
from opsmith.shipping.served_cuda import cuda_refusal, in_another_language, served_cuda
from opsmith.shipping.targets import NONE, BuildTargets
from opsmith.torch_library.registration import HIDDEN_SUFFIX
from opsmith.torch_library.served_libraries import operator_digest


@dataclass(frozen=True, slots=True)
class TorchLibrary:
    """Library for torch's dispatcher, as it was written.

    Attributes:
        path: The file.
        served: Names of the operators that it computes, as torch has them.
        cuda: Those of them that it computes on NVIDIA's GPUs.
        inlined: Names of operators that it leaves out: they have no kernel, and compiled code contains their
            references.
    """

    path: Path
    served: tuple[str, ...]
    cuda: tuple[str, ...]
    inlined: tuple[str, ...]


def build_torch_library(
    operators: Iterable[Operator[..., Any]],
    path: str | PathLike[str],
    *,
    processor: str = "native",
    cuda: str = NONE,
) -> TorchLibrary:
    """Build a library that registers operators with torch when it is loaded, and computes them.

    Programs in C++ and packages of AOTInductor call them without Python. The library uses torch's stable C
    functions alone: one file serves every torch from 2.11 on. Load it by `dlopen`, by
    `torch.ops.load_library`, or link it. It finds the driver of a GPU when a kernel first runs on one.

    Args:
        operators: The operators.
        path: The file to write, as `libmine.so`.
        processor: Level of processors that it is compiled for, as `x86-64-v3`; by default the one of this
            machine.
        cuda: Architectures of NVIDIA's GPUs with commas between, as `sm_80,sm_90`, for which it holds the
            kernels in CUDA C++; by default it holds none.

    Returns:
        The library, with the names of what it computes.

    Raises:
        ServingError: Naming every operator that cannot be in it, with the reason.
        CompileError: If a compiler refuses a kernel.
        ToolchainError: If there is no compiler.
        UsageError: If no file can be written there, or a target is not known.
        KernelSignatureError, LaunchError, MissingSamplesError: If a kernel in CUDA C++ does not fit its
            operator, or the constants of one depend on sizes, and no sample gives them.
    """
    file = writable_file(path, "libmine.so")
    if processor != "native":
        _refuse_levels(processor)
    targets = BuildTargets.of(NONE, cuda)
    if targets.cuda:
        refuse_unknown_architectures(targets.cuda)
    kernel_toolchain()  # report a missing compiler before anything about operators
    given = {each.name: each for each in operators}
    specifications = [each.specification for each in given.values()]
    on_gpu = {each.name for each in specifications if targets.cuda and cuda_kernels(each)}
    reasons = {}
    for each in specifications:
        reason = (cuda_refusal(each) if targets.cuda else None) or _refusal(each, each.name in on_gpu)
        if reason is not None:
            reasons[each.name] = reason
    rules = {
        each.name: _accepted(each)
        for each in specifications
        if each.name not in reasons and (_cpp_kernels(each) or each.name in on_gpu)
    }
    reasons |= {name: rule for name, rule in rules.items() if isinstance(rule, str)}
    if reasons:
        raise _refused(specifications, reasons)
    if not rules:
        raise errors.ServingError(
            "none of the operators has a kernel, and there is nothing to put into a library",
            got=", ".join(given) or "no operators",
            hint="give one a kernel, `op.kernel('cpu', cpp=...)`; what has none is compiled into a package "
            "of AOTInductor as its reference",
        )
    served: list[ServedOperator] = []
    objects: dict[KernelObject, None] = {}
    images: list[ServedCuda] = []
    for each in specifications:
        if each.name in rules:
            made = [kernel.library_object(processor) for kernel in _cpp_kernels(each)]
            objects |= dict.fromkeys(made)
            symbol = ""
            if each.name in on_gpu:
                symbol = f"opsmith_cuda_{len(images)}"
                images.append(served_cuda(given[each.name], symbol, targets))
            served += _served(each, made, rules[each.name], symbol)
    library = link_library(tuple(objects), served, processor, images).directory / LIBRARY
    with replacing(file) as draft:
        shutil.copyfile(library, draft)
        draft.chmod(0o755)
    left = tuple(name for name in given if name not in rules)
    names = tuple(each.name for each in served)
    return TorchLibrary(file, names, tuple(each.name for each in served if each.cuda), left)


def _refuse_levels(processor: str) -> None:
    """Refuse what is not one level of processors that the compiler knows."""
    targets = BuildTargets.of(processor, NONE)
    if len(targets.cpu) != 1:
        raise errors.UsageError(
            "a library for torch is compiled for one level of processors",
            argument="cpu",
            expected="one level, as `x86-64-v3`",
            got=processor,
            hint="name the level that all machines have which load it, or leave it out",
        )
    refuse_unknown_levels(targets.cpu)


def _cpp_kernels(specification: Specification) -> list[CppKernel]:
    """Return the kernels in C++ of an operator, in the order in which they are tried."""
    return [each.function for each in specification.kernels if isinstance(each.function, CppKernel)]


def _refusal(specification: Specification, on_gpu: bool) -> str | None:
    """Return why an operator cannot be served; None if it can, or if no library needs it.

    Args:
        specification: The operator.
        on_gpu: True if the library holds CUDA kernels of it.
    """
    if specification.origin.kind != "declared":
        return "it is adopted from code that computes it already"
    if specification.random:
        return "it draws from torch's random state"
    others = [
        each
        for each in specification.kernels
        if each.device == "cpu" and not isinstance(each.function, CppKernel)
    ]
    if others:
        return in_another_language("its kernel", others[0])
    kernels = _cpp_kernels(specification)
    if not kernels and on_gpu:
        return None
    if not kernels:
        lowering = specification.schema.lowering
        kept = (
            specification.opaque
            or specification.inline is False
            or (lowering is not None and lowering.objects)
        )
        return "it has no kernel in C++, and compiled code does not contain its reference" if kept else None
    try:
        for kernel in kernels:
            cpp_arguments(kernel)
            sized = kernel.computes_sizes
            if specification.schema.results and not sized:
                return (
                    "the sizes of its results are known in Python alone: give it `shapes=`, or `sizes` in C++"
                )
    except errors.KernelSignatureError as error:
        return error.problem
    return None


def _accepted(specification: Specification) -> tuple[str, ...] | str:
    """Return the layouts that its arguments may have, or why none are known."""
    kernels: list[BuiltKernel[Any]] = [*_cpp_kernels(specification), *cuda_kernels(specification)]
    dtypes = [dtype for kernel in kernels for dtype in kernel.dtypes or ()]
    dtype = torch.float32 if torch.float32 in dtypes or not dtypes else dtypes[0]
    accepted = accepted_layouts(specification, dtype)
    if accepted is None:
        return (
            "no samples show that its results are contiguous: give it samples, and let its reference end in "
            "`.contiguous()`"
        )
    return accepted


def _refused(given: Sequence[Specification], reasons: dict[str, str]) -> errors.ServingError:
    places = {each.name: each.where for each in given}
    lines = [f"    {name}, {places[name]}: {reason}" for name, reason in reasons.items()]
    return errors.ServingError(
        f"{len(reasons)} of {len(given)} operators cannot be served without Python",
        got="\n".join(lines).lstrip(),
        hint="leave it out, by the names of the others, or give it what it lacks",
    )


def _served(
    specification: Specification, objects: Sequence[KernelObject], accepted: Sequence[str], cuda: str
) -> list[ServedOperator]:
    """Return an operator as a library has it, and what it is called by where it has hidden results.

    Args:
        specification: The operator.
        objects: Objects of its kernels in C++.
        accepted: See `accepted_layouts`.
        cuda: Name of the table of its CUDA kernels; empty if the library has none.
    """
    schema, kernels = specification.schema, _cpp_kernels(specification)
    every_kernel: list[BuiltKernel[Any]] = [*kernels, *cuda_kernels(specification)]
    every = tuple(range(len(schema.results)))
    named = [(specification.dispatched_name, schema.visible, False)]
    if schema.hidden:
        named.append((specification.dispatched_name + HIDDEN_SUFFIX, every, True))
    returning = "" if schema.returns is None else schema.text(specification.short_name)
    return [
        ServedOperator(
            name=name,
            schema=schema.void.text(name.partition("::")[2], with_hidden=hidden),
            digest=operator_digest(specification, cuda=bool(cuda)),
            kernels=tuple(each.table for each in objects),
            copies_back=tuple(kernel.copies_back for kernel in kernels),
            names=schema.names,
            arguments=cpp_arguments(every_kernel[0]),
            accepted=tuple(accepted),
            results=len(schema.results),
            shown=shown,
            shapes="" if specification.shapes is None else specification.shapes.text,
            sizing=sizing_of(specification.shapes, schema) or (),
            returning=returning,
            cuda=cuda,
        )
        for name, shown, hidden in named
    ]
