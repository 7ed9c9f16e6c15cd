"""The dynamic axes of an export: which axis of which input has which name, and the sizes that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.exporting.tensors import resized

SMALLEST = 2
"""torch takes a size of 0 or 1 for one that never changes; such an axis is traced at this size."""


@dataclass(frozen=True)
class Axes:
    """Names of dynamic axes.

    Args:
        inputs: Names of the inputs, in order.
        of: For each input, its dynamic axes by position.
    """

    inputs: tuple[str, ...]
    of: tuple[Mapping[int, str], ...]

    def __bool__(self) -> bool:
        return any(self.of)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in the order in which they come."""
        return tuple(dict.fromkeys(name for axes in self.of for name in axes.values()))

    def places(self, name: str) -> str:
        """Where an axis is, in words: `axis 0 of x, axis 1 of y`."""
        found = [
            f"axis {axis} of `{given}`"
            for given, axes in zip(self.inputs, self.of, strict=True)
            for axis, each in sorted(axes.items())
            if each == name
        ]
        return ", ".join(found)

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The size of each axis in these inputs."""
        return {
            name: tensor.shape[axis]
            for tensor, axes in zip(tensors, self.of, strict=True)
            for axis, name in axes.items()
        }

    def at(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """The inputs at other sizes of these axes."""
        return [
            resized(tensor, {axis: sizes[name] for axis, name in axes.items() if name in sizes})
            for tensor, axes in zip(tensors, self.of, strict=True)
        ]

    def dims(self, dim: Any) -> tuple[dict[int, Any], ...]:
        """What `torch.export` calls dynamic shapes, for each input, with this dim for each axis."""
        return tuple(dict.fromkeys(axes, dim) for axes in self.of)


def read_axes(dynamic: Any, names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """The axes that `dynamic=` names.

    Args:
        dynamic: `{"x": {0: "batch"}}`, or None.
        names, tensors: The inputs.

    Raises:
        UsageError: If it is no such mapping, or names an input or axis that is not there.
        DynamicAxisError: If an axis that several inputs have is not of one size, or is empty.
    """
    given = {} if dynamic is None else dynamic
    form = '`dynamic={"x": {0: "batch"}}`'
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise errors.UsageError(
            "the dynamic axes cannot be read",
            argument="dynamic",
            expected="for each input a mapping from axis to name",
            got=repr(dynamic),
            hint=f"write {form}",
        )
    unknown = [name for name in given if name not in names]
    if unknown:
        raise errors.UsageError(
            f"there is no input `{unknown[0]}` whose axes could be dynamic",
            argument="dynamic",
            expected=", ".join(names) or "no inputs",
            got=str(unknown[0]),
            hint="name inputs as the parameters of the model, or as `input_names=` does",
        )
    of = tuple(
        _axes_of(given.get(name, {}), name, tensor) for name, tensor in zip(names, tensors, strict=True)
    )
    axes = Axes(tuple(names), of)
    _refuse_odd_sizes(axes, tensors)
    return axes


def _axes_of(given: Mapping[Any, Any], name: str, tensor: Tensor) -> dict[int, str]:
    found: dict[int, str] = {}
    for axis, title in given.items():
        fits = isinstance(axis, int) and -tensor.ndim <= axis < tensor.ndim
        if not fits or not isinstance(title, str) or not title.isidentifier():
            raise errors.UsageError(
                f"`{name}` has no such dynamic axis",
                argument="dynamic",
                expected=f"axes from {-tensor.ndim} to {tensor.ndim - 1}, with identifiers for names",
                got=f"{{{axis!r}: {title!r}}}",
                hint='write `{0: "batch"}`',
            )
        found[axis % tensor.ndim] = title
    return found


def _refuse_odd_sizes(axes: Axes, tensors: Sequence[Tensor]) -> None:
    for name in axes.names:
        sizes = {
            tensor.shape[axis]
            for tensor, of in zip(tensors, axes.of, strict=True)
            for axis, each in of.items()
            if each == name
        }
        if len(sizes) > 1:
            raise errors.DynamicAxisError(
                f"the axis `{name}` has several sizes in the inputs that are given",
                argument=name,
                expected=f"one size: {axes.places(name)}",
                got=" and ".join(map(str, sorted(sizes))),
                hint="give axes that differ names of their own",
            )
        if 0 in sizes:
            raise errors.DynamicAxisError(
                f"the axis `{name}` is empty in the inputs that are given",
                argument=name,
                expected=f"at least 1: {axes.places(name)}",
                got="0",
                hint="give inputs that hold something; the file takes other sizes all the same",
            )


def traced_inputs(axes: Axes, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs as they are traced: no dynamic axis has a size that torch takes for a constant."""
    small = {name: SMALLEST for name, size in axes.sizes(tensors).items() if size < SMALLEST}
    return axes.at([tensor.detach() for tensor in tensors], small)


def other_sizes(size: int) -> list[int]:
    """Sizes of an axis at which an export is compared beside the given one, in the order of preference.

    Example:
        >>> other_sizes(4)
        [5, 8, 7, 12, 3, 2, 1]
    """
    preferred = [size + 1, 2 * size, 2 * size - 1, 3 * size, size - 1, size // 2, 1]
    return [each for each in dict.fromkeys(preferred) if each > 0 and each != size]
