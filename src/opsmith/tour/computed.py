"""What computes involution and its gradients: kernels, or the references and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import opsmith
from opsmith.ops.involution import involution, involution_input_gradient, involution_weight_gradient


def computed_by(operator: opsmith.Operator[..., Any], *args: Any) -> str:
    """What computes a call, in a line, as `explain` says: a kernel and where it is, or the reference and why.

    Example:
        >>> import torch
        >>> from opsmith.ops import exp
        >>> line = computed_by(exp, torch.ones(2))
        >>> line.partition(",")[0], line.partition("(")[2]
        ('reference', 'there is no kernel for it)')
    """
    explanation = operator.explain(*args)
    if explanation.forward.startswith("kernel"):
        return explanation.forward
    return f"{explanation.forward} ({'; '.join(explanation.rejected) or 'there is no kernel for it'})"


def involution_computed_by(step: Callable[[], object]) -> dict[str, list[str]]:
    """Run a step of training, and tell what computes each call of involution and of its gradients in it.

    Args:
        step: Computes a loss and its gradients; run once.

    Returns:
        By the name of each of the three operators, every way that its calls are computed.
    """
    calls = _Calls()
    with calls:
        step()
    return calls.computed


class _Calls(TorchFunctionMode):
    """Sees the calls of involution, and in their backward those of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        operators = (involution, involution_input_gradient, involution_weight_gradient)
        self.computed: dict[str, list[str]] = {operator.name: [] for operator in operators}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.opsmith.involution.default:
            self._add(involution, *args)
            if result.requires_grad:
                result.register_hook(lambda grad: self._note_gradients(grad, *args))
        return result

    def _note_gradients(self, grad: Tensor, input: Tensor, weight: Tensor, *steps: Any) -> None:
        size, kernel = tuple(input.shape[2:]), tuple(weight.shape[2:4])
        if input.requires_grad:
            self._add(involution_input_gradient, grad, weight, size, *steps)
        if weight.requires_grad:
            self._add(involution_weight_gradient, grad, input, weight.shape[1], kernel, *steps)

    def _add(self, operator: opsmith.Operator[..., Any], *args: Any) -> None:
        way, known = computed_by(operator, *args), self.computed[operator.name]
        if way not in known:
            known.append(way)
