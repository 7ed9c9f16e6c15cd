"""`opsmith compile`: compile every kernel for CUDA of files and modules, with or without a GPU."""

from __future__ import annotations

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
from opsmith.core.operator import Operator
from opsmith.kernels.common.gpu_resources import ARCHITECTURES, KernelUsage
from opsmith.kernels.cuda.compiler import known_architectures
from opsmith.kernels.cuda.kernel import CudaKernel
from opsmith.kernels.cuda.nvrtc import find_nvrtc
from opsmith.kernels.gpu_usage import cuda_usage, gpu_kernels, triton_usage
from opsmith.kernels.triton.kernel import TritonKernel
from opsmith.targets import Target

SCHEMA = 1
"""Version of the JSON output; it rises when a key is renamed, removed or changes its meaning."""


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

    `--access` is a model of a GPU's memory: of each line, the requests of warps, and the sectors of global
    memory or wavefronts of shared memory that they take, in units of the fewest possible: ×1.0 is the best,
    and the worst lines come first. It needs a compiler of C++, and no NVRTC.

    **Examples**

    - `opsmith compile operators.py`

    - `opsmith compile mypackage.ops:involution --arch sm_80 --arch sm_100`

    - `opsmith compile operators.py --json > resources.json`

    - `opsmith compile operators.py:transpose --access`

    Exit status: 0 all compile and keep to their limits, 1 one does not, 2 nothing could be compiled; with
    `--access` 0 all were run, 1 one cannot be run or is at fault, 2 none could be run.
    """
    with answering(as_json=as_json, traceback=traceback) as printer:
        if access:
            _model_access(printer, targets, architectures, as_json=as_json)
        kernels = _kernels(targets)
        by_nvrtc = any(isinstance(kernel, CudaKernel) for _, kernel in kernels)
        chosen = _architectures(architectures, by_nvrtc=by_nvrtc)
        used: list[KernelUsage] = []
        refused: list[RejectedKernel] = []
        judged = False  # True once a compiler has seen a kernel
        for operator, kernel in kernels:
            with waiting(f"compiling {escape(operator.name)}"):
                try:
                    if isinstance(kernel, CudaKernel):
                        used += cuda_usage(kernel, chosen)
                    else:
                        used += triton_usage(kernel, chosen)
                except errors.ToolchainError:
                    raise
                except errors.OpsmithError as error:
                    judged |= not isinstance(error, errors.MissingSamplesError)
                    refused.append(RejectedKernel(operator.name, kernel.where, str(error)))
                    complain(error)
        if as_json:
            answer = _to_dict(used, refused, chosen, by_nvrtc=by_nvrtc)
            printer.write_json(answer)
        else:
            _show(printer.console(), used, refused)
    if not used and not judged:
        raise typer.Exit(UNUSABLE)  # samples are missing: nothing was compiled
    raise typer.Exit(FAILED if refused or any(each.faults for each in used) else 0)


def _model_access(
    printer: Output, targets: list[str], architectures: list[str] | None, *, as_json: bool
) -> NoReturn:
    """Show the access model of kernels in CUDA C++, and end the command."""
    if architectures:
        raise errors.UsageError(
            "`--access` runs kernels on the CPU, for no architecture",
            argument="--arch",
            expected="`--access` or `--arch`",
            got="both",
            hint="leave one of them out",
        )
    kernels = _kernels(targets, (CudaKernel,))
    from opsmith.cli.access import access_of  # few commands need the emulation

    answer = access_of([(operator, kernel) for operator, kernel in kernels if isinstance(kernel, CudaKernel)])
    if as_json:
        printer.write_json({"schema": SCHEMA, "access": answer.to_dict()})
    else:
        answer.show(printer.console())
    printer.close()
    if not answer.found and not answer.faulty:
        raise typer.Exit(UNUSABLE)
    raise typer.Exit(FAILED if answer.refused else 0)


def _architectures(named: list[str] | None, *, by_nvrtc: bool) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(named or ARCHITECTURES))
    if not by_nvrtc:
        return chosen  # Triton refuses unknown architectures itself
    known = known_architectures()
    unknown = [each for each in chosen if each.rstrip("af") not in known]
    if unknown:
        version = ".".join(map(str, find_nvrtc().version))
        raise errors.UsageError(
            f"NVRTC of CUDA {version} does not compile for `{unknown[0]}`",
            argument="--arch",
            expected=", ".join(known),
            got=unknown[0],
            hint="write one of these, as `--arch sm_90`; a newer NVRTC knows more: "
            "`pip install -U nvidia-cuda-nvrtc`",
        )
    return chosen


def _kernels(
    targets: list[str], languages: tuple[type[CudaKernel | TritonKernel], ...] = (CudaKernel, TritonKernel)
) -> list[tuple[Operator[..., Any], CudaKernel | TritonKernel]]:
    found: dict[CudaKernel | TritonKernel, Operator[..., Any]] = {}
    for target in targets:
        with waiting(f"importing {escape(target)}"):
            operators = Target.of(target).operators()
        for operator in operators:
            for language in languages:
                found |= dict.fromkeys(gpu_kernels(operator, language), operator)
    if not found:
        alone = TritonKernel not in languages
        raise errors.OperatorNotFoundError(
            f"no operator of {', '.join(f'`{target}`' for target in targets)} has a "
            f"{'kernel in CUDA C++' if alone else 'CUDA kernel'}",
            hint="give it one: `op.kernel('cuda', cuda=..., grid=...)`"
            + ("; kernels in Triton have no access model" if alone else ", or `triton=...`"),
        )
    return [(operator, kernel) for kernel, operator in found.items()]


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
            Text("spills and shared in bytes; occupancy is an estimate, from the samples' blocks", "dim")
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
    used: list[KernelUsage], refused: list[RejectedKernel], architectures: tuple[str, ...], *, by_nvrtc: bool
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "nvrtc": ".".join(map(str, find_nvrtc().version)) if by_nvrtc else None,
        "architectures": list(architectures),
        "passed": not refused and not any(each.faults for each in used),
        "kernels": [asdict(each) for each in used],
        "refused": [asdict(each) for each in refused],
    }
