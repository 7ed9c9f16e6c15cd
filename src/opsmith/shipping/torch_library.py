"""Library with which torch computes operators with kernels in C++ and CUDA C++ without Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import Operator
from opsmith.core.output_file import replacing, writable_file
from opsmith.core.specification import Specification
from opsmith.display import short_repr
from opsmith.kernels.common.ahead import LinkedKernel
from opsmith.kernels.languages import language_of
from opsmith.kernels.runtime.linked_library import require_compiler
from opsmith.kernels.runtime.recipe import sizing_of
from opsmith.kernels.runtime.torch_library import LIBRARY, ServedKernel, ServedOperator, link_library
from opsmith.shipping.layout_rules import accepted_layouts
from opsmith.shipping.targets import NONE, BuildTargets
from opsmith.torch_library.registration import HIDDEN_SUFFIX
from opsmith.torch_library.served_libraries import operator_digest


@dataclass(frozen=True, slots=True)
class TorchLibrary:
    """Library for torch's dispatcher, after it was written.

    Attributes:
        path: The file.
        served: Torch's names of the operators that the library computes.
        cuda: Names of the operators that it also computes on NVIDIA's GPUs.
        inlined: Names of the operators that it leaves out: they have no kernel, and compiled code contains
            their references.
    """

    __repr__ = short_repr

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

    Programs in C++ and packages of AOTInductor call the operators without Python. The library uses only
    torch's stable C functions, so one file works with every torch from 2.11 on. Load it by `dlopen` or by
    `torch.ops.load_library`, or link it. It loads the GPU driver when a kernel first runs on a GPU.

    Args:
        operators: The operators.
        path: The file to write, such as `libmine.so`.
        processor: Level of processors for which the library is compiled, such as `x86-64-v3`; by default the
            level of this machine.
        cuda: Architectures of NVIDIA's GPUs, separated by commas, such as `sm_80,sm_90`. The library contains
            the kernels in CUDA C++ for these GPUs; by default it contains none.

    Returns:
        The library, with the names of the operators that it computes.

    Raises:
        ServingError: Naming every operator that cannot be in it, with the reason.
        CompileError: If a compiler refuses a kernel.
        ToolchainError: If there is no compiler.
        UsageError: If no file can be written there, or a target is unknown.
        KernelSignatureError, LaunchError, MissingSamplesError: If a kernel in CUDA C++ does not fit its
            operator, or its constants depend on sizes, and no sample determines them.
    """
    file = writable_file(path, "libmine.so")
    targets = BuildTargets.of(NONE if processor == "native" else processor, cuda)
    if processor != "native" and len(targets.cpu) != 1:
        raise errors.UsageError(
            "a library for torch is compiled for one level of processors",
            argument="cpu",
            expected="one level, such as `x86-64-v3`",
            got=processor,
            hint="name a level that all machines that load the library have, or leave it out",
        )
    require_compiler()  # report a missing compiler before anything about operators
    given = {each.name: each for each in operators}
    specifications = [each.specification for each in given.values()]
    _refuse_targets(specifications, targets)
    linked = {each.name: _linked(each, targets) for each in specifications}
    rules = {
        each.name: _accepted(each, kernels)
        for each in specifications
        if isinstance(kernels := linked[each.name], list) and kernels
    }
    reasons = {name: each for name, each in (linked | rules).items() if isinstance(each, str)}
    if reasons:
        raise _refused(specifications, reasons)
    if not rules:
        raise errors.ServingError(
            "none of the operators has a kernel, so there is nothing to put into a library",
            got=", ".join(given) or "no operators",
            hint="give an operator a kernel, `op.kernel('cpu', cpp=...)`; the references of other operators "
            "are compiled into a package of AOTInductor",
        )
    served: list[ServedOperator] = []
    for each in specifications:
        kernels = linked[each.name]
        if kernels and not isinstance(kernels, str):
            served += _served(each, kernels, rules[each.name])
    library = link_library(served, processor).directory / LIBRARY
    with replacing(file) as draft:
        shutil.copyfile(library, draft)
        draft.chmod(0o755)
    left = tuple(name for name in given if name not in rules)
    on_gpu = tuple(each.name for each in served if GPU in each.kernels)
    return TorchLibrary(file, tuple(each.name for each in served), on_gpu, left)


GPU = "cuda"


@dataclass(frozen=True, slots=True)
class _Linked:
    """Kernel of an operator, with the data that a library needs."""

    device: str
    kernel: BuiltKernel[Any]
    linked: LinkedKernel


