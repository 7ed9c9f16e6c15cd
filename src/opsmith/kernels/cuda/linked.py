"""CUDA C++ kernel for a library without Python, with its rules, instances and images as constants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from opsmith.build.toolchain import processors
from opsmith.core.argument_types import NUMBERED
from opsmith.core.expression import Expression
from opsmith.kernels.common.ahead import LinkedKernel
from opsmith.kernels.common.dtypes import CPP_TYPES
from opsmith.kernels.common.gpu_resources import MOST_GRID, MOST_THREADS
from opsmith.kernels.common.parameters import Parameter, cpp_arguments
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.cuda.compiler import Instance, compile_to_ptx
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.parameters import CudaParameter, merged_parameters
from opsmith.kernels.cuda.recipe import RulePrograms
from opsmith.kernels.cuda.rules import ScratchRule
from opsmith.kernels.cuda.usage import needed_instances
from opsmith.kernels.runtime.linked_library import ALIGNMENT, LaunchedKernel
from opsmith.kernels.runtime.plan import counted, counted_all, encode_bytes, encode_filled
from opsmith.kernels.runtime.recipe import NotEncodedError, encode_program, encode_programs, sizing_of

PTX = "compute_"


def linked_cuda(kernel: CudaKernel, targets: Sequence[str]) -> LinkedKernel | str:
    """Return a kernel for a library without Python, or why no library can contain it.

    Args:
        kernel: The kernel.
        targets: Architectures to compile for, and finally `compute_90` for later GPUs.

    Raises:
        KernelSignatureError: If kernels cannot take an argument.
    """
    specification = kernel.operator.specification
    schema = specification.schema
    if schema.results and sizing_of(specification.shapes, schema) is None:
        return "only Python knows the sizes of its results on a GPU: give the operator `shapes=`"
    arguments = cpp_arguments(kernel)
    try:
        rules = _encoded_rules(kernel, arguments)
    except NotEncodedError as error:
        return f"{error.rule} of its CUDA kernel at {kernel.where} {error}"
    return LinkedKernel(arguments, partial(_built, kernel, arguments, rules, targets))


def _encoded_rules(kernel: CudaKernel, arguments: Sequence[Parameter]) -> list[int]:
    """Return the rules of a kernel as the numbers that `LaunchedKernel` in launched_kernel.h reads.

    Raises:
        NotEncodedError: If only Python can compute a rule.
    """
    schema, rules = kernel.operator.specification.schema, kernel.rules
    types = {name: each.type for name, each in zip(schema.names, arguments, strict=True)}
    made = [*(each.name for each in schema.results), *(each.name for each in rules.scratch)]
    places = {name: at for at, name in enumerate((*schema.names, *made))}
    programs = RulePrograms(types, made)
    numbers = counted_all(
        [*encode_bytes(name.encode()), *encode_program(programs.programs(rule)[0])]
        for launch in rules.launches
        for name, rule in launch.constants.items()
    )
    numbers += encode_programs(
        [programs.programs(each.sizes) for each in rules.scratch],
        [programs.launch(launch, (), (MOST_THREADS, MOST_GRID[0])) for launch in rules.launches],
    )
    numbers.append(len(rules.initial))
    for name, rule in rules.initial.items():
        (part,) = rule.parts
        number = 0 if isinstance(part, Expression) or callable(part) else part
        numbers += encode_filled(made.index(name), number)
        numbers += [0] if number is part else encode_program(programs.programs(rule)[0])
    numbers += counted_all(_dtype(buffer, places) for buffer in rules.scratch)
    named = [f" `{launch.call}`" if launch.entry else "" for launch in rules.launches]
    numbers += counted_all(encode_bytes(f"its CUDA kernel{each} is not launched".encode()) for each in named)
    passed = ([places[name] for name in launch.passed] for launch in rules.launches)
    return numbers + counted_all(map(counted, passed))


def _dtype(buffer: ScratchRule, places: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of a buffer's dtype, or the place of the value that has this dtype."""
    if isinstance(buffer.dtype, str):
        return -1, places[buffer.dtype]
    return NUMBERED["ScalarType"].index(buffer.dtype), -1


