"""What a node of autograd keeps for the backward: what it saved, and what a Function has put on its `ctx`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opsmith.drawing.calls import tensors_in
from opsmith.torch_library import capabilities
from opsmith.torch_library.recorded_as import recorded_as


def kept_by(node: Any) -> dict[str, Any] | None:
    """What a node saved, by name, as `capabilities.saved_tensors` tells it; None if it was freed."""
    try:
        return capabilities.saved_tensors(node)
    except RuntimeError as error:
        if "freed" not in str(error):
            raise
        return None


def on_context(node: Any) -> dict[str, Tensor]:
    """Tensors that the `forward` of a Function has set as attributes of its `ctx`, by name.

    They live as long as the graph does, and no backward frees them. An operator's `ctx` is not its author's.
    """
    if recorded_as(node) is not None:
        return {}
    found = {}
    for name, value in getattr(node, "__dict__", {}).items():
        several = list(tensors_in(value))
        for number, tensor in enumerate(several):
            found[f"ctx.{name}" + (f"[{number}]" if len(several) > 1 else "")] = tensor
    return found
