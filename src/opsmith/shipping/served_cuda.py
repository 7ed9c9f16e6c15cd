"""CUDA kernels of an operator for a library without Python: what it can hold, and their images."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from opsmith import errors
from opsmith.build.toolchain import processors
from opsmith.core.expression import Expression
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import Operator
from opsmith.core.specification import Specification
from opsmith.kernels.common.dtypes import CPP_TYPES
from opsmith.kernels.common.parameters import cpp_arguments
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.cuda.compiler import Cubin, Instance, compile_to_ptx
from opsmith.kernels.cuda.kernel import CudaKernel, cuda_kernels
from opsmith.kernels.cuda.launch import LaunchRule
from opsmith.kernels.cuda.parameters import merged_parameters
from opsmith.kernels.cuda.rules import KernelRules
from opsmith.kernels.cuda.usage import needed_instances
from opsmith.kernels.runtime.recipe import sizing_of
from opsmith.kernels.serving.cuda_tables import (
    ServedCuda,
    ServedCudaKernel,
    ServedImage,
    ServedInstance,
    ServedVariant,
)
from opsmith.shipping.targets import BuildTargets

DEVICE = "cuda"


def in_another_language(name: str, kernel: Kernel) -> str:
    """Return the refusal of a kernel in a language that no library holds."""
    function = kernel.function
    language = function.language if isinstance(function, BuiltKernel) else "Python"
    return f"{name} at {kernel.where} is in {language}"


def cuda_refusal(specification: Specification) -> str | None:
    """Return why a library cannot hold an operator's kernels for GPUs; None if it can."""
    for each in specification.kernels:
        if each.device == DEVICE and not isinstance(each.function, CudaKernel):
            return in_another_language("its kernel for GPUs", each)
    kernels = cuda_kernels(specification)
    if (
        kernels
        and specification.schema.results
        and sizing_of(specification.shapes, specification.schema) is None
    ):
        return "the sizes of its results on a GPU are known in Python alone: give it `shapes=`"
    for kernel in kernels:
        try:
            cpp_arguments(kernel)
        except errors.KernelSignatureError as error:
            return error.problem
        for rule in _rules(kernel.rules):
            if any(callable(part) for part in rule.parts):
                return (
                    f"`{rule.name}` of its CUDA kernel at {kernel.where} is a function in Python: write it "
                    "as an expression, as `ceil(result.numel / 256)`"
                )
            if any(map(_exceeds_64_bits, rule.parts)):
                return f"`{rule.name}` of its CUDA kernel at {kernel.where} has a number of more than 64 bits"
            named = [name for part in rule.parts if isinstance(part, Expression) for name in part.names]
            unread = next((name for name in named if not _is_plain(specification, name)), None)
            if unread is not None:
                return (
                    f"`{rule.name}` of its CUDA kernel at {kernel.where} reads `{unread}`, which C++ does not"
                )
    return None


def _exceeds_64_bits(part: object) -> bool:
    numbers: list[object] = [part]
    if isinstance(part, Expression):
        numbers = [each.value for each in ast.walk(part.tree) if isinstance(each, ast.Constant)]
    return any(isinstance(each, int) and abs(each) >= 2**63 for each in numbers)


def _is_plain(specification: Specification, name: str) -> bool:
    """Return True if C++ has the values of an argument as Python has them."""
    argument = next((each for each in specification.schema.arguments if each.name == name), None)
    if argument is None:
        return True  # a result, or a scratch buffer
    kind = argument.kind
    return kind.base.annotation in ("Tensor", "int", "float", "bool") and kind.structure is None


def _rules(rules: KernelRules) -> Iterator[LaunchRule]:
    for launch in rules.launches:
        yield from (launch.grid, launch.block, launch.shared, *launch.constants.values())
    for scratch in rules.scratch:
        yield scratch.sizes
    yield from rules.initial.values()


def served_cuda(operator: Operator[..., Any], symbol: str, targets: BuildTargets) -> ServedCuda:
    """Compile the CUDA kernels of an operator for a library.

    Args:
        operator: The operator; see `cuda_refusal`.
        symbol: Name of its table in the library.
        targets: Architectures to compile for; the newest one also as PTX, for later GPUs.

    Raises:
        CompileError, ToolchainError: If NVRTC refuses a kernel, or is missing.
        KernelSignatureError, LaunchError, MissingSamplesError, SampleError: See `needed_instances`.
    """
    specification = operator.specification
    kernels = cuda_kernels(specification)
    return ServedCuda(
        symbol,
        specification.schema,
        cpp_arguments(kernels[0]),
        tuple(_served_kernel(each, targets) for each in kernels),
    )


def _served_kernel(kernel: CudaKernel, targets: BuildTargets) -> ServedCudaKernel:
    architecture = targets.cuda[0]
    # This plans each sample, too: what a call would find wrong with the kernel is an error now.
    needed_instances(kernel, architecture, partial(sample_values, kernel.operator))
    variants = variants_of(kernel)
    instances = list(dict.fromkeys(each for variant in variants for each in variant))
    described = dict(zip(instances, kernel.candidates(instances, architecture), strict=True))
    with ThreadPoolExecutor(processors()) as pool:
        images = list(pool.map(partial(_images, kernel, targets), instances))
    served = {
        instance: ServedInstance(name, described[instance], listed)
        for instance, (name, listed) in zip(instances, images, strict=True)
    }
    passed = [rules.passed for rules in kernel.rules.launches]
    return ServedCudaKernel(
        kernel.rules,
        tuple(
            ServedVariant(
                tuple(served[each] for each in variant),
                tuple(int(value) for each in variant for _, value in each.constants),
                merged_parameters(kernel, zip(passed, (described[each] for each in variant), strict=True)),
            )
            for variant in variants
        ),
        kernel.copies_back,
    )


def variants_of(kernel: CudaKernel) -> list[tuple[Instance, ...]]:
    """Return the instances of the launches for each dtype, and for each value of constants in a sample."""
    constants = [rules.fixed_constants() for rules in kernel.rules.launches]
    fixed = [each for each in constants if each is not None]
    if len(fixed) == len(constants):
        return [kernel.variant(dtype, fixed) for dtype in kernel.dtypes or (None,)]
    found: Mapping[tuple[Instance, ...], None] = dict.fromkeys(
        variant
        for dtype in kernel.dtypes or CPP_TYPES
        for values in sample_values(kernel.operator, dtype)
        for variant in kernel.variants(values)
    )
    return list(found)


def _images(
    kernel: CudaKernel, targets: BuildTargets, instance: Instance
) -> tuple[str, tuple[ServedImage, ...]]:
    """Return the name of an instance in its images, and these, the best first."""
    cubins: Sequence[Cubin] = [kernel.compile(instance, each) for each in targets.cuda]
    images = [
        ServedImage(target, cubin.image, cubin.resources.shared)
        for target, cubin in zip(targets.cuda, cubins, strict=True)
    ]
    images.reverse()
    if targets.ptx is not None:
        content = compile_to_ptx(kernel.source, kernel.operator.name, instance, targets.ptx)
        target = targets.ptx.replace("sm_", "compute_")
        images.append(ServedImage(target, content, cubins[-1].resources.shared))
    return cubins[0].name, tuple(images)