def _wanted(specification: Specification, targets: BuildTargets) -> list[Kernel]:
    """Return the kernels of an operator for the devices of a library, without duplicates."""
    devices = ("cpu", GPU) if targets.cuda else ("cpu",)
    wanted = [each for each in specification.kernels if each.device in devices]
    return list({(each.device, each.function): each for each in wanted}.values())


def _refuse_targets(specifications: Sequence[Specification], targets: BuildTargets) -> None:
    """Refuse targets that no compiler knows."""
    kernels = [each.function for one in specifications for each in _wanted(one, targets)]
    languages = {found.key: found for found in map(language_of, kernels) if found is not None}
    for language in languages.values():
        named = [each for device in language.devices for each in targets.of_device(device)]
        if language.ahead is not None and named:
            language.ahead.refuse([each for each in kernels if language_of(each) is language], named)


def _linked(specification: Specification, targets: BuildTargets) -> list[_Linked] | str:
    """Return an operator's kernels for a library (none if none is needed), or why it cannot be served."""
    if specification.origin.kind != "declared":
        return "it is adopted from existing code that already computes it"
    if specification.random:
        return "it draws from torch's random state"
    found = []
    try:
        for each in _wanted(specification, targets):
            kernel, language = each.function, language_of(each.function)
            ahead = None if language is None else language.ahead
            if ahead is None or not isinstance(kernel, BuiltKernel):
                written = kernel.language if isinstance(kernel, BuiltKernel) else "Python"
                return f"its kernel for `{each.device}` at {each.where} is in {written}"
            linked = ahead.linked(kernel, targets.of_device(each.device) or ("native",))
            if isinstance(linked, str):
                return linked
            if linked.unsized:
                return linked.unsized
            found.append(_Linked(each.device, kernel, linked))
    except errors.KernelSignatureError as error:
        return error.problem
    lowering = specification.schema.lowering
    kept = (
        specification.opaque or specification.inline is False or (lowering is not None and lowering.objects)
    )
    if kept and not found:
        return "it has no kernel in C++, and compiled code does not contain its reference"
    return found


def _accepted(specification: Specification, kernels: Sequence[_Linked]) -> tuple[str, ...] | str:
    """Return the layouts that its arguments may have, or why they are unknown."""
    dtypes = [dtype for each in kernels for dtype in each.kernel.dtypes or ()]
    dtype = torch.float32 if torch.float32 in dtypes or not dtypes else dtypes[0]
    accepted = accepted_layouts(specification, dtype)
    if accepted is None:
        return (
            "no samples show that its results are contiguous: give the operator samples, and let its "
            "reference end in `.contiguous()`"
        )
    return accepted


def _refused(given: Sequence[Specification], reasons: dict[str, str]) -> errors.ServingError:
    places = {each.name: each.where for each in given}
    lines = [f"    {name}, {places[name]}: {reason}" for name, reason in reasons.items()]
    return errors.ServingError(
        f"{len(reasons)} of {len(given)} operators cannot be served without Python",
        got="\n".join(lines).lstrip(),
        hint="name only the other operators, or add the missing parts",
    )


def _served(
    specification: Specification, kernels: Sequence[_Linked], accepted: Sequence[str]
) -> list[ServedOperator]:
    """Return the entries of an operator in a library; one with hidden results has an entry for them, too.

    Args:
        specification: The operator.
        kernels: Its kernels.
        accepted: See `accepted_layouts`.
    """
    schema = specification.schema
    built: dict[str, list[ServedKernel]] = {}
    for each in kernels:
        built.setdefault(each.device, []).append(ServedKernel(each.linked.build(), each.kernel.copies_back))
    every = tuple(range(len(schema.results)))
    named = [(specification.dispatched_name, schema.visible, False)]
    if schema.hidden:
        named.append((specification.dispatched_name + HIDDEN_SUFFIX, every, True))
    return [
        ServedOperator(
            name=name,
            schema=schema.void.text(name.partition("::")[2], with_hidden=hidden),
            digest=operator_digest(specification, cuda=GPU in built),
            kernels=built,
            names=schema.names,
            arguments=kernels[0].linked.arguments,
            accepted=tuple(accepted),
            results=len(schema.results),
            shown=shown,
            shapes="" if specification.shapes is None else specification.shapes.text,
            sizing=sizing_of(specification.shapes, schema) or (),
            returning="" if schema.returns is None else schema.text(specification.short_name),
        )
        for name, shown, hidden in named
    ]
