"""`opsmith.page`: write a page for each operator, and an index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.checking import Report
from opsmith.checking.effort import effort_named
from opsmith.core.call_arguments import shown
from opsmith.core.operator import Operator
from opsmith.core.output_file import replace_file, unwritable, writable_file
from opsmith.kernels.common.gpu_resources import ARCHITECTURES
from opsmith.pages.content import PageContent, collect_content

Progress = Callable[[str, int, int], None]


# A caller's inference mode would disable autograd.
@torch.inference_mode(mode=False)
def page(
    operators: Operator[..., Any] | Iterable[Operator[..., Any]],
    path: str | os.PathLike[str],
    *,
    reports: Mapping[str, Report] | None = None,
    benchmarks: Mapping[str, Benchmark] | bool = False,
    effort: str = "default",
    seed: int = 0,
    architectures: Sequence[str] = ARCHITECTURES,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write a page about an operator; for several, a page each and an index.

    A page is one file that needs no network: signature, sources, origin of each aspect, check, graph, saved
    tensors, kernels and their resources, benchmarks, ONNX exports. A section that cannot be made contains the
    reason.

    Args:
        operators: An operator, or several.
        path: A name that ends in `.html`, for one operator; else a folder.
        reports: Existing reports of `check`, by operator; other operators are checked.
        benchmarks: Existing results of `benchmark`, by operator; True measures all at quick effort.
        effort: Effort of the check: `quick`, `default` or `thorough`.
        seed: Seed of the check.
        architectures: Architectures for which CUDA kernels are compiled, such as `sm_90`. progress: Function
            that is called with the current step, the number of finished operators, and the number of all
            operators.

    Returns:
        The files, the index first.

    Raises:
        UsageError: If a file cannot be written, or an argument has the wrong type.

    Example:
        >>> import tempfile, torch, opsmith
        >>> @opsmith.operator("demo::twice")
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> (file,) = opsmith.page(twice, tempfile.mkdtemp() + "/twice.html")
        >>> "write <code>@twice.samples</code>" in file.read_text()  # needed for check and graph
        True
    """
    from opsmith.pages.html import rendered, rendered_index

    every = _operators(operators)
    effort_named(effort)
    _refuse_others(reports or {}, Report, "reports", "check")
    if not isinstance(benchmarks, bool):
        _refuse_others(benchmarks, Benchmark, "benchmarks", "benchmark")
    paths = page_paths(path, [each.name for each in every])
    contents: list[PageContent] = []
    for done, (operator, file) in enumerate(zip(every, paths.pages, strict=True)):

        def step(what: str, done: int = done, name: str = operator.name) -> None:
            if progress is not None:
                progress(f"{name}: {what}", done, len(every))

        content = collect_content(
            operator,
            step,
            report=(reports or {}).get(operator.name),
            benchmark=benchmarks.get(operator.name) if isinstance(benchmarks, Mapping) else benchmarks,
            effort=effort,
            seed=seed,
            architectures=architectures,
        )
        contents.append(content)
        write(file, rendered(contents[-1], None if paths.index is None else paths.index.name))
    if progress is not None:
        progress("", len(every), len(every))
    if paths.index is None:
        return paths.pages
    write(paths.index, rendered_index(contents, [file.name for file in paths.pages]))
    return (paths.index, *paths.pages)


def _refuse_others(given: Any, kind: type, argument: str, made_by: str) -> None:
    """Raise an error unless results are a mapping from operator names to results of these operators.

    Raises:
        UsageError: If a result does not fit.
    """
    fits = isinstance(given, Mapping)
    found: dict[Any, Any] = dict(given) if fits else {}
    misfits = []
    for name, each in found.items():
        if not isinstance(each, kind):
            misfits.append(f"for `{name}` {shown(each)}")
        elif (other := getattr(each, "operator", None)) != name:
            misfits.append(f"for `{name}` one of `{other}`")
    if not fits or misfits:
        raise errors.UsageError(
            f"`{argument}` must be a mapping from the operators' names",
            argument=argument,
            expected=f"the result of `opsmith.{made_by}` for each operator, by the operator's name",
            got=misfits[0] if misfits else shown(given),
            hint=f"write `{argument}={{found.operator: found}}`",
        )


def _operators(given: Any) -> list[Operator[..., Any]]:
    every = [given] if isinstance(given, Operator) or not isinstance(given, Iterable) else [*given]
    misfits = [each for each in every if not isinstance(each, Operator)]
    if misfits or not every:
        raise errors.UsageError(
            "a page is about operators of opsmith",
            argument="operators",
            expected="an operator, or several",
            got=shown(misfits[0]) if misfits else "none",
            hint='declare it with `@opsmith.operator("mylib::name")`, or adopt it with `opsmith.adopt`',
        )
    names = [each.name for each in every]
    return [each for at, each in enumerate(every) if each.name not in names[:at]]


SUFFIXES = (".html", ".htm")
INDEX = "index.html"


@dataclass(frozen=True)
class PagePaths:
    """Paths of pages.

    Args:
        pages: A file for each operator, in order.
        index: The index; None for a single page.
    """

    pages: tuple[Path, ...]
    index: Path | None


def page_paths(path: Any, names: Sequence[str]) -> PagePaths:
    """The paths of all pages.

    Args:
        path: A name that ends in `.html`, for one operator; else a folder, which may not exist yet.
        names: The operators' names.

    Raises:
        UsageError: If a file cannot be written, or one file is given for several pages.

    Example:
        >>> page_paths("pages", ["demo::twice"])
        PagePaths(pages=(PosixPath('pages/demo-twice.html'),), index=PosixPath('pages/index.html'))
    """
    target = Path(os.fsdecode(path)) if isinstance(path, str | os.PathLike) else None
    if target is None or (target.suffix.lower() in SUFFIXES and not target.is_dir()):
        if target is not None and len(names) != 1:
            raise errors.UsageError(
                f"`{target}` is one file, but there are {len(names)} operators",
                argument="path",
                expected="a folder, for an index and a page for each operator",
                got=", ".join(f"`{name}`" for name in names),
                hint=f"write `{target.with_suffix('')}`, or name one operator",
            )
        return PagePaths((writable_file(path, "page.html"),), None)
    if target.exists() and not target.is_dir():
        raise unwritable(target, "a file", "name it `page.html`, or name a folder")
    pages = tuple(target / f"{name.replace('::', '-')}.html" for name in names)
    for each in (*pages, target / INDEX) if target.is_dir() else (target,):
        writable_file(each, "page.html")
    return PagePaths(pages, target / INDEX)


def write(file: Path, text: str) -> None:
    """Write a page; characters that UTF-8 cannot represent become `?`.

    Raises:
        UsageError: If it cannot be written.
    """
    replace_file(file, text.encode("utf-8", errors="replace"))
