"""Tables of the operators that a library serves, generated as C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opsmith.kernels.common.parameters import PARAMETER_TYPES, Parameter
from opsmith.kernels.cpp.literals import array, flag, text

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


def served_tables(operators: Sequence[ServedOperator]) -> str:
    """Return the C++ file of a library's tables.

    Args:
        operators: The operators, at least one.
    """
    kernels = dict.fromkeys(kernel for each in operators for kernel in each.kernels)
    cuda = dict.fromkeys(each.cuda for each in operators if each.cuda)
    lines = [
        '#include "tables.h"',
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
        arguments = zip(each.names, each.arguments, each.accepted, strict=True)
        lines += [
            array(f"const opsmith::Exported* const kernels_{at}", [f"&{kernel}" for kernel in each.kernels]),
            array(f"const bool copies_back_{at}", map(flag, each.copies_back)),
            array(
                f"const opsmith::ServedArgument arguments_{at}", [_argument(*given) for given in arguments]
            ),
            array(f"const int32_t shown_{at}", map(str, each.shown)),
            array(f"const int64_t sizing_{at}", map(str, each.sizing)),
        ]
    rows = [_operator(at, each) for at, each in enumerate(operators)]
    return "\n".join(
        [
            *lines,
            array("const opsmith::ServedOperator operators", rows),
            "}  // namespace",
            "namespace opsmith { void compute_cuda(const ServedOperator&, const Signed&, uint64_t*); }",
            "const opsmith::ServedLibrary opsmith_served = "
            f"{{operators, {len(rows)}, used_instructions, {text(CUDA_KEY)}, "
            f"{'opsmith::compute_cuda' if cuda else 'nullptr'}}};",
            "",
        ]
    )


def _operator(number: int, operator: ServedOperator) -> str:
    namespace, _, name = operator.name.partition("::")
    fields = [
        text(namespace),
        text(name),
        text(operator.schema),
        text(operator.digest),
        f"serve<{number}>",
        f"describe<{number}>",
        f"kernels_{number}",
        f"copies_back_{number}",
        str(len(operator.kernels)),
        f"arguments_{number}",
        str(len(operator.arguments)),
        f"shown_{number}",
        str(len(operator.shown)),
        str(operator.results),
        text(operator.shapes),
        f"sizing_{number}" if operator.sizing else "nullptr",
        text(operator.returning) if operator.returning else "nullptr",
        f"serve_returning<{number}>",
        f"&{operator.cuda}" if operator.cuda else "nullptr",
        f"serve_cuda<{number}>",
    ]
    return f"{{{', '.join(fields)}}}"


def _argument(name: str, parameter: Parameter, accepted: str) -> str:
    type = PARAMETER_TYPES.index(parameter.type)
    flags = f"{flag(parameter.optional)}, {flag(parameter.written)}"
    return f"{{{text(name)}, {type}, {flags}, {ACCEPTED.index(accepted)}}}"
