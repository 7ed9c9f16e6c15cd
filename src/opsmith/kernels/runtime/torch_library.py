"""Library of kernels for torch's dispatcher, without Python: write its tables, and link it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opsmith.build.cache import CacheEntry
from opsmith.kernels.cpp.compiler import STUB
from opsmith.kernels.cpp.kernel_object import flags_for
from opsmith.kernels.cpp.literals import array, flag, text
from opsmith.kernels.runtime.library import CALLING, HERE, PLANNING, PROCESSOR
from opsmith.kernels.runtime.linked_library import (
    ALIGNMENT,
    IMAGES,
    KernelObject,
    LaunchedKernel,
    LinkedLibrary,
    table_file,
)
from opsmith.kernels.runtime.operators import LinkedOperator, whole

LIBRARY = "served.so"
_LIBRARY = LinkedLibrary(
    program="torch",
    name=LIBRARY,
    source=HERE / "torch_library.cpp",
    headers=(
        *CALLING,
        *PLANNING,
        *(HERE / name for name in ("torch_library.h", "launches.h", "driver.h")),
        PROCESSOR,
    ),
    exported="{ local: *; };\n",
    # Torch keeps the kernels until the process ends.
    linking=("-Wl,-z,nodelete", "-Wl,--no-as-needed"),
    stubs=(STUB,),
)
KEYS = {"cpu": "CPU", "cuda": "CUDA"}
"""Keys of torch's dispatcher, by type of device."""


@dataclass(frozen=True, slots=True)
class ServedKernel:
    """Kernel of an operator in a library.

    Attributes:
        built: The kernel.
        copies_back: True if arguments that it writes in place may be copied into a layout and back.
    """

    built: KernelObject | LaunchedKernel
    copies_back: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOperator(LinkedOperator):
    """Operator that a library registers with torch's dispatcher.

    Attributes:
        schema: The schema in torch's language, with the name after `::`.
        digest: Digest of the author's sources.
        kernels: The kernels by type of device, in the order in which they are tried.
        shown: Positions of the results that callers get.
        returning: Schema of the operator that returns the first argument, written by this one; or empty.
    """

    schema: str
    digest: str
    kernels: Mapping[str, Sequence[ServedKernel]]
    shown: tuple[int, ...]
    returning: str = ""


def link_library(operators: Sequence[ServedOperator], processor: str = "native") -> CacheEntry:
    """Link kernels into a library that registers operators with torch's dispatcher.

    Args:
        operators: The operators, at least one.
        processor: The processor for which the CPU kernels were compiled.

    Returns:
        Entry whose directory contains `LIBRARY`.

    Raises:
        ToolchainError: If there is no compiler, or linking fails.
    """
    built = dict.fromkeys(
        kernel.built for each in operators for kernels in each.kernels.values() for kernel in kernels
    )
    objects = [each for each in built if isinstance(each, KernelObject)]
    launched = [each for each in built if isinstance(each, LaunchedKernel)]
    images = b"".join(each.images for each in launched)
    tables = served_tables(operators, objects, launched)
    names = [each.name for each in operators]
    return _LIBRARY.link(names, objects, tables, flags_for(processor), images)


def served_tables(
    operators: Sequence[ServedOperator], objects: Sequence[KernelObject], launched: Sequence[LaunchedKernel]
) -> str:
    """Return the C++ file of a library's tables.

    Args:
        operators: The operators, at least one.
        objects: The linked kernels of the operators.
        launched: The GPU kernels of the operators, in the order of their images in `IMAGES`.
    """
    lines = [
        *(_included_images() if launched else ()),
        "template <int at, int device> void serve(uint64_t* stack, uint64_t, uint64_t) "
        "{ opsmith::serve(at, device, stack); }",
        *(
            f"template <int at> void {function}(uint64_t* stack, uint64_t, uint64_t) "
            f"{{ opsmith::{function}(at, stack); }}"
            for function in ("describe", "serve_returning")
        ),
    ]
    fields: dict[KernelObject | LaunchedKernel, tuple[str, str, str]] = {
        each: (f"&{each.table}", "nullptr", "nullptr") for each in objects
    }
    first = 0
    for number, kernel in enumerate(launched):
        lines.append(array(f"const int64_t launched_{number}", map(whole, kernel.numbers)))
        fields[kernel] = "nullptr", f"launched_{number}", f"opsmith_images + {first}"
        first += len(kernel.images)
    for at, each in enumerate(operators):
        devices = []
        for number, (device, kernels) in enumerate(each.kernels.items()):
            rows = []
            for tried in kernels:
                instances, numbers, content = fields[tried.built]
                rows.append(f"{{{instances}, {flag(tried.copies_back)}, {numbers}, {content}}}")
            lines.append(array(f"const opsmith::OperatorKernel kernels_{at}_{device}", rows))
            devices.append(
                f"{{{text(KEYS[device])}, serve<{at}, {number}>, {{kernels_{at}_{device}, {len(rows)}}}}}"
            )
        lines += [
            array(f"const opsmith::ServedDevice devices_{at}", devices),
            array(f"const int32_t shown_{at}", map(str, each.shown)),
            *each.tables(at),
        ]
    rows = [_operator(at, each) for at, each in enumerate(operators)]
    lines.append(array("const opsmith::ServedOperator operators", rows))
    last = f"const opsmith::ServedLibrary opsmith_served = {{operators, {len(rows)}, used_instructions}};"
    return table_file("torch_library.h", objects, lines, last)


def _included_images() -> list[str]:
    return [
        f'asm(".section .rodata\\n.balign {ALIGNMENT}\\n.globl opsmith_images\\n.hidden opsmith_images\\n"',
        f'    "opsmith_images: .incbin \\"{IMAGES}\\"\\n.byte 0\\n.previous\\n");',
    ]


def _operator(number: int, operator: ServedOperator) -> str:
    fields = [
        operator.row(number),
        text(operator.schema),
        text(operator.digest),
        f"describe<{number}>",
        f"devices_{number}",
        str(len(operator.kernels)),
        f"shown_{number}",
        str(len(operator.shown)),
        text(operator.returning) if operator.returning else "nullptr",
        f"serve_returning<{number}>",
    ]
    return f"{{{', '.join(fields)}}}"
