"""Library of kernels for torch's dispatcher, without Python: its tables, and how it is linked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opsmith.build.cache import CacheEntry
from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.cpp.compiler import STUB
from opsmith.kernels.cpp.kernel_object import flags_for
from opsmith.kernels.cpp.literals import array, flag, text
from opsmith.kernels.runtime.library import CALLING, HERE, PLANNING, PROCESSOR
from opsmith.kernels.runtime.linked_library import ANY_PROCESSOR, GeneratedFile, KernelObject, LinkedLibrary
from opsmith.kernels.serving.cuda_tables import IMAGES, ServedCuda, cuda_tables

REGISTERING = HERE / "library.cpp"
LIBRARY = "served.so"
_CUDA = HERE.parent / "serving"
CALLING_CUDA = _CUDA / "cuda.cpp"
_AS_PYTHON = (*ANY_PROCESSOR, "-ffp-contract=off")
"""Flags for launch expressions: a multiplication and an addition round twice."""
_LIBRARY = LinkedLibrary(
    program="torch",
    kind="torch library",
    part="torch library part",
    name=LIBRARY,
    headers=(
        *(_CUDA / name for name in ("expression.h", "cuda_tables.h", "cuda_driver.h")),
        HERE / "library.h",
        *CALLING,
        *PLANNING,
        PROCESSOR,
    ),
    exported="{ local: *; };\n",
    # Torch holds the kernels as long as the process.
    linking=("-Wl,-z,nodelete", "-Wl,--no-as-needed"),
    stubs=(STUB,),
)
ACCEPTED = ("any", "nested", "contiguous")
"""Layouts of an argument for which the results are contiguous, in the order of `enum Accepted`."""


@dataclass(frozen=True, slots=True)
class ServedOperator:
    """Operator that a library gives to torch's dispatcher.

    Attributes:
        name: `namespace::name`.
        schema: Its schema in torch's language, with the name after `::`.
        digest: Digest of what its author wrote.
        kernels: Names of its kernels' tables in the library, in the order in which they are tried.
        copies_back: For each kernel, True if what it writes in place may be copied, and back.
        names: Names of the arguments.
        arguments: Parameters for the arguments.
        accepted: For each argument, one of `ACCEPTED`.
        results: Number of results.
        shown: Positions of the results that callers get.
        shapes: Text of `shapes=`; may be empty.
        sizing: Sizes of the results by it: see `sizing_of`; empty if it does not tell them.
        returning: Schema of the operator that returns its first argument, which this one writes; or empty.
        cuda: Name of the table of its CUDA kernels; empty if it has none.
    """

    name: str
    schema: str
    digest: str
    kernels: tuple[str, ...]
    copies_back: tuple[bool, ...]
    names: tuple[str, ...]
    arguments: tuple[Parameter, ...]
    accepted: tuple[str, ...]
    results: int
    shown: tuple[int, ...]
    shapes: str
    sizing: tuple[int, ...]
    returning: str = ""
    cuda: str = ""


CUDA_KEY = "CUDA"
"""Key of torch's dispatcher for tensors on NVIDIA's GPUs."""


def link_library(
    kernels: Sequence[KernelObject],
    operators: Sequence[ServedOperator],
    processor: str = "native",
    cuda: Sequence[ServedCuda] = (),
) -> CacheEntry:
    """Link kernels into a library that gives operators to torch's dispatcher.

    Args:
        kernels: All kernels in C++ of the operators.
        operators: The operators, at least one.
        processor: The one that the kernels were compiled for.
        cuda: CUDA kernels of operators.

    Returns:
        Entry whose directory holds `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or it does not link.
    """
    generated = [GeneratedFile("tables.cpp", served_tables(operators), flags_for(processor), {})]
    compiled = [_LIBRARY.compiled(REGISTERING)]
    if cuda:
        text, images = cuda_tables(cuda)
        generated.append(GeneratedFile("cuda_tables.cpp", text, _AS_PYTHON, {IMAGES: images}))
        compiled.append(_LIBRARY.compiled(CALLING_CUDA))
    names = [each.name for each in operators]
    return _LIBRARY.link(names, kernels, generated, compiled)


def served_tables(operators: Sequence[ServedOperator]) -> str:
    """Return the C++ file of a library's tables.

    Args:
        operators: The operators, at least one.
    """
    kernels = dict.fromkeys(kernel for each in operators for kernel in each.kernels)
    cuda = dict.fromkeys(each.cuda for each in operators if each.cuda)
    lines = [
        '#include "library.h"',
        '#include "processor.h"',
        'extern "C" {',
        *(f"extern opsmith::Exported {kernel};" for kernel in kernels),
        *(f"extern const opsmith::CudaOperator {symbol};" for symbol in cuda),
        "}",
        "namespace {",
        *(
            f"template <int at> void {function}(uint64_t* stack, uint64_t, uint64_t) "
            f"{{ opsmith::{function}(at, stack); }}"
            for function in ("serve", "describe", "serve_returning", "serve_cuda")
        ),
    ]
    for at, each in enumerate(operators):
        tables = map(_kernel, each.kernels, each.copies_back)
        arguments = map(_argument, each.names, each.arguments, each.accepted)
        lines += [
            array(f"const opsmith::OperatorKernel kernels_{at}", tables),
            array(f"const opsmith::OperatorArgument arguments_{at}", arguments),
            array(f"const int32_t shown_{at}", map(str, each.shown)),
            array(f"const int64_t sizing_{at}", map(str, each.sizing)),
        ]
    rows = [_operator(at, each) for at, each in enumerate(operators)]
    return "\n".join(
        [
            *lines,
            array("const opsmith::ServedOperator operators", rows),
            "}  // namespace",
            "namespace opsmith {",
            "void compute_cuda(const ServedOperator&, const Signed&, Arguments&, uint64_t*);",
            "}",
            "const opsmith::ServedLibrary opsmith_served = "
            f"{{operators, {len(rows)}, used_instructions, {text(CUDA_KEY)}, "
            f"{'opsmith::compute_cuda' if cuda else 'nullptr'}}};",
            "",
        ]
    )


def _operator(number: int, operator: ServedOperator) -> str:
    described = [
        text(operator.name),
        f"arguments_{number}",
        str(len(operator.arguments)),
        str(operator.results),
        text(operator.shapes),
        f"sizing_{number}" if operator.sizing else "nullptr",
    ]
    fields = [
        f"{{{', '.join(described)}}}",
        text(operator.schema),
        text(operator.digest),
        f"serve<{number}>",
        f"describe<{number}>",
        f"{{kernels_{number}, {len(operator.kernels)}}}",
        f"shown_{number}",
        str(len(operator.shown)),
        text(operator.returning) if operator.returning else "nullptr",
        f"serve_returning<{number}>",
        f"&{operator.cuda}" if operator.cuda else "nullptr",
        f"serve_cuda<{number}>",
    ]
    return f"{{{', '.join(fields)}}}"


def _kernel(table: str, copies_back: bool) -> str:
    return f"{{&{table}, {flag(copies_back)}}}"


def _argument(name: str, parameter: Parameter, accepted: str) -> str:
    type = PARAMETER_TYPES.index(parameter.type)
    flags = f"{flag(parameter.optional)}, {flag(parameter.written)}"
    return f"{{{text(name)}, {type}, {flags}, {ACCEPTED.index(accepted)}}}"
