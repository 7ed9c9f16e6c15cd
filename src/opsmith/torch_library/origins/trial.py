"""Metadata of the results of a Function class whose code runs only on real tensors, found by a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.origins.function_class import AdoptedFunction
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import (
    autocast_in_force,
    autocast_of_call,
    autocasting,
    noting_autocast,
)
from opsmith.torch_library.autograd.gradient_values import has_gradient


def results_by_trial(
    adopted: AdoptedFunction, values: Sequence[Any], run: Callable[[list[Any]], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Results without data, with the metadata of the forward's results for other numbers of the same shapes.

    Args:
        adopted: The class.
        values: Values of the operator's arguments: its tensors are fake, or on the device `meta`.
        run: Runs its forward on such values, and returns the flat results.
    """
    devices = {each.device for each in tensors_in(list(values))}
    key, called = metadata_of(values), autocast_of_call() or autocast_in_force()
    if (key, called) not in adopted.facts.tried:
        with capabilities.without_modes(), capabilities.above_autograd(), torch.random.fork_rng(devices=[]):
            real = [_filled(value) for value in values]
            found = {}
            for state in {called, ""}:  # compiled code runs kept operators without autocast
                with torch.no_grad(), noting_autocast(state), autocasting(state):
                    found[state] = metadata_of(run(real))
        if found[called] != found[""]:
            raise autocast_error(adopted)
        adopted.facts.tried[key, called] = found[""]
    device = next(iter(devices), torch.device("cpu"))
    return tuple(
        None if each is None else torch.empty_strided(each[0], each[1], dtype=each[2], device=device)
        for each in adopted.facts.tried[key, called]
    )


def autocast_error(adopted: AdoptedFunction) -> errors.TransformError:
    """The error for a class that compiled code keeps whole, but that depends on autocast."""
    return adopted.error(
        errors.TransformError,
        f"`{adopted.name}.forward` returns a different dtype under autocast, but compiled code keeps it "
        "whole and runs it without autocast",
        hint="cast its arguments, and call it where autocast is off: "
        "`with torch.autocast(device, enabled=False)`",
    )


def refuse_other_metadata(adopted: AdoptedFunction, values: Sequence[Any], results: Sequence[Any]) -> None:
    """Refuse results whose metadata differs from the trial for compiled code.

    Raises:
        ShapeError: If they differ.
    """
    expected = adopted.facts.tried.get((metadata_of(values), autocast_in_force()))
    found = metadata_of(results)
    if expected is None or expected == found:
        return
    raise adopted.error(
        errors.ShapeError,
        f"the shape, layout or dtype of the results of `{adopted.name}.forward` depends on the numbers of "
        "its arguments, which compiled code cannot know",
        expected=str(expected),
        got=str(found),
        hint="give the same mathematics in plain PyTorch: `adopt(..., reference=...)`, or call the "
        "operator outside of compiled code",
    )


def metadata_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """Shape, strides and dtype of each tensor; any other value itself, or as text."""
    return tuple(map(_metadata, values))


def _metadata(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_metadata, value))
    return value if value is None else repr(value)


def _filled(value: Any) -> Any:
    """A real tensor with the metadata of a tensor without data: numbers between 0 and 1, whole numbers 0."""
    if type(value) in (list, tuple):  # no other container has tensors here
        return type(value)(map(_filled, value))
    if not isinstance(value, Tensor):
        return value
    device = "cpu" if value.is_meta else value.device
    shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    real = torch.empty_strided(shape, strides, dtype=value.dtype, device=device)
    return real.uniform_(0.1, 0.9) if has_gradient(value.dtype) and not value.is_complex() else real.zero_()
