"""ONNX Runtime: a file as a session on tensors, and as a module."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.exporting import packages
from opsmith.exporting.dtypes import DTYPES, ONNX_TYPES
from opsmith.extras import install

ERRORS_ONLY = 3


_WEIGHTS_FILE = {
    "session.optimized_model_external_initializers_file_name": "weights",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}
"""Session options that write the weights of an optimised graph to a separate file."""
_MERGING = ["ConstantFolding", "CommonSubexpressionElimination"]


class Runtime:
    """A file in ONNX Runtime, on the CPU.

    Args:
        source: A path, or a model as bytes.
        name: The name in messages.
        library: A library of kernels for its nodes.
        optimised: Path for the optimised graph. With it, equal nodes are not merged and constants are not
            folded, so that each node of the file can be identified in the graph.

    Attributes:
        inputs: Name, dtype and shape of each input; a dynamic size has a name.
        outputs: Name, dtype and shape of each output.

    Raises:
        OnnxRuntimeError: If ONNX Runtime does not load the file.
    """

    def __init__(
        self,
        source: Path | bytes,
        name: str,
        *,
        library: Path | None = None,
        optimised: Path | None = None,
    ) -> None:
        if packages.NO_RUNTIME:
            raise errors.MissingExtraError(packages.NO_RUNTIME, hint=install("onnx"))
        options = packages.onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = torch.get_num_threads()
        self.name, self.library = name, library
        if library is not None:
            _register(options, library)
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
            for key, value in _WEIGHTS_FILE.items():
                options.add_session_config_entry(key, value)
        try:
            self._session = packages.onnxruntime.InferenceSession(
                str(source) if isinstance(source, Path) else source,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=[] if optimised is None else _MERGING,
            )
        except Exception as error:  # its exceptions share no base class
            raise _not_loaded(name, error) from error
        self.inputs = tuple(map(_described, self._session.get_inputs()))
        self.outputs = tuple(map(_described, self._session.get_outputs()))

    def run(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs for these inputs, given by name; inputs that the file does not read are left out.

        Raises:
            OnnxRuntimeError: If ONNX Runtime refuses the call.
        """
        read = {name for name, _, _ in self.inputs}
        given = {name: _to_runtime(tensor) for name, tensor in tensors.items() if name in read}
        try:
            values = self._session.run_with_ort_values(None, given)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise errors.OnnxRuntimeError(
                f"ONNX Runtime does not run `{self.name}`: {reason(error)}",
                got=shapes,
                hint="give sizes that the model takes in PyTorch; an axis that is not in `dynamic=` "
                "must have the size of the export",
            ) from error
        return [_from_runtime(value) for value in values]


def _register(options: Any, library: Path) -> None:
    try:
        options.register_custom_ops_library(str(library.absolute()))
    except Exception as error:  # its exceptions share no base class
        raise errors.OnnxRuntimeError(
            f"ONNX Runtime does not load the library `{library.name}`: {reason(error)}",
            expected="a library that `export_onnx(..., library=...)` wrote, on a machine of this kind",
            got=library.name,
            hint="export the model again on this machine; the library needs the OpenMP of g++ (libgomp)",
        ) from error


def _described(value: Any) -> tuple[str, torch.dtype | None, tuple[int | str | None, ...]]:
    return value.name, DTYPES.get(value.type), tuple(value.shape)


def _to_runtime(tensor: Tensor) -> Any:
    held = tensor.detach().cpu().contiguous()
    if held.dtype is torch.bfloat16:  # NumPy has no bfloat16
        return packages.onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            held.view(torch.uint16).numpy(), ONNX_TYPES[torch.bfloat16]
        )
    return packages.onnxruntime.OrtValue.ortvalue_from_numpy(held.numpy())


def _from_runtime(value: Any) -> Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value).clone()
    return torch.from_numpy(value.numpy())


def reason(error: BaseException) -> str:
    """The message of ONNX Runtime without its error codes and locations."""
    text = " ".join(str(error).split())
    while text.startswith("[ONNXRuntimeError]"):
        text = text.removeprefix("[ONNXRuntimeError]").partition(" : ")[2].partition(" : ")[2] or text[18:]
        text = text.partition(" : ")[2] or text
    return re.sub(r"^Load model from .*? failed:", "", text)  # the path of a draft, which no longer exists


