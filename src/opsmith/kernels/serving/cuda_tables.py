"""Tables of the CUDA kernels that a library serves, generated as C++, and the file of their images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opsmith.core.argument_types import NUMBERED
from opsmith.core.schema import Schema
from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.cpp.literals import array, flag, text
from opsmith.kernels.cuda.launch import LaunchRule
from opsmith.kernels.cuda.parameters import CudaParameter
from opsmith.kernels.cuda.rules import KernelRules, ScratchRule
from opsmith.kernels.serving.expressions import rule_in_cpp
from opsmith.torch_library.result_layouts import LAYOUTS

IMAGES = "images.bin"
"""File of all images, which the assembler puts into the library."""
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class ServedImage:
    """Image of an instance.

    Attributes:
        target: `sm_90`, or `compute_90` for PTX.
        content: The image.
        shared: Bytes of static shared memory.
    """

    target: str
    content: bytes
    shared: int


@dataclass(frozen=True, slots=True)
class ServedInstance:
    """Instance of a kernel.

    Attributes:
        name: Name in its images.
        parameters: Parameters of the kernel.
        images: Images, the best first.
    """

    name: str
    parameters: tuple[CudaParameter, ...]
    images: tuple[ServedImage, ...]


@dataclass(frozen=True, slots=True)
class ServedVariant:
    """Instances of a kernel's launches for one dtype, and for one value of each constant.

    Attributes:
        instances: Instance of each launch.
        constants: Constants of the templates of all launches.
        taken: For each argument, result and scratch buffer, the parameter that takes what each launch does.
    """

    instances: tuple[ServedInstance, ...]
    constants: tuple[int, ...]
    taken: Mapping[str, CudaParameter]


@dataclass(frozen=True, slots=True)
class ServedCudaKernel:
    """CUDA kernel of an operator.

    Attributes:
        rules: Launches and buffers; no part is a function in Python.
        variants: Its variants, in the order in which they are tried.
        copies_back: True if what it writes in place may be copied, and back.
    """

    rules: KernelRules
    variants: tuple[ServedVariant, ...]
    copies_back: bool


@dataclass(frozen=True, slots=True)
class ServedCuda:
    """CUDA kernels of an operator.

    Attributes:
        symbol: Name of its table in the library.
        schema: Signature of the operator.
        arguments: Parameters for the arguments.
        kernels: The kernels, in the order in which they are tried.
    """

    symbol: str
    schema: Schema
    arguments: tuple[Parameter, ...]
    kernels: tuple[ServedCudaKernel, ...]


def cuda_tables(operators: Sequence[ServedCuda]) -> tuple[str, bytes]:
    """Return the C++ file of the tables of CUDA kernels, and the content of `IMAGES`.

    Args:
        operators: The operators, at least one.
    """
    images = bytearray()
    lines = ['#include "cuda_tables.h"']
    for number, each in enumerate(operators):
        lines += [
            f"namespace operator_{number} {{",
            "using namespace opsmith;",
            *_operator_lines(each, images),
            "}",
        ]
    lines += [
        'extern "C" {',
        *(
            f"extern const opsmith::CudaOperator {each.symbol};\nconst opsmith::CudaOperator {each.symbol}"
            f" = {{operator_{number}::kernels, {len(each.kernels)}}};"
            for number, each in enumerate(operators)
        ),
        "}",
        f'asm(".section .rodata\\n.balign {ALIGNMENT}\\n.globl opsmith_images\\n.hidden opsmith_images\\n"',
        f'    "opsmith_images: .incbin \\"{IMAGES}\\"\\n.byte 0\\n.previous\\n");',
        "",
    ]
    return "\n".join(lines), bytes(images)


def _operator_lines(operator: ServedCuda, images: bytearray) -> Iterator[str]:
    for number, kernel in enumerate(operator.kernels):
        yield f"namespace kernel_{number} {{"
        yield from _kernel_lines(operator, kernel, images)
        yield "}"
    rows = [_kernel_row(number, each) for number, each in enumerate(operator.kernels)]
    yield array("static const CudaKernel kernels", rows)


def _kernel_row(number: int, kernel: ServedCudaKernel) -> str:
    names = [name for launch in kernel.rules.launches for name in launch.constants]
    own = f"kernel_{number}::"
    fields = [
        f"{own}constants",
        str(len(names)),
        text(", ".join(names)),
        f"{own}launches",
        str(len(kernel.rules.launches)),
        f"{own}variants",
        str(len(kernel.variants)),
        f"{own}buffers",
        f"sizeof {own}buffers / sizeof *{own}buffers * {own}has_buffers",
        flag(kernel.copies_back),
    ]
    return f"{{{', '.join(fields)}}}"


def _kernel_lines(operator: ServedCuda, kernel: ServedCudaKernel, images: bytearray) -> Iterator[str]:
    schema, rules = operator.schema, kernel.rules
    results = [result.name for result in schema.results]
    scratch = [each.name for each in rules.scratch]
    places = {name: at for at, name in enumerate((*schema.names, *results, *scratch))}
    yield _rule(
        "constants", [rule for launch in rules.launches for rule in launch.constants.values()], places
    )
    for at, launch in enumerate(rules.launches):
        for name in ("grid", "block", "shared"):
            yield _rule(f"{name}_{at}", [getattr(launch, name)], places)
        yield array(f"static const int32_t passed_{at}", [str(places[name]) for name in launch.passed])
    calls = [
        f"{{{text(launch.call if launch.entry else 'kernel')}, passed_{at}, "
        f"grid_{at}, block_{at}, shared_{at}}}"
        for at, launch in enumerate(rules.launches)
    ]
    yield array("static const CudaLaunch launches", calls)
    buffers = []
    for at, name in enumerate((*results, *scratch)):
        if name in rules.initial:
            yield _rule(f"initial_{at}", [rules.initial[name]], places)
        size = next((each for each in rules.scratch if each.name == name), None)
        if size is not None:
            yield _rule(f"sizes_{at}", [size.sizes], places)
        buffers.append(_buffer(at, size, name in rules.initial, places))
    yield array("static const CudaBuffer buffers", buffers or ["{}"])
    yield f"static constexpr int has_buffers = {int(bool(buffers))};"
    instances = {id(each): each for variant in kernel.variants for each in variant.instances}
    numbers = {key: number for number, key in enumerate(instances)}
    for key, each in instances.items():
        yield from _instance_lines(numbers[key], each, images)
    rows = []
    for at, variant in enumerate(kernel.variants):
        numbered = [f"&instance_{numbers[id(each)]}" for each in variant.instances]
        yield array(f"static const CudaInstance* const instances_{at}", numbered)
        yield array(f"static const int64_t constants_{at}", map(str, variant.constants))
        yield from _taken_lines(at, operator, variant, results)
        candidate = f"{{parameters_{at}, {len(schema.names) + len(results)}, -1, nullptr, nullptr}}"
        rows.append(f"{{constants_{at}, instances_{at}, {candidate}, taken_{at}}}")
    yield array("static const CudaVariant variants", rows)


def _rule(name: str, rules: Sequence[LaunchRule], places: Mapping[str, int]) -> str:
    body = " ".join(rule_in_cpp(each, places) for each in rules)
    return (
        f"static void {name}(const Scope& scope, std::vector<Term>& parts) "
        f"{{ (void)scope; (void)parts; {body} }}"
    )


def _buffer(at: int, scratch: ScratchRule | None, filled: bool, places: Mapping[str, int]) -> str:
    initial = f"initial_{at}" if filled else "nullptr"
    if scratch is None:
        return f"{{nullptr, -1, -1, {initial}}}"
    if isinstance(scratch.dtype, str):
        return f"{{sizes_{at}, -1, {places[scratch.dtype]}, {initial}}}"
    return f"{{sizes_{at}, {NUMBERED['ScalarType'].index(scratch.dtype)}, -1, {initial}}}"


def _instance_lines(number: int, instance: ServedInstance, images: bytearray) -> Iterator[str]:
    rows = []
    for image in instance.images:
        images.extend(bytes(-len(images) % ALIGNMENT))
        match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", image.target)
        assert match is not None
        suffix = f"'{match[3]}'" if match[3] else "0"
        rows.append(f"{{{flag(match[1] == 'compute')}, {suffix}, {match[2]}, {len(images)}, {image.shared}}}")
        images += image.content
    yield array(f"static const CudaImage images_{number}", rows)
    yield array(
        f"static const CudaParameter parameters_of_{number}", map(_cuda_parameter, instance.parameters)
    )
    yield (
        f"static const CudaInstance instance_{number} = {{{text(instance.name)}, images_{number}, "
        f"{len(rows)}, parameters_of_{number}, {len(instance.parameters)}}};"
    )


def _taken_lines(at: int, operator: ServedCuda, variant: ServedVariant, results: list[str]) -> Iterator[str]:
    taken = [variant.taken.get(name) for name in operator.schema.names]
    every = [parameter or given for parameter, given in zip(taken, operator.arguments, strict=True)]
    rows = [_parameter(each) for each in (*every, *(variant.taken[name] for name in results))]
    yield array(f"static const Parameter parameters_{at}", rows)
    yield array(
        f"static const CudaParameter taken_{at}",
        ["{}" if each is None else _cuda_parameter(each) for each in taken],
    )


def _fields(parameter: Parameter) -> list[int]:
    return [
        PARAMETER_TYPES.index(parameter.type),
        int(parameter.optional),
        int(parameter.written),
        -1 if parameter.dtype is None else NUMBERED["ScalarType"].index(parameter.dtype),
        -1 if parameter.dim is None else parameter.dim,
        LAYOUTS.index(parameter.layout),
    ]


def _parameter(parameter: Parameter) -> str:
    return f"{{{', '.join(map(str, _fields(parameter)))}}}"


def _cuda_parameter(parameter: CudaParameter) -> str:
    more = (parameter.capacity_items, parameter.item, parameter.size, parameter.alignment)
    return f"{{{', '.join(map(str, (*_fields(parameter), *more)))}}}"
