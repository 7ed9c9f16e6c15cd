"""A library of an exported file's kernels: packaged, loaded into ONNX Runtime, and held to PyTorch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opsmith import errors
from opsmith.build.ort.packaging import LIBRARY, packaged
from opsmith.exporting.calls import Call
from opsmith.exporting.finishing import counted
from opsmith.exporting.natives import Natives, Place, natives
from opsmith.exporting.packages import onnx
from opsmith.exporting.report import Export
from opsmith.exporting.request import Request
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.verifying import Verification


def calls_by_place(pairs: Iterable[tuple[Any, Call]]) -> dict[Place, list[Call]]:
    """The calls that nodes of each type stand for, of those that are alike one.

    Args:
        pairs: Nodes and their calls.
    """
    found: dict[Place, dict[Any, Call]] = {}
    for node, call in pairs:
        found.setdefault((node.domain, node.op_type), {}).setdefault(call.signature(), call)
    return {place: list(calls.values()) for place, calls in found.items()}


def by_library_alone(request: Request, pairs: Iterable[tuple[Any, Call]]) -> bool:
    """Whether nothing but a library can compute the nodes of a file, which is held to PyTorch with it alone.

    That is so of operators without a body, and of bfloat16, for which it has next to no kernels.
    """
    if request.library is None:
        return False
    return any(call.specification.opaque or torch.bfloat16 in call.dtypes() for _, call in pairs)


def with_library(
    export: Export,
    file: Path,
    library: Path,
    calls: Mapping[Place, Sequence[Call]],
    verification: Verification | None,
) -> Export:
    """Write a library with the kernels of a file's nodes, and hold the two together to PyTorch.

    Args:
        export: What was written.
        file: Where it is now.
        library: Where the library goes.
        calls: The calls that its nodes stand for, those in bodies too.
        verification: How it is compared; None where it is not to be.

    Raises:
        ExportError, CompileError, ToolchainError: If it cannot be packaged.
        ExportMismatchError: If the kernels compute something else than PyTorch.
        OnnxRuntimeError: If ONNX Runtime does not take the library, or leaves a node to its body.
    """
    model = onnx.load(str(file), load_external_data=False)
    within = {(function.domain, function.name): list(_places(function.node)) for function in model.functions}
    held = natives(calls, _places(model.graph.node), within if export.body == "function" else None)
    shutil.copyfile(packaged(held.kernels, held.types).directory / LIBRARY, library)
    library.chmod(0o755)
    native = counted(_named(model.graph, held))
    export = replace(export, native=native, left_to_bodies=held.left)
    if verification is None:
        return export
    with tempfile.TemporaryDirectory() as folder:
        optimised = Path(folder) / "optimised.onnx"
        runtime = Runtime(file, export.path.name, library=library, optimised=optimised)
        used = counted(_named(onnx.load(str(optimised), load_external_data=False).graph, held))
    refuse_unused(native, used, export.path.name)
    comparisons, left_out = verification.compare(runtime, library=library)
    return replace(export, comparisons=(*export.comparisons, *comparisons), left_out=left_out)


def refuse_unused(native: Mapping[str, int], used: Mapping[str, int], name: str) -> None:
    """Refuse a library whose kernels ONNX Runtime does not use for every node.

    Args:
        native: How many nodes of each operator it is to compute.
        used: How many are left where ONNX Runtime has put bodies in the place of all others.
        name: Of the file.

    Raises:
        OnnxRuntimeError: If there are fewer.
    """
    for operator, count in native.items():
        if used.get(operator, 0) < count:
            raise errors.OnnxRuntimeError(
                f"ONNX Runtime computes nodes of `{name}` by their bodies, though the library has a kernel",
                operator=operator,
                expected=f"{count} node{'s' * (count != 1)} of it in the optimised graph",
                got=str(used.get(operator, 0)),
                hint="leave `library=` out, and report it to opsmith with the model",
            )


def _named(graph: Any, held: Natives) -> Iterator[str]:
    """The operators of a graph's nodes that a library computes."""
    return (held.operators[place] for place in _places(graph.node) if place in held.operators)


def _places(nodes: Iterable[Any]) -> Iterator[Place]:
    """The types of nodes, and of those in their graphs."""
    for node in nodes:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _places(inner.node)
