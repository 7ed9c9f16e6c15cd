"""torch's registry of translations to ONNX, which is made once for all programs of an export."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opsmith.torch_library.torch_messages import quiet_exporter


def onnx_translator(opset: int, table: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that translates modules and programs to ONNX, as `torch.onnx.export` does.

    `torch.onnx.export` reads the source of a thousand translations in each call; here they are read once.

    Args:
        opset: Version of ONNX's operators, 18 or later.
        table: Translations of operators that are not torch's own.
    """
    from torch.onnx._internal.exporter import _core  # imported with the first export, not before

    registry = copy.copy(_torchlib(opset))
    registry.functions = {name: [*functions] for name, functions in registry.functions.items()}
    for operator, function in table.items():
        registry.register_op(operator, function)

    def translate(model: Any, args: tuple[Any, ...] = (), dynamic_shapes: Any = None) -> Any:
        return _core.export(
            model, args, registry=registry, dynamic_shapes=dynamic_shapes, opset_version=opset, verbose=False
        )

    return translate


@functools.cache
def _torchlib(opset: int) -> Any:
    """The translations of torch's own operators: reading their sources takes half of a small export."""
    from torch.onnx._internal.exporter import _registration

    return _registration.ONNXRegistry.from_torchlib(opset_version=opset)


def self_test() -> None:
    """One registry translates a module and a program, and a translation added to it makes nodes."""
    import inspect

    from torch.onnx._internal.exporter import _core, _registration

    assert "registry" in inspect.signature(_core.export).parameters
    assert "opset_version" in inspect.signature(_registration.ONNXRegistry.from_torchlib).parameters
    try:
        import onnxscript
    except ModuleNotFoundError:  # no export is possible, and an export reports this
        return
    opset: Any = onnxscript.values.Opset("", 18)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    module, args = Module().eval(), (torch.ones(2),)
    with quiet_exporter():
        translate = onnx_translator(18, {torch.ops.aten.relu.default: lambda x: opset.Abs(x)})
        programs = translate(module, args), translate(torch.export.export(module, args))
    for program in programs:
        assert [node.op_type for node in program.model.graph] == ["Abs"], "its table does not make the nodes"
