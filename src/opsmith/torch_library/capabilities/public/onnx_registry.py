"""Translations to ONNX by `torch.onnx.export` alone, which looks them up anew for each program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def onnx_translator(opset: int, table: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """What translates modules and programs to ONNX.

    Args:
        opset: Version of ONNX's operators.
        table: What makes the nodes of operators that are not torch's own.
    """

    def translate(model: Any, args: tuple[Any, ...] = (), dynamic_shapes: Any = None) -> Any:
        return torch.onnx.export(
            model,
            args,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=dynamic_shapes,
            custom_translation_table=dict(table),
            verbose=False,
        )

    return translate
