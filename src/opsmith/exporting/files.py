"""The file itself: written beside its place, checked there, and moved to it when all is well."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opsmith import errors
from opsmith.exporting.packages import onnx, onnx_ir

LIMIT = 2**31 - 2**24
"""Bytes of tensors up to which they stay in the file: a message of protobuf holds less than 2 GiB."""


def save(model: Any, file: Path) -> None:
    """Write a model in onnx_ir's form; beyond the limit, its weights go into `FILE.data`.

    What a node holds, as a constant of a body, stays in the file, and counts.
    """
    held = sum(each.nbytes for each in tensors_in(model))
    onnx_ir.save(model, file, external_data=f"{file.name}.data" if held > LIMIT else None)


def tensors_in(model: Any) -> Iterator[Any]:
    """The tensors that a model in onnx_ir's form holds: weights, and those of nodes, in functions too."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for graph in (*model.graphs(), *model.functions.values()):
        for node in graph.all_nodes():
            for attribute in node.attributes.values():
                if attribute.type == onnx_ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield attribute.value


class Draft:
    """A file that is not at its place yet.

    Args:
        folder: A folder of its own, beside the place.
        path: The place.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path

    @property
    def file(self) -> Path:
        """Where it is now."""
        return self._folder / self._path.name

    def write(self, model: Any) -> None:
        """Write a model in onnx_ir's form, with its tensors; beyond the limit they go into `PATH.data`."""
        self.clear()
        save(model, self.file)

    def clear(self) -> None:
        """Drop what was written."""
        for each in self._folder.iterdir():
            each.unlink()

    def check(self) -> None:
        """Hold the file to ONNX's own rules, types and shapes among them.

        Raises:
            ExportError: If it breaks one.
        """
        try:
            onnx.checker.check_model(str(self.file), full_check=True)
        except Exception as error:  # it raises classes of its own, which share no base
            raise errors.ExportError(
                f"what torch's exporter wrote is no valid file: {' '.join(str(error).split())}",
                hint="try another `opset=`; the model may use an operator that ONNX has in later ones",
            ) from error

    def publish(self) -> None:
        """Move it to its place, in which a file of that name is replaced."""
        for each in sorted(self._folder.iterdir(), key=lambda file: file.name == self._path.name):
            os.replace(each, self._path.parent / each.name)  # the model last: what it refers to is there


@contextmanager
def drafted(path: Path, argument: str = "path") -> Iterator[Draft]:
    """A region with a draft of a file; afterwards nothing of it is left but what was published.

    Args:
        path: Where it goes.
        argument: What names that, for messages.

    Raises:
        UsageError: If the system does not let it be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield Draft(folder, path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise unwritable(path, argument, error.strerror or str(error), "name another one") from error


def unwritable(path: str | Path, argument: str, got: str, hint: str) -> errors.UsageError:
    """The error of a place that no file can be written to."""
    return errors.UsageError(
        f"no file can be written to `{path}`",
        argument=argument,
        expected="a file in a folder that is there, and can be written to",
        got=got,
        hint=hint,
    )
