"""Gradients derived from a function made of torch operations: run it again, and pull back through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from opsmith.torch_library import capabilities
from opsmith.torch_library.flattening import Flattening
from opsmith.torch_library.pullback import pull_back
from opsmith.torch_library.random_state import RandomState


def vjp_by_recompute(
    function: Callable[..., Any],
    flattening: Flattening,
    flat: Sequence[Any],
    wanted: Sequence[int],
    grads: Sequence[Tensor | None],
    state: RandomState | None,
) -> list[Tensor]:
    """Gradients of `function` for some of its flat arguments, given the gradients of its results.

    Args:
        function: Takes the operator's arguments, returns its results.
        flattening: How `flat` packs into arguments.
        flat: The saved arguments, flat.
        wanted: Places in `flat` whose gradient is wanted.
        grads: For each flat result its gradient, or None.
        state: Random state of the forward, for a random function.

    Returns:
        One gradient for each place in `wanted`; zeros where the function does not depend on it.
    """
    others = flat if torch.is_grad_enabled() else [_constant(value) for value in flat]

    there: list[bool] = []

    def again(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(others)
        for place, value in zip(wanted, values, strict=True):
            filled[place] = value
        args, kwargs = flattening.schema.split(flattening.pack(filled))
        with state.again() if state else nullcontext():
            results = function(*args, **kwargs)
        results = results if isinstance(results, tuple | list) else (results,)
        spread = [each for one in results for each in (one if isinstance(one, tuple | list) else (one,))]
        there[:] = [each is not None for each in spread]
        return tuple(each for each in spread if each is not None)

    closed = [value for value in others if isinstance(value, Tensor)]
    _, pull = pull_back(again, [flat[place] for place in wanted], closed)
    return pull([grad for grad, is_there in zip(grads, there, strict=True) if is_there])


def _constant(value: Any) -> Any:
    return capabilities.outside_graph(value) if isinstance(value, Tensor) else value
