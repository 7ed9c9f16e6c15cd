"""ONNX Runtime: a file, run on tensors of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.exporting.packages import onnxruntime
from opsmith.exporting.tensors import DTYPES, ONNX_TYPES

ERRORS_ONLY = 3


_BESIDE = {
    "session.optimized_model_external_initializers_file_name": "weights",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}
"""Has an optimised graph written without its weights, of which there may be more than a file holds."""
_MERGING = ["ConstantFolding", "CommonSubexpressionElimination"]


class Runtime:
    """A file in ONNX Runtime, on the CPU.

    Args:
        source: A path, or a model as bytes.
        name: What messages call it.
        library: A library of kernels for its nodes.
        optimised: Where the graph is written as it runs. Nodes that are alike are not made one then, and
            constants are computed in every run, so that each node of the file can be told in it.

    Attributes:
        inputs: For each input its name, dtype and shape; a size that varies has a name.
        outputs: The same of each output.

    Raises:
        OnnxRuntimeError: If ONNX Runtime does not load it.
    """

    def __init__(
        self,
        source: Path | bytes,
        name: str,
        *,
        library: Path | None = None,
        optimised: Path | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = torch.get_num_threads()
        self.name = name
        if library is not None:
            _register(options, library)
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
            for key, value in _BESIDE.items():
                options.add_session_config_entry(key, value)
        try:
            self._session = onnxruntime.InferenceSession(
                str(source) if isinstance(source, Path) else source,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=[] if optimised is None else _MERGING,
            )
        except Exception as error:  # it raises classes of its own, which share no base
            raise _not_loaded(name, error) from error
        self.inputs = tuple(map(_described, self._session.get_inputs()))
        self.outputs = tuple(map(_described, self._session.get_outputs()))

    def run(self, tensors: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> list[Tensor]:
        """The outputs for these inputs, by name; all outputs, or those that are named.

        Raises:
            OnnxRuntimeError: If ONNX Runtime refuses the call.
        """
        given = {name: _to_runtime(tensor) for name, tensor in tensors.items()}
        try:
            values = self._session.run_with_ort_values(None if outputs is None else list(outputs), given)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise errors.OnnxRuntimeError(
                f"ONNX Runtime does not run `{self.name}`: {reason(error)}",
                got=shapes,
                hint="call it with sizes that the model takes in PyTorch; an axis that is not in `dynamic=` "
                "has the size of the export",
            ) from error
        return [_from_runtime(value) for value in values]


def _register(options: Any, library: Path) -> None:
    try:
        options.register_custom_ops_library(str(library.absolute()))
    except Exception as error:  # it raises classes of its own, which share no base
        raise errors.OnnxRuntimeError(
            f"ONNX Runtime does not load the library `{library.name}`: {reason(error)}",
            expected="a library that `export_onnx(..., library=...)` wrote, on a machine of this kind",
            got=library.name,
            hint="export it again, on this machine; it needs the OpenMP of g++ (libgomp)",
        ) from error


def _described(value: Any) -> tuple[str, torch.dtype | None, tuple[int | str | None, ...]]:
    return value.name, DTYPES.get(value.type), tuple(value.shape)


def _to_runtime(tensor: Tensor) -> Any:
    held = tensor.detach().cpu().contiguous()
    if held.dtype is torch.bfloat16:  # which NumPy lacks
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            held.view(torch.uint16).numpy(), ONNX_TYPES[torch.bfloat16]
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(held.numpy())


def _from_runtime(value: Any) -> Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value).clone()
    return torch.from_numpy(value.numpy())


def reason(error: BaseException) -> str:
    """What ONNX Runtime says, without its numbers and places in its own source."""
    text = " ".join(str(error).split())
    while text.startswith("[ONNXRuntimeError]"):
        text = text.removeprefix("[ONNXRuntimeError]").partition(" : ")[2].partition(" : ")[2] or text[18:]
        text = text.partition(" : ")[2] or text
    return text


def _not_loaded(name: str, error: BaseException) -> errors.OnnxRuntimeError:
    text = reason(error)
    lacks = "is not a registered function/op" in text
    return errors.OnnxRuntimeError(
        f"ONNX Runtime has no kernel for a node of `{name}`: {text}"
        if lacks
        else f"ONNX Runtime does not load `{name}`: {text}",
        hint="export it with `body='function'`, which every runtime runs, or give the runtime a library that "
        "has the kernel"
        if lacks
        else "export it in a type that ONNX Runtime computes on the CPU: float32, float64, mostly float16; "
        "or with `verify=False` for another runtime",
    )
