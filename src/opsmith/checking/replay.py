"""A few lines of Python that show a failure again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.calls import tensors_in

MOST_ELEMENTS = 64
"""A script with more numbers than this is no longer a few lines."""


def replay(
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    ending: Sequence[str],
    more: dict[str, Tensor] | None = None,
) -> str | None:
    """A script that sets up a call and ends in lines that fail.

    Args:
        subject: What is under check.
        sample: The sample that failed.
        flat: Its arguments, as they were when it failed.
        ending: Lines that use `operator` and the arguments by name, and fail.
        more: Other tensors that the ending names.

    Returns:
        The script; None where the arguments cannot be written in a few lines, or the operator is random.
    """
    tensors = {**_arguments(sample, flat), **(more or {})}
    if subject.draws or not all(_writable(value) for value in tensors.values()):
        return None
    elements = sum(value.numel() for value in tensors_in(list(tensors.values())))
    if elements > MOST_ELEMENTS:
        return None
    lines = ["import torch, opsmith", "", f"operator = {_finder(subject)}"]
    lines += [f"{name} = {_written(value)}" for name, value in tensors.items()]
    return "\n".join([*lines, *ending])


def call_code(sample: Sample) -> str:
    """The arguments of a call, as code: every one by its name."""
    return ", ".join(f"{name}={name}" for name in sample.flattening.schema.names)


def visible_code(subject: Subject, position: int, call: str) -> tuple[str, str]:
    """Code for one result of the operator, and for the same result of the reference."""
    schema = subject.specification.schema
    shown = "" if len(schema.visible) == 1 else f"[{position}]"
    every = "" if schema.single else f"[{schema.visible[position]}]"
    return f"operator({call}){shown}", f"operator.reference({call}){every}"


def _arguments(sample: Sample, flat: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(sample.flattening.schema.names, sample.flattening.pack(flat), strict=True))


TEMPORARY = ("checked", "surveyed")
"""Namespaces of operators that a Function class is adopted as for a check alone."""


def _finder(subject: Subject) -> str:
    specification = subject.specification
    if specification.adopted is not None and specification.namespace in TEMPORARY:
        name = specification.adopted.function_class.__name__
        return f'opsmith.adopt({name}, "replayed::operator")  # with the words of the line for it, if any'
    if specification.module == "__main__" or "<locals>" in specification.qualname:
        return f'opsmith.find_operator("{specification.name}")  # declared at {specification.where}'
    return f'opsmith.find_operator("{specification.name}", "{specification.module}")'


def _writable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_writable(item) for item in value)
    plain = (
        Tensor,
        bool,
        int,
        float,
        complex,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
    return value is None or isinstance(value, plain)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_written(item) for item in value)}]"
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.detach().cpu()
    for dimension, stride in enumerate(plain.stride()):
        if stride == 0:  # an expanded dimension is stored once
            plain = plain.narrow(dimension, 0, min(1, plain.shape[dimension]))
    device = f", device={value.device.type!r}" if value.device.type != "cpu" else ""
    form = f"dtype={value.dtype}{device}"
    numbers = repr(plain.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    text = (
        f"torch.tensor({numbers}, {form})" if plain.numel() else f"torch.empty({list(plain.shape)}, {form})"
    )
    if not plain.is_contiguous():
        text = f"torch.empty_strided({list(plain.shape)}, {list(plain.stride())}, {form}).copy_({text})"
    if plain.shape != value.shape:
        text = f"{text}.expand({list(value.shape)})"
    return f"{text}.requires_grad_()" if value.requires_grad else text
