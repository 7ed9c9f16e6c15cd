"""Dynamic axes: names and sizes in the inputs, symbolic sizes in a traced program."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.source_lines import user_line_of_frame, user_line_of_traceback
from opsmith.core.tensors import tiled

SMALLEST = 2
"""A dynamic axis is traced at this size or a larger one: torch specialises sizes of 0 and 1."""


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
        """Every name, in order of first use."""
        return tuple(dict.fromkeys(name for axes in self.of for name in axes.values()))

    def positions(self, name: str) -> str:
        """The positions of an axis in words: `axis 0 of x, axis 1 of y`."""
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
            tiled(tensor, {axis: sizes[name] for axis, name in axes.items() if name in sizes})
            for tensor, axes in zip(tensors, self.of, strict=True)
        ]

    def dims(self, dim: Any) -> tuple[dict[int, Any], ...]:
        """The `dynamic_shapes` of `torch.export`: for each input this dim at each dynamic axis."""
        return tuple(dict.fromkeys(axes, dim) for axes in self.of)


def read_axes(dynamic: Any, names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """The axes that `dynamic=` names.

    Args:
        dynamic: `{"x": {0: "batch"}}`, or None.
        names, tensors: The inputs.

    Raises:
        UsageError: If it is no such mapping, or names an input or axis that does not exist.
        DynamicAxisError: If an axis has several sizes, or is empty.
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
                expected=f"one size: {axes.positions(name)}",
                got=" and ".join(map(str, sorted(sizes))),
                hint="give axes that differ names of their own",
            )
        if 0 in sizes:
            raise errors.DynamicAxisError(
                f"the axis `{name}` is empty in the inputs that are given",
                argument=name,
                expected=f"at least 1: {axes.positions(name)}",
                got="0",
                hint="give inputs that hold something; the file takes other sizes all the same",
            )


def traced_inputs(axes: Axes, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs for tracing: every dynamic axis has at least the size 2, since torch specialises 0 and 1."""
    small = {name: SMALLEST for name, size in axes.sizes(tensors).items() if size < SMALLEST}
    return axes.at([tensor.detach() for tensor in tensors], small)


def other_sizes(size: int) -> list[int]:
    """Other sizes of an axis at which an export is compared, the preferred ones first.

    Example:
        >>> other_sizes(4)
        [5, 8, 7, 12, 3, 2, 1]
    """
    preferred = [size + 1, 2 * size, 2 * size - 1, 3 * size, size - 1, size // 2, 1]
    return [each for each in dict.fromkeys(preferred) if each > 0 and each != size]


def varies(size: Any) -> bool:
    """Whether a size is symbolic; a symbol that torch has resolved to a number is not.

    Example:
        >>> varies(3)
        False
    """
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def example_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor during tracing."""
    return tuple(example_size(size) for size in tensor.shape)


def example_size(size: Any) -> int:
    """A size; of a symbolic one, the size during tracing.

    Raises:
        ExportError: If the size depends on the values of tensors.
    """
    if not varies(size):
        return int(size)
    hint = size.node.hint  # `int(size)` would fix it
    if hint is None:
        raise errors.ExportError(
            "the size of a tensor depends on the values of others, and no body can be derived for it",
            got=str(size),
            hint="compute what has such a size outside of the operator, or export it with `body='node', "
            "verify=False`",
        )
    return int(hint)


LOGGER = "torch.fx.experimental.symbolic_shapes"
FIXED = "set_replacement"
"""Beginning of a line in torch's log about a symbol that was replaced by a number."""


class _Specialisations(logging.Handler):
    """Record the user's line whenever torch fixes a size."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record the innermost line of the user."""
        text = record.getMessage()
        if not text.startswith(FIXED):
            return
        line = user_line_of_frame(inspect.currentframe())
        if line is not None:
            self.seen.append((text, f"{line[0]}:{line[1]}"))


def specialising_line(trace: Callable[[], Any], size: int) -> str | None:
    """`file:line` that fixes the size of a dynamic axis; None where torch's log does not name the size.

    torch logs each decision about a size while the line that causes it runs, so the line is read from the
    stack at that moment; the line that torch records may be one of its own.

    Args:
        trace: Traces the program with a dynamic axis.
        size: The size that is fixed.
    """
    logger, watcher = logging.getLogger(LOGGER), _Specialisations()
    before = logger.handlers, logger.level, logger.propagate
    try:
        logger.handlers, logger.propagate = [watcher], False
        logger.setLevel(logging.INFO)
        trace()
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    return next((line for text, line in watcher.seen if f"= {size} " in f"{text} "), None)


def where_called(node: Any) -> str | None:
    """`file:line` of the call that became a node of torch's graph; None where torch has not recorded it."""
    line = user_line_of_traceback(node.meta.get("stack_trace"))
    return None if line is None else f"{line[0]}:{line[1]}"
