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
from opsmith.core.formula import Formula
from opsmith.torch_library.distributed import mesh_of, replicated


@dataclass(frozen=True, slots=True)
class Form:
    """What a gradient must look like: the form of its tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    mesh: Any = None

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of this tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device, mesh_of(tensor))

    def zeros(self) -> Tensor:
        """A zero tensor of this form."""
        return self.placed(torch.zeros(self.shape, dtype=self.dtype, device=self.device))

    def placed(self, value: Tensor) -> Tensor:
        """A value of this form, or of one that broadcasts with it; beside a DTensor, one of its mesh."""
        return value if self.mesh is None or mesh_of(value) else replicated(value, self.mesh)


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
    about = _About("gradient", label, operator, formula, form)
    gradient = _dense(gradient, about)
    if gradient.shape != form.shape:
        if not _broadcasts(form.shape, gradient.shape):
            raise about.shape_error(gradient, "or a shape that broadcasting made of it", "are summed")
        gradient = gradient.sum_to_size(form.shape)
    if gradient.is_complex() and not form.dtype.is_complex:
        gradient = gradient.real
    return _of_form(gradient, about, mixed=mixed)


def fit_tangent(
    tangent: Any, form: Form, *, label: str, operator: str, formula: Formula, mixed: bool
) -> Tensor:
    """A formula's tangent, made to fit its result: broadcast to its shape, complex where the result is.

    The arguments and what is raised are those of `fit`, with the result in the place of the input.
    """
    if isinstance(tangent, Zero):
        return form.zeros()
    about = _About("tangent", label, operator, formula, form)
    tangent = _dense(tangent, about)
    if tangent.shape != form.shape:
        if not _broadcasts(tangent.shape, form.shape):
            raise about.shape_error(tangent, "or a shape that broadcasts to it", "the result has")
        tangent = tangent.expand(form.shape)
    return _of_form(tangent, about, mixed=mixed)


@dataclass(frozen=True, slots=True)
class _About:
    """What a message about an answer says: what it is, of what, by which formula."""

    what: str
    label: str
    operator: str
    formula: Formula
    form: Form

    def shape_error(self, value: Tensor, also: str, look: str) -> errors.GradientShapeError:
        """The error for an answer of a shape that does not fit."""
        return errors.GradientShapeError(
            f"the {self.what} of `{self.label}` has the wrong shape",
            operator=self.operator,
            argument=self.label,
            expected=f"{list(self.form.shape)}, {also}",
            got=str(list(value.shape)),
            where=self.formula.where,
            hint=_shape_mend(value, self.form, look),
        )


def _dense(value: Any, about: _About) -> Tensor:
    """An answer as a dense tensor."""
    if not isinstance(value, Tensor):
        raise errors.GradientTypeError(
            f"the {about.what} of `{about.label}` is not a tensor",
            operator=about.operator,
            argument=about.label,
            expected=f"a tensor of shape {list(about.form.shape)}",
            got=shown(value),
            where=about.formula.where,
            hint=f"return a tensor, or `opsmith.zero` where the {about.what} is zero",
        )
    return about.form.placed(value if value.layout is torch.strided else value.to_dense())


def _of_form(value: Tensor, about: _About, *, mixed: bool) -> Tensor:
    """An answer of the right shape, with the dtype and on the device that it must have."""
    source = "grad" if about.what == "gradient" else "result"
    if value.device != about.form.device:
        raise errors.GradientDeviceError(
            f"the {about.what} of `{about.label}` is on the wrong device",
            operator=about.operator,
            argument=about.label,
            expected=str(about.form.device),
            got=str(value.device),
            where=about.formula.where,
            hint=f"make new tensors with `device={source}.device`",
        )
    wanted = about.form.dtype
    if value.dtype != wanted:
        widened = mixed and (value.is_floating_point() or (value.is_complex() and wanted.is_complex))
        if not widened and not (wanted.is_complex and value.dtype == wanted.to_real()):
            raise errors.GradientDtypeError(
                f"the {about.what} of `{about.label}` has the wrong dtype",
                operator=about.operator,
                argument=about.label,
                expected=str(wanted),
                got=str(value.dtype),
                where=about.formula.where,
                hint=f"make new tensors with `dtype={source}.dtype`, and cast nothing",
            )
        value = value.to(wanted)
    return value


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether broadcasting a tensor of this shape gives one of the target's."""
    if len(shape) > len(target):
        return False
    trailing = target[len(target) - len(shape) :]
    return all(size in (1, given) for size, given in zip(shape, trailing, strict=True))


def _shape_mend(value: Tensor, form: Form, look: str) -> str:
    if list(value.shape) == list(reversed(form.shape)):
        return "transpose it: `.mT`"
    if value.numel() == torch.Size(form.shape).numel():
        return "reshape it, or look whether two dimensions are swapped"
    return f"look at which dimensions {look}"
