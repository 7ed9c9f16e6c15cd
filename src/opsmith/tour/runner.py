"""The tour: its stages in order, a summary, and an index page of all files.

To add a stage, write a module with `run(context)`, and add it to `STAGES`.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import multiprocessing
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import opsmith
from opsmith import errors
from opsmith.core.output_file import replacing
from opsmith.extras import install
from opsmith.tour import decoder, digits, linear_fit, onnx_export, operator_pages, operators, pictures
from opsmith.tour.stage import StageResult, TourContext, TourStage, write_json

STAGES = (
    TourStage(
        "checks",
        "check every operator that the tour uses, quickly",
        operators.run,
        prepare=operators.build_kernels,
    ),
    TourStage("linear", "learn a plane with the linear operator", linear_fit.run, background=True),
    TourStage(
        "pages",
        "time involution, and write a page about each operator",
        operator_pages.run,
        ("matplotlib", "onnx", "onnxscript", "onnxruntime", "pygraphviz"),
        prepare=operator_pages.build_emulated_kernels,
    ),
    TourStage(
        "digits",
        "read handwritten digits with a network of our own operators",
        digits.run,
        ("sklearn",),
        background=True,
    ),
    TourStage(
        "pictures",
        "draw graphs and learning curves",
        pictures.run,
        ("matplotlib", "pygraphviz"),
    ),
    TourStage(
        "onnx",
        "export both models to ONNX, and run them in ONNX Runtime",
        onnx_export.run,
        ("sklearn", "onnx", "onnxscript", "onnxruntime"),
        background=True,
    ),
    TourStage(
        "decoder",
        "write text with a small language model, whose cache is written in place",
        decoder.run,
        background=True,
    ),
)


@dataclass(frozen=True)
class FinishedStage:
    """A stage that has run, with its result and time."""

    stage: TourStage
    result: StageResult
    seconds: float


def run_tour(context: TourContext, stages: Sequence[TourStage] = STAGES) -> bool:
    """Run the stages, print a summary, and write it to `summary.json` and `index.html`.

    Background stages run in a second process from the start; their output is printed when their turn comes.

    Args:
        context: Arguments of every stage.
        stages: Stages to run, in this order.

    Returns:
        True if every stage reached its target.

    Raises:
        MissingExtraError: If a package that a stage needs is missing; raised before any stage runs.
    """
    for stage in stages:
        refuse_missing(stage)
    start = perf_counter()
    finished: list[FinishedStage] = []
    with _started(stages, context) as running:
        for number, stage in enumerate(stages, start=1):
            context.console.print(f"\n[bold]{number}. {stage.title}[/bold]")
            if stage.name in running:
                one, printed = running[stage.name].result()
                context.console.print(Text.from_ansi(printed.rstrip()), soft_wrap=True)
            else:
                one = _finished(stage, context)
            finished.append(one)
    summary = _summary(context, finished, perf_counter() - start)
    write_json(context.out / "summary.json", summary)
    path = write_index(context.out, summary)
    context.console.print(_table(finished))
    context.console.print(f"results: {path}", highlight=False, markup=False, soft_wrap=True)
    return bool(summary["passed"])


def _finished(stage: TourStage, context: TourContext) -> FinishedStage:
    start = perf_counter()
    result = stage.run(context)
    return FinishedStage(stage, result, perf_counter() - start)


@contextmanager
def _started(
    stages: Sequence[TourStage], context: TourContext
) -> Iterator[Mapping[str, Future[tuple[FinishedStage, str]]]]:
    """Start background stages in a second process, one after the other, and yield their results by name."""
    if not any(stage.background for stage in stages):
        yield {}
        return
    options = {each.name: getattr(context, each.name) for each in fields(context) if each.name != "console"}
    # An interrupt ends the second process without a traceback.
    pool = ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_DFL)
    )
    try:
        console = context.console.width, context.console.color_system
        running = {}
        for stage in stages:
            if stage.prepare is not None:
                pool.submit(stage.prepare)
            if stage.background:
                running[stage.name] = pool.submit(_finished_apart, stage, options, *console)
        yield running
    finally:
        pool.shutdown(cancel_futures=True)


def _finished_apart(
    stage: TourStage, options: Mapping[str, Any], width: int, color_system: Any
) -> tuple[FinishedStage, str]:
    """Run a stage in the second process; return its result and its printed output."""
    printed = io.StringIO()
    console = Console(file=printed, width=width, color_system=color_system)
    return _finished(stage, TourContext(console=console, **options)), printed.getvalue()


def refuse_missing(stage: TourStage) -> None:
    """Refuse a stage that needs a package which is not installed.

    Raises:
        MissingExtraError: If one is missing; the hint is the command that installs it.
    """
    for package in stage.needs:
        if importlib.util.find_spec(package) is None:
            raise errors.MissingExtraError(
                f"the tour's stage `{stage.name}` needs the package `{package}`",
                got=f"no module named {package!r}",
                hint=install("tour"),
            )


def _summary(context: TourContext, finished: Sequence[FinishedStage], seconds: float) -> dict[str, Any]:
    return {
        "passed": all(one.result.passed for one in finished),
        "seconds": round(seconds, 2),
        "device": str(context.device),
        "seed": context.seed,
        "versions": {
            "opsmith": opsmith.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "stages": [
            {
                "name": one.stage.name,
                "title": one.stage.title,
                "passed": one.result.passed,
                "headline": one.result.headline,
                "seconds": round(one.seconds, 2),
                "details": dict(one.result.details),
                "files": [file.relative_to(context.out).as_posix() for file in one.result.files],
            }
            for one in finished
        ],
    }


def _table(finished: Sequence[FinishedStage]) -> Table:
    table = Table("stage", "", "outcome", "seconds", title="The tour")
    for one in finished:
        verdict = "[green]passed" if one.result.passed else "[red]failed"
        table.add_row(one.stage.name, verdict, one.result.headline, f"{one.seconds:.1f}")
    return table


PICTURES = {
    "example-graph.svg": "b + sum(w x): the autograd graph of two small operators",
    "curves.svg": "Learning curves",
    "involution-roofline.svg": "Involution and its reference, and the ceilings of this machine",
    "digits-graph.svg": "The network for digits: the graph of its backward",
}
"""Pictures of the index page with their captions, in this order; missing pictures are left out."""

WIDE = ("curves.svg", "involution-roofline.svg")
"""Pictures that scroll sideways on a narrow screen."""

KINDS = {
    ".html": "pages",
    ".svg": "pictures",
    ".png": "pictures",
    ".onnx": "exported models",
    ".pt": "weights",
    ".txt": "texts",
    ".json": "figures",
}


def write_index(out: Path, summary: Mapping[str, Any]) -> Path:
    """Write `index.html` into the folder of the files that it links.

    Args:
        out: Folder of the results.
        summary: Content of `summary.json`.
    """
    from opsmith.checking.output.html import source, templates

    made = templates("opsmith.tour", "opsmith.pages")
    names = [name for stage in summary["stages"] for name in stage["files"]]
    text = made.get_template("tour.html").render(
        summary=summary,
        pictures=[
            (title, name in WIDE, _data_uri(out / name), _formats_of(name, names))
            for name, title in PICTURES.items()
            if name in names
        ],
        groups=_grouped([*names, "summary.json"]),
        styles=[source(made, "page.css"), source(made, "operator.css")],
        scripts=[],
    )
    path = out / "index.html"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _data_uri(picture: Path) -> str:
    """Encode a picture as a data URI, so that the page needs no further file."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.read_bytes()).decode()}"


def _formats_of(name: str, names: Sequence[str]) -> list[str]:
    """Return the names of a picture in all its formats."""
    stem = name.rpartition(".")[0]
    return [each for each in names if each.rpartition(".")[0] == stem]


def _grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Group files by kind; only the index of a folder is listed."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    for name in names:
        if "/" not in name or name.endswith("/index.html"):
            found.setdefault(KINDS.get(Path(name).suffix, "others"), []).append(name)
    return {kind: files for kind, files in found.items() if files}
