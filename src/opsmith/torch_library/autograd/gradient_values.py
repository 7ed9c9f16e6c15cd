"""Gradients and tangents that formulas return: fitted to the shape, dtype and device of their tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan
from opsmith.core.call_arguments import shown
from opsmith.core.formula import Formula, Zero
from opsmith.core.origins.function_class import ClassFormula
from opsmith.core.specification import Specification
from opsmith.torch_library.dtensor.placements import dtensor, mesh_of, replicated
from opsmith.torch_library.flattening import ResultFlattening

E = TypeVar("E", bound=errors.OpsmithError)


class TensorMetadata(NamedTuple):
    """Shape, dtype, device and mesh of a tensor, which its gradient must have, too."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    mesh: Any = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMetadata:
        """Metadata of this tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device, mesh_of(tensor))

    def describes(self, value: Any) -> bool:
        """Return True for a dense tensor that has this metadata, plain or on a mesh."""
        kind = Tensor if self.mesh is None else dtensor()
        alike = type(value) is kind and value.layout is torch.strided and value.dtype is self.dtype
        return alike and value.device == self.device and value.shape == self.shape

    def zeros(self) -> Tensor:
        """Return a zero tensor with this metadata."""
        return self.placed(torch.zeros(self.shape, dtype=self.dtype, device=self.device))

    def placed(self, value: Tensor) -> Tensor:
        """Place a value on the mesh, if there is one."""
        return value if self.mesh is None or mesh_of(value) else replicated(value, self.mesh)


def fit(
    gradient: Any, expected: TensorMetadata, *, label: str, operator: str, formula: Formula, mixed: bool
) -> Tensor:
    """Fit a gradient to its input: sum over broadcast dimensions; for a real input drop the imaginary part.

    The backward of a class must not return a complex gradient for a real input: autograd refuses it, too.

    Args:
        gradient: Gradient that the formula returned.
        expected: Metadata of the input.
        label: Name of the input, in messages.
        operator: Name of the operator.
        formula: The formula, for its location.
        mixed: True if the call mixed floating dtypes, so that the gradient may have the wider dtype.

    Raises:
        GradientTypeError, GradientShapeError, GradientDtypeError, GradientDeviceError: As their names say.
    """
    if isinstance(gradient, Zero):
        return expected.zeros()
    about = _Subject("gradient", label, operator, formula, expected)
    gradient = _dense(gradient, about)
    if gradient.shape != expected.shape:
        if not _broadcasts(expected.shape, gradient.shape):
            raise about.shape_error(gradient, "or a shape to which it was broadcast", "are summed")
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.is_complex() and not (expected.dtype.is_complex or isinstance(formula, ClassFormula)):
        gradient = gradient.real
    return _matching(gradient, about, mixed=mixed)


def fit_tangent(
    tangent: Any, expected: TensorMetadata, *, label: str, operator: str, formula: Formula, mixed: bool
) -> Tensor:
    """Fit the tangent of a formula to its result: broadcast it, and make it complex if the result is.

    It has the arguments and errors of `fit`, for the result instead of the input.
    """
    if isinstance(tangent, Zero):
        return expected.zeros()
    about = _Subject("tangent", label, operator, formula, expected)
    tangent = _dense(tangent, about)
    if tangent.shape != expected.shape:
        if not _broadcasts(tangent.shape, expected.shape):
            raise about.shape_error(tangent, "or a shape that broadcasts to it", "the result has")
        tangent = tangent.expand(expected.shape)
    return _matching(tangent, about, mixed=mixed)


@dataclass(frozen=True, slots=True)
class _Subject:
    """Subject of an error message: a gradient or tangent, its tensor, and the formula."""

    what: str
    label: str
    operator: str
    formula: Formula
    expected: TensorMetadata

    def error(self, kind: type[E], problem: str, expected: str, got: str, hint: str) -> E:
        """The error for a value that does not fit."""
        return kind(
            f"the {self.what} of `{self.label}` {problem}",
            operator=self.operator,
            argument=self.label,
            expected=expected,
            got=got,
            where=self.formula.where,
            hint=hint,
        )

    def shape_error(self, value: Tensor, also: str, advice: str) -> errors.GradientShapeError:
        """The error for a shape that does not fit."""
        expected, got = f"{list(self.expected.shape)}, {also}", str(list(value.shape))
        hint = _shape_hint(value, self.expected, advice)
        return self.error(errors.GradientShapeError, "has the wrong shape", expected, got, hint)


def _dense(value: Any, about: _Subject) -> Tensor:
    """Return a dense tensor, or raise."""
    if not isinstance(value, Tensor):
        expected = f"a tensor of shape {list(about.expected.shape)}"
        hint = f"return a tensor, or `opsmith.zero` if the {about.what} is zero"
        raise about.error(errors.GradientTypeError, "is not a tensor", expected, shown(value), hint)
    return about.expected.placed(value if value.layout is torch.strided else value.to_dense())


def _matching(value: Tensor, about: _Subject, *, mixed: bool) -> Tensor:
    """Convert a value of the right shape to the expected dtype; raise if the dtype or device is wrong."""
    source = "grad" if about.what == "gradient" else "result"
    device, wanted = about.expected.device, about.expected.dtype
    if value.device != device:
        hint = f"make new tensors with `device={source}.device`"
        problem = "is on the wrong device"
        raise about.error(errors.GradientDeviceError, problem, str(device), str(value.device), hint)
    if value.dtype != wanted:
        widened = mixed and (value.is_floating_point() or (value.is_complex() and wanted.is_complex))
        if not widened and not (wanted.is_complex and value.dtype == wanted.to_real()):
            hint = f"make new tensors with `dtype={source}.dtype`, without casts"
            if value.is_complex() and about.what == "gradient":
                hint = "the input is real: return the real part, `.real`"
            problem = "has the wrong dtype"
            raise about.error(errors.GradientDtypeError, problem, str(wanted), str(value.dtype), hint)
        value = value.to(wanted)
    return value


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return True if a tensor of this shape broadcasts to the target shape."""
    if len(shape) > len(target):
        return False
    trailing = target[len(target) - len(shape) :]
    return all(size in (1, given) for size, given in zip(shape, trailing, strict=True))