def _built(
    kernel: CudaKernel, arguments: Sequence[Parameter], rules: list[int], targets: Sequence[str]
) -> LaunchedKernel:
    """Compile the instances of a kernel.

    Raises:
        CompileError, ToolchainError: If NVRTC refuses a kernel, or is missing.
        KernelSignatureError, LaunchError, MissingSamplesError, SampleError: See `needed_instances`.
    """
    architecture = targets[0]
    # This also plans each sample, so that faults which a call would find raise an error now.
    needed_instances(kernel, architecture, partial(sample_values, kernel.operator))
    variants = variants_of(kernel)
    instances = list(dict.fromkeys(each for variant in variants for each in variant))
    described = dict(zip(instances, kernel.candidates(instances, architecture), strict=True))
    with ThreadPoolExecutor(processors()) as pool:
        compiled = list(pool.map(partial(_images, kernel, targets), instances))
    images = bytearray()
    numbers = [*rules, len(instances)]
    for instance, (name, listed) in zip(instances, compiled, strict=True):
        numbers += [*encode_bytes(name.encode()), len(listed)]
        for target, content, shared in listed:
            match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", target)
            assert match is not None
            numbers += [*encode_bytes(match[1].encode()), *encode_bytes(match[3].encode())]
            numbers += [int(match[2]), len(images), shared]
            images += content.ljust(-(-len(content) // ALIGNMENT) * ALIGNMENT, b"\0")
        numbers += _encoded(described[instance])
    passed = [launch.passed for launch in kernel.rules.launches]
    schema = kernel.operator.specification.schema
    numbers.append(len(variants))
    for variant in variants:
        constants = [value for each in variant for _, value in each.constants]
        taken = merged_parameters(kernel, zip(passed, (described[each] for each in variant), strict=True))
        every = [taken.get(name, given) for name, given in zip(schema.names, arguments, strict=True)]
        every += [taken[each.name] for each in schema.results]
        numbers += [*counted(constants), *counted([*map(instances.index, variant)]), *_encoded(every)]
    return LaunchedKernel(tuple(map(int, numbers)), bytes(images))


def variants_of(kernel: CudaKernel) -> list[tuple[Instance, ...]]:
    """Return the instances of the launches for each dtype, and for each value of constants in a sample."""
    constants = [rules.fixed_constants() for rules in kernel.rules.launches]
    fixed = [each for each in constants if each is not None]
    if len(fixed) == len(constants):
        return [kernel.variant(dtype, fixed) for dtype in kernel.dtypes or (None,)]
    dtypes = kernel.dtypes or tuple(CPP_TYPES)
    samples = (values for dtype in dtypes for values in sample_values(kernel.operator, dtype))
    return list(dict.fromkeys(variant for values in samples for variant in kernel.variants(values)))


def _images(
    kernel: CudaKernel, targets: Sequence[str], instance: Instance
) -> tuple[str, list[tuple[str, bytes, int]]]:
    """Return an instance's name in its images, and the target, content and static shared memory of each."""
    images: list[tuple[str, bytes, int]] = []
    here = [each for each in targets if not each.startswith(PTX)]
    for target in (*here[::-1], *(each for each in targets if each.startswith(PTX))):
        architecture = target.replace(PTX, "sm_")
        cubin = kernel.compile(instance, architecture)
        content = cubin.image
        if target.startswith(PTX):
            content = compile_to_ptx(kernel.source, kernel.operator.name, instance, architecture)
        images.append((target, content, cubin.resources.shared))
    return cubin.name, images


def _encoded(parameters: Sequence[Parameter]) -> list[int]:
    """Return parameters as numbers, with the fields of `DeviceParameter` in launched_kernel.h."""
    unused = (0, 0, 0, 1)  # for a parameter that no launch gets
    return counted_all(
        [*each.numbers(), *(() if isinstance(each, CudaParameter) else unused)] for each in parameters
    )
