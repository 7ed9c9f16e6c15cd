"""A file of ONNX as a module: tensors of torch in and out, computed by ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.exporting.runtime import Runtime


class OnnxModule(torch.nn.Module):
    """A file in ONNX Runtime; call it as the model that it was exported from, with its tensors alone.

    It computes on the CPU, has no parameters and no gradient, and always evaluates.

    Attributes:
        path: The file.
        library: The library of kernels that computes its nodes; None where it has none.
        input_names, output_names: In order.
    """

    def __init__(self, path: Path, library: Path | None = None) -> None:
        super().__init__()
        self.path, self.library = path, library
        self._runtime = Runtime(path, path.name, library=library)
        self.input_names = tuple(name for name, _, _ in self._runtime.inputs)
        self.output_names = tuple(name for name, _, _ in self._runtime.outputs)
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The outputs for these inputs, by position or by name: a tensor, or a tuple of them.

        Raises:
            OnnxRuntimeError: If they are not what the file takes.
        """
        if len(args) > len(self.input_names):
            raise self._misfit("there are too many inputs", str(len(args)))
        given = dict(zip(self.input_names, args, strict=False))
        twice = next((name for name in kwargs if name in given), None)
        if twice is not None:
            raise self._misfit(f"`{twice}` is given twice", twice)
        given |= kwargs
        self._refuse_misfits(given)
        results = self._runtime.run(given)
        return results[0] if len(results) == 1 else tuple(results)

    def _refuse_misfits(self, given: Mapping[str, Any]) -> None:
        if set(given) != set(self.input_names):
            raise self._misfit("these are not its inputs", ", ".join(given) or "none")
        for name, dtype, shape in self._runtime.inputs:
            tensor = given[name]
            if not isinstance(tensor, Tensor):
                raise self._misfit(f"`{name}` is no tensor", type(tensor).__name__)
            fits = len(shape) == tensor.ndim and all(
                size == own for size, own in zip(shape, tensor.shape, strict=True) if isinstance(size, int)
            )
            if tensor.dtype is not dtype or not fits:
                raise self._misfit(f"`{name}` does not fit", f"{tensor.dtype} {list(tensor.shape)}")

    def _misfit(self, problem: str, got: str) -> errors.OnnxRuntimeError:
        expected = ", ".join(f"{name}: {dtype} {list(shape)}" for name, dtype, shape in self._runtime.inputs)
        return errors.OnnxRuntimeError(
            f"`{self.path.name}` cannot be called so: {problem}",
            expected=expected.replace("'", "") or "no inputs",
            got=got,
            hint="give each input a tensor of its type; an axis without a name has the size of the export",
        )

    def extra_repr(self) -> str:
        """The file, with its inputs and outputs."""
        return f"{str(self.path)!r}, {', '.join(self.input_names)} -> {', '.join(self.output_names)}"

    def __reduce__(self) -> Any:
        return load, (self.path, self.library)


def load(path: str | os.PathLike[str], library: str | os.PathLike[str] | None = None) -> OnnxModule:
    """A file of ONNX as a module, which ONNX Runtime computes.

    Args:
        path: The file.
        library: A library of kernels for its nodes, as `opsmith.export_onnx(..., library=...)` writes it.

    Returns:
        A module; its inputs and outputs are tensors of torch, on the CPU.

    Raises:
        UsageError: If there is no such file.
        OnnxRuntimeError: If ONNX Runtime does not load it, or the library.

    Example:
        >>> import torch, opsmith, tempfile, opsmith.onnx
        >>> file = tempfile.mkdtemp() + "/add.onnx"
        >>> _ = opsmith.export_onnx(opsmith.ops.add, (torch.ones(2), torch.ones(2)), file)
        >>> opsmith.onnx.load(file)(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([4., 6.])
    """
    file = Path(path)
    if not file.is_file():
        raise errors.UsageError(
            f"there is no file `{file}`",
            argument="path",
            expected="a file of ONNX",
            got="a folder" if file.is_dir() else "nothing there",
            hint="export it first: `opsmith.export_onnx(model, args, path)`",
        )
    return OnnxModule(file, None if library is None else Path(library))