def _shape_hint(value: Tensor, expected: TensorMetadata, advice: str) -> str:
    if list(value.shape) == list(reversed(expected.shape)):
        return "transpose it: `.mT`"
    if value.numel() == torch.Size(expected.shape).numel():
        return "reshape it, or check whether two dimensions are swapped"
    return f"check which dimensions {advice}"


class CallMetadata(NamedTuple):
    """Metadata of the tensors of a call.

    Attributes:
        inputs: Metadata of each flat argument that needs a gradient; None for the others.
        shapes: Shape of each flat argument that is a tensor; None for the others.
        results: Metadata of each flat result; None for a missing one.
        mixed: True if the call mixed floating dtypes.
    """

    inputs: tuple[TensorMetadata | None, ...]
    shapes: tuple[torch.Size | None, ...]
    results: tuple[TensorMetadata | None, ...]
    mixed: bool

    @classmethod
    def of(cls, flat: Sequence[Any], results: Sequence[Any], needs: Sequence[bool]) -> CallMetadata:
        """Metadata of these arguments, some of which need a gradient, and results."""
        every = [TensorMetadata.of(value) if isinstance(value, Tensor) else None for value in flat]
        return cls(
            tuple(each if need else None for each, need in zip(every, needs, strict=True)),
            tuple(None if each is None else each.shape for each in every),
            tuple(None if result is None else TensorMetadata.of(result) for result in results),
            _are_mixed({each.dtype for each in every if each is not None}),
        )


def mixes_dtypes(values: Sequence[Any]) -> bool:
    """Return True if the tensors among some values have more than one dtype that can have a gradient."""
    return _are_mixed({each.dtype for each in values if isinstance(each, Tensor)})


def _are_mixed(dtypes: Collection[torch.dtype]) -> bool:
    return len(dtypes) > 1 and sum(map(has_gradient, dtypes)) > 1


def has_gradient(dtype: torch.dtype) -> bool:
    """Return True if tensors of this dtype can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def constant_results(
    flattening: ResultFlattening, specification: Specification, plan: BackwardPlan, results: Sequence[Any]
) -> list[Tensor]:
    """Results without a gradient: declared non-differentiable, or of an integer dtype.

    Raises:
        IntegerResultError: If a formula uses the gradient of a result that has none.
    """
    constant: list[Tensor] = []
    for described, result in zip(flattening.described, results, strict=True):
        if result is None or (described.differentiable and has_gradient(result.dtype)):
            continue
        constant.append(result)
        uses = any(described.gradient_name() in formula.parameters for formula in plan.formulas)
        if described.differentiable and uses and specification.origin.kind != "class":
            raise specification.error(
                errors.IntegerResultError,
                f"an input requires a gradient, but `{described.name}` is {result.dtype}, which has none",
                argument=described.name,
                expected="a floating or complex result, because a formula uses its gradient",
                got=str(result.dtype),
                hint=f"declare `results={{{described.name!r}: opsmith.non_differentiable}}`, "
                "or call it on floating tensors",
            )
    return constant
