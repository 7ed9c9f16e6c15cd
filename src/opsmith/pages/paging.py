"""`opsmith.page`: what is known about operators, as files to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.benchmarking import Benchmark
from opsmith.checking import Report
from opsmith.checking.effort import effort_named
from opsmith.core.calls import shown
from opsmith.core.operator import Operator
from opsmith.kernels.cuda_report import ARCHITECTURES
from opsmith.pages.content import Content
from opsmith.pages.looking import Wanted, look_at
from opsmith.pages.places import read_places, write

Progress = Callable[[str, int, int], None]


# In a caller's inference mode there would be nothing to differentiate.
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
    """Write a page about an operator; about several, an index and a page each.

    A page is one file that asks no network for anything: signature and sources, what is handwritten and what
    is derived, the check, the graph, what is saved, kernels and what they take, benchmarks, ONNX. A section
    that cannot be made says why.

    Args:
        operators: An operator, or several.
        path: A name that ends in `.html`, for one operator; else a folder.
        reports: What `check` has found already, by operator; the others are checked.
        benchmarks: What `benchmark` has measured, by operator; True: all are measured now, at quick effort.
        effort: Of the check: `quick`, `default` or `thorough`.
        seed: Of the check.
        architectures: What kernels for CUDA are compiled for, as `sm_90`.
        progress: Called with what is looked at next, how many operators are done, and how many there are.

    Returns:
        The files, the one to open first first.

    Raises:
        UsageError: If nothing can be written there, or something else is given than operators, or than what
            was found of them.
        MissingExtraError: If the package for pages is missing.

    Example:
        >>> import tempfile, torch, opsmith
        >>> @opsmith.operator("demo::twice")
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> (file,) = opsmith.page(twice, tempfile.mkdtemp() + "/twice.html")
        >>> "write <code>@twice.samples</code>" in file.read_text()  # of them it would be checked, and drawn
        True
    """
    from opsmith.pages.rendering import rendered, rendered_index

    every = _operators(operators)
    effort_named(effort)
    _refuse_others(reports or {}, Report, "reports", "check")
    if not isinstance(benchmarks, bool):
        _refuse_others(benchmarks, Benchmark, "benchmarks", "benchmark")
    places = read_places(path, [each.name for each in every])
    contents: list[Content] = []
    for done, (operator, file) in enumerate(zip(every, places.pages, strict=True)):

        def say(what: str, done: int = done, name: str = operator.name) -> None:
            if progress is not None:
                progress(f"{name}: {what}", done, len(every))

        wanted = Wanted(
            (reports or {}).get(operator.name),
            benchmarks.get(operator.name) if isinstance(benchmarks, Mapping) else benchmarks,
            effort,
            seed,
            architectures,
        )
        contents.append(look_at(operator, wanted, say))
        write(file, rendered(contents[-1], None if places.index is None else places.index.name))
    if progress is not None:
        progress("", len(every), len(every))
    if places.index is None:
        return places.pages
    write(places.index, rendered_index(contents, [file.name for file in places.pages]))
    return (places.index, *places.pages)


def _refuse_others(given: Any, kind: type, argument: str, made_by: str) -> None:
    """Refuse what is not found of the operators that it is given for.

    Raises:
        UsageError: Saying what it is.
    """
    fits = isinstance(given, Mapping)
    found: dict[Any, Any] = dict(given) if fits else {}
    strange = []
    for name, each in found.items():
        if not isinstance(each, kind):
            strange.append(f"for `{name}` {shown(each)}")
        elif (other := getattr(each, "operator", None)) != name:
            strange.append(f"for `{name}` one of `{other}`")
    if not fits or strange:
        raise errors.UsageError(
            f"`{argument}` is not by the operators' names",
            argument=argument,
            expected=f"what `opsmith.{made_by}` returned of each operator, by its name",
            got=strange[0] if strange else shown(given),
            hint=f"write `{argument}={{found.operator: found}}`",
        )


def _operators(given: Any) -> list[Operator[..., Any]]:
    every = [given] if isinstance(given, Operator) or not isinstance(given, Iterable) else [*given]
    strange = [each for each in every if not isinstance(each, Operator)]
    if strange or not every:
        raise errors.UsageError(
            "a page is about operators of opsmith",
            argument="operators",
            expected="an operator, or several",
            got=shown(strange[0]) if strange else "none",
            hint='declare it, with `@opsmith.operator("mylib::name")`, or `opsmith.adopt` what there is',
        )
    names = [each.name for each in every]
    return [each for at, each in enumerate(every) if each.name not in names[:at]]
