"""`opsmith compile`: compile every kernel for CUDA of files and modules, with or without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from opsmith import errors
from opsmith.cli.guard import FAILED, UNUSABLE, complain, waiting
from opsmith.cli.options import AsJson, Traceback
from opsmith.cli.output import Output, answering, columns
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage
from opsmith.kernels.common.gpu_usage import GpuUsage
from opsmith.kernels.languages import with_gpu_usage
from opsmith.targets import Target

SCHEMA = 1
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


GpuKernel = tuple[Operator[..., Any], BuiltKernel[Any], GpuUsage]
"""Kernel of an operator, with the compiler of its language."""


@dataclass(frozen=True, slots=True)
class RejectedKernel:
    """A kernel that does not compile, cannot be launched with its parameters, or cannot be counted.

    Attributes:
        operator: Name of the operator.
        where: `file:line` of the kernel.
        message: The reason.
    """

    operator: str
    where: str
    message: str


def compile(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE_OR_MODULE[:NAME]...",
            help="`.py` files or modules, with the name of one operator; without `:NAME`, all operators.",
        ),
    ],
    architectures: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Compile for this architecture, such as `sm_90`; may be given again. By default: "
            f"{' and '.join(ARCHITECTURES)}.",
        ),
    ] = None,
    access: Annotated[
        bool,
        typer.Option(
            "--access",
            help="Run kernels in CUDA C++ on the CPU instead, and show how well each line accesses memory.",
        ),
    ] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Compile kernels for CUDA, and show the resources of each: registers, spills, shared memory, occupancy.

    Kernels in CUDA C++ need NVRTC, those in Triton need Triton; neither needs a GPU or a driver. A kernel is
    compiled for the operator's samples. Limits that its author states, `max_spills=` and `max_registers=`,
    are enforced for CUDA C++.

    `--access` is a model of a GPU's memory. For each line it shows the requests of warps, and the sectors of
    global memory or wavefronts of shared memory that they need. The ratio compares this with the minimum:
    ×1.0 is best, and the worst lines come first. It needs a C++ compiler, but no NVRTC.

    **Examples**

    - `opsmith compile operators.py`

    - `opsmith compile mypackage.ops:involution --arch sm_80 --arch sm_100`

    - `opsmith compile operators.py --json > resources.json`

    - `opsmith compile operators.py:transpose --access`

    Exit status: 0 all kernels compile and meet their limits, 1 a kernel does not, 2 nothing could be
    compiled. With `--access`: 0 all kernels ran, 1 a kernel cannot be run or has a fault, 2 none could be
    run.
    """
    with answering(as_json=as_json, traceback=traceback) as printer:
        if access:
            _model_access(printer, targets, architectures, as_json=as_json)
        kernels = _kernels(targets)
        chosen = tuple(dict.fromkeys(architectures or ARCHITECTURES))
        compilers = {type(usage): usage for _, _, usage in kernels}.values()
        for compiler in compilers:
            compiler.refuse_unknown(chosen)
        used: list[KernelUsage] = []
        refused: list[RejectedKernel] = []
        judged = False  # True once a compiler has seen a kernel
        for operator, kernel, usage in kernels:
            with waiting(f"compiling {escape(operator.name)}"):
                try:
                    used += usage.usage(kernel, chosen)
                except errors.ToolchainError:
                    raise
                except errors.OpsmithError as error:
                    judged |= not isinstance(error, errors.MissingSamplesError | errors.LanguageError)
                    refused.append(RejectedKernel(operator.name, kernel.where, str(error)))
                    complain(error)
        if as_json:
            versions = {name: version for each in compilers for name, version in each.versions().items()}
            answer = _to_dict(used, refused, chosen, versions)
            printer.write_json(answer)
        else:
            _show(printer.console(), used, refused)
    if not used and not judged:
        raise typer.Exit(UNUSABLE)  # samples are missing, so nothing was compiled
    raise typer.Exit(FAILED if refused or any(each.faults for each in used) else 0)


def _model_access(
    printer: Output, targets: list[str], architectures: list[str] | None, *, as_json: bool
) -> NoReturn:
    """Show the access model of kernels in CUDA C++, and end the command."""
    if architectures:
        raise errors.UsageError(
            "`--access` runs kernels on the CPU, so it takes no `--arch`",
            argument="--arch",
            expected="`--access` or `--arch`",
            got="both",
            hint="leave one of them out",
        )
    kernels = _kernels(targets, with_access=True)
    from opsmith.cli.access import access_of  # few commands need the emulation

    answer = access_of(kernels)
    if as_json:
        printer.write_json({"schema": SCHEMA, "access": answer.to_dict()})
    else:
        answer.show(printer.console())
    printer.close()
    if not answer.found and not answer.faulty:
        raise typer.Exit(UNUSABLE)
    raise typer.Exit(FAILED if answer.refused else 0)


def _kernels(targets: list[str], *, with_access: bool = False) -> list[GpuKernel]:
    found: dict[BuiltKernel[Any], GpuKernel] = {}
    for target in targets:
        with waiting(f"importing {escape(target)}"):
            operators = Target.of(target).operators()
        for operator in operators:
            for kernel, usage in with_gpu_usage(operator.specification.kernels):
                if usage.models_access or not with_access:
                    found[kernel] = operator, kernel, usage
    if not found:
        raise errors.OperatorNotFoundError(
            f"no operator of {', '.join(f'`{target}`' for target in targets)} has a "
            f"{'kernel in CUDA C++' if with_access else 'CUDA kernel'}",
            hint="add a kernel: `op.kernel('cuda', cuda=..., grid=...)`"
            + ("; kernels in Triton have no access model" if with_access else ", or `triton=...`"),
        )
    return [*found.values()]


def _show(console: Console, used: list[KernelUsage], refused: list[RejectedKernel]) -> None:
    numbers = ("registers", "spills", "shared", "threads", "occupancy")
    rows = columns("kernel", "for", "", *numbers, right=numbers, whole=True)
    for each in used:
        shared = f"{each.shared + each.dynamic_shared}"
        rows.add_row(
            each.operator,
            each.instance,
            each.architecture,
            str(each.registers),
            Text(str(each.spills), style="red" if each.faults else ""),
            shared,
            "?" if each.threads is None else str(each.threads),
            "?" if each.occupancy is None else f"{each.occupancy:.0%}",
        )
    if used:
        console.print(rows)
        console.print(
            Text("spills and shared memory are in bytes; occupancy is an estimate from the samples", "dim")
        )
    for each in used:
        for fault in each.faults:
            name = ", ".join(filter(None, [each.operator, each.instance, each.architecture]))
            console.print(Text(f"{name}: {fault}\n  {each.where}", style="red"), soft_wrap=True)
    wrong = {each.where for each in refused} | {each.where for each in used if each.faults}
    total = len(wrong | {each.where for each in used})
    kernels = f"{total} kernel{'' if total == 1 else 's'}"
    console.print(f"{len(wrong)} of {kernels} failed" if wrong else f"{kernels} compiled")


def _to_dict(
    used: list[KernelUsage],
    refused: list[RejectedKernel],
    architectures: tuple[str, ...],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "nvrtc": None,
        **versions,
        "architectures": list(architectures),
        "passed": not refused and not any(each.faults for each in used),
        "kernels": [asdict(each) for each in used],
        "refused": [asdict(each) for each in refused],
    }
