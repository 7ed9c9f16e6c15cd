"""Gradients as they come out of formulas, held to the input they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.answers import Zero
from opsmith.core.calls import shown
from opsmith.core.gradients import Formula


@dataclass(frozen=True, slots=True)
class Form:
    """What a gradient must look like: the form of its tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of this tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        """A zero tensor of this form."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def fit(gradient: Any, form: Form, *, label: str, operator: str, formula: Formula, mixed: bool) -> Tensor:
    """A formula's answer, made to fit its input: reduced over broadcast dimensions, real where the input is.

    Args:
        gradient: What the formula returned.
        form: Form of the input.
        label: Name of the input, in messages.
        operator: Name of the operator.
        formula: The formula, for its place.
        mixed: Whether the call mixed floating dtypes, so that the gradient may come in the wider one.

    Raises:
        GradientTypeError, GradientShapeError, GradientDtypeError, GradientDeviceError: As their names say.
    """
    if isinstance(gradient, Zero):
        return form.zeros()
    if not isinstance(gradient, Tensor):
        raise errors.GradientTypeError(
            f"the gradient of `{label}` is not a tensor",
            operator=operator,
            argument=label,
            expected=f"a tensor of shape {list(form.shape)}",
            got=shown(gradient),
            where=formula.where,
            mend="return a tensor, or `opsmith.zero` where the gradient is zero",
        )
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.shape != form.shape:
        if not _reduces_to(gradient.shape, form.shape):
            raise errors.GradientShapeError(
                f"the gradient of `{label}` has the wrong shape",
                operator=operator,
                argument=label,
                expected=f"{list(form.shape)}, or a shape that broadcasting made of it",
                got=str(list(gradient.shape)),
                where=formula.where,
                mend=_shape_mend(gradient, form),
            )
        gradient = gradient.sum_to_size(form.shape)
    if gradient.is_complex() and not form.dtype.is_complex:
        gradient = gradient.real
    if gradient.device != form.device:
        raise errors.GradientDeviceError(
            f"the gradient of `{label}` is on the wrong device",
            operator=operator,
            argument=label,
            expected=str(form.device),
            got=str(gradient.device),
            where=formula.where,
            mend="make new tensors with `device=grad.device`",
        )
    if gradient.dtype != form.dtype:
        widened = mixed and (gradient.is_floating_point() or gradient.is_complex())
        if not widened and not (form.dtype.is_complex and gradient.dtype == form.dtype.to_real()):
            raise errors.GradientDtypeError(
                f"the gradient of `{label}` has the wrong dtype",
                operator=operator,
                argument=label,
                expected=str(form.dtype),
                got=str(gradient.dtype),
                where=formula.where,
                mend="make new tensors with `dtype=grad.dtype`, and cast nothing",
            )
        gradient = gradient.to(form.dtype)
    answer: Tensor = gradient
    return answer


def _reduces_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(target) > len(shape):
        return False
    trailing = shape[len(shape) - len(target) :]
    return all(size in (1, given) for size, given in zip(target, trailing, strict=True))


def _shape_mend(gradient: Tensor, form: Form) -> str:
    if list(gradient.shape) == list(reversed(form.shape)):
        return "transpose it: `.mT`"
    if gradient.numel() == torch.Size(form.shape).numel():
        return "reshape it, or look whether two dimensions are swapped"
    return "look at which dimensions are summed"