def _not_loaded(name: str, error: BaseException) -> errors.OnnxRuntimeError:
    text = reason(error)
    no_kernel = "is not a registered function/op" in text
    return errors.OnnxRuntimeError(
        f"ONNX Runtime has no kernel for a node of `{name}`: {text}"
        if no_kernel
        else f"ONNX Runtime does not load `{name}`: {text}",
        hint="export the model with `body='function'`, which every runtime runs, or give the runtime a "
        "library that has the kernel"
        if no_kernel
        else "export the model in a dtype that ONNX Runtime computes on the CPU: float32, float64, often "
        "float16; or write `verify=False` for another runtime",
    )


class OnnxModule(torch.nn.Module):
    """A file in ONNX Runtime as a module, which is called like the exported model, with tensors only.

    The module computes on the CPU, has no parameters and no gradients, and is always in evaluation mode.

    Attributes:
        path: The file.
        library: The library of kernels; None if there is none.
        input_names, output_names: Names of the inputs and outputs, in order.
    """

    def __init__(self, path: Path, library: Path | None = None) -> None:
        super().__init__()
        self.path, self.library = path, library
        self._runtime = Runtime(path, path.name, library=library)
        self.input_names = tuple(name for name, _, _ in self._runtime.inputs)
        self.output_names = tuple(name for name, _, _ in self._runtime.outputs)
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The outputs for these inputs, given by position or by name: a tensor, or a tuple of tensors.

        Raises:
            OnnxRuntimeError: If the inputs do not fit the file.
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
            raise self._misfit("their names do not fit", ", ".join(given) or "none")
        for name, dtype, shape in self._runtime.inputs:
            tensor = given[name]
            if not isinstance(tensor, Tensor):
                raise self._misfit(f"`{name}` is not a tensor", type(tensor).__name__)
            fits = len(shape) == tensor.ndim and all(
                size == own for size, own in zip(shape, tensor.shape, strict=True) if isinstance(size, int)
            )
            if tensor.dtype is not dtype or not fits:
                raise self._misfit(f"`{name}` does not fit", f"{tensor.dtype} {list(tensor.shape)}")

    def _misfit(self, problem: str, got: str) -> errors.OnnxRuntimeError:
        expected = ", ".join(f"{name}: {dtype} {list(shape)}" for name, dtype, shape in self._runtime.inputs)
        return errors.OnnxRuntimeError(
            f"`{self.path.name}` cannot be called with these inputs: {problem}",
            expected=expected.replace("'", "") or "no inputs",
            got=got,
            hint="pass a tensor of this dtype for each input; an axis without a name has a constant size",
        )

    def extra_repr(self) -> str:
        """The path of the file, with the names of its inputs and outputs."""
        return f"{str(self.path)!r}, {', '.join(self.input_names)} -> {', '.join(self.output_names)}"

    def __reduce__(self) -> Any:
        return load, (self.path, self.library)


def load(path: str | os.PathLike[str], library: str | os.PathLike[str] | None = None) -> OnnxModule:
    """Load an ONNX file as a module that ONNX Runtime computes.

    Args:
        path: The file.
        library: The library that `opsmith.export_onnx(..., library=...)` wrote for it.

    Returns:
        A module with tensors on the CPU as inputs and outputs.

    Raises:
        UsageError: If the file or the library does not exist.
        OnnxRuntimeError: If ONNX Runtime does not load the file or the library.

    Example:
        >>> import torch, opsmith, tempfile, opsmith.onnx
        >>> file = tempfile.mkdtemp() + "/add.onnx"
        >>> _ = opsmith.export_onnx(opsmith.ops.add, (torch.ones(2), torch.ones(2)), file)
        >>> opsmith.onnx.load(file)(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([4., 6.])
    """
    file = _there(path, "path", "a file of ONNX", "path")
    expected = "a library that `export_onnx(..., library=...)` wrote"
    return OnnxModule(
        file, None if library is None else _there(library, "library", expected, "path, library=library")
    )


def _there(path: str | os.PathLike[str], argument: str, expected: str, given: str) -> Path:
    """Return the path of a file.

    Raises:
        UsageError: If there is no such file.
    """
    file = Path(path)
    if file.is_file():
        return file
    raise errors.UsageError(
        f"there is no file `{file}`",
        argument=argument,
        expected=expected,
        got="a folder" if file.is_dir() else "nothing there",
        hint=f"export it first: `opsmith.export_onnx(model, args, {given})`",
    )
